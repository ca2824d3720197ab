"""One round with the clients: who is there, their payloads, and the test of the global model.

Written for what Flower really does (a reply that is not pulled is lost with its node; pulling several at once blocks on the
slowest; nothing is redelivered): push node by node, pull one reply at a time, store before anything else, acknowledge.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import httpx
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

import osfl
from osfl import wire
from osfl.config import RunConfig, is_identifier
from osfl.costs import release_memory
from osfl.data.parts import class_names
from osfl.payloads import Payload
from osfl.protocol import ACKNOWLEDGE, JOIN, pack_model, unpack_payload
from server_app.expected import ExpectedOf, probe
from server_app.job import GlobalModel
from server_app.run_folder import RunFolder
from server_app.status import Status, log

POLL_SECONDS = 1.0
RETRY_SECONDS = 10.0
TRIES = 2  # of a node whose app died; an exception of the app would only happen again
# A node whose SuperLink failed while it fetched a message drops it and tells nobody: who does not answer is asked once more, and again after twice as long.
PATIENCE_SECONDS = 120.0
WORK_PATIENCE_SECONDS = (
    600.0  # with what takes long; a client that is asked twice sends what it made, or waits for it
)
THANKS_SECONDS = 30.0  # for acknowledgements, at most
# What Flower raises, and what reading raises, where a reply's body is not what its sender should have sent.
_UNREADABLE = (
    AttributeError,
    DecodeError,
    IndexError,
    KeyError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class RoundError(RuntimeError):
    """The round cannot go on; the message says which clients failed and why."""


@dataclass(frozen=True)
class _Request:
    node: int
    message_type: str
    content: RecordDict
    attempt: int
    activated: str = ""  # when its node came online, at the time of sending
    patience: float = 0.0  # seconds
    again_at: float = 0.0  # by time.monotonic()


@dataclass
class Exchange:
    """Messages under way: pushed, and pulled one at a time."""

    grid: Grid
    ttl: float
    patience: float | None = None  # seconds; else PATIENCE_SECONDS
    _open: dict[str, _Request] = field(default_factory=dict)  # by message id
    _later: list[tuple[float, _Request]] = field(
        default_factory=list
    )  # to be pushed again, not before
    _heard: float = field(default_factory=time.monotonic)  # when something last came

    def rest(self) -> None:
        """Until the next look: a second, or a twentieth of the time in which nothing has come, at most ten. A look costs the SuperLink a request for each open message."""
        time.sleep(min(max(POLL_SECONDS, (time.monotonic() - self._heard) / 20), 10 * POLL_SECONDS))

    def push(
        self,
        node: int,
        message_type: str,
        content: RecordDict,
        attempt: int = 1,
        patience: float = 0.0,
    ) -> None:
        """Send one message to one node, which owes no other reply."""
        message = Message(
            content=content, dst_node_id=node, message_type=message_type, ttl=self.ttl
        )
        patience = patience or self.patience or PATIENCE_SECONDS
        activated, again_at = online_nodes(self.grid).get(node, ""), time.monotonic() + patience
        request = _Request(node, message_type, content, attempt, activated, patience, again_at)
        try:
            (message_id,) = self.grid.push_messages([message])
        except httpx.HTTPStatusError as error:
            _bear(error)
            message_id = ""
        if message_id:
            self._open[message_id] = request
        else:  # which is also what the SuperLink answers when it no longer knows the node
            self._put_off(request)

    def pull(
        self, on_reply: Callable[[int, RecordDict], None], on_failure: Callable[[int, str], None]
    ) -> int:
        """Look once for every open message; returns how many replies are still owed.

        A node whose app raised has failed. One that is or was offline is asked again when it is back, for nothing is delivered to it twice;
        one whose app crashed, once more; one that does not answer, too, and the first answer counts. A reply that cannot be read is that node's
        failure and nobody else's.
        """
        if not self.waiting():
            return 0
        online = online_nodes(self.grid)
        for message_id, request in list(self._open.items()):
            if (
                message_id not in self._open
            ):  # its node answered the same question, asked at another time
                continue
            try:
                for reply in self.grid.pull_messages([message_id]):
                    self._forget(request.node)
                    if reply.has_error():
                        self._failed(request, reply.error, on_failure)
                    else:
                        on_reply(request.node, reply.content)
            except httpx.HTTPStatusError as error:
                _bear(error)
                if not error.request.url.path.endswith(
                    "/pull-messages"
                ):  # it came half, and will not be given out again
                    self._put_off(self._open.pop(message_id))
            except _UNREADABLE as error:
                self._forget(request.node)
                on_failure(
                    request.node,
                    f"its reply to {request.message_type} cannot be read: {type(error).__name__}: {error}",
                )
            came = online.get(request.node, "")
            if (
                message_id in self._open
                and request.activated
                and came
                and came != request.activated
            ):
                log.warning("node %s was away; it will be asked again", request.node)
                self._put_off(self._open.pop(message_id))
            elif message_id in self._open and time.monotonic() >= request.again_at:
                log.warning(
                    "node %s has not answered %s; it is asked once more",
                    request.node,
                    request.message_type,
                )
                self._open[message_id] = replace(request, again_at=math.inf)
                self.push(
                    request.node,
                    request.message_type,
                    request.content,
                    request.attempt,
                    2 * request.patience,
                )
        for due, request in list(self._later):
            if time.monotonic() >= due and request.node in online:
                self._later.remove((due, request))
                self.push(request.node, request.message_type, request.content, request.attempt)
        return len(self._open) + len(self._later)

    def _failed(
        self, request: _Request, error: Error, on_failure: Callable[[int, str], None]
    ) -> None:
        if error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION or request.attempt >= TRIES:
            return on_failure(request.node, _reason(error.reason, error.code))
        log.warning("node %s failed (code %s); it will be asked again", request.node, error.code)
        offline = error.code == ErrorCode.NODE_UNAVAILABLE  # not its fault, so not an attempt
        self._put_off(replace(request, attempt=request.attempt + (not offline)))

    def _put_off(self, request: _Request) -> None:
        again_at = time.monotonic() + RETRY_SECONDS
        for message_id, other in self._open.items():
            if (
                other.node == request.node
            ):  # asked at another time, and it may be that one which the node lost
                self._open[message_id] = replace(other, again_at=min(other.again_at, again_at))
        if request.node not in self.waiting():
            self._later.append((again_at, request))

    def _forget(self, node: int) -> None:
        self._heard = time.monotonic()
        self._open = {
            message_id: request
            for message_id, request in self._open.items()
            if request.node != node
        }
        self._later = [(due, request) for due, request in self._later if request.node != node]

    def unsent(self) -> int:
        """How many messages are not with the SuperLink, and will be pushed again."""
        return len(self._later)

    def waiting(self) -> list[int]:
        """Nodes that still owe a reply."""
        return list(
            dict.fromkeys(r.node for r in (*self._open.values(), *(r for _, r in self._later)))
        )


def online_nodes(grid: Grid) -> dict[int, str]:
    """The nodes that are online, and when each came; none when the SuperLink cannot say."""
    try:
        return {node.node_id: node.last_activated_at for node in grid.get_nodes()}
    except httpx.HTTPStatusError as error:
        _bear(error)
        return {}


def _bear(error: httpx.HTTPStatusError) -> None:
    """Go on after a SuperLink's own failure, such as a database that was locked for too long (Flower itself tries again only at 503 and 504)."""
    if not error.response.is_server_error:
        raise error
    log.warning(
        "the SuperLink answered %s with %s; it will be asked again",
        error.request.url.path,
        error.response.status_code,
    )


