"""What a run is doing, for whoever watches: `status.json` in the run's folder, and the log."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("flwr")  # Flower carries this logger's lines to `flwr log`


class Status:
    """Phase, clients and counters; written at most about twice a second."""

    def __init__(self, folder: Path):
        self._file, self._written = folder / "status.json", 0.0
        self.state: dict[str, Any] = {"phase": "", "clients": {}, "done": 0, "total": 0}

    def phase(self, name: str, total: int = 0) -> None:
        """A new phase begins."""
        log.info("%s%s", name, f" ({total})" if total else "")
        self.state.update(phase=name, done=0, total=total)
        self._write(now=True)

    def advance(self, done: int, total: int) -> None:
        """So many of the phase's steps are done."""
        self.state.update(done=done, total=total)
        self._write(now=done == total)

    def client(self, name: str, state: str) -> None:
        """A client joined, is asked, delivered, failed or was refused."""
        log.info("%s: %s", name, state)
        self.state["clients"][name] = state
        self._write(now=True)

    def _write(self, now: bool) -> None:
        if now or time.monotonic() - self._written > 0.5:
            self._written = time.monotonic()
            temporary = self._file.with_name(f".status.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.state))
            temporary.replace(self._file)
