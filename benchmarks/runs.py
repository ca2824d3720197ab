"""Running a configuration through the `osfl` command and reading what it measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"


def run(name: str, *settings: str) -> dict[str, Any]:
    """The metrics of a run, which is done now unless it was done before; an interrupted one is resumed.

    Raises:
        subprocess.CalledProcessError: the run failed; its output was shown.
    """
    metrics = RUNS / name / "metrics.json"
    if not metrics.is_file():
        command = [str(Path(sys.executable).parent / "osfl"), "run", *settings, f"job-id={name}", "--runs", str(RUNS)]
        print("$ osfl run", *settings, flush=True)
        subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(metrics.read_text())


def write(name: str, records: list[dict[str, Any]], table: str) -> None:
    """Keep a benchmark's records as JSON and its table as Markdown in `benchmarks/results`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def machine() -> str:
    """Hardware in a few words."""
    import os
    import platform

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {device}, Python {platform.python_version()}, torch {torch.__version__}"
