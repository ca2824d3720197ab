"""Measurement of costs: FLOPs, seconds, peak memory."""

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")


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
