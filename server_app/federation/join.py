"""Membership: which clients have joined, participate, or are on standby."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

import osfl
from osfl.config import IDENTIFIER_RULE, RunConfig, is_identifier, split_names
from osfl.data.parts import class_names
from osfl.methods import METHODS
from osfl.payload.encryption import pack_public_key
from osfl.payload.messages import JOIN
from osfl.run_folder.status import Status
from osfl.util.log import log
from osfl.util.text import sanitize
from server_app.defenses.image_counts import ALL, check_counts
from server_app.federation.exchange import Exchange, InvalidReplyError, RoundError, format_reasons

# If enough clients have joined, a client whose payload is stored is awaited this long after the
# last join. It may also join later
QUIET_SECONDS = 15.0


@dataclass(frozen=True)
class JoinReply:
    """A client's reply to the join request.

    Attributes:
        architecture: of its model, for iterative methods.
        images: its number of training images, by class or of `ALL`; None if it declares none.
    """

    client: str
    architecture: str
    images: dict[str, int] | None


class Members:
    """The clients: all online nodes get a join request; some participate, the others stand by.

    Attributes:
        joined: the node of each eligible client.
        architectures: each eligible client's model architecture, for iterative methods.
        declared: each eligible client's declared number of training images, if it declares one.
        nodes: the node of each participating client, sorted by client.
        testers: the node of each client of a held-out domain, which only tests.
        failures: why a node cannot participate.
        until: end of `join-timeout` by time.monotonic().
        heard: time.monotonic() of the last join.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        status: Status,
        kit: Mapping[str, str] | None = None,
        sealing: bytes | None = None,
    ):
        self._exchange = Exchange(grid, config.join_timeout)
        self._config = config
        self._num_clients = config.num_clients
        self._places = config.training_clients
        self._held_out = config.left_out_clients
        self._rounds = METHODS[config.method].rounds
        self._allowed = split_names(config.classifier.architecture)
        self._status = status
        self._request = RecordDict(
            {"kit": ConfigRecord(dict(kit or {})), **pack_public_key(sealing)}
        )
        self._requested: set[int] = set()
        self._replaced: set[str] = set()  # clients that a standby has replaced
        self.joined: dict[str, int] = {}
        self.architectures: dict[str, str] = {}
        self.declared: dict[str, dict[str, int]] = {}
        self.nodes: dict[str, int] = {}
        self.left_out_clients: dict[str, int] = {}
        self.failures: dict[int, str] = {}
        self.until = time.monotonic() + config.join_timeout
        self.heard = time.monotonic()

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
        self._exchange.wait(self.until)

    def end(self) -> None:
        """Stop accepting clients."""
        self._exchange.end()

    def silent(self) -> list[int]:
        """Return the nodes that have not replied yet."""
        return self._exchange.pending_nodes()

    def cannot_complete(self) -> bool:
        """Check whether enough nodes have replied, but some of them cannot participate."""
        all_replied = not self.silent() and len(self._requested) >= self._num_clients
        return bool(self.failures) and all_replied

    def select(self, stored: list[str]) -> None:
        """Select the participants: clients whose payload is stored, then the others by name.

        Raises:
            RoundError: a held-out client has not joined.
        """
        if missing := sorted(set(self._held_out) - self.joined.keys()):
            raise RoundError(
                f"left-out: {missing[0]!r} has not joined, and is required for testing; the "
                f"clients are {', '.join(sorted(self.joined))}"
            )
        self.left_out_clients = {client: self.joined[client] for client in self._held_out}
        for client in self.left_out_clients:
            self._status.client(client, "held out")
        candidates = sorted(self.joined.keys() - stored - self.left_out_clients.keys())
        places = max(0, self._places - len(stored))
        selected = [*(self.joined.keys() & stored), *candidates[:places]]
        self.nodes = {client: self.joined[client] for client in sorted(selected)}
        for standby in candidates[places:]:
            self._status.client(standby, "standby")
        self._warn_of_unnamed_keys()

    def standby(self) -> list[str]:
        """Return the standby clients: eligible clients that were not selected."""
        unavailable = self.nodes.keys() | self.left_out_clients.keys() | self._replaced
        return sorted(self.joined.keys() - unavailable)

    def admit(self, spare: str, instead_of: str | None = None) -> int:
        """Give a standby client a free place, or that of another client, and return its node."""
        if instead_of:
            log.warning("%s replaces %s", spare, instead_of)
            del self.nodes[instead_of]
            self._replaced.add(instead_of)
        node = self.joined[spare]
        self.nodes = dict(sorted({**self.nodes, spare: node}.items()))
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
        if version != osfl.__version__:
            raise InvalidReplyError(
                f"{client} has osfl {sanitize(version, 40)} installed, and the run requires "
                f"{osfl.__version__}; install the same version"
            )
        architecture = str(record["architecture"]) if self._rounds else ""
        if self._rounds and architecture not in self._allowed:
            raise InvalidReplyError(
                f"{client} has architecture {sanitize(architecture, 80)!r}: this run allows "
                f"{', '.join(self._allowed)}"
            )
        return JoinReply(client, architecture, self._declared(client, record.get("images")))

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
                f"{client!r}; "
                "set client-id to the key's name"
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

    def _keep(self, node: int, joined: JoinReply) -> None:
        client = joined.client
        if (holder := self.joined.get(client)) is not None:
            names = self._exchange.names
            # A key named after the client id takes precedence over an unnamed one
            selected = self.nodes.keys() | self.left_out_clients.keys()
            if node not in names or holder in names or client in selected:
                reason = f"its client id {client!r} is already used by another node"
                return self._fail(node, reason)
            self._fail(holder, f"its client id {client!r} is the name of another node's key")
            self._replaced.discard(client)
        self.joined[client] = node
        if self._rounds:
            self.architectures[client] = joined.architecture
        self.declared.pop(client, None)
        if joined.images is not None:
            self.declared[client] = joined.images
        self.heard = time.monotonic()
        self._status.client(client, "joined")
        return None

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
    meanwhile: Callable[[], None] = lambda: None,
    kit: Mapping[str, str] | None = None,
    sealing: bytes | None = None,
) -> Members:
    """Wait until enough clients have joined, and select the participants.

    All online nodes get a join request. The first to reply participate; nodes that refuse or do not
    reply cost nothing while there are enough others.

    Args:
        stored: clients whose payload is stored; they count as joined and keep their places.
        meanwhile: called once, after the first join requests, so that nodes and server prepare in
            parallel.
        kit: digests of the server's kit weights, which a client's must equal (`weights_digests`).
        sealing: the public key that payloads are sealed to.

    Raises:
        RoundError: fewer than `min-clients` have joined after `join-timeout`, or when all nodes
            have replied and some refused.
    """
    status.phase("joining", config.num_clients)
    members = Members(grid, config, status, kit, sealing)
    members.ask()
    meanwhile()
    members.until = time.monotonic() + config.join_timeout
    while time.monotonic() < members.until:
        members.poll(members.until)
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
    if len(members.joined) < num_clients:
        return False
    is_quiet = time.monotonic() - members.heard > QUIET_SECONDS
    return is_quiet or members.joined.keys() >= set(stored)


def _too_few(members: Members, count: int, config: RunConfig) -> str:
    """Describe why too few clients joined, with the timeout only if it was reached."""
    timed_out = time.monotonic() >= members.until
    within = f" within {config.join_timeout:g} s (join-timeout)" if timed_out else ""
    refusals = {f"node {node}": reason for node, reason in members.failures.items()}
    silent = [str(node) for node in members.silent()]
    no_reply = f"\n  {len(silent)} did not reply: {sanitize(', '.join(silent))}" if silent else ""
    return (
        f"{count} of {config.num_clients} clients joined{within}; at least "
        f"{config.needed_clients} are required (min-clients, num-clients)"
        f"{format_reasons(refusals)}{no_reply}"
    )
