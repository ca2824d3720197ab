"""Log a run to its trackers while it is at work, in a thread of its own.

A tracker that is away, or slow, costs the run no more than `END_SECONDS`, at its end.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import read_status
from osfl.tracking.contents import read_contents
from osfl.tracking.track import (
    check_trackers,
    describe_place,
    open_log,
    reason_of,
    track,
)
from osfl.util.log import log

# Between two looks at the run's folder
INTERVAL_SECONDS = 2.0
# Until a tracker that has failed is asked again
RETRY_SECONDS = 60.0
# For all that is logged at the end of a run
END_SECONDS = 60.0


class LiveTracking:
    """Logs the configuration, each phase and the growing curves of a run, and at its end the rest.

    Args:
        folder: the run's folder, which has its configuration.
        trackers: names in `TRACKERS`; without any, nothing is done.
        mlflow_uri: as of `track`.
    """

    def __init__(self, folder: Path, trackers: Sequence[str], mlflow_uri: str):
        self._folder = folder
        self._trackers = tuple(trackers)
        self._uri = mlflow_uri
        self._wake = threading.Event()
        self._logs_end = False
        self._warnings: list[str] = []
        # A daemon: a tracker that hangs must not keep the server's process
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        if self._trackers:
            self._thread.start()

    def finish(self) -> list[str]:
        """Log the run as it has ended, and return a warning for each tracker that failed."""
        if not self._trackers:
            return []
        self._logs_end = True
        self._wake.set()
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            return self._warnings
        places = " and ".join(describe_place(name, self._uri) for name in self._trackers)
        return [f"{places}: not logged within {END_SECONDS:g} s; `osfl track` logs this run again"]

    def stop(self) -> None:
        """End the thread without logging more; also called after `finish`."""
        self._wake.set()

    def _follow(self) -> None:
        # A tracker that cannot work here ends the run before the clients work
        with suppress(Exception):
            check_trackers(self._trackers, self._uri)
            self._follow_changes([_LiveLog(name, self._uri) for name in self._trackers])
        self._wake.wait()
        if self._logs_end:
            self._warnings = track(self._folder, self._trackers, self._uri)

    def _follow_changes(self, logs: Sequence["_LiveLog"]) -> None:
        stamp: object = None
        while not self._wake.is_set():
            current = _stamp(self._folder)
            if current != stamp:
                stamp = current
                for each in logs:
                    each.update(self._folder, self._wake)
            self._wake.wait(INTERVAL_SECONDS)
        for each in logs:
            each.close()


class _LiveLog:
    """One tracker, which is left alone for a while after it has failed, and warned of once."""

    def __init__(self, name: str, uri: str):
        self._name = name
        self._uri = uri
        self._log = open_log(name, uri)
        self._until = 0.0
        self._has_warned = False

    def update(self, folder: Path, ending: threading.Event) -> None:
        """Log what is new, unless the run is ending: then `track` logs everything."""
        if ending.is_set() or time.monotonic() < self._until:
            return
        try:
            self._log.log(read_contents(folder, with_files=False))
        # The libraries raise errors of any kind
        except Exception as error:
            self._until = time.monotonic() + RETRY_SECONDS
            if not self._has_warned:
                self._has_warned = True
                place = describe_place(self._name, self._uri)
                log.warning("%s does not answer, the run goes on: %s", place, reason_of(error))

    def close(self) -> None:
        """End what the tracker has open."""
        with suppress(Exception):
            self._log.close()


def _stamp(folder: Path) -> object:
    """Return a value that changes with the phase and the curves."""
    files = sorted(RunFolder(folder).curves_folder.glob("*.json"))
    with suppress(OSError):
        times = [(file.name, file.stat().st_mtime_ns) for file in files]
        return read_status(folder).get("phase"), times
    return None
