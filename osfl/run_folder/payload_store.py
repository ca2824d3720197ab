"""The payloads of a run, as they were received, with their records."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from osfl.run_folder.job_files import HINT_RESTORE, JobFiles
from osfl.util.files import CorruptFileError, link_file, read_json, write_atomically
from osfl.util.log import log
from osfl.util.names import is_identifier

# Crashes of the server while it decodes a client's payloads, after which the client is refused. A
# single crash may have another cause.
MAX_DECODING_CRASHES = 2


@dataclass(frozen=True)
class PayloadSource:
    """The payloads that a run has from another one.

    Attributes:
        run: the other run's folder.
        job: the job that the clients made them for, which is in every payload.
        payloads: the SHA-256 of each payload as it is stored, by client.
        jobs: the job of clients that made theirs for another one, which the other run continued.
    """

    run: str
    job: str
    payloads: dict[str, str]
    jobs: dict[str, str] = field(default_factory=dict)


class PayloadStore(JobFiles):
    """Owner of `payloads/` and `payloads-from.json`."""

    @property
    def payload_source_file(self) -> Path:
        """The path of the record of where the payloads are from."""
        return self.path / "payloads-from.json"

    def payload_source(self) -> PayloadSource | None:
        """Read where the payloads are from; None if the clients made them for this run.

        Raises:
            CorruptFileError: the record is corrupt.
        """
        kinds = {"run": str, "job": str, "payloads": dict}
        record = self.read_json("payloads-from.json", kinds)
        if record is None:
            return None
        jobs = record.get("jobs", {})
        if not are_digests(record["payloads"]) or not _are_jobs(jobs):
            raise CorruptFileError(f"{self.payload_source_file} is corrupt; {HINT_RESTORE}")
        return PayloadSource(**{key: record[key] for key in kinds}, jobs=jobs)

    def store_payload_source(self, source: PayloadSource) -> None:
        """Bind this run to another run's payloads."""
        record = asdict(source)
        # Most runs have no such payload
        if not source.jobs:
            del record["jobs"]
        self.write_json("payloads-from.json", record)

    def link_payload(self, other: "PayloadStore", client: str) -> None:
        """Store another run's payload: as a hard link, or a copy on another disk."""
        self.write_json(f"payloads/{client}.json", other.read_json(f"payloads/{client}.json", {}))
        name = f"payloads/{client}.pb"
        link_file(other.path / name, self.path / name)

    def has_payload(self, client: str, sha256: str) -> bool:
        """Return whether a payload with this SHA-256 is stored, and not as a link."""
        file = self.path / "payloads" / f"{client}.pb"
        # A hard link to a link would be one
        if file.is_symlink() or not file.is_file():
            return False
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == sha256

    def store_payload(self, client: str, blob: bytes, record: dict[str, Any]) -> None:
        """Store a payload durably; afterwards the client can delete it.

        Args:
            record: the payload's `sha256`, `bytes`, `costs`, for a sealed one the key, and in a
                mixed run the `kind`.
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

    def payload_kind(self, client: str) -> str:
        """Return the kind of a mixed run's stored payload; "" without one, or in another run."""
        record = self.read_json(f"payloads/{client}.json") or {}
        return str(record.get("kind", ""))

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


def _are_jobs(jobs: object) -> bool:
    """Return whether a value has a job by client."""
    return isinstance(jobs, dict) and all(
        isinstance(job, str) and is_identifier(job) for job in jobs.values()
    )


def are_digests(payloads: Mapping[str, object]) -> bool:
    """Return whether payloads are SHA-256 digests by client, whose names are safe for files."""
    return all(
        is_identifier(client) and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
        for client, digest in payloads.items()
    )


def _quarantine(file: Path) -> None:
    """Rename a file to `<name>.refused`, and replace an earlier one."""
    target = file.with_name(file.name + ".refused")
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    file.replace(target)
