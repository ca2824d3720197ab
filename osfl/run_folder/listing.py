"""The runs of a folder, newest first, with the state and figures of each: `osfl runs`."""

import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.config import ConfigError
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import read_metrics
from osfl.run_folder.status import read_status
from osfl.run_folder.verify import contains_run
from osfl.util.text import sanitize

# Characters of a summary's problem
MAX_PROBLEM = 300
# Seconds since 1970, in the year 2100
MAX_TIME = 4.1e9
FINAL_PHASES = ("finished", "failed")
_NO_METRICS: Mapping[str, Any] = {"accuracy": {}, "clients": {}}


@dataclass(frozen=True)
class RunSummary:
    """A run in a list. What is unknown is empty or None.

    Attributes:
        job: the job id, which is the folder's name.
        folder: the run's folder.
        state: `running`, `interrupted` (no server is at work on it), `finished`, `failed`, or
            `damaged` (see `problem`).
        phase: the last phase in `status.json`.
        method: its method.
        seed: its seed.
        started: the start of its first recorded phase, in seconds since 1970.
        seconds: the time from `started` to its end, or until now while it is running.
        clients: the number of its clients.
        model: the global model that `accuracy` belongs to: the one that the report shows first.
        accuracy: the mean of the clients' accuracies in percent.
        epsilon: the largest epsilon of its clients' guarantees; None without a guarantee.
        problem: why the run failed, or what is damaged; "" otherwise.
    """

    job: str
    folder: Path
    state: str
    phase: str = ""
    method: str = ""
    seed: int | None = None
    started: float | None = None
    seconds: float | None = None
    clients: int = 0
    model: str = ""
    accuracy: float | None = None
    epsilon: float | None = None
    problem: str = ""


def list_runs(folder: Path) -> list[RunSummary]:
    """Summarize the runs in a folder, newest first; runs of unknown start come last.

    Damaged runs and broken links are listed as `damaged`. Files, hidden folders and folders without
    a trace of a run are left out.

    Raises:
        ConfigError: it is not a folder.
        PermissionError: this user may not read it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{sanitize(folder, 1000)} must be a folder with runs")
    summaries = [summarize(entry) for entry in folder.iterdir() if _is_listed(entry)]
    summaries.sort(key=lambda summary: summary.job)
    return sorted(summaries, key=lambda summary: summary.started or 0.0, reverse=True)


def find_run(folder: Path) -> Path:
    """Return a run's folder.

    Raises:
        ConfigError: it does not exist, with the runs beside it, or has no trace of a run.
    """
    if not folder.is_dir():
        suggestion = Path("runs") / folder.name
        if suggestion.is_dir():
            raise ConfigError(f"{folder}: no such folder; did you mean {suggestion}?")
        names = ", ".join(_runs_in(folder.parent)) or "none"
        raise ConfigError(f"{folder}: no such folder; runs in {folder.parent}: {names}")
    if not contains_run(folder):
        names = ", ".join(_runs_in(folder)) or "none"
        raise ConfigError(f"{folder} is not the folder of a run; runs in it: {names}")
    return folder


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if contains_run(path))


def summarize(folder: Path) -> RunSummary:
    """Summarize one run. Damage becomes the summary's state and problem, and is never raised."""
    try:
        return _read_summary(folder)
    # Other versions of OSFL, other programs and people may have written the files
    except (OSError, RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        problem = sanitize(error, MAX_PROBLEM)
        return RunSummary(folder.name, folder, "damaged", problem=problem)


def is_locked(folder: Path) -> bool:
    """Return whether a server is at work on a run; False where the system cannot tell."""
    try:
        import fcntl
    # Windows has no such module
    except ImportError:
        return False
    try:
        # A named pipe would block until somebody writes to it
        handle = os.open(folder / ".lock", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return False
        # Shared, and for an instant: a server that starts just then tries for several seconds
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _is_listed(entry: Path) -> bool:
    if entry.name.startswith("."):
        return False
    # A link whose target is missing, or which points to itself
    if entry.is_symlink() and not os.path.exists(entry):
        return True
    try:
        return entry.is_dir() and (contains_run(entry) or os.path.lexists(entry / ".lock"))
    except OSError:
        return True


def _read_summary(folder: Path) -> RunSummary:
    if not os.path.exists(folder):
        raise OSError(f"{folder} is a broken link")
    run = RunFolder(folder)
    config = run.stored_config() or {}
    status = read_status(folder)
    metrics, problem = _metrics(folder, config, status)
    state = _state(folder, status, problem)
    started, end = _times(run, status, state)
    clients = metrics["clients"] or status.get("clients") or {}
    return RunSummary(
        job=sanitize(folder.name),
        folder=folder,
        state=state,
        phase=sanitize(status.get("phase", "")),
        method=sanitize(config.get("method", "")),
        seed=_integer(config.get("seed")),
        started=started,
        seconds=None if started is None else max(0.0, end - started),
        clients=len(clients) or _integer(config.get("num-clients")) or 0,
        **_figures(metrics),
        problem=sanitize(status.get("error", ""), MAX_PROBLEM) if state == "failed" else problem,
    )


def _metrics(
    folder: Path, config: Mapping[str, Any], status: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str]:
    """Return a finished run's metrics (else none), and what is damaged ("" for nothing)."""
    if not config:
        return _NO_METRICS, "config.json is missing"
    if status.get("phase") != "finished":
        return _NO_METRICS, ""
    try:
        return read_metrics(folder), ""
    except OSError as error:
        return _NO_METRICS, sanitize(error, MAX_PROBLEM)


def _state(folder: Path, status: Mapping[str, Any], problem: str) -> str:
    if is_locked(folder):
        return "running"
    if problem:
        return "damaged"
    phase: str = status.get("phase", "")
    return phase if phase in FINAL_PHASES else "interrupted"


def _times(run: RunFolder, status: Mapping[str, Any], state: str) -> tuple[float | None, float]:
    """Return a run's start and end in seconds since 1970.

    The start is that of the first recorded phase, or else the time of `config.json`; None if
    neither is known.
    """
    starts = list(_starts(status))
    config_time = run.config_file.stat().st_mtime if run.config_file.is_file() else None
    began = starts[0] if starts else config_time
    if state == "running":
        return began, time.time()
    written = run.status_file.stat().st_mtime if run.status_file.is_file() else began or 0.0
    return began, starts[-1] if state in FINAL_PHASES and starts else written


def _starts(status: Mapping[str, Any]) -> Iterator[float]:
    for phase in status.get("phases", []):
        began = float(phase["began"])
        if not 0 <= began < MAX_TIME:
            raise ValueError(f"status.json: a phase began at {began}, which is not a valid time")
        yield began


def _figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    accuracy = metrics["accuracy"]
    model = str(metrics.get("shown") or next(iter(accuracy), ""))
    average = metrics.get("average", accuracy.get(model, {}).get("average"))
    # 0 stands for a client without a guarantee
    epsilons = [float(value) for value in metrics.get("epsilons", []) if float(value) > 0]
    return {
        "model": sanitize(model),
        # NaN without any test result
        "accuracy": None if average is None or math.isnan(average) else float(average),
        "epsilon": max(epsilons, default=None),
    }


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
