"""Pulling of replies in threads, so that a node that uploads slowly does not delay the others.

Flower's `pull_messages` returns when the whole reply has arrived, which a sender can delay for
hours. A thread cannot be stopped from outside. So a phase that ends abandons its threads: their
later results are dropped, and as daemons they do not keep the process alive.
"""

import threading
import time
from collections import deque

import psutil
from flwr.app import Message
from flwr.serverapp import Grid

from server_app.federation.counted import limit_reply_bytes

MAX_CONCURRENT_REQUESTS = (
    4  # concurrent requests to the SuperLink; without slow nodes, also replies in memory
)
# A slower pull no longer counts among the concurrent ones
SLOW_SECONDS = 1.0
# Threads, if memory allows. This many simultaneous slow uploads delay later replies until one of
# them ends. They never delay the end of the phase
MAX_THREADS = 64
SMALL_REPLY_BYTES = 2**24  # bytes that every reply may have, such as a confusion matrix
Result = list[Message] | BaseException


class Pulls:
    """Pulls in progress, each in its own thread, and the results of finished ones.

    Args:
        grid: its `pull_messages` is called from several threads. Flower's grids allow that: httpx's
            client is thread-safe, and the in-memory state has a lock.
        largest: bytes of the largest expected reply; a larger one raises. The number of threads is
            limited so that half of the free memory holds all their replies, but is at least
            `MAX_CONCURRENT_REQUESTS`.
    """

    def __init__(self, grid: Grid, largest: float = 0):
        self._grid = grid
        free = psutil.virtual_memory().available
        self._limit = largest + SMALL_REPLY_BYTES
        self._max_threads = max(
            MAX_CONCURRENT_REQUESTS, min(MAX_THREADS, int(free / 2 / max(largest, 1)))
        )
        self._started: dict[str, float] = {}  # time.monotonic() by message id
        self._results: deque[tuple[str, Result]] = deque()
        self._has_result = threading.Event()
        self._ended = False

    def start(self, message_id: str) -> None:
        """Pull the reply to a message."""
        self._started[message_id] = time.monotonic()
        threading.Thread(target=self._pull, args=(message_id,), daemon=True).start()

    def _pull(self, message_id: str) -> None:
        result: Result
        try:
            with limit_reply_bytes(self._limit):
                result = list(self._grid.pull_messages([message_id]))
        # The consumer raises it again, or counts it as the node's failure
        except BaseException as error:
            result = error
        if not self._ended:
            self._results.append((message_id, result))
            self._has_result.set()

    def in_progress(self, message_id: str) -> bool:
        """Check whether a pull is in progress or its result has not been consumed."""
        return message_id in self._started

    def room(self) -> bool:
        """Check whether another pull may start now."""
        recent = time.monotonic() - SLOW_SECONDS
        fast = sum(started > recent for started in self._started.values())
        return fast < MAX_CONCURRENT_REQUESTS and len(self._started) < self._max_threads

    def next(self, until: float) -> tuple[str, Result] | None:
        """Return the next result; None at `until`, or when all pulls in progress are slow."""
        while not self._results:
            all_slow = max(self._started.values(), default=0.0) + SLOW_SECONDS
            seconds = min(all_slow, until) - time.monotonic()
            if seconds <= 0:
                return None
            self.wait(seconds)
        message_id, result = self._results.popleft()
        del self._started[message_id]
        return message_id, result

    def wait(self, seconds: float) -> None:
        """Sleep until there is a result, at most this many seconds."""
        self._has_result.clear()
        if not self._results:
            self._has_result.wait(max(0.0, seconds))

    def end(self) -> None:
        """Drop all results, including later ones."""
        self._ended = True
        self._results.clear()
