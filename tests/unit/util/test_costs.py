"""osfl/util/costs.py: memory that a process keeps."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import psutil
from osfl.util.costs import keep_freed_memory, release_memory

def megabytes():
    return psutil.Process().memory_info().rss / 1e6

if sys.argv[1] == "kept":
    keep_freed_memory()
before = megabytes()
block = bytearray(b"x") * 200_000_000
del block
freed = megabytes()
release_memory()
print(freed - before, megabytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_memory_is_kept_until_it_is_released() -> None:
    """A process of its own frees 200 MB: options of malloc stay."""
    megabytes = {}
    for name in ("kept", "default"):
        command = [sys.executable, "-c", PROGRAM, name]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        megabytes[name] = [float(text) for text in result.stdout.split()]
    assert megabytes["default"][0] < 20
    assert megabytes["kept"][0] > 180
    assert megabytes["kept"][1] < 20
