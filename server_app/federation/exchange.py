"""Requests in flight between the server and the nodes.

In Flower, a reply that is not pulled is lost with its node, a pull waits for the slowest upload,
and nothing is redelivered. So requests are pushed node by node, each reply is pulled separately,
stored before anything else, and acknowledged.
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

from osfl.payload.error_codes import find_error_code
from osfl.payload.wire import PayloadError
from osfl.util.log import log
from osfl.util.text import sanitize
from server_app.federation.pulls import Pulls, Result

POLL_SECONDS = 1.0
RETRY_SECONDS = 10.0
# Attempts at a node whose app crashed. An exception of the app is not retried: it would recur
MAX_ATTEMPTS = 2
# A node whose SuperLink failed during a fetch silently drops the message. So an unresponsive node
# gets the request again after this time, then after twice as long
PATIENCE_SECONDS = 120.0
# For long work. A client that gets the request twice sends its finished result, or waits for it
WORK_PATIENCE_SECONDS = 600.0
ACKNOWLEDGE_SECONDS = 30.0  # at most, for acknowledgements
# A node that is offline for this long loses its place if a standby can take it. A SuperNode that
# crashed and restarts is back within about 60 s
OFFLINE_SECONDS = 90.0
GRACE_SECONDS = 2.0  # after a phase's end, to use replies that have already arrived
MAX_REASONS = 20  # in an error's text
MAX_TRACEBACK_CHARS = 10_000  # of a client's exception, which are searched for its last line
# Flower's text around the message of a client's exception, in a simulation and on a node
FLOWER_EXCEPTION = re.compile(
    r"(?:Exception ClientAppException occurred\. Message: |<class '[\w.]+'>:<['\"])"
    r"(?P<text>.*?)(?:['\"]>)?$"
)
MAX_REASON_CHARS = 1000  # characters of an exception's last line

T = TypeVar("T")
Read = Callable[[int, RecordDict], T]  # (node, content) -> value
Keep = Callable[[int, T], None]
OnFailure = Callable[[int, str], None]


class RoundError(RuntimeError):
    """The round cannot continue. The message says which clients failed and why."""


class InvalidReplyError(ValueError):
    """A reply could be read but not used. The message says why."""


@dataclass(frozen=True)
class _Request:
    node: int
    message_type: str
    content: RecordDict
    attempt: int
    activated: str = ""  # last activation of the node at the time of sending
    patience: float = 0.0  # seconds without a reply before the request is sent again
    # By time.monotonic()
    sent: float = 0.0
    resend_at: float = 0.0


@dataclass
class Exchange:
    """Requests in flight, each pushed and pulled separately.

    Attributes:
        ttl: seconds that Flower keeps a message and its reply.
        patience: seconds without a reply after which a node gets the request again.
        largest: bytes of the largest expected reply.
        names: registered key names of all nodes seen so far, where the key has a name.
    """

    grid: Grid
    ttl: float
    patience: float | None = None  # None: PATIENCE_SECONDS
    largest: float = 0
    names: dict[int, str] = field(default_factory=dict)
    _in_flight: dict[str, _Request] = field(default_factory=dict)  # by message id
    _ids: dict[int, list[str]] = field(default_factory=dict)  # of the requests in flight, by node
    # Requests to push again, each with its earliest time, by node
    _retries: dict[int, tuple[float, _Request]] = field(default_factory=dict)
    # Times are by time.monotonic()
    _last_reply: float = field(default_factory=time.monotonic)
    _online: dict[int, NodeInfo] | None = None
    _last_poll: float = 0.0
    _offline_since: dict[int, float] = field(default_factory=dict)  # first poll without the node

    def __post_init__(self) -> None:
        self._pulls = Pulls(self.grid, self.largest)

    def poll_nodes(self) -> dict[int, NodeInfo]:
        """Ask the SuperLink which nodes are online."""
        self._online = online_nodes(self.grid)
        self.names |= {node: info.name for node, info in self._online.items() if info.name}
        self._last_poll = time.monotonic()
        # An empty answer may mean that the SuperLink itself has a problem
        offline = set(self.pending_nodes()) - self._online.keys() if self._online else set()
        self._offline_since = {
            node: self._offline_since.get(node, self._last_poll) for node in offline
        }
        return self._online

    def push(
        self,
        node: int,
        message_type: str,
        content: RecordDict,
        attempt: int = 1,
        patience: float = 0.0,
    ) -> None:
        """Send a request to a node that owes no other reply."""
        message = Message(
            content=content, dst_node_id=node, message_type=message_type, ttl=self.ttl
        )
        patience = patience or self.patience or PATIENCE_SECONDS
        online = self.poll_nodes() if self._online is None else self._online
        sent = time.monotonic()
        activated = online[node].last_activated_at if node in online else ""
        request = _Request(
            node, message_type, content, attempt, activated, patience, sent, sent + patience
        )
        try:
            (message_id,) = self.grid.push_messages([message])
        except httpx.HTTPError as error:
            _tolerate_server_error(error)
            message_id = ""
        # The SuperLink also answers with an empty id if it no longer knows the node
        if message_id:
            self._in_flight[message_id] = request
            self._ids.setdefault(node, []).append(message_id)
        else:
            self._retry_later(request)

    def pull(
        self, read: Read[T], keep: Keep[T], on_failure: OnFailure, until: float = math.inf
    ) -> int:
        """Poll every request in flight once, and return how many replies are still owed.

        A node whose app raised an exception has failed. A node that is or was offline gets the
        request again when it is back, because Flower delivers nothing twice. A node whose app
        crashed, or that does not reply, gets it once more; the first reply counts.

        Args:
            read: converts a reply to the argument of `keep`. Its exceptions, and Flower's while it
                assembles the reply, count as that node's failure only.
            keep: stores the value. Its exceptions are this machine's failure, such as a full disk.
            on_failure: called with a node that failed permanently, and the reason.
            until: end of the phase by time.monotonic(). No reply is awaited longer.
        """
        if not self._in_flight and not self._retries:
            return 0
        online = self.poll_nodes()
        pending = deque(
            message_id for message_id in self._in_flight if not self._pulls.in_progress(message_id)
        )
        while True:
            while pending and self._pulls.room() and time.monotonic() < until:
                message_id = pending.popleft()
                # It is gone if its node has since answered another copy of the request
                if message_id in self._in_flight:
                    self._pulls.start(message_id)
            if result := self._pulls.next(until):
                self._handle(*result, read, keep, on_failure)
            elif not (pending and self._pulls.room()):
                break
            if time.monotonic() >= until + GRACE_SECONDS * bool(result):
                break
        self._resend(online)
        return len(self._in_flight) + len(self._retries)

    def _handle(
        self, message_id: str, result: Result, read: Read[T], keep: Keep[T], on_failure: OnFailure
    ) -> None:
        """Handle the result of a pull: a reply, no reply yet, or an error."""
        request = self._in_flight.get(message_id)
        if isinstance(result, httpx.HTTPError):
            _tolerate_server_error(result)
            # After the first HTTP request the reply is partly pulled and not handed out again
            if request and not _path(result).endswith("/pull-messages"):
                self._retry_later(self._take(message_id))
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
        # Being offline is not the app's failure, so it does not count as an attempt
        is_offline = error.code == ErrorCode.NODE_UNAVAILABLE
        has_raised = error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        if has_raised or (request.attempt >= MAX_ATTEMPTS and not is_offline):
            return on_failure(request.node, _reason(error.reason, error.code))
        log.warning(
            "node %s failed (code %s); the request will be sent again", request.node, error.code
        )
        self._retry_later(replace(request, attempt=request.attempt + (not is_offline)))
        return None

    def _resend(self, online: Mapping[int, NodeInfo]) -> None:
        """Resend to nodes that reconnected or timed out, and to those whose retry is due."""
        for message_id, request in list(self._in_flight.items()):
            node = request.node
            activated = online[node].last_activated_at if node in online else ""
            # A partly pulled reply continues when its node is back, or ends as an error
            if message_id not in self._in_flight or self._pulls.in_progress(message_id):
                continue
            if request.activated and activated and activated != request.activated:
                log.warning("node %s reconnected; the request will be sent again", node)
                self._retry_later(self._take(message_id))
            elif time.monotonic() >= request.resend_at:
                message_type = request.message_type
                name = self.names.get(node) or f"node {node}"
                log.info("no reply from %s yet; sending %s again", name, message_type)
                self._in_flight[message_id] = replace(request, resend_at=math.inf)
                patience = 2 * request.patience
                self.push(node, message_type, request.content, request.attempt, patience)
        for node, (due, request) in list(self._retries.items()):
            if time.monotonic() >= due and node in online:
                del self._retries[node]
                self.push(request.node, request.message_type, request.content, request.attempt)

    def _retry_later(self, request: _Request) -> None:
        resend_at = time.monotonic() + RETRY_SECONDS
        copies = self._ids.get(request.node, [])
        for message_id in copies:
            # The node may have lost this copy of the request
            copy = self._in_flight[message_id]
            self._in_flight[message_id] = replace(copy, resend_at=min(copy.resend_at, resend_at))
        if not copies:
            self._retries.setdefault(request.node, (resend_at, request))

    def _take(self, message_id: str) -> _Request:
        """Remove one request in flight, and return it."""
        request = self._in_flight.pop(message_id)
        self._ids[request.node].remove(message_id)
        if not self._ids[request.node]:
            del self._ids[request.node]
        return request

    def _forget(self, node: int) -> None:
        self._last_reply = time.monotonic()
        for message_id in self._ids.pop(node, []):
            del self._in_flight[message_id]
        self._retries.pop(node, None)

    def poll_interval(self) -> float:
        """Return the seconds to the next poll: 1, or 1/20 of the time without a reply, at most 10.

        A poll costs the SuperLink one HTTP request per message in flight.
        """
        silence = time.monotonic() - self._last_reply
        return min(max(POLL_SECONDS, silence / 20), 10 * POLL_SECONDS)

    def wait(self, until: float = math.inf) -> None:
        """Sleep until the next poll, the end of the phase, or a reply."""
        self._pulls.wait(min(self.poll_interval(), until - time.monotonic()))

    def end(self) -> None:
        """End the phase: replies that arrive later are dropped."""
        self._pulls.end()

    def unsent(self) -> int:
        """Return how many messages the SuperLink does not have and that will be pushed again."""
        return len(self._retries)

    def pending_nodes(self) -> list[int]:
        """Return the nodes that still owe a reply."""
        return list(dict.fromkeys((*self._ids, *self._retries)))

    def was_asked(self, node: int, since: float) -> bool:
        """Check whether a node got a request since a time, or is online and will get one again.

        Args:
            since: by time.monotonic().
        """
        requests = [self._in_flight[message_id] for message_id in self._ids.get(node, [])]
        if node in self._retries:
            if node in (self._online or {}):
                return True
            requests.append(self._retries[node][1])
        return any(request.sent > since for request in requests)

    def offline(self) -> list[int]:
        """Return nodes that owe a reply and were offline at every poll for `OFFLINE_SECONDS`."""
        limit = self._last_poll - OFFLINE_SECONDS
        return [
            node for node in self.pending_nodes() if self._offline_since.get(node, math.inf) < limit
        ]

    def give_up(self, node: int) -> None:
        """Stop waiting for a node; its later replies are dropped."""
        self._forget(node)


def ignore(*_: Any) -> None:
    """Ignore a reply or failure that nothing depends on."""


def format_reasons(reasons: Mapping[Any, str]) -> str:
    """Format the failed clients and reasons, one per line, for the end of an error's text."""
    lines = [f"\n  {client}: {reason}" for client, reason in sorted(reasons.items())]
    extra = len(lines) - MAX_REASONS
    return "".join(lines[:MAX_REASONS]) + (f"\n  and {extra} more" if extra > 0 else "")


