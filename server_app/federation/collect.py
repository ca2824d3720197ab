"""Collection of the clients' payloads."""

import time
from collections.abc import Callable, Mapping
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
from osfl.payload.kinds import Sent
from osfl.payload.messages import ACKNOWLEDGE, pack_acknowledgement, unpack_payload
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import ASKED_STATE, Status
from osfl.util.costs import release_memory
from osfl.util.loading import LOADING
from osfl.util.log import log
from osfl.util.text import sanitize
from server_app.expected import (
    ExpectedOf,
    check_plausible,
    check_stated_counts,
    expected_payloads,
)
from server_app.federation import exchange as exchange_module
from server_app.federation.exchange import Exchange, RoundError, format_reasons, ignore
from server_app.federation.join import Members
from server_app.federation.secure_members import SecureMembers

# Releasing memory takes 50 ms, so that small payloads share it
RELEASE_BYTES = 2**24


@dataclass
class _Upload:
    blob: bytes  # as stored
    sha256: str  # of the unsealed payload
    costs: dict[str, float]


class Collection:
    """Payloads that have arrived, and requests for the missing ones.

    Attributes:
        end: end of the phase by time.monotonic().
        payloads: valid payloads by client.
        problems: reason of each client's failure.
    """

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
        secure: SecureMembers | None = None,
    ):
        self.config = config
        self.members = members
        self.folder = folder
        self.status = status
        self.expected = expected
        self.end = time.monotonic() + config.deadline
        self.payloads: dict[str, Sent] = {}
        self.problems: dict[str, str] = {}
        largest = config.max_payload_mb * 1e6
        self._exchange = Exchange(
            grid, config.deadline, exchange_module.WORK_PATIENCE_SECONDS, largest=largest
        )
        self._acknowledgements = Exchange(grid, config.join_timeout)
        self._job_id = job_id
        self._key = key
        self._secure = secure
        self._is_reused = folder.payload_source() is not None
        public_key = None if key is None else public_bytes(key)
        self._public_key = pack_public_key(public_key)
        self._client_of: dict[int, str] = {}  # client by node
        self._unreleased = 0  # bytes of payloads that arrived since memory was released
        self._awaits_standby = False  # alone: no payload is owed

    def poll(self) -> bool:
        """Poll for payloads once, and ask standby clients in place of failed ones.

        Returns:
            Whether more payloads may arrive.
        """
        self._exchange.pull(self._read, self._keep, self._fail, self.end)
        self._acknowledgements.pull(ignore, ignore, ignore, self.end)
        self._fill_places()
        self.status.advance(len(self.payloads), len(self.members.nodes))
        if self._exchange.pending_nodes():
            return True
        if is_awaited := self._standby_may_join():
            self._log_wait()
        return is_awaited

    def wait(self) -> None:
        """Sleep until the next poll."""
        self._exchange.wait(self.end)

    def load_stored(self, client: str) -> None:
        """Use a payload that is already in the store."""
        try:
            expected = self.expected(client)
        except wire.PayloadError as error:
            self.folder.quarantine_payload(client)
            return self._refuse(client, error)
        # An accepted payload is not refused later because the limit was lowered, or because the
        # client now declares other image counts
        job = self.folder.payload_job(client, self._job_id)
        size = self.folder.payload_size(client)
        limits = replace(expected, max_bytes=size, job=job)
        stored_sha256 = self.folder.payload_digest(client)
        # A sealed payload is authenticated by its seal; its stored digest is that of the sealed one
        sha256 = None if self.folder.sealing_fingerprint(client) else stored_sha256
        is_accepted = self._accept(client, sha256, limits)
        # Clients have had the acknowledgement of a reused payload from the run that they sent it to
        is_reused = self._is_reused or job != self._job_id
        if is_accepted and client in self.members.nodes and not is_reused:
            payload_sha256 = sha256 or wire.digest(self._stored_payload(client))
            self._acknowledge(self.members.nodes[client], payload_sha256)
        return None

    def ask(self, client: str, node: int) -> None:
        """Ask a client for its payload."""
        self.problems.pop(client, None)
        self._client_of[node] = client
        self.status.client(client, ASKED_STATE)
        # A client of a mixed run makes the kind of payload that it announced
        kinds = self.members.kinds
        kind = {"kind": kinds[client]} if client in kinds else {}
        job = ConfigRecord({"job": self._job_id, **kind})
        roster = self._secure.packed if self._secure else {}
        self._exchange.push(node, "train", RecordDict({"job": job, **self._public_key, **roster}))

    def close(self) -> None:
        """End the phase: record the missing clients, and send the remaining acknowledgements."""
        for node in self._exchange.pending_nodes():
            reason = f"no payload within {self.config.deadline:g} s (deadline)"
            self.problems[self._client_of[node]] = reason
        self._exchange.end()
        now = time.monotonic()
        end = min(
            now + exchange_module.ACKNOWLEDGE_SECONDS,
            max(now, self.end) + exchange_module.GRACE_SECONDS,
        )
        while self._acknowledgements.unsent() and time.monotonic() < end:
            self._acknowledgements.pull(ignore, ignore, ignore, end)
            self._acknowledgements.wait(end)
        self._acknowledgements.end()
        self.status.advance(len(self.payloads), len(self.members.nodes))

    def _vacant(self) -> int:
        """Return the number of places with neither a payload nor a client that owes one."""
        occupied = len(self.payloads) + len(self._exchange.pending_nodes())
        return self.config.training_clients - occupied

    def _fill_places(self) -> None:
        # All members of a secure sum have masked for each other
        if self._secure:
            return
        offline = self._exchange.offline()
        if self._vacant() > 0 or offline:
            self.members.poll(self.end)
        # An offline node may come back, so it is given up only if a standby replaces it
        for node in offline[: max(0, len(self.members.standby()) - self._vacant())]:
            self._exchange.give_up(node)
            self._fail(
                node, f"offline for {exchange_module.OFFLINE_SECONDS:g} s, replaced by a standby"
            )
        for standby in self.members.standby()[: max(0, self._vacant())]:
            failed = [client for client in self.members.nodes if client in self.problems]
            self.ask(standby, self.members.admit(standby, failed[0] if failed else None))

    def _standby_may_join(self) -> bool:
        """Check whether a standby is needed and a node may still join as one."""
        is_needed = self._vacant() > 0 and bool(self.members.silent()) and not self._secure
        return is_needed and time.monotonic() < self.members.join_end

    def _log_wait(self) -> None:
        """Say once for which nodes the run waits after a client has failed."""
        if not self._awaits_standby:
            seconds = self.members.join_end - time.monotonic()
            nodes = sanitize(", ".join(self.members.silent_names()))
            log.warning(
                "a client has failed; waiting up to %.0f s (join-timeout) for another in its "
                "place. Asked to join, but silent: node %s",
                seconds,
                nodes,
            )
        self._awaits_standby = True

    def _read(self, node: int, content: RecordDict) -> _Upload:
        client = self._client_of[node]
        expected = self.expected(client)
        if self._key is None:
            return _Upload(*unpack_payload(content, expected))
        # The seal authenticates the payload, so the header's digest is not needed
        sealed, _, costs = unpack_payload(content, expected, OVERHEAD)
        blob = self._unseal(client, sealed)
        return _Upload(sealed if self.config.sealed_store else blob, wire.digest(blob), costs)

    def _keep(self, node: int, upload: _Upload) -> None:
        client = self._client_of[node]
        blob = upload.blob
        sha256 = upload.sha256
        record = {"sha256": wire.digest(blob), "bytes": len(blob), "costs": upload.costs}
        if self._key is not None and self.config.sealed_store:
            record["sealed-to"] = fingerprint(public_bytes(self._key))
        if client in self.members.kinds:
            record["kind"] = self.members.kinds[client]
        # Before anything else: once it is stored, the client is never asked again
        self.folder.store_payload(client, blob, record)
        size = len(blob)
        del blob
        upload.blob = b""
        self._unreleased += size
        # Decoding needs three times the payload's size
        if self._unreleased >= RELEASE_BYTES:
            release_memory()
            self._unreleased = 0
        declared = self.members.declared.get(client)
        if self._accept(client, sha256, self.expected(client), declared):
            self._acknowledge(node, sha256)

    def _acknowledge(self, node: int, sha256: str) -> None:
        """Acknowledge the stored payload by its digest: a client deletes no other one.

        A client of a secure sum still needs its secrets, until the sum is open.
        """
        if self._secure:
            return
        self._acknowledgements.push(node, ACKNOWLEDGE, pack_acknowledgement(self._job_id, sha256))

    def _accept(
        self,
        client: str,
        sha256: str | None,
        limits: wire.Expected,
        declared: Mapping[str, int] | None = None,
    ) -> bool:
        try:
            with LOADING, self.folder.decoding(client):
                # Read from disk, so that only `decode` holds the bytes
                payload = wire.decode(self._stored_payload(client), limits, sha256)
                if self._secure:
                    self._secure.check(client, payload)
                check_plausible(payload, client, self.config)
                check_stated_counts(payload, client, self.config, declared)
        # A disk failure is not the client's
        except OSError:
            raise
        except Exception as error:
            self.folder.quarantine_payload(client)
            self._refuse(client, error)
            return False
        self.payloads[client] = payload
        size = self.folder.payload_size(client)
        job = self.folder.payload_job(client, self._job_id)
        is_reused = self._is_reused or job != self._job_id
        arrival = f"payload of {job}," if is_reused else "delivered"
        self.status.client(client, f"{arrival} {size:,} bytes")
        return True

    def _stored_payload(self, client: str) -> bytes:
        """Read a payload from the store, and unseal it if it is sealed."""
        blob = self.folder.stored_payload(client)
        return self._unseal(client, blob) if self.folder.sealing_fingerprint(client) else blob

    def _unseal(self, client: str, sealed: bytes) -> bytes:
        assert self._key is not None
        try:
            job = self.folder.payload_job(client, self._job_id)
            return open_sealed(sealed, self._key, job, client)
        except SealError as error:
            raise wire.PayloadError(client, "payload", str(error)) from None

    def _refuse(self, client: str, error: Exception) -> None:
        is_invalid = isinstance(error, wire.PayloadError)
        reason = sanitize(error if is_invalid else f"{type(error).__name__}: {error}")
        self.problems[client] = reason if is_invalid else f"its payload cannot be read: {reason}"
        log.error("%s refused: %s", client, self.problems[client])
        self.status.client(client, "refused")

    def _fail(self, node: int, reason: str) -> None:
        client = self._client_of[node]
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
    secure: SecureMembers | None = None,
    use_early: Callable[[Mapping[str, Sent]], None] | None = None,
) -> dict[str, Sent]:
    """Return every client's payload, from the store or else by request.

    A standby client replaces one that failed permanently or sent an unusable payload;
    `members.nodes` then has the standby.

    Args:
        key: the private key that payloads are sealed to; None: payloads are unsealed.
        secure: the members of a secure sum, who alone are asked; None without one.
        use_early: called with the payloads so far, whenever others are awaited.

    Raises:
        RoundError: fewer than `min-clients` valid payloads at the end or at the `deadline`.
    """
    status.phase("waiting for payloads", len(members.nodes))
    collection = Collection(grid, config, job_id, members, folder, status, expected, key, secure)
    for client in folder.stored_clients():
        collection.load_stored(client)
    nodes = secure.nodes(members) if secure else members.nodes
    for client, node in nodes.items():
        if client not in collection.payloads:
            collection.ask(client, node)
    collection.end = time.monotonic() + config.deadline
    while collection.poll() and time.monotonic() < collection.end:
        if use_early:
            use_early(collection.payloads)
        collection.wait()
    result = (
        f"{len(collection.payloads)} of {config.training_clients} clients delivered a valid payload"
    )
    return _finish(collection, result, config)


