"""Compare what `osfl run --dry-run` estimates with what the run then took.

python -m benchmarks.speed.cost_model          # every row, ten minutes on two quiet cores
python -m benchmarks.speed.cost_model oscar    # some; the others stay

Each row is a simulation of three clients with `osfl run`, in processes of its own.
"""

import json
import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.federation import Settings, config_of
from benchmarks.harness import Experiment, Line
from osfl.cli.estimate import Estimate, estimate_run
from osfl.tables.table_file import as_arguments

COMMON: Settings = {
    "num-clients": 3,
    "synthesis.images-per-class": 10,
    "synthesis.parallel-units": 1,
    "global-model.steps": 100,
    "global-model.batch-size": 32,
}
ROWS: dict[str, Settings] = {
    "prompts-domain": {},
    "domain-vector": {"domain-vector.steps": 150},
    "feddeo": {"feddeo.steps": 150},
    "espresso": {"espresso.steps": 50},
    "votes": {},
    "oscar": {},
    "fedlmg": {"classifier.steps": 100, "fedlmg.strategies": "ft,sd"},
}
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "Estimates of `osfl run --dry-run` beside what the run took, and by how many per cent they are "
    "too high: bytes and FLOPs of the client that sends or computes most, seconds of synthesis and "
    "of training on the server, bytes of the finished run's folder, and peak bytes of the server's "
    "memory. "
    f"{' '.join(as_arguments(COMMON))}; the program has each row's own settings.",
)


def measured(settings: Settings, name: str) -> dict[str, float]:
    """Run, and return what the run took."""
    runs = EXPERIMENT.work / "runs"
    shutil.rmtree(runs / name, ignore_errors=True)
    arguments = as_arguments({**settings, "job-id": name, "runs-dir": str(runs)})
    command = [str(Path(sys.executable).with_name("osfl")), "run", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    metrics: dict[str, Any] = json.loads((runs / name / "metrics.json").read_text())
    clients = metrics["clients"].values()
    files = [file for file in (runs / name).rglob("*") if file.is_file()]
    return {
        "bytes": max(client["upload_bytes"] for client in clients),
        "client FLOPs": max(client["flops"] for client in clients),
        "synthesis": metrics["server"]["synthesis_seconds"],
        "training": sum(metrics["server"]["training_seconds"].values()),
        "folder": sum(file.stat().st_size for file in files),
        "server's memory": 1e6 * metrics["server"]["peak_memory_mb"],
    }


def estimated(settings: Settings) -> dict[str, float | None]:
    """Return the same figures of an estimate in a process of its own, as the command's is."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(estimated_here, settings).result()


def estimated_here(settings: Settings) -> dict[str, float | None]:
    """Return the figures of an estimate; None for those that it does not have."""
    estimate: Estimate = estimate_run(config_of(settings))
    flops = [value for value in estimate.client_flops.values() if value]
    return {
        "bytes": max(estimate.uploads.values()),
        "client FLOPs": max(flops, default=None),
        "synthesis": estimate.sampling.seconds if estimate.sampling else None,
        "training": estimate.training.seconds if estimate.training else None,
        "folder": estimate.folder_bytes,
        "server's memory": 1e6 * estimate.memory_mb if estimate.memory_mb else None,
    }


def line(row: str, seeds: Sequence[int] = ()) -> Line:
    """Return a row of the table."""
    settings: Settings = {**COMMON, "method": row, "seed": 0, **ROWS[row]}
    columns = {"": row}
    expected = estimated(settings)
    actual = measured(settings, row)
    for name, value in actual.items():
        columns[name] = compared(expected[name], value)
    return columns


def compared(estimate: float | None, value: float) -> str:
    """Return an estimate beside what it is of, such as "1.2e+03, 1.1e+03: +9 %"."""
    if not estimate or not value:
        return ""
    return f"{estimate:.3g}, {value:.3g}: {100 * (estimate / value - 1):+.0f} %"


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
