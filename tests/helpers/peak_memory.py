"""The peak of this process's memory."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import psutil

from osfl.util.costs import release_memory

# An option of mallopt (glibc's malloc.h)
M_MMAP_THRESHOLD = -3


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak of resident bytes during `work`, beyond those resident before it."""
    # Otherwise work would reuse memory that malloc has kept, and the peak would not show it
    release_memory()
    # A kit that another test loaded would let malloc take large tensors from a heap with gaps
    # (`keep_freed_memory`); glibc's default is a map for each
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    work()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) * 1024 - before
