"""Cache of a client's finished payload on disk, until the server has stored it.

A payload stays with its job: its bytes and its seal state the job's id, and the privacy ledger
books it under that job. Another job gets it only from its own server's store (`payloads-from`).

`payload.json` holds the payload's SHA-256 and costs, and its own checksum. It is written last, so
without it there is no payload.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osfl.util.files import CorruptFileError, read_record, write_atomically, write_record
from osfl.util.text import sanitize

_PAYLOAD = "payload.pb"
_RECORD = "payload.json"


@dataclass(frozen=True)
class CachedPayload:
    """A payload and its costs."""

    blob: bytes
    costs: dict[str, float]


def store(folder: Path, blob: bytes, costs: Mapping[str, float]) -> None:
    """Write a finished payload to a folder.

    Raises:
        OSError: it cannot be written.
    """
    (folder / _RECORD).unlink(missing_ok=True)
    write_atomically(folder / _PAYLOAD, blob)
    write_record(folder / _RECORD, {"sha256": _digest(blob), "costs": dict(costs)})


def load(folder: Path) -> CachedPayload | None:
    """Return the payload in a folder, or None if there is none.

    Raises:
        CorruptFileError: the payload or its record is corrupt.
    """
    if not has_payload(folder):
        return None
    record = read_record(folder / _RECORD)
    file = folder / _PAYLOAD
    try:
        blob = file.read_bytes()
    except FileNotFoundError:
        raise CorruptFileError(f"{sanitize(file, 1000)} is missing") from None
    if _digest(blob) != record["sha256"]:
        raise CorruptFileError(f"{sanitize(file, 1000)} is corrupt (its SHA-256 differs)")
    return CachedPayload(blob, record["costs"])


def costs_of(folder: Path) -> dict[str, float]:
    """Return the costs of the payload that a folder holds or held.

    Raises:
        CorruptFileError: the record is missing or corrupt.
    """
    costs: dict[str, float] = read_record(folder / _RECORD)["costs"]
    return costs


def delete_content(folder: Path) -> None:
    """Delete a payload, but not its record, which says that it was made."""
    (folder / _PAYLOAD).unlink(missing_ok=True)


def may_delete(folder: Path, sha256: str, is_masked: bool = False) -> bool:
    """Return whether a folder holds the payload that the server has stored, without a DP guarantee.

    A payload with a guarantee stays: a second noisy draw would spend epsilon again.

    Args:
        is_masked: whether the digest is that of the payload as it was masked for a secure sum.
    """
    try:
        record = read_record(folder / _RECORD)
    except OSError:
        return False
    is_stored = is_masked or record["sha256"] == sha256
    return bool(is_stored and not record["costs"]["epsilon"])


def has_payload(folder: Path) -> bool:
    """Return whether a folder holds a payload, corrupt or not."""
    return (folder / _PAYLOAD).exists() or (folder / _RECORD).exists()


def _digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()
