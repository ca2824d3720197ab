"""Messages under way between the server and the nodes.

Written for what Flower really does (a reply that is not pulled is lost with its node; a pull waits
for the slowest upload; nothing is redelivered): push node by node, pull each reply by itself, store
before anything else, acknowledge.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from osfl.payload.error_codes import find_coded
from osfl.payload.wire import PayloadError
from osfl.util.log import log
from osfl.util.text import plain
from server_app.federation.pulls import Pulls, Result

POLL_SECONDS = 1.0
RETRY_SECONDS = 10.0
TRIES = 2  # of a node whose app died; an exception of the app would only happen again
# A node whose SuperLink failed while it fetched a message drops it and tells nobody: who does not
# answer is asked once more, and again after twice as long.
PATIENCE_SECONDS = 120.0
# With what takes long; a client that is asked twice sends what it made, or waits for it.
WORK_PATIENCE_SECONDS = 600.0
THANKS_SECONDS = 30.0  # for acknowledgements, at most
# A node that is offline for so long loses its place where another can take it. A SuperNode that
# crashed and starts again is back within some 60 s.
AWAY_SECONDS = 90.0
GRACE_SECONDS = 2.0  # after a phase's end, to use replies that are here already
MOST_REASONS = 20  # in one error's text
LAST_LETTERS = 10_000  # of a client's exception, to look for its last line
# Flower's words around those of a client's exception: in a simulation, and of a node
WRAPPED = re.compile(
    r"(?:Exception ClientAppException occurred\. Message: |<class '[\w.]+'>:<['\"])"
    r"(?P<words>.*?)(?:['\"]>)?$"
)
MOST_REASON = 1000  # characters of that line

T = TypeVar("T")
Read = Callable[[int, RecordDict], T]  # (node, content) -> what it says
Keep = Callable[[int, T], None]
OnFailure = Callable[[int, str], None]


class RoundError(RuntimeError):
    """The round cannot go on; the message says which clients failed and why."""


class UnfitError(ValueError):
    """A reply that was read and cannot be used; the message says why."""


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
    """Messages under way: pushed, and pulled each by itself.

    Attributes:
        ttl: seconds that Flower keeps a message and its reply.
        patience: seconds of silence after which a node is asked once more.
        largest: bytes of the largest reply to expect.
        names: of the keys of all nodes that were seen; of those that have one.
    """

    grid: Grid
    ttl: float
    patience: float | None = None  # else PATIENCE_SECONDS
    largest: float = 0
    names: dict[int, str] = field(default_factory=dict)
    _open: dict[str, _Request] = field(default_factory=dict)  # by message id
    # To be pushed again, not before.
    _later: list[tuple[float, _Request]] = field(default_factory=list)
    _heard: float = field(default_factory=time.monotonic)  # when something last came
    _online: dict[int, NodeInfo] | None = None
    _looked: float = 0.0  # when, by time.monotonic()
    _absent: dict[int, float] = field(default_factory=dict)  # since which look, by node

    def __post_init__(self) -> None:
        self._pulls = Pulls(self.grid, self.largest)

    def look_around(self) -> dict[int, NodeInfo]:
        """The nodes that are online: a request to the SuperLink."""
        self._online = online_nodes(self.grid)
        self.names |= {node: one.name for node, one in self._online.items() if one.name}
        self._looked = time.monotonic()
        # Where the SuperLink names nobody, it may be the one that is away
        missing = set(self.waiting()) - self._online.keys() if self._online else set()
        self._absent = {node: self._absent.get(node, self._looked) for node in missing}
        return self._online

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
        online = self.look_around() if self._online is None else self._online
        again_at = time.monotonic() + patience
        since = online[node].last_activated_at if node in online else ""
        request = _Request(node, message_type, content, attempt, since, patience, again_at)
        try:
            (message_id,) = self.grid.push_messages([message])
        except httpx.HTTPError as error:
            _bear(error)
            message_id = ""
        if message_id:
            self._open[message_id] = request
        else:  # which is also what the SuperLink answers when it no longer knows the node
            self._put_off(request)

    def pull(
        self, read: Read[T], keep: Keep[T], on_failure: OnFailure, until: float = math.inf
    ) -> int:
        """Look once for every open message; returns how many replies are still owed.

        A node whose app raised has failed. One that is or was offline is asked again when it is
        back, for nothing is delivered to it twice; one whose app crashed, once more; one that does
        not answer, too, and the first answer counts.

        Args:
            read: makes of a reply what `keep` gets. Whatever it raises, and whatever Flower raises
                while it puts the reply together, is that node's failure and nobody else's.
            keep: what it raises is this machine's failure, such as a full disk.
            on_failure: called with a node that failed for good, and why.
            until: by time.monotonic(), when the phase is over; no reply is waited for any longer.
        """
        if not self.waiting():
            return 0
        online = self.look_around()
        unasked = deque(name for name in self._open if not self._pulls.under_way(name))
        while True:
            while unasked and self._pulls.room() and time.monotonic() < until:
                message_id = unasked.popleft()
                # Else its node answered the same question, asked at another time
                if message_id in self._open:
                    self._pulls.start(message_id)
            if done := self._pulls.next(until):
                self._take(*done, read, keep, on_failure)
            elif not (unasked and self._pulls.room()):
                break
            if time.monotonic() >= until + GRACE_SECONDS * bool(done):
                break
        self._ask_again(online)
        return len(self._open) + len(self._later)

    def _take(
        self, message_id: str, result: Result, read: Read[T], keep: Keep[T], on_failure: OnFailure
    ) -> None:
        """Use what a pull brought: a reply, none yet, or an error."""
        request = self._open.get(message_id)
        if isinstance(result, httpx.HTTPError):
            _bear(result)
            # Another request than the first: the reply came half, and is not given out again
            if request and not _path(result).endswith("/pull-messages"):
                self._put_off(self._open.pop(message_id))
        elif isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        elif request and isinstance(result, Exception):
            self._forget(request.node)
            on_failure(request.node, _unreadable(request, result))
        elif request and isinstance(result, list) and result:
            self._forget(request.node)
            self._use(request, result[0], read, keep, on_failure)

    def _use(
        self,
        request: _Request,
        reply: Message,
        read: Read[T],
        keep: Keep[T],
        on_failure: OnFailure,
    ) -> None:
        try:
            error = reply.error if reply.has_error() else None
            value = None if error else read(request.node, reply.content)
        except Exception as reason:
            return on_failure(request.node, _unreadable(request, reason))
        if error:
            return self._failed(request, error, on_failure)
        keep(request.node, value)  # type: ignore[arg-type]
        return None

    def _failed(self, request: _Request, error: Error, on_failure: OnFailure) -> None:
        if error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION or request.attempt >= TRIES:
            return on_failure(request.node, _reason(error.reason, error.code))
        log.warning("node %s failed (code %s); it will be asked again", request.node, error.code)
        offline = error.code == ErrorCode.NODE_UNAVAILABLE  # not its fault, so not an attempt
        self._put_off(replace(request, attempt=request.attempt + (not offline)))
        return None

    def _ask_again(self, online: Mapping[int, NodeInfo]) -> None:
        """Those who were away, those who are silent, and those whose time to be asked has come."""
        for message_id, request in list(self._open.items()):
            node = request.node
            came = online[node].last_activated_at if node in online else ""
            # A reply that is half here goes on when its node is back, or ends as an error
            if message_id not in self._open or self._pulls.under_way(message_id):
                continue
            if request.activated and came and came != request.activated:
                log.warning("node %s was away; it will be asked again", node)
                self._put_off(self._open.pop(message_id))
            elif time.monotonic() >= request.again_at:
                kind = request.message_type
                twice = 2 * request.patience
                name = self.names.get(node) or f"node {node}"
                log.info("still waiting for %s (%s); it is asked once more", name, kind)
                self._open[message_id] = replace(request, again_at=math.inf)
                self.push(node, kind, request.content, request.attempt, twice)
        for due, request in list(self._later):
            if time.monotonic() >= due and request.node in online:
                self._later.remove((due, request))
                self.push(request.node, request.message_type, request.content, request.attempt)

    def _put_off(self, request: _Request) -> None:
        again_at = time.monotonic() + RETRY_SECONDS
        for message_id, other in self._open.items():
            # Asked at another time, and it may be that one which the node lost
            if other.node == request.node:
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

    def pause(self) -> float:
        """Seconds to the next look: one, or a twentieth of the silence, at most ten.

        A look costs the SuperLink a request for each open message.
        """
        return min(max(POLL_SECONDS, (time.monotonic() - self._heard) / 20), 10 * POLL_SECONDS)

    def rest(self, until: float = math.inf) -> None:
        """Until the next look, the end of the phase, or something comes."""
        self._pulls.wait(min(self.pause(), until - time.monotonic()))

    def end(self) -> None:
        """The phase is over: what is still on its way is dropped when it comes."""
        self._pulls.end()

    def unsent(self) -> int:
        """How many messages are not with the SuperLink, and will be pushed again."""
        return len(self._later)

    def waiting(self) -> list[int]:
        """Nodes that still owe a reply."""
        later = [request for _, request in self._later]
        return list(dict.fromkeys(request.node for request in (*self._open.values(), *later)))

    def away(self) -> list[int]:
        """Nodes that owe a reply and were offline at every look for `AWAY_SECONDS`."""
        limit = self._looked - AWAY_SECONDS
        return [node for node in self.waiting() if self._absent.get(node, math.inf) < limit]

    def give_up(self, node: int) -> None:
        """Wait no longer for a node; what it still sends is dropped."""
        self._forget(node)


def ignore(*_: Any) -> None:
    """For replies, and failures, that nothing depends on."""


def listed(reasons: Mapping[Any, str]) -> str:
    """Who failed and why, a line each, for the end of an error's text."""
    lines = [f"\n  {client}: {reason}" for client, reason in sorted(reasons.items())]
    more = len(lines) - MOST_REASONS
    return "".join(lines[:MOST_REASONS]) + (f"\n  and {more} more" if more > 0 else "")


