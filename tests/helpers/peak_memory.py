"""The peak of this process's memory."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil

from osfl.util.costs import release_memory


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of memory that were resident beside those that were before."""
    # What malloc keeps of earlier work would be taken again, and not be seen
    release_memory()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    work()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) * 1024 - before
