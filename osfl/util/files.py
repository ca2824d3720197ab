"""Atomic, private files: complete or absent, and readable only by their owner."""

import hashlib
import json
import os
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from osfl.util.text import sanitize

OWNER_ONLY = 0o600
# For files that others read: certificates, kits
PUBLIC = 0o644
# Limits on JSON files. The depth is limited because code that walks the value recurses.
MAX_JSON_BYTES = 2**28
MAX_JSON_DEPTH = 100
_CONTAINERS = frozenset({dict, list})
# Windows has no such flags
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)


class CorruptFileError(OSError):
    """A file that is missing or corrupt. The message names it and ends with a hint."""


def write_atomically(
    path: Path, data: bytes | Iterable[bytes], mode: int = OWNER_ONLY, durable: bool = True
) -> None:
    """Write to a temporary file beside `path`, fsync, rename, fsync the folder.

    A crash leaves either the old file or the new one. The temporary file is opened exclusively
    under an unpredictable name, and a link at `path` is replaced, not followed. Missing folders are
    created for their owner only.

    Args:
        data: the file's content, or its parts in order.
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
            file.writelines([data] if isinstance(data, bytes) else data)
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


def write_record(
    path: Path, content: Mapping[str, Any], signature: Mapping[str, str] | None = None
) -> None:
    """Write a JSON file that contains the SHA-256 of its own content, atomically.

    Args:
        signature: of the content, by whoever vouches for it.

    Raises:
        OSError: see `write_atomically`.
    """
    record: dict[str, Any] = {"sha256": _digest(content), "content": content}
    if signature is not None:
        record["signature"] = signature
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def read_record(path: Path, hint: str = "") -> dict[str, Any]:
    """Read the content that `write_record` wrote.

    Args:
        hint: the end of the error message, such as "restore it from a backup".

    Raises:
        CorruptFileError: the file is missing or corrupt.
        PermissionError: this user may not read it.
    """
    record = read_json(path, hint=hint)
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


def link_file(file: Path, target: Path) -> None:
    """Create a hard link to a file, or a copy on another disk; an earlier target is replaced.

    Raises:
        OSError: the file is missing, or cannot be copied.
    """
    make_private_folder(target.parent)
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        write_atomically(target, file.read_bytes())


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


def remove_empty_folders(folder: Path) -> None:
    """Remove the empty folders below a folder."""
    for root, _, _ in os.walk(folder, topdown=False):
        if Path(root) != folder and not any(Path(root).iterdir()):
            Path(root).rmdir()


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
    hint: str = "",
    most_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """Read a JSON file.

    Args:
        kind: the type or types that the value may have.
        hint: the end of the error message, such as "run it again to recreate the file".
        most_bytes: upper bound on the file's size.

    Raises:
        CorruptFileError: the path is missing or not a file, or the file is not JSON, too large,
            nested too deeply, or its value has another type.
        PermissionError: this user may not read it.
    """
    ending = f"; {hint}" if hint else ""
    if not file.is_file():
        problem = "is not a file" if os.path.lexists(file) else "is missing"
        raise CorruptFileError(f"{sanitize(file, 1000)} {problem}{ending}")
    try:
        value = parse_json(read_bounded(file, most_bytes))
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise CorruptFileError(
            f"{sanitize(file, 1000)} is corrupt ({sanitize(error, 100)}){ending}"
        ) from None
    if not isinstance(value, kind):
        raise CorruptFileError(
            f"{sanitize(file, 1000)} is corrupt (another type of JSON value){ending}"
        )
    return value


def read_bounded(file: Path, most_bytes: int) -> bytes:
    """Read a file of limited size.

    Raises:
        ValueError: it has more than `most_bytes` bytes, or is a placeholder for another file.
        OSError: it cannot be read.
    """
    with open(file, "rb") as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    if problem := placeholder_problem(content):
        raise ValueError(problem)
    return content


def read_below(root: Path, name: str, most_bytes: int) -> bytes:
    """Read a file below a folder whose content is untrusted: no link below `root` is followed.

    Args:
        name: the file's path relative to `root`, with slashes.

    Raises:
        ValueError: the path is absolute or has `..`, or the file has more than `most_bytes` bytes.
        OSError: the path is missing, has a link, or is not a regular file.
    """
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise ValueError(f"{sanitize(name)} is not a path below a folder")
    folder = os.open(root, os.O_RDONLY | _FOLDER)
    try:
        for part in parts[:-1]:
            parent = folder
            folder = os.open(part, os.O_RDONLY | _FOLDER | _NO_LINKS, dir_fd=parent)
            os.close(parent)
        # A named pipe would block until somebody writes to it
        handle = os.open(parts[-1], os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=folder)
    finally:
        os.close(folder)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{sanitize(name)} is not a file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{sanitize(name)} has more than {most_bytes:,} bytes")
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
    """Return the values in an object or a list, unless none of them has values itself."""
    if not isinstance(value, dict | list):
        return ()
    values = value.values() if isinstance(value, dict) else value
    # A confusion matrix has a million numbers, which only C compares in no time
    return () if _CONTAINERS.isdisjoint(map(type, values)) else values


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
