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
# Options of mallopt (glibc's malloc.h)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Freed memory that a process may keep at the end of its heap
KEPT_BYTES = 2**30
# Larger pieces, such as a model's weights, return to the kernel at once
LARGEST_KEPT_BYTES = 2**28


@dataclass(frozen=True)
class Cost:
    """A part of a run's work.

    Attributes:
        seconds: on this machine.
    """

    flops: float
    seconds: float

    def times(self, factor: float) -> "Cost":
        """Return the cost of `factor` such parts."""
        return Cost(factor * self.flops, factor * self.seconds)


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
    """Return the cost per row of the largest batch that time and memory allow.

    Args:
        time_batch: returns the cost per row of a batch, by its number of rows.
        first: rows of the first batch; each is twice as large as the one before.
        most: rows of the largest batch.
        seconds: time after which no further batch is timed.

    Raises:
        torch.OutOfMemoryError: not even the first batch fits.
    """
    rows = min(first, most)
    watch = Stopwatch()
    cost = time_batch(rows)
    while rows < most and watch.seconds < seconds:
        rows = min(2 * rows, most)
        try:
            cost = time_batch(rows)
        except torch.OutOfMemoryError:
            break
    return cost


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


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensors, until `release_memory`.

    By default it maps every large tensor anew, and the kernel's page faults slow a UNet pass on a
    CPU down. Numbers stay the same. It applies to the main thread: other threads have arenas whose
    pieces are small.
    """
    # Not every C library has mallopt
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)


def release_memory() -> None:
    """Return freed memory to the kernel.

    Otherwise glibc would retain the freed 5 MB chunks in which Flower sends and receives a message,
    as many as the message has.
    """
    gc.collect()
    # Not every C library has malloc_trim
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
