"""Files that are either whole or not there."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write to a temporary file beside `path`, fsync, rename, fsync the folder: a crash leaves the old file or the new one.

    Args:
        mode: the file's permissions from its first byte on, less the umask.

    Raises:
        OSError: among others when the disk is full; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
