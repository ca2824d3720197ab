"""What a run is doing, for whoever watches: `status.json` in the run's folder, and the log."""

import json
import time
from pathlib import Path
from typing import Any

from osfl.run_folder.events import log_event
from osfl.util.files import read_json, write_atomically
from osfl.util.log import log
from osfl.util.text import plain, plain_lines

_DETAILS = "; details: "
MOST_PHASES = 50  # that `status.json` keeps
LOG_SECONDS = 10.0  # between two lines of the log on how far a phase is
MOST_ERROR = 10_000  # characters; a line for each of many clients


def with_details(warning: str, details: str) -> str:
    """Return a warning with what only an expert needs, which is shown folded or not at all."""
    return f"{warning}{_DETAILS}{details}"


def split_details(warning: str) -> tuple[str, str]:
    """Return a warning and its details, which may be empty."""
    text, _, details = warning.partition(_DETAILS)
    return text, details


def read_status(folder: Path) -> dict[str, Any]:
    """What a run is doing; empty where `status.json` is missing or damaged: it is written anew."""
    try:
        state = read_json(folder / "status.json")
    except OSError:
        return {}
    kinds = {"phase": str, "clients": dict, "done": int, "total": int}
    good = all(isinstance(state.get(key), kind) for key, kind in kinds.items())
    return state if good else {}


def has_finished(folder: Path) -> bool:
    """Whether a run says that it has finished.

    Raises:
        DamageError: `status.json` is missing or damaged.
    """
    return read_json(folder / "status.json").get("phase") == "finished"


class Status:
    """Phase, clients and counters; written at most about twice a second."""

    def __init__(self, folder: Path):
        self._file = folder / "status.json"
        self._written = 0.0
        self._logged = 0.0
        self.state: dict[str, Any] = {"phase": "", "clients": {}, "done": 0, "total": 0, "step": []}
        self.state["phases"] = []

    def phase(self, name: str, total: int = 0) -> None:
        """A new phase begins; when, is kept for the last phases of this process."""
        log.info("%s%s", name, f" ({total})" if total else "")
        log_event({"phase": name, "total": total})
        self._logged = time.monotonic()
        began = {"phase": name, "began": round(time.time(), 2)}
        self.state["phases"] = [*self.state["phases"], began][-MOST_PHASES:]
        self.state.update(phase=name, done=0, total=total, step=[])
        self._write(now=True)

    def failed(self, error: BaseException) -> None:
        """The run ends here; the error is what people will read."""
        self.state["error"] = plain_lines(f"{type(error).__name__}: {error}", MOST_ERROR)
        self.phase("failed")

    def advance(self, done: int, total: int) -> None:
        """So many of the phase's steps are done."""
        self.state.update(done=done, total=total)
        if time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            log_event({"done": done, "total": total})
        self._write(now=done == total)

    def within(self, done: int, total: int) -> None:
        """Within what is being done now, a unit of images say, so many steps are."""
        self.state["step"] = [done, total]
        self._write(now=False)

    def client(self, name: str, state: str) -> None:
        """A client joined, is asked, delivered, failed or was refused."""
        name = plain(name)
        state = plain(state)
        log.info("%s: %s", name, state)
        log_event({"client": name, "state": state})
        self.state["clients"][name] = state
        self._write(now=True)

    def warn(self, warnings: list[str]) -> None:
        """What a person should look at before using the result."""
        for warning in warnings:
            log.warning("%s", warning)
        self.state["warnings"] = warnings
        self._write(now=True)

    def warn_of(self, warning: str) -> None:
        """One more, beside those that were said."""
        self.warn([*self.state.get("warnings", []), warning])

    def _write(self, now: bool) -> None:
        if now or time.monotonic() - self._written > 0.5:
            self._written = time.monotonic()
            write_atomically(self._file, json.dumps(self.state).encode(), durable=False)
