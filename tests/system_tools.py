"""Helpers of the system tests."""

import sys
from pathlib import Path

from conftest import defaults, quick

BIN = Path(sys.executable).parent


def quick_arguments(kit: Path, **overrides: object) -> list[str]:
    """`conftest.quick` as arguments of `osfl run`."""
    usual, wanted = defaults(), quick(kit=str(kit), join_timeout=300.0, deadline=300.0, **overrides)
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in wanted.items() if v != usual[k]}
    return [f"{key}={value}" for key, value in shown.items()]