def online_nodes(grid: Grid) -> dict[int, NodeInfo]:
    """The nodes that are online; none when the SuperLink cannot say."""
    try:
        return {node.node_id: node for node in grid.get_nodes()}
    except httpx.HTTPError as error:
        _bear(error)
        return {}


def _bear(error: httpx.HTTPError) -> None:
    """Go on after a SuperLink's own failure, such as a database that was locked for too long.

    Flower itself tries again at 503 and 504, and for ever while nobody answers.
    """
    if isinstance(error, httpx.HTTPStatusError):
        if not error.response.is_server_error:
            raise error
        failure = f"answered {_path(error)} with {error.response.status_code}"
    else:
        failure = f"was not reached ({type(error).__name__}: {error})"
    log.warning("the SuperLink %s; it will be asked again", failure)


def _path(error: httpx.HTTPError) -> str:
    with suppress(RuntimeError):  # nobody told the error which request it was
        return error.request.url.path
    return ""


def _unreadable(request: _Request, error: Exception) -> str:
    if isinstance(error, UnfitError | PayloadError):
        return plain(error)
    message = plain(f"{type(error).__name__}: {error}")
    return f"its reply to {request.message_type} cannot be read: {message}"


def _reason(text: str | None, code: int) -> str:
    """The last line of an exception, which says what to do; the whole is in the client's log.

    A site with a guarantee sends a code in place of it.
    """
    lines = [line.strip() for line in (text or "")[-LAST_LETTERS:].splitlines() if line.strip()]
    if lines and (told := find_coded(lines[-1])):
        return told
    words = plain(_unwrapped(lines[-1]), MOST_REASON) if lines else "no reason given"
    return f"{words} (code {code})"


def _unwrapped(line: str) -> str:
    """Return an exception's own words, without those that Flower puts around them."""
    found = WRAPPED.search(line)
    return found["words"] if found else line