def read_reused(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    members: Members,
    folder: RunFolder,
    status: Status,
    key: X25519PrivateKey | None = None,
) -> dict[str, Sent]:
    """Return the payloads of another run, which are in the store; no client is asked.

    Args:
        job_id: the job that the clients made them for.
        key: as `collect`.

    Raises:
        RoundError: fewer than `min-clients` of them are valid.
    """
    status.phase("reading payloads", len(folder.payload_files()))
    expected = expected_payloads(config, job_id, folder.payload_kind)
    collection = Collection(grid, config, job_id, members, folder, status, expected, key)
    for client in folder.stored_clients():
        collection.load_stored(client)
    result = (
        f"payloads-from = {config.payloads_from!r}: {len(collection.payloads)} of "
        f"{config.training_clients} payloads are valid"
    )
    return _finish(collection, result, config)


def _finish(collection: Collection, result: str, config: RunConfig) -> dict[str, Sent]:
    """Return the payloads in the order of their clients, and log who is missing.

    Args:
        result: how many payloads there are, for the error.

    Raises:
        RoundError: they are fewer than `min-clients`.
    """
    collection.close()
    needed = config.needed_clients
    if len(collection.payloads) < needed:
        raise RoundError(
            f"{result}; at least {needed} are required (min-clients, num-clients)"
            f"{format_reasons(collection.problems)}"
        )
    for client, reason in sorted(collection.problems.items()):
        log.warning("continuing without %s: %s", client, reason)
    return dict(sorted(collection.payloads.items()))


def drop_payload(
    error: wire.PayloadError,
    payloads: dict[str, Sent],
    config: RunConfig,
    folder: RunFolder,
    status: Status,
) -> dict[str, Sent]:
    """Drop a payload that passed every check and still cannot be used.

    Args:
        error: names the payload's client.

    Raises:
        RoundError: fewer than `min-clients` payloads remain.
    """
    usable = {client: payload for client, payload in payloads.items() if client != error.client}
    log.error("%s", sanitize(error))
    folder.quarantine_payload(error.client)
    status.client(error.client, "refused")
    if len(usable) < config.needed_clients:
        raise RoundError(
            f"{len(usable)} of {config.training_clients} clients delivered a usable payload; at "
            f"least {config.needed_clients} are required (min-clients, num-clients)"
            f"{format_reasons({error.client: sanitize(error)})}"
        ) from error
    return usable
