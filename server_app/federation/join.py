"""Membership: which clients have joined, participate, or are on standby."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

import osfl
from osfl.config import (
    COMPARISON,
    IDENTIFIER_RULE,
    TEST_ONLY,
    RunConfig,
    is_identifier,
    is_mixed,
    kinds_of,
    split_names,
)
from osfl.data.parts import class_names
from osfl.methods import METHODS
from osfl.payload.encryption import pack_public_key
from osfl.payload.masking import is_public_key
from osfl.payload.messages import JOIN
from osfl.payload.sum_messages import pack_job
from osfl.run_folder.forgotten_store import name_digest
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import TEST_ONLY_STATE, Status
from osfl.util.log import log
from osfl.util.text import sanitize
from server_app.defenses.image_counts import ALL, check_counts
from server_app.federation.exchange import Exchange, InvalidReplyError, RoundError, format_reasons

# If enough clients have joined, a client whose payload is stored is awaited this long after the
# last join. It may also join later
QUIET_SECONDS = 15.0
# Before the tests, a node that has just come online has this long to reply, but no longer than
# `join-timeout`: Flower starts a process for the request
TESTER_SECONDS = 60.0
# Length of an Ed25519 signature
MAX_SIGNATURE_BYTES = 64


@dataclass(frozen=True)
class JoinReply:
    """A client's reply to the join request.

    Attributes:
        architecture: of its model, for iterative methods.
        images: its number of training images, by class or of `ALL`; None if it declares none.
        tests_only: whether its site trains nothing and only tests (node-config `role`).
        compares: whether its site asks for images of its own (node-config `comparison-dir`).
        kind: of payload that it sends; "" if it sends none, or if the run is not mixed.
        sum_key: its public key of a secure sum, and its site's signature of it, or b"".
    """

    client: str
    architecture: str
    images: dict[str, int] | None
    tests_only: bool = False
    compares: bool = False
    kind: str = ""
    sum_key: tuple[bytes, bytes] = (b"", b"")


class Members:
    """The clients: all online nodes get a join request; some participate, the others stand by.

    Attributes:
        joined: the node of each eligible client.
        architectures: each eligible client's model architecture, for iterative methods.
        declared: each eligible client's declared number of training images, if it declares one.
        kinds: the kind of payload that each eligible client sends, in a mixed run.
        sum_keys: each eligible client's public key of a secure sum, and the signature of it.
        nodes: the node of each participating client, sorted by client.
        held_out_clients: the node of each client that the run holds out (`held-out`). It counts
            towards `num-clients`, must join, and takes the test from those that train.
        testers: the node of each client whose own site only tests (node-config `role`). It has no
            place among the clients, may be absent, and tests beside the others.
        comparing: eligible clients whose site asks for images that were synthesized for it.
        failures: why a node cannot participate.
        join_end: end of `join-timeout` by time.monotonic().
        last_join: time.monotonic() of the last join.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        status: Status,
        kit: Mapping[str, str] | None = None,
        public_key: bytes | None = None,
    ):
        self._exchange = Exchange(grid, config.join_timeout)
        self._config = config
        self._num_clients = config.num_clients
        self._places = config.training_clients
        self._held_out = config.held_out_clients
        self._rounds = METHODS[config.method].rounds
        self._allowed = split_names(config.classifier.architecture)
        self._status = status
        folder = RunFolder(status.folder)
        self._forgotten = folder.departed_digests()
        self._is_continued = folder.continuation() is not None
        self._request = RecordDict(
            {
                "kit": ConfigRecord(dict(kit or {})),
                **pack_public_key(public_key),
                **(pack_job(status.folder.name) if config.secure_sum else {}),
            }
        )
        self._requested: set[int] = set()
        self._replaced: set[str] = set()  # clients that a standby has replaced
        self._stored: set[str] = set()  # clients whose payload was stored at the selection
        self.joined: dict[str, int] = {}
        self.architectures: dict[str, str] = {}
        self.declared: dict[str, dict[str, int]] = {}
        self.kinds: dict[str, str] = {}
        self.sum_keys: dict[str, tuple[bytes, bytes]] = {}
        self.nodes: dict[str, int] = {}
        self.held_out_clients: dict[str, int] = {}
        self.testers: dict[str, int] = {}
        self.comparing: set[str] = set()
        self.failures: dict[int, str] = {}
        self.join_end = time.monotonic() + config.join_timeout
        self.last_join = time.monotonic()

    def ask(self) -> None:
        """Send a join request to every online node that has not got one."""
        for node in self._exchange.poll_nodes():
            if node not in self._requested:
                self._requested.add(node)
                self._exchange.push(node, JOIN, self._request)

    def poll(self, until: float) -> None:
        """Send join requests to new nodes, and poll for replies once."""
        self.ask()
        self._exchange.pull(self._read, self._keep, self._fail, until)

    def wait(self) -> None:
        """Sleep until the next poll."""
        self._exchange.wait(self.join_end)

    def test_nodes(self) -> dict[str, int]:
        """Return the nodes that test for the run: held-out clients, or else the participants."""
        return self.held_out_clients or self.nodes

    def await_testers(self) -> None:
        """Let test-only clients join before the tests, and clients whose payload was stored.

        Other clients come too late. A node that was asked less than `TESTER_SECONDS` ago, or is
        asked again because it restarted, is awaited; so is every silent node if a client whose
        payload was stored has not joined. The run warns of all nodes that have not replied.
        """
        patience = min(TESTER_SECONDS, self._config.join_timeout)
        end = time.monotonic() + patience
        self._poll_testers(end)
        while self._awaits_nodes(patience) and time.monotonic() < end:
            self._exchange.wait(end)
            self._poll_testers(end)
        if silent := ", ".join(self.silent_names()):
            self._status.add_warning(
                f"asked to join, but did not reply: node {sanitize(silent)}; if its site only "
                "tests, its results are missing"
            )

    def _poll_testers(self, until: float) -> None:
        self.ask()
        self._exchange.pull(self._read, self._keep_tester, self._fail, until)

    def _awaits_nodes(self, patience: float) -> bool:
        # The node of such a client may have restarted, and cannot be told from another
        if self._stored - self.nodes.keys() and not self._held_out:
            return bool(self.silent())
        earliest = time.monotonic() - patience
        return any(self._exchange.was_asked(node, since=earliest) for node in self.silent())

    def leave(self, client: str) -> None:
        """Remove a client that has left the continued run from this run."""
        self._forget(client)
        self._stored.discard(client)
        self.nodes.pop(client, None)

    def end(self) -> None:
        """Stop accepting clients."""
        self._exchange.end()

    def silent(self) -> list[int]:
        """Return the nodes that have not replied yet."""
        return self._exchange.pending_nodes()

    def silent_names(self) -> list[str]:
        """Return the names of these nodes' keys, or their ids."""
        return [str(self._exchange.names.get(node, node)) for node in self.silent()]

    def present(self, stored: Iterable[str]) -> set[str]:
        """Return the clients that need not be awaited.

        These are the joined clients and, in a run that continues another one, those whose payload
        is stored.
        """
        return self.joined.keys() | (stored if self._is_continued else ())

    def cannot_complete(self) -> bool:
        """Check whether enough nodes have replied, but some of them cannot participate."""
        candidates = len(self._requested) - len(self.testers)
        all_replied = not self.silent() and candidates >= self._num_clients
        # A standing run waits for nodes that come later
        return bool(self.failures) and all_replied and not self._config.new_clients

    def select(self, stored: list[str]) -> None:
        """Select the participants: clients whose payload is stored, then the others by name.

        Raises:
            RoundError: a held-out client has not joined.
        """
        if missing := sorted(set(self._held_out) - self.joined.keys()):
            raise RoundError(
                f"held-out: {missing[0]!r} has not joined, and is required for testing; the "
                f"clients are {', '.join(sorted(self.joined))}"
            )
        self.held_out_clients = {client: self.joined[client] for client in self._held_out}
        for client in self.held_out_clients:
            self._status.client(client, "held out")
        self._stored = set(stored)
        candidates = sorted(self.joined.keys() - stored - self.held_out_clients.keys())
        places = max(0, self._places - len(stored))
        selected = [*(self.joined.keys() & stored), *candidates[:places]]
        self.nodes = {client: self.joined[client] for client in sorted(selected)}
        for standby in candidates[places:]:
            self._status.client(standby, "standby")
        self._warn_of_unnamed_keys()

    def standby(self) -> list[str]:
        """Return the standby clients: eligible clients that were not selected."""
        unavailable = self.nodes.keys() | self.held_out_clients.keys() | self._replaced
        return sorted(self.joined.keys() - unavailable)

    def admit(self, standby: str, failed: str | None = None) -> int:
        """Give a standby client a free place, or a failed client's, and return its node."""
        if failed:
            log.warning("%s replaces %s", standby, failed)
            del self.nodes[failed]
            self._replaced.add(failed)
        node = self.joined[standby]
        self.nodes = dict(sorted({**self.nodes, standby: node}.items()))
        return node

    def _read(self, node: int, content: RecordDict) -> JoinReply:
        """Read and check a client's reply to the join request.

        Raises:
            InvalidReplyError: the client cannot participate.
        """
        record = content.config_records["join"]
        client = str(record["client"])
        version = str(record["version"])
        if not is_identifier(client):
            raise InvalidReplyError(f"its client id {sanitize(client, 80)!r} {IDENTIFIER_RULE}")
        self._check_key(node, client)
        if name_digest(client) in self._forgotten:
            raise InvalidReplyError("this run has forgotten its client (osfl forget)")
        if version != osfl.__version__:
            raise InvalidReplyError(
                f"{client} has osfl {sanitize(version, 40)} installed, and the run requires "
                f"{osfl.__version__}; install the same version"
            )
        # A client that the run holds out only tests, whatever its own site says
        if record.get("role") == TEST_ONLY and client not in self._held_out:
            return JoinReply(client, "", None, tests_only=True)
        architecture = str(record["architecture"]) if self._rounds else ""
        if self._rounds and architecture not in self._allowed:
            raise InvalidReplyError(
                f"{client} has architecture {sanitize(architecture, 80)!r}: this run allows "
                f"{', '.join(self._allowed)}"
            )
        declared = self._declared(client, record.get("images"))
        return JoinReply(
            client,
            architecture,
            declared,
            compares=bool(record.get(COMPARISON)),
            kind=self._kind(client, record),
            sum_key=self._sum_key(client, record),
        )

    def _sum_key(self, client: str, record: ConfigRecord) -> tuple[bytes, bytes]:
        """Return a client's public key of a secure sum and its signature; b"" if there is none.

        Raises:
            InvalidReplyError: the key is missing, or no public key.
        """
        if not self._config.secure_sum or client in self._held_out:
            return b"", b""
        key, signature = record.get("sum-key"), record.get("sum-signature", b"")
        if not isinstance(key, bytes) or not isinstance(signature, bytes) or not is_public_key(key):
            raise InvalidReplyError(f"{client} sent no public key for the secure sum")
        return key, signature[:MAX_SIGNATURE_BYTES]

    def _kind(self, client: str, record: ConfigRecord) -> str:
        """Return the kind of payload that a client of a mixed run announces; "" for no payload.

        Raises:
            InvalidReplyError: the run does not welcome it.
        """
        if not is_mixed(self._config) or client in self._held_out:
            return ""
        kind = str(record.get("kind", ""))
        kinds = kinds_of(self._config)
        if kind not in kinds:
            raise InvalidReplyError(
                f"{client} announces a payload of kind {sanitize(kind, 80)!r}: this run welcomes "
                f"{', '.join(kinds)} (mixed.methods)"
            )
        return kind

    def _declared(self, client: str, images: object) -> dict[str, int] | None:
        """Return a client's declared image counts, by class or of `ALL`; None if it has none.

        Raises:
            InvalidReplyError: they are malformed, or exceed `max-images`.
        """
        if not images:
            return None
        names = (ALL,) if self._rounds else class_names(self._config.data)
        if not isinstance(images, list) or len(images) != len(names) or not _are_counts(images):
            raise InvalidReplyError(
                f"{client} declares {sanitize(images, 80)} as its image counts; they must be "
                f"{len(names)} whole numbers, one per class or one for all"
            )
        declared = dict(zip(names, images, strict=True))
        try:
            check_counts(declared, self._config.max_images)
        except ValueError as error:
            raise InvalidReplyError(f"{client}, image counts at join: {error}") from None
        return declared

    def _check_key(self, node: int, client: str) -> None:
        """Check a client id against the registered name of its node's key, if it has one.

        Raises:
            InvalidReplyError: the name is another, or the id is the name of another node's key.
        """
        names = self._exchange.names
        name = names.get(node, "")
        if name and name != client:
            raise InvalidReplyError(
                f"its key is registered as {sanitize(name, 80)!r}, but its client id is "
                f"{client!r}; set client-id to the key's name"
            )
        if not name and client in names.values():
            raise InvalidReplyError(
                f"its client id {client!r} is the name of another node's key, and its own key has "
                "no name"
            )

    def _warn_of_unnamed_keys(self) -> None:
        """Warn of keys without a name if other keys have one."""
        names = self._exchange.names
        for client, node in sorted(self.joined.items()):
            if names and node not in names:
                log.warning(
                    "%s: its key has no name, so any node with an unnamed key could claim this "
                    "client id; register the key with --name",
                    client,
                )

    def _keep_tester(self, node: int, reply: JoinReply) -> None:
        client = reply.client
        if reply.tests_only or client in self._stored:
            self._keep(node, reply)
        if client in self._stored and self.joined.get(client) == node and not self._held_out:
            self.admit(client)

    def _keep(self, node: int, reply: JoinReply) -> None:
        client = reply.client
        holder = self.joined.get(client, self.testers.get(client))
        if holder is not None:
            names = self._exchange.names
            # A key named after the client id takes precedence over an unnamed one
            selected = self.nodes.keys() | self.held_out_clients.keys()
            if node not in names or holder in names or client in selected:
                reason = f"its client id {client!r} is already used by another node"
                return self._fail(node, reason)
            self._fail(holder, f"its client id {client!r} is the name of another node's key")
            self._forget(client)
        if reply.tests_only:
            self.testers[client] = node
            self._status.client(client, TEST_ONLY_STATE)
            return None
        self.joined[client] = node
        if self._rounds:
            self.architectures[client] = reply.architecture
        if reply.images is not None:
            self.declared[client] = reply.images
        if reply.compares:
            self.comparing.add(client)
        if reply.kind:
            self.kinds[client] = reply.kind
        if reply.sum_key[0]:
            self.sum_keys[client] = reply.sum_key
        self.last_join = time.monotonic()
        self._status.client(client, "joined")
        return None

    def _forget(self, client: str) -> None:
        self._replaced.discard(client)
        self.comparing.discard(client)
        self.kinds.pop(client, None)
        self.sum_keys.pop(client, None)
        for by_client in (self.joined, self.testers, self.architectures, self.declared):
            by_client.pop(client, None)

    def _fail(self, node: int, reason: str) -> None:
        self.failures[node] = reason
        log.error("node %s cannot participate: %s", node, reason)


