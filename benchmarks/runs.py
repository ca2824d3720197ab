"""Running a configuration through the `osfl` command and reading what it measured."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from osfl.config import NOT_IDENTITY, flatten
from osfl.kits import find_kit, kit_digest
from osfl.launch import resolve_config

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"


def run_all(wanted: list[tuple[str, ...]], at_once: int) -> list[dict[str, Any]]:
    """The metrics of every (name, *settings), some of them running side by side, each on its share of the cores.

    Raises:
        RuntimeError: a run failed; the others are ended first, and what is done is kept.
    """
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(run, *one, threads=max(1, (os.cpu_count() or 1) // at_once)) for one in wanted]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run(name: str, *settings: str, threads: int) -> dict[str, Any]:
    """The metrics of a run, which is done now unless it was done before with these settings and this kit; else it is done again.

    Raises:
        RuntimeError: the run failed.
    """
    metrics = RUNS / name / "metrics.json"
    if (RUNS / name).is_dir() and not _is_current(RUNS / name, settings):
        shutil.rmtree(RUNS / name)
    if not metrics.is_file():
        command = [str(Path(sys.executable).parent / "osfl"), "run", *settings, f"job-id={name}", "--runs", str(RUNS)]
        print(time.strftime("%H:%M:%S"), "osfl run", *settings, flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"osfl run {' '.join(settings)}\n{done.stdout[-3000:]}")
    return json.loads(metrics.read_text())


def _is_current(folder: Path, settings: tuple[str, ...]) -> bool:
    """Whether a run, finished or not, has these settings and this kit."""
    config, _ = resolve_config([*settings, f"job-id={folder.name}"])
    wanted = {key: value for key, value in flatten(config).items() if key not in NOT_IDENTITY}
    wanted["kit-sha256"] = kit_digest(find_kit(config.kit))
    found = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    return wanted == {key: value for key, value in found.items() if key not in NOT_IDENTITY}


def write(name: str, records: list[dict[str, Any]], table: str) -> None:
    """Keep a benchmark's records as JSON and its table as Markdown in `benchmarks/results`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def machine() -> str:
    """Hardware in a few words."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {device}, Python {platform.python_version()}, torch {torch.__version__}"
