"""The progress of a run for its observers: `status.json` in the run's folder, and the log."""

import json
import time
from pathlib import Path
from typing import Any

from osfl.run_folder.events import log_event
from osfl.util.files import read_json, write_atomically
from osfl.util.log import log
from osfl.util.text import sanitize, sanitize_lines

_DETAILS = "; details: "
# Phases that `status.json` keeps
MAX_PHASES = 50
# Time between two log lines about a phase's progress
LOG_SECONDS = 10.0
# Characters: an error may have a line for each of many clients
MAX_ERROR = 10_000


def with_details(warning: str, details: str) -> str:
    """Append details for experts to a warning, which are shown folded or not at all."""
    return f"{warning}{_DETAILS}{details}"


def split_details(warning: str) -> tuple[str, str]:
    """Split a warning into its text and its details, which may be empty."""
    text, _, details = warning.partition(_DETAILS)
    return text, details


def read_status(folder: Path) -> dict[str, Any]:
    """Read `status.json`; {} if it is missing or corrupt, because a run soon rewrites it."""
    try:
        state = read_json(folder / "status.json")
    except OSError:
        return {}
    kinds = {"phase": str, "clients": dict, "done": int, "total": int}
    is_valid = all(isinstance(state.get(key), kind) for key, kind in kinds.items())
    return state if is_valid else {}


def has_finished(folder: Path) -> bool:
    """Return whether a run's status is that it has finished.

    Raises:
        CorruptFileError: `status.json` is missing or corrupt.
    """
    return read_json(folder / "status.json").get("phase") == "finished"


class Status:
    """A run's phase, clients and counters. Progress is written at most about twice a second."""

    def __init__(self, folder: Path):
        self._file = folder / "status.json"
        self._written = 0.0
        self._logged = 0.0
        self.state: dict[str, Any] = {"phase": "", "clients": {}, "done": 0, "total": 0, "step": []}
        self.state["phases"] = []

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a phase. The starts of this process's last phases are kept.

        Args:
            total: the number of the phase's steps; 0 if unknown.
        """
        log.info("%s%s", name, f" ({total})" if total else "")
        log_event({"phase": name, "total": total})
        self._logged = time.monotonic()
        start = {"phase": name, "began": round(time.time(), 2)}
        self.state["phases"] = [*self.state["phases"], start][-MAX_PHASES:]
        self.state.update(phase=name, done=0, total=total, step=[])
        self._write(immediately=True)

    def fail(self, error: BaseException) -> None:
        """End the run with an error, which users read in its status."""
        self.state["error"] = sanitize_lines(f"{type(error).__name__}: {error}", MAX_ERROR)
        self.phase("failed")

    def advance(self, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the phase are finished."""
        self.state.update(done=done, total=total)
        if time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            log_event({"done": done, "total": total})
        self._write(immediately=done == total)

    def step(self, done: int, total: int) -> None:
        """Report progress within the current step, such as a work unit of images."""
        self.state["step"] = [done, total]
        self._write(immediately=False)

    def client(self, name: str, state: str) -> None:
        """Report a client's new state, such as joined, asked, delivered, failed or refused."""
        name = sanitize(name)
        state = sanitize(state)
        log.info("%s: %s", name, state)
        log_event({"client": name, "state": state})
        self.state["clients"][name] = state
        self._write(immediately=True)

    def warn(self, warnings: list[str]) -> None:
        """Replace the warnings that users should read before they use the result."""
        for warning in warnings:
            log.warning("%s", warning)
        self.state["warnings"] = warnings
        self._write(immediately=True)

    def add_warning(self, warning: str) -> None:
        """Add a warning to the earlier ones."""
        self.warn([*self.state.get("warnings", []), warning])

    def _write(self, immediately: bool) -> None:
        if immediately or time.monotonic() - self._written > 0.5:
            self._written = time.monotonic()
            write_atomically(self._file, json.dumps(self.state).encode(), durable=False)
