"""The peak of this process's memory."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil

from osfl.util.costs import release_memory


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak of resident bytes during `work`, beyond those resident before it."""
    # Otherwise work would reuse memory that malloc has kept, and the peak would not show it
    release_memory()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    work()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) * 1024 - before
