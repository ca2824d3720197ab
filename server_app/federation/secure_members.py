"""The members of a secure sum, and what the server keeps of them in the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord

from osfl.config import ConfigError, RunConfig
from osfl.data.parts import class_names
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.fields import field_tensors
from osfl.payload.kinds import Masked, Sent
from osfl.payload.masking import MaskingError, Roster
from osfl.payload.sum_messages import pack_roster
from osfl.payload.summands import Layout, run_layout, summand_shapes
from osfl.run_folder.layout import RunFolder
from server_app.expected import ExpectedOf, expected_payload, expected_tensors
from server_app.federation.exchange import RoundError
from server_app.federation.join import Members


@dataclass(frozen=True)
class SecureMembers:
    """The roster of a run's secure sum.

    Attributes:
        signatures: each member's signature of its key.
        layout: of the numbers that are added.
        absent: members that the server has named as absent; their payloads are no longer accepted.
    """

    roster: Roster
    signatures: Mapping[str, bytes]
    layout: Layout
    absent: tuple[str, ...] = ()

    @property
    def present(self) -> tuple[str, ...]:
        """Return the members that are not named as absent, in order."""
        return tuple(client for client in self.roster.members if client not in self.absent)

    @property
    def packed(self) -> dict[str, ConfigRecord]:
        """Return the records of a request."""
        return pack_roster(self.roster, self.signatures)

    def nodes(self, members: Members) -> dict[str, int]:
        """Return the nodes of the members that are online and not named as absent."""
        return {
            client: members.joined[client] for client in self.present if client in members.joined
        }

    def expected(self, config: RunConfig, job_id: str) -> ExpectedOf:
        """Return a function from client to the schema of its masked payload."""
        of_client = expected_payload(config, job_id)
        count = self.layout.size + 1
        sizes = {"4s": 4 * count, "m": len(self.roster.keys)}
        tensors = field_tensors(Masked, sizes)

        def expected(client: str) -> wire.Expected:
            return replace(of_client(client), tensors=tensors, architectures={}, masked=True)

        return expected

    def check(self, client: str, payload: Sent) -> None:
        """Check that a payload is masked for this roster, by a member that is not absent.

        Raises:
            PayloadError: it is not.
        """
        assert isinstance(payload, Masked)
        if client not in self.roster.keys or client in self.absent:
            raise wire.PayloadError(client, "roster", "it is not a present member of this sum")
        if payload.roster != self.roster.digest.hex():
            raise wire.PayloadError(client, "roster", "it is masked for other members")


def select_members(
    config: RunConfig, job_id: str, members: Members, folder: RunFolder
) -> SecureMembers:
    """Return the members of the run's secure sum: those of the folder, or the joined clients.

    Raises:
        RoundError: too few clients have joined.
        CorruptFileError: the folder's record is corrupt.
    """
    record = folder.secure_members()
    count = len(record["clients"] if record else members.nodes)
    layout = sum_layout(config, count)
    if record is None:
        keys = {client: members.sum_keys[client] for client in members.nodes}
        roster = Roster(
            job_id,
            config.needed_clients,
            layout.text,
            {client: key for client, (key, _) in sorted(keys.items())},
        )
        try:
            roster.check()
        except MaskingError as error:
            raise RoundError(f"secure-sum = true: {error}") from None
        signatures = {client: signature for client, (_, signature) in keys.items()}
        secure = SecureMembers(roster, signatures, layout)
        store_members(folder, secure)
        return secure
    return _stored_members(record, config, job_id, layout)


def _stored_members(
    record: Mapping[str, Any], config: RunConfig, job_id: str, layout: Layout
) -> SecureMembers:
    """Return the members that the run's folder has.

    Raises:
        ConfigError: `min-clients` is another now; each client has accepted the first.
    """
    rows = record["clients"]
    keys = {row["client"]: bytes.fromhex(row["key"]) for row in rows}
    roster = Roster(job_id, record["threshold"], record["settings"], keys)
    if roster.threshold != config.needed_clients:
        raise ConfigError(
            f"min-clients = {config.min_clients}: stays {roster.threshold} in this job's secure "
            "sum, which its clients have accepted; use another job-id for another value"
        )
    signatures = {row["client"]: bytes.fromhex(row["signature"]) for row in rows}
    return SecureMembers(roster, signatures, layout, tuple(record["absent"]))


def store_members(folder: RunFolder, secure: SecureMembers) -> None:
    """Keep the members in the run's folder, before any client hears of them."""
    roster = secure.roster
    rows = [
        {
            "client": client,
            "key": key.hex(),
            "signature": secure.signatures.get(client, b"").hex(),
        }
        for client, key in roster.keys.items()
    ]
    folder.store_secure_members(
        {
            "threshold": roster.threshold,
            "settings": roster.settings,
            "clients": rows,
            "absent": list(secure.absent),
        }
    )


def sum_layout(config: RunConfig, members: int) -> Layout:
    """Return the layout of the numbers that the run's clients add."""
    classes = len(class_names(config.data))
    shapes = {
        name: tuple(classes if size == "classes" else int(size) for size in shape)
        for name, (shape, _) in expected_tensors(config).items()
    }
    kind = METHODS[config.method].payload or ""
    parts = summand_shapes(kind, shapes, classes, len(config.votes.words))
    return run_layout(config, parts, members)
