"""SHA-256 of files, remembered: gigabytes of weights are read once, not at every start."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from osfl.util.files import OWNER_ONLY, make_private_folder, read_record, write_record

SMALL_BYTES = 2**20  # a file below it is read each time
YOUNG_SECONDS = 2.0  # a file that has just changed may change again within its clock's tick
CHUNK_BYTES = 2**24
MOST_FILES = 1000  # that are remembered

Progress = Callable[[int], None]  # bytes read since it was last called

_here: dict[tuple[Any, ...], str] = {}  # what this process has read, by path and `_about`


def sha256_of(file: Path, progress: Progress = lambda read: None) -> str:
    """A file's SHA-256: remembered by its path, size, time and inode, else computed.

    Of several processes that ask for it at the same time, one reads the file.

    Raises:
        OSError: it cannot be read.
    """
    if known := _recall(file):
        return known
    if file.stat().st_size < SMALL_BYTES:
        return _read(file, progress)
    with _alone():
        if known := _recall(file):
            return known
        before = _about(file)
        digest = _read(file, progress)
        if _about(file) == before and time.time() - file.stat().st_mtime > YOUNG_SECONDS:
            _remember(file, before, digest)
    return digest


def unread_bytes(files: Iterable[Path]) -> int:
    """How many bytes `sha256_of` would have to read, small files aside."""
    sizes = (file.stat().st_size for file in files if _recall(file) is None)
    return sum(size for size in sizes if size >= SMALL_BYTES)


def _read(file: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def _about(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _recall(file: Path) -> str | None:
    name = str(file.resolve())
    about = _about(file)
    if digest := _here.get((name, *about)):
        return digest
    entry = _known().get(name)
    if not isinstance(entry, dict) or entry.get("about") != about:
        return None
    digest = entry.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _remember(file: Path, about: list[int], digest: str) -> None:
    """In this process, and for others where there is a place to write to."""
    _here[str(file.resolve()), *about] = digest
    kept = {name: entry for name, entry in _known().items() if os.path.isfile(name)}
    kept.pop(str(file.resolve()), None)
    kept = dict(list(kept.items())[1 - MOST_FILES :])
    kept[str(file.resolve())] = {"about": about, "sha256": digest}
    with suppress(OSError):
        write_record(_cache_file(), kept)


def _known() -> dict[str, Any]:
    """What is remembered; nothing where the file is missing or damaged."""
    try:
        return read_record(_cache_file())
    except (OSError, ValueError):
        return {}


@contextmanager
def _alone() -> Iterator[None]:
    """One process after the other, where there is a place for a lock."""
    lock = FileLock(_cache_file().with_suffix(".lock"), mode=OWNER_ONLY)
    with suppress(OSError):
        make_private_folder(_cache_file().parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cache_folder() -> Path:
    """Return the folder for what this machine remembers; it may not be there."""
    return Path(os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser()


def _cache_file() -> Path:
    return cache_folder() / "digests.json"
