"""Measurement of costs: FLOPs, seconds, peak memory."""

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")
# A larger batch is timed while doubling it saves this part of the time per row
LEAST_GAIN = 0.1


@dataclass(frozen=True)
class Cost:
    """A part of a run's work.

    Attributes:
        seconds: on this machine.
    """

    flops: float
    seconds: float


class FlopMeter:
    """A sum of the FLOPs (2 per multiply-add) of repeated steps, which counts each kind once.

    Counting slows a step down by an order of magnitude, and a step of fixed shapes costs the same
    every time.
    """

    def __init__(self) -> None:
        self.total = 0
        self._flops: dict[Hashable, int] = {}

    def run(self, kind: Hashable, step: Callable[[], T]) -> T:
        """Run a step and add its FLOPs to the total.

        Args:
            kind: identifies the step's shapes, and so its cost.
        """
        result = step() if kind in self._flops else self._count(kind, step)
        self.total += self._flops[kind]
        return result

    def run_by_result(self, step: Callable[[], T], kind_of: Callable[[T], Hashable]) -> T:
        """Run a step whose kind depends on its result, such as on the length of a text.

        The first step of each kind runs twice, so a step must be repeatable.
        """
        result = step()
        kind = kind_of(result)
        if kind not in self._flops:
            self._count(kind, step)
        self.total += self._flops[kind]
        return result

    def _count(self, kind: Hashable, step: Callable[[], T]) -> T:
        with FlopCounterMode(display=False) as counter:
            result = step()
        self._flops[kind] = counter.get_total_flops()
        return result


class Stopwatch:
    """A clock that starts when it is created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the wall-clock seconds since the start."""
        return time.perf_counter() - self._start


def time_growing_batches(
    time_batch: Callable[[int], Cost], first: int, most: int, seconds: float
) -> Cost:
    """Return the cost per row of the fastest batch, each twice as large as the one before.

    The search ends at the first batch that saves less than `LEAST_GAIN` of the time per row.

    Args:
        time_batch: returns the cost per row of a batch, by its number of rows.
        first: rows of the first batch.
        most: rows of the largest batch.
        seconds: time after which no further batch is timed.
    """
    rows = min(first, most)
    watch = Stopwatch()
    best = time_batch(rows)
    while rows < most and watch.seconds < seconds:
        rows = min(2 * rows, most)
        cost = time_batch(rows)
        if cost.seconds > (1 - LEAST_GAIN) * best.seconds:
            return min(best, cost, key=lambda each: each.seconds)
        best = cost
    return best


def peak_memory_mb() -> float:
    """Return this process's peak memory in MB (1e6 bytes).

    It is the peak of resident memory plus, with CUDA, the peaks of torch's allocator on all GPUs.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak += sum(
            torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())
        )
    return peak / 1e6


def release_memory() -> None:
    """Return freed memory to the kernel.

    Otherwise glibc would retain the freed 5 MB chunks in which Flower sends and receives a message,
    as many as the message has.
    """
    gc.collect()
    # Not every C library has malloc_trim
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
