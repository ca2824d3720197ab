"""What things cost: FLOPs, seconds, peak memory."""

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
    """Counts the FLOPs (2 per multiply-add) of repeated steps by counting each kind of step once.

    Counting slows a step down by an order of magnitude, and a step of fixed shapes costs the same
    every time.
    """

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[Hashable, int] = {}

    def run(self, kind: Hashable, step: Callable[[], T]) -> T:
        """Run a step; `kind` names its shapes."""
        result = step() if kind in self._of else self._count(kind, step)
        self.total += self._of[kind]
        return result

    def run_then(self, step: Callable[[], T], kind_of: Callable[[T], Hashable]) -> T:
        """Run a step whose cost its result tells, such as a text's length.

        Of every kind the first is run twice, so it must be repeatable.
        """
        result = step()
        kind = kind_of(result)
        if kind not in self._of:
            self._count(kind, step)
        self.total += self._of[kind]
        return result

    def _count(self, kind: Hashable, step: Callable[[], T]) -> T:
        with FlopCounterMode(display=False) as counter:
            result = step()
        self._of[kind] = counter.get_total_flops()
        return result


class Stopwatch:
    """Wall-clock seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


def peak_memory_mb() -> float:
    """Peak resident memory of this process in MB (1e6 bytes).

    On CUDA, plus the peak of its allocator.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak += sum(
            torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())
        )
    return peak / 1e6


def release_memory() -> None:
    """Give freed memory back to the kernel.

    Of what comes and goes in Flower's chunks of 5 MB, glibc would keep as much as the message has.
    """
    gc.collect()
    with suppress(AttributeError, OSError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)
