"""Set the clock of a process ahead or back; Python imports this file first.

The variable OSFL_CLOCK_FILE names a file with the seconds. It is read at each call, so that a fork
has its own clock, and a running process follows a change. The system's own clock stays.
"""

import os
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

from flwr.supercore import date

true_now = date.now
true_time = time.time


def seconds_ahead() -> float:
    """Return the seconds by which this process's clock is ahead."""
    file = os.environ.get("OSFL_CLOCK_FILE")
    return float(Path(file).read_text()) if file else 0.0


def now() -> datetime:
    """Return Flower's time of day."""
    return true_now() + timedelta(seconds=seconds_ahead())


def seconds() -> float:
    """Return the seconds since the epoch."""
    return true_time() + seconds_ahead()


time.time = seconds
# Modules that have taken the function meanwhile
for module in list(sys.modules.values()):
    if getattr(module, "now", None) is true_now:
        module.now = now  # type: ignore[attr-defined]
