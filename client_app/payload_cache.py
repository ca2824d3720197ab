"""A client's finished payload at rest, until the server has stored it.

`payload.json` holds the payload's SHA-256 and costs, and its own. It is written last: without it
there is no payload.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osfl.util.files import DamageError, read_record, write_atomically, write_record
from osfl.util.text import plain

_PAYLOAD = "payload.pb"
_RECORD = "payload.json"


@dataclass(frozen=True)
class CachedPayload:
    """A payload as it was made, and what it cost."""

    blob: bytes
    costs: dict[str, float]


def store(folder: Path, blob: bytes, costs: Mapping[str, float]) -> None:
    """Keep a finished payload.

    Raises:
        OSError: it cannot be written.
    """
    (folder / _RECORD).unlink(missing_ok=True)
    write_atomically(folder / _PAYLOAD, blob)
    write_record(folder / _RECORD, {"sha256": _digest(blob), "costs": dict(costs)})


def load(folder: Path) -> CachedPayload | None:
    """Return the payload of a folder, or None if it has none.

    Raises:
        DamageError: the payload or its record is not as it was written.
    """
    if not has_payload(folder):
        return None
    record = read_record(folder / _RECORD)
    file = folder / _PAYLOAD
    try:
        blob = file.read_bytes()
    except FileNotFoundError:
        raise DamageError(f"{plain(file, 1000)} is missing") from None
    if _digest(blob) != record["sha256"]:
        raise DamageError(f"{plain(file, 1000)} is damaged (its SHA-256 differs)")
    return CachedPayload(blob, record["costs"])


def may_forget(folder: Path, sha256: str) -> bool:
    """Whether a folder holds the payload that the server has stored, without a guarantee.

    One with a guarantee stays: another draw would give away as much again.
    """
    try:
        record = read_record(folder / _RECORD)
    except OSError:
        return False
    return bool(record["sha256"] == sha256 and not record["costs"]["epsilon"])


def has_payload(folder: Path) -> bool:
    """Whether a folder holds a payload, damaged or not."""
    return (folder / _PAYLOAD).exists() or (folder / _RECORD).exists()


def _digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()
