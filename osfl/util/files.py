"""Atomic, private files: complete or absent, and readable only by their owner."""

import hashlib
import json
import os
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from osfl.util.text import sanitize

OWNER_ONLY = 0o600
# For files that others read: certificates, kits
PUBLIC = 0o644
# Limits on JSON files. The depth is limited because code that walks the value recurses.
MAX_JSON_BYTES = 2**28
MAX_JSON_DEPTH = 100
# Windows has no such flag
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class CorruptFileError(OSError):
    """A file that is missing or corrupt. The message names it and ends with a hint."""


def write_atomically(path: Path, data: bytes, mode: int = OWNER_ONLY, durable: bool = True) -> None:
    """Write to a temporary file beside `path`, fsync, rename, fsync the folder.

    A crash leaves either the old file or the new one. The temporary file is opened exclusively
    under an unpredictable name, and a link at `path` is replaced, not followed. Missing folders are
    created for their owner only.

    Args:
        mode: the file's permissions, whatever the umask.
        durable: False skips fsync, for files that are rewritten every second.

    Raises:
        OSError: the file cannot be written, for instance on a full disk. The temporary file is
            removed.
    """
    make_private_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
        if mode != OWNER_ONLY:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that contains the SHA-256 of its own content, atomically.

    Raises:
        OSError: see `write_atomically`.
    """
    record = {"sha256": _digest(content), "content": content}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def read_record(path: Path, hint: str = "") -> dict[str, Any]:
    """Read the content that `write_record` wrote.

    Args:
        hint: the end of the error message, such as "restore it from a backup".

    Raises:
        CorruptFileError: the file is missing or corrupt.
        PermissionError: this user may not read it.
    """
    record = read_json(path, cure=hint)
    content = record.get("content")
    if not isinstance(content, dict) or record.get("sha256") != _digest(content):
        end = f"; {hint}" if hint else ""
        raise CorruptFileError(f"{sanitize(path, 1000)} is corrupt (its SHA-256 differs){end}")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents for their owner only (0700).

    Existing folders keep their permissions, which somebody chose.

    Raises:
        OSError: the folder cannot be created, or is a file.
    """
    try:
        folder.mkdir(0o700)
    except FileNotFoundError:
        make_private_folder(folder.parent)
        folder.mkdir(0o700, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


def ensure_own_folder(folder: Path) -> None:
    """Create a folder for its owner only, or check an existing one.

    Raises:
        OSError: it cannot be created, or `check_own_folder` refuses it.
    """
    make_private_folder(folder)
    check_own_folder(folder)


def check_own_folder(folder: Path) -> None:
    """Check that no other user can have prepared a folder with a predictable name.

    Its parents may be links or shared, because the user chose them.

    Raises:
        OSError: it is a link, belongs to another user, or is world-writable.
    """
    status = folder.lstat()
    name = sanitize(folder, 1000)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(f"{name} is a link to another folder; remove the link, or set another folder")
    if status.st_uid != os.geteuid():
        raise OSError(f"{name} belongs to another user (uid {status.st_uid}); set another folder")
    if status.st_mode & stat.S_IWOTH:
        raise OSError(f"{name} is writable by every user; run chmod o-w on it")


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file like `open`; a new one is its owner's only (0600), and no link is followed."""
    return open(path, mode, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_LINKS, OWNER_ONLY)


def read_json(
    file: Path,
    kind: type | tuple[type, ...] = dict,
    cure: str = "",
    most_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """Read a JSON file.

    Args:
        kind: the type or types that the value may have.
        cure: hint at the end of the error message, such as "run it again to recreate the file".
        most_bytes: upper bound on the file's size.

    Raises:
        CorruptFileError: the path is missing or not a file, or the file is not JSON, too large,
            nested too deeply, or its value has another type.
        PermissionError: this user may not read it.
    """
    hint = f"; {cure}" if cure else ""
    if not file.is_file():
        problem = "is not a file" if os.path.lexists(file) else "is missing"
        raise CorruptFileError(f"{sanitize(file, 1000)} {problem}{hint}")
    try:
        value = parse_json(read_bounded(file, most_bytes))
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise CorruptFileError(
            f"{sanitize(file, 1000)} is corrupt ({sanitize(error, 100)}){hint}"
        ) from None
    if not isinstance(value, kind):
        raise CorruptFileError(
            f"{sanitize(file, 1000)} is corrupt (another type of JSON value){hint}"
        )
    return value


def read_bounded(file: Path, most_bytes: int) -> bytes:
    """Read a file of limited size.

    Raises:
        ValueError: it has more than `most_bytes` bytes, or is a placeholder for another file.
        OSError: it cannot be read.
    """
    with open(file, "rb") as opened:
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    if problem := placeholder_problem(content):
        raise ValueError(problem)
    return content


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or is nested deeper than `MAX_JSON_DEPTH`.
    """
    too_deep = f"it is nested deeper than {MAX_JSON_DEPTH} levels"
    try:
        # Python would take UTF-16 and a byte order mark, which the libraries do not
        value = json.loads(content if isinstance(content, str) else _utf8(content))
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(too_deep)


def _utf8(content: bytes) -> str:
    if content.startswith(BOM_UTF8):
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8; save it as UTF-8") from None


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def placeholder_problem(start: bytes) -> str:
    """Say what a file is in place of weights or settings, by its first bytes; "" if nothing."""
    head = start[:200].lstrip().lower()
    if not start:
        return "it is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file (git lfs pull fetches it)"
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, perhaps the error page of a failed download"
    return ""


def not_weights(start: bytes) -> str:
    """Say what a file is in place of safetensors, by its first bytes; "" if these do not tell."""
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "it is a pickle, as torch.save writes; save the weights as safetensors"
    words = sanitize(start, 100)
    if start and "\N{REPLACEMENT CHARACTER}" not in words:
        return f"it is a text, not weights: {words!r}"
    return ""
