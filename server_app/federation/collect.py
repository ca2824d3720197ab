"""The clients' payloads."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from osfl.config import RunConfig
from osfl.payload import wire
from osfl.payload.encryption import (
    OVERHEAD,
    SealError,
    fingerprint,
    open_sealed,
    pack_public_key,
    public_bytes,
)
from osfl.payload.kinds import Payload
from osfl.payload.messages import ACKNOWLEDGE, pack_acknowledgement, unpack_payload
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.costs import release_memory
from osfl.util.log import log
from osfl.util.text import plain
from server_app.expected import ExpectedOf, check_stated, probe
from server_app.federation import exchange as under_way
from server_app.federation.exchange import Exchange, RoundError, ignore, listed
from server_app.federation.join import Members


@dataclass
class _Upload:
    blob: bytes  # as it is stored
    sha256: str  # of the open payload
    costs: dict[str, float]


class Collection:
    """The payloads that are here, and those that are owed."""

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        job_id: str,
        members: Members,
        folder: RunFolder,
        status: Status,
        expected: ExpectedOf,
        key: X25519PrivateKey | None = None,
    ):
        self.config = config
        self.members = members
        self.folder = folder
        self.status = status
        self.expected = expected
        self.end = time.monotonic() + config.deadline
        self.payloads: dict[str, Payload] = {}
        self.problems: dict[str, str] = {}  # by client
        largest = config.max_payload_mb * 1e6
        self._exchange = Exchange(
            grid, config.deadline, under_way.WORK_PATIENCE_SECONDS, largest=largest
        )
        self._thanks = Exchange(grid, config.join_timeout)
        self._job_id = job_id
        self._key = key
        public = None if key is None else public_bytes(key)
        self._job = RecordDict({"job": ConfigRecord({"job": job_id}), **pack_public_key(public)})
        self._asked: dict[int, str] = {}  # the client of each node

    def look(self) -> bool:
        """Take what has come, and ask spares in the place of those who failed.

        Returns: whether there is more to come.
        """
        self._exchange.pull(self._read, self._keep, self._fail, self.end)
        self._thanks.pull(ignore, ignore, ignore, self.end)
        self._fill_places()
        self.status.advance(len(self.payloads), len(self.members.nodes))
        return bool(self._exchange.waiting()) or self._a_spare_may_come()

    def rest(self) -> None:
        """Until the next look."""
        self._exchange.rest(self.end)

    def from_store(self, client: str) -> None:
        """Use a payload that came before."""
        # What was accepted once is not refused for a lower limit, nor for what its client declares
        # now: its images may be others
        limits = replace(self.expected(client), max_bytes=self.folder.payload_size(client))
        sha256 = self.folder.payload_digest(client)
        # Of a sealed one the seal finds damage, and its digest is no open payload's
        known = None if self.folder.sealed_to(client) else sha256
        if self._accept(client, known, limits) and client in self.members.nodes:
            named = known or wire.digest(self._opened(client))
            self._acknowledge(self.members.nodes[client], named)

    def ask(self, client: str, node: int) -> None:
        """Ask a client for its payload."""
        self.problems.pop(client, None)
        self._asked[node] = client
        self.status.client(client, "asked")
        self._exchange.push(node, "train", self._job)

    def close(self) -> None:
        """The phase is over: say who is missing, and send the acknowledgements that are left."""
        for node in self._exchange.waiting():
            late = f"no payload within {self.config.deadline:g} s (deadline)"
            self.problems[self._asked[node]] = late
        self._exchange.end()
        now = time.monotonic()
        end = min(now + under_way.THANKS_SECONDS, max(now, self.end) + under_way.GRACE_SECONDS)
        while self._thanks.unsent() and time.monotonic() < end:
            self._thanks.pull(ignore, ignore, ignore, end)
            self._thanks.rest(end)
        self._thanks.end()
        self.status.advance(len(self.payloads), len(self.members.nodes))

    def _vacant(self) -> int:
        """Places without a payload, and without a client that owes one."""
        there = len(self.payloads) + len(self._exchange.waiting())
        return self.config.training_clients - there

    def _fill_places(self) -> None:
        away = self._exchange.away()
        if self._vacant() > 0 or away:
            self.members.look(self.end)
        # Only as many as spares can replace: without one, a node may still come back
        for node in away[: max(0, len(self.members.spares()) - self._vacant())]:
            self._exchange.give_up(node)
            self._fail(node, f"offline for {under_way.AWAY_SECONDS:g} s, and another is there")
        for spare in self.members.spares()[: max(0, self._vacant())]:
            gone = [client for client in self.members.nodes if client in self.problems]
            self.ask(spare, self.members.take_in(spare, gone[0] if gone else None))

    def _a_spare_may_come(self) -> bool:
        """Whether a node that is fit may still answer, and is needed."""
        asked = self._vacant() > 0 and bool(self.members.silent())
        return asked and time.monotonic() < self.members.until

    def _read(self, node: int, content: RecordDict) -> _Upload:
        client = self._asked[node]
        expected = self.expected(client)
        if self._key is None:
            return _Upload(*unpack_payload(content, expected))
        # The seal itself finds damage, so the header's digest says no more
        sealed, _, costs = unpack_payload(content, expected, OVERHEAD)
        blob = self._open(client, sealed)
        return _Upload(sealed if self.config.sealed_store else blob, wire.digest(blob), costs)

    def _keep(self, node: int, upload: _Upload) -> None:
        client = self._asked[node]
        blob = upload.blob
        sha256 = upload.sha256
        about = {"sha256": wire.digest(blob), "bytes": len(blob), "costs": upload.costs}
        if self._key is not None and self.config.sealed_store:
            about["sealed-to"] = fingerprint(public_bytes(self._key))
        # Before anything else: from here on nobody is asked twice
        self.folder.store_payload(client, blob, about)
        del blob
        upload.blob = b""
        release_memory()  # to decode needs the payload's size three times
        declared = self.members.declared.get(client)
        if self._accept(client, sha256, self.expected(client), declared):
            self._acknowledge(node, sha256)

    def _acknowledge(self, node: int, sha256: str) -> None:
        """Name the payload that is stored: a client forgets no other one."""
        self._thanks.push(node, ACKNOWLEDGE, pack_acknowledgement(self._job_id, sha256))

    def _accept(
        self,
        client: str,
        sha256: str | None,
        limits: wire.Expected,
        declared: Mapping[str, int] | None = None,
    ) -> bool:
        try:  # from the disk, so that `decode` alone has the bytes
            with self.folder.decoding(client):
                payload = wire.decode(self._opened(client), limits, sha256)
                probe(payload, client, self.config)
                check_stated(payload, client, self.config, declared)
        except OSError:  # the disk's failure, not the client's
            raise
        except Exception as error:
            self.folder.refuse_payload(client)
            self._refuse(client, error)
            return False
        self.payloads[client] = payload
        size = self.folder.payload_size(client)
        self.status.client(client, f"delivered {size:,} bytes")
        return True

    def _opened(self, client: str) -> bytes:
        """A payload from the store."""
        blob = self.folder.stored_payload(client)
        return self._open(client, blob) if self.folder.sealed_to(client) else blob

    def _open(self, client: str, sealed: bytes) -> bytes:
        assert self._key is not None
        try:
            return open_sealed(sealed, self._key, self._job_id, client)
        except SealError as error:
            raise wire.PayloadError(client, "payload", str(error)) from None

    def _refuse(self, client: str, error: Exception) -> None:
        known = isinstance(error, wire.PayloadError)
        reason = plain(error if known else f"{type(error).__name__}: {error}")
        self.problems[client] = reason if known else f"its payload cannot be read: {reason}"
        log.error("%s refused: %s", client, self.problems[client])
        self.status.client(client, "refused")

    def _fail(self, node: int, reason: str) -> None:
        client = self._asked[node]
        self.problems[client] = reason
        log.error("%s failed: %s", client, reason)
        self.status.client(client, "failed")


def collect(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    members: Members,
    folder: RunFolder,
    status: Status,
    expected: ExpectedOf,
    key: X25519PrivateKey | None = None,
) -> dict[str, Payload]:
    """Every client's payload: from the store if it came before, else by asking for it.

    A spare is asked in the place of a client that failed for good or sent what cannot be used;
    `members.nodes` then has the spare.

    Args:
        key: that payloads are sealed to; None: they are open.

    Raises:
        RoundError: fewer than `min-clients` valid payloads at the end or at the `deadline`.
    """
    status.phase("waiting for payloads", len(members.nodes))
    collection = Collection(grid, config, job_id, members, folder, status, expected, key)
    for client in folder.stored_clients():
        collection.from_store(client)
    for client, node in members.nodes.items():
        if client not in collection.payloads:
            collection.ask(client, node)
    collection.end = time.monotonic() + config.deadline
    while collection.look() and time.monotonic() < collection.end:
        collection.rest()
    collection.close()
    payloads = collection.payloads
    needed = config.needed_clients
    if len(payloads) < needed:
        raise RoundError(
            f"{len(payloads)} of {config.training_clients} clients delivered a valid payload; "
            f"{needed} are needed (min-clients, num-clients){listed(collection.problems)}"
        )
    for client, reason in sorted(collection.problems.items()):
        log.warning("going on without %s: %s", client, reason)
    return dict(sorted(payloads.items()))


def leave_out(
    error: wire.PayloadError,
    payloads: dict[str, Payload],
    config: RunConfig,
    folder: RunFolder,
    status: Status,
) -> dict[str, Payload]:
    """The payloads without one that passed every check and still cannot be used.

    Raises:
        RoundError: fewer than `min-clients` are left.
    """
    left = {client: payload for client, payload in payloads.items() if client != error.client}
    log.error("%s", plain(error))
    folder.refuse_payload(error.client)
    status.client(error.client, "refused")
    if len(left) < config.needed_clients:
        raise RoundError(
            f"{len(left)} of {config.training_clients} clients delivered a payload that can be "
            f"used; {config.needed_clients} are needed (min-clients, num-clients)"
            f"{listed({error.client: plain(error)})}"
        ) from error
    return left
