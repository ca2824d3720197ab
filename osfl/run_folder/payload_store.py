"""The payloads of a run, as they were received, with their records."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from osfl.run_folder.job_files import JobFiles
from osfl.util.files import CorruptFileError, read_json, write_atomically
from osfl.util.log import log

# Crashes of the server while it decodes a client's payloads, after which the client is refused. A
# single crash may have another cause.
MAX_DECODING_CRASHES = 2


class PayloadStore(JobFiles):
    """Owner of `payloads/`."""

    def store_payload(self, client: str, blob: bytes, record: dict[str, Any]) -> None:
        """Store a payload durably; afterwards the client can delete it.

        Args:
            record: the payload's `sha256`, `bytes`, `costs`, and for a sealed one the key.
        """
        self.write_json(f"payloads/{client}.json", record)
        write_atomically(self.path / "payloads" / f"{client}.pb", blob)

    def stored_payload(self, client: str) -> bytes:
        """Read a payload as it was stored."""
        return (self.path / "payloads" / f"{client}.pb").read_bytes()

    def sealing_fingerprint(self, client: str) -> str:
        """Return the fingerprint of the key that a payload is sealed to; "" if it is open."""
        record = self.read_json(f"payloads/{client}.json") or {}
        return str(record.get("sealed-to", ""))

    def payload_size(self, client: str) -> int:
        """Return the size of a stored payload in bytes."""
        return (self.path / "payloads" / f"{client}.pb").stat().st_size

    def payload_digest(self, client: str) -> str:
        """Return the recorded SHA-256 of a payload; "" for a client without one."""
        record = self.read_json(f"payloads/{client}.json") or {}
        return str(record.get("sha256", ""))

    def payload_files(self) -> list[Path]:
        """List the files of all payloads, in the order of the clients' names."""
        return sorted((self.path / "payloads").glob("*.pb"), key=lambda file: file.stem)

    def payload_records(self) -> list[Path]:
        """List the records of all payloads, which are named after the clients."""
        return sorted((self.path / "payloads").glob("*.json"))

    def stored_clients(self) -> list[str]:
        """List the clients whose payloads are stored with a valid record.

        Payloads without one are quarantined, so that their clients are asked again.
        """
        clients = [file.stem for file in self.payload_files()]
        for client in clients:
            if problem := self._payload_problem(client):
                log.error("%s; the payload is quarantined, and %s is asked again", problem, client)
                self.quarantine_payload(client)
        return [client for client in clients if (self.path / "payloads" / f"{client}.pb").is_file()]

    def _payload_problem(self, client: str) -> str:
        """Return the problem with a payload's record, or ""; the payload itself is not read."""
        file = self.path / "payloads" / f"{client}.json"
        try:
            record = read_json(file)
        except CorruptFileError as error:
            return str(error)
        if not file.with_suffix(".pb").is_file():
            return f"{file.with_suffix('.pb')} is not a file"
        costs = record.get("costs")
        is_valid = (
            isinstance(record.get("sha256"), str)
            and isinstance(record.get("bytes"), int)
            and isinstance(costs, dict)
            and all(isinstance(value, int | float) for value in costs.values())
        )
        return "" if is_valid else f"{file} is corrupt (it lacks sha256, bytes or costs)"

    @contextmanager
    def decoding(self, client: str) -> Iterator[None]:
        """Mark a payload on disk as being decoded, while the context is open.

        A payload that crashes the server is already stored, and would crash every server that
        resumes the run. The mark makes the next server refuse it. The client's next payload is
        decoded, but if the server crashes again, none after it.

        Raises:
            PayloadError: the server ended while it decoded this payload, or too often while it
                decoded this client's payloads; or there is not enough memory to decode it.
        """
        from osfl.payload.wire import PayloadError

        marker = f"payloads/{client}.decoding"
        if self.read_json(marker) is not None:
            raise PayloadError(client, "message", "the server ended while it decoded this payload")
        crashes = self.read_json(f"{marker}.refused") or 0
        if crashes >= MAX_DECODING_CRASHES:
            raise PayloadError(
                client,
                "message",
                f"the server ended {crashes} times while it decoded this client's payloads; this "
                "job accepts no more of them",
            )
        self.write_json(marker, crashes + 1)
        try:
            yield
        except MemoryError as error:
            raise PayloadError(
                client, "message", "there is not enough memory to decode it"
            ) from error
        finally:
            (self.path / marker).unlink()

    def quarantine_payload(self, client: str) -> None:
        """Quarantine an invalid payload, as `<client>.pb.refused`."""
        for ending in ("pb", "json", "decoding"):
            file = self.path / "payloads" / f"{client}.{ending}"
            if os.path.lexists(file):
                _quarantine(file)


def _quarantine(file: Path) -> None:
    """Rename a file to `<name>.refused`, and replace an earlier one."""
    target = file.with_name(file.name + ".refused")
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    file.replace(target)
