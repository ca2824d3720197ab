"""The records of clients that a run has forgotten (`osfl forget`).

A record is also a journal, from which an interrupted removal continues. It has the names and the
SHA-256 of the removed files, never their contents.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.run_folder.job_files import JobFiles
from osfl.util.files import CorruptFileError, read_json, read_record, write_record

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# The states of a record, in their order
REMOVING = "removing"
REMOVED = "removed"
RECOMPUTED = "recomputed"
HINT_RECORD = "restore it from a backup; without it the run may ask the client again"


@dataclass(frozen=True)
class Removal:
    """The removal of a client from a run.

    Attributes:
        job: the run's job id.
        client_sha256: the SHA-256 of the client's name.
        client: the client's name, if the operator records it; "" if not.
        state: `removing`, `removed`, or `recomputed` once the run has its results again.
        had_payload: whether the client had sent a payload, and so had a place in the run.
        osfl: the version of OSFL.
        began: the UTC time at which the removal began.
        removed: the UTC time at which the last file was removed; "" before.
        files: `file` and `sha256` of each removed file. The client's name in a path is replaced
            unless it is recorded.
        not_reached: texts that say what the removal cannot reach.
        recomputed: `images`, the number of images synthesized again, and `seconds`; {} before.
    """

    job: str
    client_sha256: str
    client: str
    state: str
    had_payload: bool
    osfl: str
    began: str
    removed: str = ""
    files: tuple[dict[str, str], ...] = ()
    not_reached: tuple[str, ...] = ()
    recomputed: dict[str, float] = field(default_factory=dict)


def name_digest(client: str) -> str:
    """Return the SHA-256 of a client's name, by which a record identifies it."""
    return hashlib.sha256(client.encode()).hexdigest()


def signed_message(content: dict[str, Any]) -> bytes:
    """Return the bytes that the signature of a record covers."""
    return json.dumps(content, sort_keys=True).encode()


class ForgottenStore(JobFiles):
    """Owner of `forgotten/`."""

    def forgotten_files(self) -> list[Path]:
        """List the records, the oldest first."""
        return sorted((self.path / "forgotten").glob("*.json"))

    def removals(self) -> dict[Path, Removal]:
        """Read all records.

        Raises:
            CorruptFileError: one is corrupt.
        """
        return {file: read_removal(file) for file in self.forgotten_files()}

    def forgotten_digests(self) -> frozenset[str]:
        """Return the digest of each forgotten client's name.

        Raises:
            CorruptFileError: a record is corrupt.
        """
        return frozenset(removal.client_sha256 for removal in self.removals().values())

    def forgotten_places(self) -> int:
        """Return the number of places that forgotten clients had in this run."""
        return sum(removal.had_payload for removal in self.removals().values())

    def interrupted_removal(self) -> Path | None:
        """Return the record of a removal that has not removed everything yet, or None."""
        states = ((file, removal.state) for file, removal in self.removals().items())
        return next((file for file, state in states if state == REMOVING), None)

    def new_forgotten_file(self) -> Path:
        """Return the path of the next record."""
        numbers = [int(file.stem) for file in self.forgotten_files() if file.stem.isdecimal()]
        return self.path / "forgotten" / f"{max(numbers, default=0) + 1:04d}.json"

    def store_removal(
        self, file: Path, removal: Removal, key: "Ed25519PrivateKey | None" = None
    ) -> None:
        """Store a record, signed if there is a key."""
        from osfl.run_folder.signatures import sign

        content = asdict(removal)
        signature = None if key is None else sign(signed_message(content), key)
        write_record(file, content, signature)


def read_removal(file: Path) -> Removal:
    """Read a record.

    Raises:
        CorruptFileError: it is corrupt.
    """
    content = read_record(file, HINT_RECORD)
    try:
        lists = {name: tuple(content[name]) for name in ("files", "not_reached")}
        return Removal(**{**content, **lists})
    except (KeyError, TypeError):
        raise CorruptFileError(f"{file} is corrupt; {HINT_RECORD}") from None


def signer_of(file: Path) -> str:
    """Return the public key, in hex, that signed a record; "" for an unsigned one.

    Raises:
        CorruptFileError: the record is corrupt, or its signature does not match its content.
    """
    from osfl.run_folder.signatures import signing_key

    content = read_record(file, HINT_RECORD)
    signature = read_json(file).get("signature")
    if signature is None:
        return ""
    key = signing_key(signature, signed_message(content)) if isinstance(signature, dict) else ""
    if not key:
        raise CorruptFileError(
            f"{file} has a signature that does not match its content; {HINT_RECORD}"
        )
    return key


def record_problems(files: list[Path]) -> Iterator[str]:
    """Yield a message on each record that is corrupt, wrongly signed or of an interrupted removal.

    Only the name of a record's file is in the message.
    """
    for file in files:
        try:
            signer_of(file)
            removal = read_removal(file)
        except OSError:
            yield f"forgotten/{file.name} is corrupt, or its signature does not match its content"
            continue
        if removal.state == REMOVING:
            yield f"forgotten/{file.name}: the removal was interrupted; repeat `osfl forget`"
