"""The secure sum of a run: its members, and the sum once it is open."""

import hashlib
import os
from typing import Any

from osfl.run_folder.job_files import HINT_RESTORE, JobFiles
from osfl.util.files import CorruptFileError, read_record, write_atomically, write_record

_MEMBERS = "secure-sum.json"
_NUMBERS = "secure-sum.bin"
DIGEST_BYTES = 32


class SumStore(JobFiles):
    """Owner of `secure-sum.json` and `secure-sum.bin`."""

    def store_secure_members(self, record: dict[str, Any]) -> None:
        """Keep the members: `threshold`, `settings`, `clients` with their keys, and `absent`."""
        write_record(self.path / _MEMBERS, record)

    def secure_members(self) -> dict[str, Any] | None:
        """Read the members; None before they were selected.

        Raises:
            CorruptFileError: the record is corrupt.
        """
        file = self.path / _MEMBERS
        return read_record(file, HINT_RESTORE) if os.path.lexists(file) else None

    def store_secure_sum(self, content: bytes) -> None:
        """Store the unmasked sum: its integers modulo 2^32, four bytes each, and their SHA-256."""
        write_atomically(self.path / _NUMBERS, hashlib.sha256(content).digest() + content)

    def secure_sum(self) -> bytes | None:
        """Read the unmasked sum; None before it is stored.

        Raises:
            CorruptFileError: it is corrupt.
        """
        file = self.path / _NUMBERS
        if not os.path.lexists(file):
            return None
        stored = file.read_bytes()
        digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise CorruptFileError(f"{file} is corrupt (its SHA-256 differs); {HINT_RESTORE}")
        return content
