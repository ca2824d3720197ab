"""Who is there, who takes part, and who stands by."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

import osfl
from osfl.config import RunConfig, is_identifier, split_names
from osfl.data.parts import class_names
from osfl.methods import METHODS
from osfl.payload.encryption import pack_public_key
from osfl.payload.messages import JOIN
from osfl.run_folder.status import Status
from osfl.util.log import log
from osfl.util.text import plain
from server_app.defenses.image_counts import ALL, check_counts
from server_app.federation.exchange import Exchange, RoundError, UnfitError, listed

# While enough others are there, a client whose payload is stored is expected for so long after
# the last one came. It is welcome later, too.
SILENCE_SECONDS = 15.0


@dataclass(frozen=True)
class Joined:
    """What a client says of itself.

    Attributes:
        architecture: of its model, where the method has rounds.
        images: its training images, by class or of `ALL`; None if it declares no number.
    """

    client: str
    architecture: str
    images: dict[str, int] | None


class Members:
    """The clients: all that are online are asked, some take part, the others are spares.

    Attributes:
        joined: the node of each client that is fit.
        architectures: that of each such client's model, where the method has rounds.
        declared: the training images of each such client that declares their number.
        nodes: of those that take part, by client, sorted.
        testers: of those that are left out of all but the test.
        failed: why a node cannot take part.
        until: by time.monotonic(), when `join-timeout` is reached.
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
        self._wanted = config.num_clients
        self._places = config.training_clients
        self._left_out = config.testers
        self._rounds = METHODS[config.method].rounds
        self._allowed = split_names(config.classifier.architecture)
        self._status = status
        self._question = RecordDict(
            {"kit": ConfigRecord(dict(kit or {})), **pack_public_key(sealing)}
        )
        self._asked: set[int] = set()
        self._left: set[str] = set()  # in whose place a spare was asked
        self.joined: dict[str, int] = {}
        self.architectures: dict[str, str] = {}
        self.declared: dict[str, dict[str, int]] = {}
        self.nodes: dict[str, int] = {}
        self.testers: dict[str, int] = {}
        self.failed: dict[int, str] = {}
        self.until = time.monotonic() + config.join_timeout
        self.heard = time.monotonic()  # when one last joined

    def ask(self) -> None:
        """Ask every node that is online and was not asked before."""
        for node in self._exchange.look_around():
            if node not in self._asked:
                self._asked.add(node)
                self._exchange.push(node, JOIN, self._question)

    def look(self, until: float) -> None:
        """Ask who is new, and hear who has answered."""
        self.ask()
        self._exchange.pull(self._read, self._keep, self._fail, until)

    def rest(self) -> None:
        """Until the next look."""
        self._exchange.rest(self.until)

    def end(self) -> None:
        """Nobody else is needed."""
        self._exchange.end()

    def silent(self) -> list[int]:
        """Nodes that have not answered yet."""
        return self._exchange.waiting()

    def hopeless(self) -> bool:
        """Whether enough nodes have answered, but some of them with a no."""
        return bool(self.failed) and not self.silent() and len(self._asked) >= self._wanted

    def choose(self, stored: list[str]) -> None:
        """Who takes part: those whose payload is stored, then the others by name.

        Raises:
            RoundError: who is to test is not there.
        """
        if missing := sorted(set(self._left_out) - self.joined.keys()):
            raise RoundError(
                f"left-out: {missing[0]!r} has not joined, and is to test; the clients are "
                f"{', '.join(sorted(self.joined))}"
            )
        self.testers = {client: self.joined[client] for client in self._left_out}
        for client in self.testers:
            self._status.client(client, "left out")
        new = sorted(self.joined.keys() - stored - self.testers.keys())
        places = max(0, self._places - len(stored))
        chosen = [*(self.joined.keys() & stored), *new[:places]]
        self.nodes = {client: self.joined[client] for client in sorted(chosen)}
        for spare in new[places:]:
            self._status.client(spare, "spare")
        self._warn_of_nameless()

    def spares(self) -> list[str]:
        """Who is fit and has no place."""
        outside = self.nodes.keys() | self.testers.keys() | self._left
        return sorted(self.joined.keys() - outside)

    def take_in(self, spare: str, instead_of: str | None = None) -> int:
        """Give a spare a place, or that of another client; returns its node."""
        if instead_of:
            log.warning("%s takes the place of %s", spare, instead_of)
            del self.nodes[instead_of]
            self._left.add(instead_of)
        node = self.joined[spare]
        self.nodes = dict(sorted({**self.nodes, spare: node}.items()))
        return node

    def _read(self, node: int, content: RecordDict) -> Joined:
        """What a client says of itself, checked."""
        record = content.config_records["join"]
        client = str(record["client"])
        version = str(record["version"])
        if not is_identifier(client):
            raise UnfitError(
                f"its client id {plain(client, 80)!r} is not 1 to 64 letters, digits, '-' or '_'"
            )
        self._check_key(node, client)
        if version != osfl.__version__:
            raise UnfitError(
                f"{client} has osfl {plain(version, 40)} installed, the run is of "
                f"{osfl.__version__}; install the same"
            )
        architecture = str(record["architecture"]) if self._rounds else ""
        if self._rounds and architecture not in self._allowed:
            raise UnfitError(
                f"{client} has architecture {plain(architecture, 80)!r}: this run has "
                f"{', '.join(self._allowed)}"
            )
        return Joined(client, architecture, self._declared(client, record.get("images")))

    def _declared(self, client: str, images: object) -> dict[str, int] | None:
        """The training images that a client declares, by class or of `ALL`; None: no number.

        Raises:
            UnfitError: they are no numbers of images, or more than `max-images`.
        """
        if not images:
            return None
        names = (ALL,) if self._rounds else class_names(self._config.data)
        if not isinstance(images, list) or len(images) != len(names) or not _are_counts(images):
            raise UnfitError(
                f"{client} declares {plain(images, 80)} as its images; expected {len(names)} whole "
                "numbers, one for each class or one for all"
            )
        declared = dict(zip(names, images, strict=True))
        try:
            check_counts(declared, self._config.max_images)
        except ValueError as error:
            raise UnfitError(f"{client} declares its images: {error}") from None
        return declared

    def _check_key(self, node: int, client: str) -> None:
        """Whether a client is who its key says. A key without a name says nothing.

        Raises:
            UnfitError: it is not.
        """
        names = self._exchange.names
        name = names.get(node, "")
        if name and name != client:
            raise UnfitError(
                f"its key is registered as {plain(name, 80)!r}, and its client id is {client!r}; "
                "set client-id to the key's name"
            )
        if not name and client in names.values():
            raise UnfitError(
                f"its client id {client!r} is the name of another node's key, and its own key has "
                "no name"
            )

    def _warn_of_nameless(self) -> None:
        """Where some keys have names."""
        names = self._exchange.names
        for client, node in sorted(self.joined.items()):
            if names and node not in names:
                log.warning(
                    "%s: its key has no name, so any node with such a key could be it; register "
                    "its key with --name",
                    client,
                )

    def _keep(self, node: int, joined: Joined) -> None:
        client = joined.client
        if (holder := self.joined.get(client)) is not None:
            names = self._exchange.names
            # A key that the client id belongs to goes before one without a name
            at_work = self.nodes.keys() | self.testers.keys()
            if node not in names or holder in names or client in at_work:
                taken = f"its client id {client!r} is already taken by another node"
                return self._fail(node, taken)
            self._fail(holder, f"its client id {client!r} is the name of another node's key")
            self._left.discard(client)
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
        self.failed[node] = reason
        log.error("node %s cannot take part: %s", node, reason)


