"""A method of an installed package, from `osfl methods` to a simulation's results."""

import json
import os
from pathlib import Path

import pytest

from osfl.payload.v1 import payload_pb2
from tests.helpers.own_package import install, install_styled
from tests.helpers.system_tools import ONE_AT_A_TIME, TWO_CLASSES, make_images, quick_arguments

pytestmark = pytest.mark.system


def test_a_method_of_an_installed_package_is_listed_and_run(
    osfl, tmp_path: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    install_styled(tmp_path / "site")
    install(tmp_path / "site", "odd", {"method.py": "1 / 0"}, "odd = odd.method")
    path = os.pathsep.join([str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split()])
    monkeypatch.setenv("PYTHONPATH", path)
    listed = osfl("methods")
    assert "styled" in [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    assert "method = 'odd': refused from the package odd 1.0 (odd.method)" in listed.stdout
    for name in ("a", "b"):
        make_images(tmp_path / "sites" / name)
    arguments = quick_arguments(
        tiny_kit, job_id="own", **TWO_CLASSES, data__root=tmp_path / "sites"
    )
    result = osfl("run", *ONE_AT_A_TIME, *arguments, "method=styled", "styled.style=neon")
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "own"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["method"] == "styled"
    assert metrics["sends"] == "the name of a style"
    assert metrics["config"]["styled.style"] == "neon"
    assert sorted(metrics["clients"]) == ["a", "b"]
    assert metrics["server"]["synthetic_images"] == 4
    for file in (run / "payloads").glob("*.pb"):
        assert payload_pb2.Payload.FromString(file.read_bytes()).domain.name == "neon"
    refused = osfl("run", *arguments, "method=odd")
    assert refused.returncode != 0
    assert "cannot be imported: ZeroDivisionError" in refused.stdout + refused.stderr
