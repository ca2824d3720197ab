"""Helpers of the system tests."""

import os
import sys
from pathlib import Path

from conftest import defaults, quick

BIN = Path(sys.executable).parent
# Every client that is simulated at the same time is a process that imports torch: half of what a small run costs.
ONE_AT_A_TIME = ("--client-cpus", str(os.cpu_count() or 1))


def quick_arguments(kit: Path, **overrides: object) -> list[str]:
    """`conftest.quick` as arguments of `osfl run`."""
    usual, wanted = defaults(), quick(kit=str(kit), join_timeout=300.0, deadline=300.0, **overrides)
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in wanted.items() if v != usual[k]}
    return [f"{key}={value}" for key, value in shown.items()]