def _are_counts(values: list[object]) -> bool:
    whole = all(type(value) is int and value >= 0 for value in values)
    return whole and any(values)


def join(
    grid: Grid,
    config: RunConfig,
    status: Status,
    stored: list[str],
    meanwhile: Callable[[], None] = lambda: None,
    kit: Mapping[str, str] | None = None,
    sealing: bytes | None = None,
) -> Members:
    """Wait until the clients are there.

    All nodes that are online are asked. Who answers first takes part; a node that refuses or is
    silent costs nothing while there are others.

    Args:
        stored: clients whose payload came before; they count as joined, and keep their places.
        kit: digests of the kit's weights here, which a client's must equal (`weights_digests`).
        sealing: the public key that payloads are sealed to.
        meanwhile: called once, after the nodes that are there already were asked: they and the
            server get ready side by side.

    Raises:
        RoundError: fewer than `min-clients` after `join-timeout`, or because others refused.
    """
    status.phase("joining", config.num_clients)
    members = Members(grid, config, status, kit, sealing)
    members.ask()
    meanwhile()
    members.until = time.monotonic() + config.join_timeout
    while time.monotonic() < members.until:
        members.look(members.until)
        status.advance(min(len(members.joined), config.num_clients), config.num_clients)
        if _complete(members, stored, config.num_clients) or members.hopeless():
            break
        members.rest()
    members.choose(stored)
    there = len(members.nodes.keys() | stored)
    if there < config.needed_clients:
        raise RoundError(_too_few(members, there, config))
    for client in sorted(set(stored) - set(members.joined)):
        log.warning("%s is not online; its payload is here", client)
    return members


def _complete(members: Members, stored: list[str], wanted: int) -> bool:
    """Whether nobody needs to be waited for."""
    if len(members.joined) < wanted:
        return False
    quiet = time.monotonic() - members.heard > SILENCE_SECONDS
    return quiet or members.joined.keys() >= set(stored)


def _too_few(members: Members, there: int, config: RunConfig) -> str:
    """Who refused and why, who is silent; the time only if it was reached."""
    late = time.monotonic() >= members.until
    within = f" within {config.join_timeout:g} s (join-timeout)" if late else ""
    refused = {f"node {node}": reason for node, reason in members.failed.items()}
    silent = [str(node) for node in members.silent()]
    mute = f"\n  {len(silent)} gave no answer: {plain(', '.join(silent))}" if silent else ""
    return (
        f"{there} of {config.num_clients} clients joined{within}; {config.needed_clients} are "
        f"needed (min-clients, num-clients){listed(refused)}{mute}"
    )
