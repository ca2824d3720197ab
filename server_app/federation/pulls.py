"""Replies are pulled in threads, so that a node that uploads slowly holds up nobody else.

Flower's `pull_messages` returns when all of a reply has arrived: after hours, if its sender likes.
A thread cannot be ended from outside. So a phase that is over leaves its threads behind: what they
bring later is dropped, and as daemons they do not keep the process.
"""

import threading
import time
from collections import deque

import psutil
from flwr.app import Message
from flwr.serverapp import Grid

from server_app.federation.counted import at_most

AT_ONCE = 4  # requests to the SuperLink; without slow nodes, also replies in memory
# A pull that takes longer gives its place among those to another.
SLOW_SECONDS = 1.0
# Threads, if memory allows. So many nodes that upload slowly at the same time keep later replies
# from being pulled until one of theirs is through. They never keep the phase from ending.
MOST = 64
SMALL = 2**24  # bytes that every reply may have, such as a confusion matrix
Result = list[Message] | BaseException


class Pulls:
    """Pulls under way, each in its thread, and what came of those that are done.

    Args:
        grid: its `pull_messages` is called from several threads. Flower's grids allow that: httpx's
            client is safe to share, the in-memory state has a lock.
        largest: bytes of the largest reply to expect. One that is larger raises. Half of the free
            memory must hold all that are pulled at the same time, but for `AT_ONCE`.
    """

    def __init__(self, grid: Grid, largest: float = 0):
        self._grid = grid
        free = psutil.virtual_memory().available
        self._limit = largest + SMALL
        self._most = max(AT_ONCE, min(MOST, int(free / 2 / max(largest, 1))))
        self._began: dict[str, float] = {}  # of a message id, by time.monotonic()
        self._done: deque[tuple[str, Result]] = deque()
        self._news = threading.Event()
        self._ended = False

    def start(self, message_id: str) -> None:
        """Pull the reply to a message."""
        self._began[message_id] = time.monotonic()
        threading.Thread(target=self._pull, args=(message_id,), daemon=True).start()

    def _pull(self, message_id: str) -> None:
        result: Result
        try:
            with at_most(self._limit):
                result = list(self._grid.pull_messages([message_id]))
        except BaseException as error:  # raised again by who takes the result, or its node's
            result = error
        if not self._ended:
            self._done.append((message_id, result))
            self._news.set()

    def under_way(self, message_id: str) -> bool:
        """Whether a thread is at it, or has a result that nobody took."""
        return message_id in self._began

    def room(self) -> bool:
        """Whether another pull may start now."""
        recent = time.monotonic() - SLOW_SECONDS
        fast = sum(began > recent for began in self._began.values())
        return fast < AT_ONCE and len(self._began) < self._most

    def next(self, until: float) -> tuple[str, Result] | None:
        """The next result; None at `until`, or when all that are under way are slow."""
        while not self._done:
            slow = max(self._began.values(), default=0.0) + SLOW_SECONDS
            seconds = min(slow, until) - time.monotonic()
            if seconds <= 0:
                return None
            self.wait(seconds)
        message_id, result = self._done.popleft()
        del self._began[message_id]
        return message_id, result

    def wait(self, seconds: float) -> None:
        """Sleep, at most until there is a result."""
        self._news.clear()
        if not self._done:
            self._news.wait(max(0.0, seconds))

    def end(self) -> None:
        """Nobody will take another result: drop what comes."""
        self._ended = True
        self._done.clear()
