"""`osfl run` of a mixed run on Flower's simulation engine."""

import json
from pathlib import Path

import pytest

from tests.helpers.system_tools import ONE_AT_A_TIME, quick_arguments

pytestmark = pytest.mark.system


def test_a_mixed_simulation_runs_to_its_report(osfl, tmp_path: Path, tiny_kit: Path) -> None:  # type: ignore[no-untyped-def]
    """The keys of mixed runs, which pyproject.toml lacks, reach server and clients."""
    arguments = quick_arguments(tiny_kit, method="mixed", job_id="mixed", seed=1)
    kinds = ("mixed.methods=votes,oscar+fedcgs", "mixed.assignment=cyclic")
    result = osfl("run", *ONE_AT_A_TIME, *arguments, *kinds, timeout=1200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = tmp_path / "runs" / "mixed"
    metrics = json.loads((folder / "metrics.json").read_text())
    rows = {row["kind"]: row["clients"] for row in metrics["kinds"]}
    assert rows == {"votes": ["client-0"], "oscar+fedcgs": ["client-1"]}
    assert set(metrics["accuracy"]) == {"Mixed", "FedCGS"}
    assert "<h2>Kinds of payload</h2>" in (folder / "report.html").read_text()