def _are_counts(values: list[object]) -> bool:
    are_whole = all(type(value) is int and value >= 0 for value in values)
    return are_whole and any(values)


def join(
    grid: Grid,
    config: RunConfig,
    status: Status,
    stored: list[str],
    prepare: Callable[[], None] = lambda: None,
    kit: Mapping[str, str] | None = None,
    public_key: bytes | None = None,
) -> Members:
    """Wait until enough clients have joined, and select the participants.

    All online nodes get a join request. The first to reply participate; nodes that refuse or do not
    reply cost nothing while there are enough others.

    Args:
        stored: clients whose payload is stored; they count as joined and keep their places.
        prepare: called once, after the first join requests, so that nodes and server prepare in
            parallel.
        kit: digests of the server's kit weights, which a client's must equal (`weights_digests`).
        public_key: payloads are sealed to it.

    Raises:
        RoundError: fewer than `min-clients` have joined after `join-timeout`, or when all nodes
            have replied and some refused.
    """
    status.phase("joining", config.num_clients)
    members = Members(grid, config, status, kit, public_key)
    members.ask()
    prepare()
    # The preparation may have taken minutes, in which no reply was read
    members.last_join = time.monotonic()
    members.join_end = time.monotonic() + config.join_timeout
    while time.monotonic() < members.join_end:
        members.poll(members.join_end)
        status.advance(min(len(members.joined), config.num_clients), config.num_clients)
        if _complete(members, stored, config.num_clients) or members.cannot_complete():
            break
        members.wait()
    members.select(stored)
    count = len(members.nodes.keys() | stored)
    if count < config.needed_clients:
        raise RoundError(_too_few(members, count, config))
    for client in sorted(set(stored) - set(members.joined)):
        log.warning("%s is not online; its stored payload is used", client)
    return members


def _complete(members: Members, stored: list[str], num_clients: int) -> bool:
    """Check whether no further client needs to be awaited."""
    if len(members.present(stored)) < num_clients:
        return False
    is_quiet = time.monotonic() - members.last_join > QUIET_SECONDS
    return is_quiet or members.joined.keys() >= set(stored)


def _too_few(members: Members, count: int, config: RunConfig) -> str:
    """Describe why too few clients joined, with the timeout only if it was reached."""
    timed_out = time.monotonic() >= members.join_end
    within = f" within {config.join_timeout:g} s (join-timeout)" if timed_out else ""
    refusals = {f"node {node}": reason for node, reason in members.failures.items()}
    silent = [str(node) for node in members.silent()]
    no_reply = f"\n  {len(silent)} did not reply: {sanitize(', '.join(silent))}" if silent else ""
    return (
        f"{count} of {config.num_clients} clients joined{within}; at least "
        f"{config.needed_clients} are required (min-clients, num-clients)"
        f"{format_reasons(refusals)}{no_reply}"
    )
