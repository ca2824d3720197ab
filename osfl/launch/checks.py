"""Check a run before a SuperLink or Ray starts, like `osfl run --dry-run` does.

The checks run in a process of their own: the one that starts a run lives as long as the run, and
would keep the half a gigabyte that torch and the models' libraries occupy.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from osfl.config import ConfigError, Scalar
from osfl.util.text import sanitize_lines

# Exit status for an invalid run; a check that crashes has another one
REFUSED = 3


def check_run(overrides: Mapping[str, Scalar], runs: Path | None) -> list[str]:
    """Check a run in a subprocess, and return notes on its data.

    Args:
        overrides: run-config settings that override the defaults.
        runs: folder of a simulation's runs; None for a real federation, of which only the settings
            can be checked here.

    Raises:
        ConfigError: the run cannot work, with the reason.
    """
    request = json.dumps(
        {"overrides": dict(overrides), "runs": None if runs is None else str(runs)}
    )
    # -P: no module in the working directory can shadow a library
    command = [sys.executable, "-P", "-m", "osfl.cli.preflight"]
    # torch leaves a folder behind among the temporary files
    with tempfile.TemporaryDirectory(prefix="osfl-", ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        check = subprocess.run(
            command, input=request.encode(), capture_output=True, env=environment
        )
    if check.returncode == REFUSED:
        raise ConfigError(sanitize_lines(check.stdout.strip()))
    if check.returncode:
        raise ConfigError(f"the check of this run failed:\n{sanitize_lines(check.stderr.strip())}")
    return sanitize_lines(check.stdout.strip()).splitlines()