def join(
    grid: Grid,
    config: RunConfig,
    status: Status,
    stored: list[str],
    meanwhile: Callable[[], None] = lambda: None,
    kit: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Wait until the clients are there; returns the node of each that is online.

    Args:
        stored: clients whose payload came before; they count as joined.
        kit: digests of the kit's weights here, which a client's must equal (`weights_digests`).
        meanwhile: called once, after the nodes that are there already were asked: they and the server get ready side by side.

    Raises:
        RoundError: fewer than `min-clients` after `join-timeout`, or a client that cannot take part and is needed.
    """
    status.phase("joining", config.num_clients)
    run = RecordDict({"kit": ConfigRecord(dict(kit or {}))})
    exchange, asked, joined, failed = (
        Exchange(grid, config.join_timeout),
        set[int](),
        dict[str, int](),
        dict[int, str](),
    )

    def on_reply(node: int, content: RecordDict) -> None:
        record = content.config_records["join"]
        client, version = str(record["client"]), str(record["version"])
        if not is_identifier(client):
            on_failure(
                node, f"its client id {client[:80]!r} is not 1 to 64 letters, digits, '-' or '_'"
            )
        elif client in joined:
            on_failure(node, f"its client id {client!r} is already taken by another node")
        elif version != osfl.__version__:
            on_failure(
                node,
                f"{client} has osfl {version} installed, the run is of {osfl.__version__}; install the same",
            )
        else:
            joined[client] = node
            status.client(client, "joined")

    def on_failure(node: int, reason: str) -> None:
        failed[node] = reason
        log.error("node %s cannot take part: %s", node, reason)

    def ask() -> None:
        for node in online_nodes(grid):
            if node not in asked and len(asked) < config.num_clients + len(failed):
                asked.add(node)
                exchange.push(node, JOIN, run)

    ask()
    meanwhile()
    end = time.monotonic() + config.join_timeout
    while time.monotonic() < end:
        ask()
        open_count = exchange.pull(on_reply, on_failure)
        status.advance(len(joined), config.num_clients)
        if len(joined) == config.num_clients:
            break
        if (
            failed and not open_count and len(asked) >= config.num_clients
        ):  # the rest said no; waiting would not help
            break
        time.sleep(POLL_SECONDS)
    needed, there = config.needed_clients, len(joined.keys() | stored)
    if there < needed:
        reasons = "".join(f"\n  node {node}: {reason}" for node, reason in failed.items())
        raise RoundError(
            f"{there} of {config.num_clients} clients joined within {config.join_timeout:g} s (join-timeout); {needed} are "
            f"needed (min-clients, num-clients){reasons}"
        )
    for client in sorted(set(stored) - set(joined)):
        log.warning("%s is not online; its payload is here", client)
    return dict(sorted(joined.items()))


def collect(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    nodes: dict[str, int],
    folder: RunFolder,
    status: Status,
    expected: ExpectedOf,
) -> dict[str, Payload]:
    """Every client's payload: from the store if it came before, else by asking for it.

    Raises:
        RoundError: fewer than `min-clients` valid payloads at the end or at the `deadline`.
    """
    status.phase("waiting for payloads", len(nodes))
    payloads: dict[str, Payload] = {}
    client_of = {node: client for client, node in nodes.items()}
    problems: dict[str, str] = {}
    exchange, thanks = (
        Exchange(grid, config.deadline, WORK_PATIENCE_SECONDS),
        Exchange(grid, config.join_timeout),
    )
    job = RecordDict({"job": ConfigRecord({"job": job_id})})

    def accept(client: str, sha256: str, limits: wire.Expected) -> bool:
        try:  # from the disk, so that `decode` alone has the bytes
            payload = wire.decode(folder.stored_payload(client), limits, sha256)
            probe(payload, client, config)
        except wire.PayloadError as error:
            folder.refuse_payload(client)
            refuse(client, error)
            return False
        payloads[client] = payload
        status.client(client, f"delivered {folder.payload_size(client):,} bytes")
        return True

    def refuse(client: str, error: wire.PayloadError) -> None:
        problems[client] = str(error)
        log.error("%s", error)
        status.client(client, "refused")

    def on_reply(node: int, content: RecordDict) -> None:
        client = client_of[node]
        limits = expected(client)
        try:
            blob, sha256, costs = unpack_payload(content, limits)
        except wire.PayloadError as error:
            return refuse(client, error)
        # Before anything else: from here on nobody is asked twice
        folder.store_payload(
            client, blob, {"sha256": wire.digest(blob), "bytes": len(blob), "costs": costs}
        )
        del blob
        release_memory()  # `accept` needs the payload's size three times
        if accept(client, sha256, limits):
            thanks.push(node, ACKNOWLEDGE, job)

    def on_failure(node: int, reason: str) -> None:
        problems[client_of[node]] = reason
        log.error("%s failed: %s", client_of[node], reason)
        status.client(client_of[node], "failed")

    for client in folder.stored_clients():
        own_limit = replace(
            expected(client), max_bytes=folder.payload_size(client)
        )  # what was accepted once is not refused for a lower one
        if (
            accept(client, folder.read_json(f"payloads/{client}.json")["sha256"], own_limit)
            and client in nodes
        ):
            thanks.push(nodes[client], ACKNOWLEDGE, job)
    for client, node in nodes.items():
        if client not in payloads:
            problems.pop(client, None)
            status.client(client, "asked")
            exchange.push(node, "train", job)
    end = time.monotonic() + config.deadline
    while exchange.pull(on_reply, on_failure) and time.monotonic() < end:
        thanks.pull(lambda node, content: None, lambda node, reason: None)
        status.advance(len(payloads), len(nodes))
        exchange.rest()
    for node in exchange.waiting():
        problems[client_of[node]] = f"no payload within {config.deadline:g} s (deadline)"
    end = time.monotonic() + THANKS_SECONDS
    while thanks.unsent() and time.monotonic() < end:
        thanks.pull(lambda node, content: None, lambda node, reason: None)
        time.sleep(POLL_SECONDS)
    status.advance(len(payloads), len(nodes))
    needed = config.needed_clients
    if len(payloads) < needed:
        reasons = "".join(f"\n  {client}: {reason}" for client, reason in sorted(problems.items()))
        raise RoundError(
            f"{len(payloads)} of {config.num_clients} clients delivered a valid payload; {needed} are needed (min-clients, num-clients){reasons}"
        )
    for client, reason in sorted(problems.items()):
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
    log.error("%s", error)
    folder.refuse_payload(error.client)
    status.client(error.client, "refused")
    if len(left) < config.needed_clients:
        raise RoundError(
            f"{len(left)} of {config.num_clients} clients delivered a payload that can be used; "
            f"{config.needed_clients} are needed (min-clients, num-clients)\n  {error.client}: {error}"
        ) from error
    return left


def evaluate_on_clients(
    grid: Grid,
    config: RunConfig,
    nodes: dict[str, int],
    models: dict[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Send every global model to every client and store the confusion matrices in `tests/<name>.json`.

    A client that does not answer within `test-timeout` is left out of that model's average, and the report says so.

    Raises:
        RoundError: no client could test a model.
    """
    status.phase("testing on clients", len(models) * len(nodes))
    done, size = 0, len(class_names(config.data))
    client_of = {node: client for client, node in nodes.items()}
    for name, entry in models.items():
        matrices: dict[str, list[list[int]]] = {}
        exchange = Exchange(grid, config.test_timeout)

        def on_reply(node: int, content: RecordDict, matrices: dict = matrices) -> None:
            cells = cast(list[int], content.metric_records["metrics"]["confusion"])
            if len(cells) != size * size or not all(
                isinstance(c, int) and 0 <= c < 2**40 for c in cells
            ):
                return on_failure(
                    node, "its confusion matrix has the wrong size, or cells that are not counts"
                )
            matrices[client_of[node]] = [
                cells[row * size : (row + 1) * size] for row in range(size)
            ]

        def on_failure(node: int, reason: str, name: str = name) -> None:
            log.error("%s could not test %s: %s", client_of[node], name, reason)

        content = pack_model(entry.model.state_dict(), entry.architecture, entry.small_stem)
        for node in nodes.values():
            exchange.push(node, "evaluate", content)
        release_memory()
        end = time.monotonic() + config.test_timeout
        while exchange.pull(on_reply, on_failure) and time.monotonic() < end:
            status.advance(done + len(matrices), len(models) * len(nodes))
            exchange.rest()
        done += len(nodes)
        if not matrices:
            raise RoundError(f"no client could test the global model {name}; see the log above")
        folder.write_json(f"tests/{name}.json", dict(sorted(matrices.items())))


def _reason(text: str | None, code: int) -> str:
    """The last line of an exception, which says what to do; the whole is in the client's own log."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'no reason given'} (code {code})"