def online_nodes(grid: Grid) -> dict[int, NodeInfo]:
    """Return the nodes that are online; {} if the SuperLink cannot answer."""
    try:
        return {node.node_id: node for node in grid.get_nodes()}
    except httpx.HTTPError as error:
        _tolerate_server_error(error)
        return {}


def _tolerate_server_error(error: httpx.HTTPError) -> None:
    """Log a failure of the SuperLink itself, such as a database that was locked for too long.

    Flower already retries 503 and 504, and retries forever while nothing answers.

    Raises:
        httpx.HTTPStatusError: the SuperLink rejected the request (4xx).
    """
    if isinstance(error, httpx.HTTPStatusError):
        if not error.response.is_server_error:
            raise error
        failure = f"answered {_path(error)} with {error.response.status_code}"
    else:
        failure = f"could not be reached ({type(error).__name__}: {error})"
    log.warning("the SuperLink %s; the request will be sent again", failure)


def _path(error: httpx.HTTPError) -> str:
    # httpx raises RuntimeError if the error has no request
    with suppress(RuntimeError):
        return error.request.url.path
    return ""


def _unreadable(request: _Request, error: Exception) -> str:
    if isinstance(error, InvalidReplyError | PayloadError):
        return sanitize(error)
    message = sanitize(f"{type(error).__name__}: {error}")
    return f"its reply to {request.message_type} cannot be read: {message}"


def _reason(text: str | None, code: int) -> str:
    """Return the last line of an exception, which has the hint; the client's log has the rest.

    A client with a privacy guarantee sends a coded reason instead.
    """
    lines = [
        line.strip() for line in (text or "")[-MAX_TRACEBACK_CHARS:].splitlines() if line.strip()
    ]
    if lines and (coded_reason := find_error_code(lines[-1])):
        return coded_reason
    message = sanitize(_unwrap(lines[-1]), MAX_REASON_CHARS) if lines else "no reason given"
    return f"{message} (code {code})"


def _unwrap(line: str) -> str:
    """Return an exception's own message, without the text that Flower puts around it."""
    match = FLOWER_EXCEPTION.search(line)
    return match["text"] if match else line
