"""The progress of a run for its observers: `status.json` in the run's folder, and the log."""

import json
import time
from pathlib import Path
from typing import Any

from osfl.run_folder.events import log_event
from osfl.util.files import read_json, write_atomically
from osfl.util.log import log
from osfl.util.text import sanitize, sanitize_lines

# The state of a client that only tests, and of one that was asked for its payload
TEST_ONLY_STATE = "test only"
ASKED_STATE = "asked"
# A time of a client whose payload the defense drops
DROPPED = "dropped"
# A time of a client: all its images are synthesized, although others still work
SYNTHESIZED = "synthesized"
_DETAILS = "; details: "
# Between a client's state and its note
_NOTE = "; "
# Phases that `status.json` keeps
MAX_PHASES = 50
# Time between two log lines about a phase's progress
LOG_SECONDS = 10.0
# Clients whose every change is written at once; with more, a change waits up to a second per 1,000
AT_ONCE = 100
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
        state: dict[str, Any] = read_json(folder / "status.json")
    except OSError:
        return {}
    return state if is_status(state) else {}


def is_status(state: Any) -> bool:
    """Return whether a JSON value is an object with a status' keys of the right types."""
    kinds = {"phase": str, "clients": dict, "done": int, "total": int}
    return isinstance(state, dict) and all(
        isinstance(state.get(key), kind) for key, kind in kinds.items()
    )


def has_finished(folder: Path) -> bool:
    """Return whether a run's status is that it has finished.

    Raises:
        CorruptFileError: `status.json` is missing or corrupt.
    """
    is_finished: bool = read_json(folder / "status.json").get("phase") == "finished"
    return is_finished


class Status:
    """A run's phase, clients and counters. Progress is written at most about twice a second.

    The file has all clients, so writing each change of thousands would take most of the server's
    time.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file = folder / "status.json"
        self._written = 0.0
        self._logged = 0.0
        self.state: dict[str, Any] = {"phase": "", "clients": {}, "done": 0, "total": 0, "step": []}
        self.state["phases"] = []
        # Seconds since 1970 of each client's last change to a state, by the state's first word
        self.state["times"] = {}

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
        self.stamp(name, state.partition(" ")[0])

    def note(self, name: str, text: str) -> None:
        """Replace the note behind a client's state; "" removes it."""
        name = sanitize(name)
        clients = self.state["clients"]
        if name in clients:
            state = clients[name].partition(_NOTE)[0]
            clients[name] = f"{state}{_NOTE}{sanitize(text)}" if text else state
            log_event({"client": name, "state": clients[name]})
            self._write(immediately=False)

    def stamp(self, name: str, state: str) -> None:
        """Record the time at which a client reached a state, for the report's timeline."""
        times = self.state["times"].setdefault(sanitize(name), {})
        times[state] = round(time.time(), 2)
        clients = len(self.state["times"])
        # Written again at the phase's next progress, which every poll reports
        self._write(immediately=clients <= AT_ONCE, pause=clients / 1000)

    def remove(self, client: str) -> None:
        """Remove a client and its times."""
        self.state["clients"].pop(sanitize(client), None)
        self.state["times"].pop(sanitize(client), None)
        self._write(immediately=True)

    def forget(self, state: str) -> None:
        """Remove the time of a state of all clients."""
        for times in self.state["times"].values():
            times.pop(state, None)

    def warn(self, warnings: list[str]) -> None:
        """Replace the warnings that users should read before they use the result."""
        for warning in warnings:
            log.warning("%s", warning)
        self.state["warnings"] = warnings
        self._write(immediately=True)

    def add_warning(self, warning: str) -> None:
        """Add a warning to the earlier ones."""
        self.warn([*self.state.get("warnings", []), warning])

    def _write(self, immediately: bool, pause: float = 0.5) -> None:
        if immediately or time.monotonic() - self._written > pause:
            self._written = time.monotonic()
            write_atomically(self._file, json.dumps(self.state).encode(), durable=False)
