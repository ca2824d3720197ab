"""Files that are either whole or not there, and that only their owner reads."""

import hashlib
import json
import os
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from osfl.util.text import plain

OWNER_ONLY = 0o600
PUBLIC = 0o644  # of what is meant for others: certificates, kits
# Bounds of a JSON file that is read; whoever reads it again recurses for every level.
MOST_BYTES = 2**28
MOST_LEVELS = 100
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


class DamageError(OSError):
    """A file that is missing, cut short or something else; the message names it and the cure."""


def write_atomically(path: Path, data: bytes, mode: int = OWNER_ONLY, durable: bool = True) -> None:
    """Write to a temporary file beside `path`, fsync, rename, fsync the folder.

    A crash leaves the old file or the new one. The temporary file is opened exclusively, by a name
    that nobody can guess; a link at `path` is replaced, not followed. Folders that are missing are
    made for their owner alone.

    Args:
        mode: the file's permissions, whatever the umask.
        durable: False leaves the fsync out, for what is written anew every second.

    Raises:
        OSError: among others when the disk is full; the temporary file is removed.
    """
    private_folder(path.parent)
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
    """Write a JSON file that carries the SHA-256 of its own content, whole or not at all.

    Raises:
        OSError: as `write_atomically`.
    """
    record = {"sha256": _digest_of(content), "content": content}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def read_record(path: Path, hint: str = "") -> dict[str, Any]:
    """Read the content of `write_record`.

    Args:
        hint: the end of the message, such as "restore it from a backup".

    Raises:
        DamageError: the file is missing, or is not as it was written.
        PermissionError: this user may not read it.
    """
    record = read_json(path, cure=hint)
    content = record.get("content")
    if not isinstance(content, dict) or record.get("sha256") != _digest_of(content):
        end = f"; {hint}" if hint else ""
        raise DamageError(f"{plain(path, 1000)} is damaged (its SHA-256 differs){end}")
    return content


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone (0700).

    What is there already keeps its permissions: they are somebody's decision.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    try:
        folder.mkdir(0o700)
    except FileNotFoundError:
        private_folder(folder.parent)
        folder.mkdir(0o700, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


def own_folder(folder: Path) -> None:
    """Make a folder for its owner alone, or check the one that is there.

    Raises:
        OSError: it cannot be made, or as `check_own_folder`.
    """
    private_folder(folder)
    check_own_folder(folder)


def check_own_folder(folder: Path) -> None:
    """Check that no other user can have prepared a folder whose name they can guess.

    The folders above it may be links, or shared: the user chose them.

    Raises:
        OSError: it is a link, belongs to another user, or every user may write in it.
    """
    about = folder.lstat()
    name = plain(folder, 1000)
    if stat.S_ISLNK(about.st_mode):
        raise OSError(f"{name} is a link to another folder; remove the link, or set another folder")
    if about.st_uid != os.geteuid():
        raise OSError(f"{name} belongs to another user (uid {about.st_uid}); set another folder")
    if about.st_mode & stat.S_IWOTH:
        raise OSError(f"{name} can be written by every user; run chmod o-w on it")


def open_private(path: Path, mode: str) -> IO[Any]:
    """As `open`, but a new file is its owner's alone (0600), and a link is not followed."""
    return open(path, mode, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_LINKS, OWNER_ONLY)


def read_json(
    file: Path, kind: type | tuple[type, ...] = dict, cure: str = "", most_bytes: int = MOST_BYTES
) -> Any:
    """Return the content of a JSON file.

    Args:
        kind: what it must be.
        cure: how the message goes on, such as "the same run again makes it anew".
        most_bytes: the size above which it is not read.

    Raises:
        DamageError: it is missing, no file, no JSON, of another kind, too large or nested too deep.
        PermissionError: this user may not read it.
    """
    cure = f"; {cure}" if cure else ""
    if not file.is_file():
        problem = "is not a file" if os.path.lexists(file) else "is missing"
        raise DamageError(f"{plain(file, 1000)} {problem}{cure}")
    try:
        value = parse_json(read_bounded(file, most_bytes))
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise DamageError(f"{plain(file, 1000)} is damaged ({plain(error, 100)}){cure}") from None
    if not isinstance(value, kind):
        raise DamageError(f"{plain(file, 1000)} is damaged (another kind of JSON){cure}")
    return value


def read_bounded(file: Path, most_bytes: int) -> bytes:
    """Return a file's content.

    Raises:
        ValueError: it has more bytes than `most_bytes`, or is a placeholder of the real file.
        OSError: it cannot be read.
    """
    with open(file, "rb") as opened:
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    if problem := placeholder(content):
        raise ValueError(problem)
    return content


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, not UTF-8, or nested deeper than `MOST_LEVELS`.
    """
    too_deep = f"it is nested deeper than {MOST_LEVELS} levels"
    try:
        # Python would take UTF-16 and a byte order mark, which the libraries do not
        value = json.loads(content if isinstance(content, str) else _utf8(content))
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MOST_LEVELS):
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


def placeholder(start: bytes) -> str:
    """Say what a file is in place of weights or settings, by its first bytes; "" if neither."""
    words = start[:200].lstrip().lower()
    if not start:
        return "it is empty"
    if words.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file (git lfs pull fetches it)"
    if words.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, such as an error message of a download"
    return ""


def not_weights(start: bytes) -> str:
    """Say what a file is in place of safetensors, by its first bytes; "" if these do not tell."""
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "it is a pickle, as torch.save writes; save the weights as safetensors"
    words = plain(start, 100)
    if start and "\N{REPLACEMENT CHARACTER}" not in words:
        return f"it is a text, not weights: {words!r}"
    return ""
