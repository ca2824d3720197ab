"""SHA-256 of files, cached, so that gigabytes of weights are read once and not at every start."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from osfl.util.files import OWNER_ONLY, make_private_folder, read_record, write_record

SMALL_BYTES = 2**20  # a smaller file is read each time
SETTLE_SECONDS = 2.0  # a file that has just changed may change again within its clock's tick
CHUNK_BYTES = 2**24
MAX_FILES = 1000  # in the cache

Progress = Callable[[int], None]  # bytes read since the last call

_memory_cache: dict[tuple[Any, ...], str] = {}  # this process's digests, by path and `_identity`


def file_sha256(file: Path, progress: Progress = lambda read: None) -> str:
    """Return a file's SHA-256, cached by its path, size, modification time and inode.

    If several processes need it at the same time, only one reads the file.

    Raises:
        OSError: the file cannot be read.
    """
    if digest := _recall(file):
        return digest
    if file.stat().st_size < SMALL_BYTES:
        return _read(file, progress)
    with _exclusive():
        if digest := _recall(file):
            return digest
        before = _identity(file)
        digest = _read(file, progress)
        if _identity(file) == before and time.time() - file.stat().st_mtime > SETTLE_SECONDS:
            _remember(file, before, digest)
    return digest


def uncached_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes `file_sha256` would have to read, without small files."""
    sizes = (file.stat().st_size for file in files if _recall(file) is None)
    return sum(size for size in sizes if size >= SMALL_BYTES)


def _read(file: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def _identity(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _recall(file: Path) -> str | None:
    name = str(file.resolve())
    identity = _identity(file)
    if digest := _memory_cache.get((name, *identity)):
        return digest
    entry = _load_cache().get(name)
    if not isinstance(entry, dict) or entry.get("about") != identity:
        return None
    digest = entry.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _remember(file: Path, identity: list[int], digest: str) -> None:
    """Cache a digest in this process, and on disk for others if the cache can be written."""
    name = str(file.resolve())
    _memory_cache[name, *identity] = digest
    entries = {path: entry for path, entry in _load_cache().items() if os.path.isfile(path)}
    entries.pop(name, None)
    entries = dict(list(entries.items())[1 - MAX_FILES :])
    entries[name] = {"about": identity, "sha256": digest}
    with suppress(OSError):
        write_record(_cache_file(), entries)


def _load_cache() -> dict[str, Any]:
    """Return the cache's entries by path; none if the file is missing or corrupt."""
    try:
        return read_record(_cache_file())
    except (OSError, ValueError):
        return {}


@contextmanager
def _exclusive() -> Iterator[None]:
    """Let one process in at a time, if a lock file can be written."""
    lock = FileLock(_cache_file().with_suffix(".lock"), mode=OWNER_ONLY)
    with suppress(OSError):
        make_private_folder(_cache_file().parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cache_folder() -> Path:
    """Return the folder of this machine's caches; it may not exist."""
    return Path(os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser()


def _cache_file() -> Path:
    return cache_folder() / "digests.json"
