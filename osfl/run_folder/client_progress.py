"""The progress of simulated clients, which they write in their cache beside the runs' folders."""

from contextlib import suppress
from pathlib import Path

from osfl.util.files import read_below
from osfl.util.names import is_identifier
from osfl.util.text import sanitize

# Beside the folders of a simulation's runs; it has a folder per job
CLIENT_CACHE = ".client-cache"
MAX_PROGRESS_BYTES = 1000


def client_progress(cache: Path, client: str) -> str:
    """Return a client's progress, such as `epoch 3 of 40`; "" if it has written none.

    Args:
        cache: the folder of the job in the clients' cache.
    """
    # A name from a damaged status may be a path or a pattern
    if not is_identifier(client):
        return ""
    for file in cache.glob(f"{client}-{'?' * 12}/progress"):
        # The client may be writing or removing the file
        with suppress(OSError, ValueError):
            text = read_below(cache, f"{file.parent.name}/{file.name}", MAX_PROGRESS_BYTES)
            completed, total, task = text.decode().split(maxsplit=2)
            return sanitize(f"{task} {int(completed)} of {int(total)}")
    return ""
