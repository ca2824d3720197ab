"""Standing mode (`osfl serve`): version after version of a model, as clients come.

Every version is a run that continues the one before it (`continue-from`, `new-clients`). Its server
listens until enough new clients have joined, or until the interval ends with at least one.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.config import IDENTIFIER_RULE, ConfigError, Scalar
from osfl.launch.flower import LaunchError
from osfl.settings import Setting
from osfl.util.files import CorruptFileError, read_json, write_atomically
from osfl.util.names import is_identifier
from osfl.util.text import quote

HINT_STATE = "remove it, and the standing mode resumes from its first version"
# Seconds from the start of a failed run to its retry. A run fails without the SuperLink, without a
# new client, or while an earlier `osfl serve`'s run of the same version is at work
RETRY_SECONDS = 60.0

# Runs one version with these settings, and returns its metrics
RunVersion = Callable[[list[Setting]], Mapping[str, Any]]


@dataclass(frozen=True)
class StandingMode:
    """Settings of the standing mode.

    Attributes:
        name: the beginning of each version's job id, `<name>-v<number>`.
        new_clients: the number of new clients with which a version starts at once.
        interval: seconds after which one new client is enough.
        versions: the number of versions after which it ends; 0: it does not end.
    """

    name: str
    new_clients: int
    interval: float
    versions: int = 0

    def job_id(self, number: int) -> str:
        """Return the job id of a version."""
        return f"{self.name}-v{number}"


def serve(
    settings: Iterable[Setting],
    standing: StandingMode,
    state_file: Path,
    run_version: RunVersion,
    show: Callable[[str], None],
) -> None:
    """Make one version after the other.

    A version whose run fails, as when no new client has come, is tried again, and its job resumes.
    A restarted standing mode resumes after the last finished version.

    Args:
        settings: of every version; their `num-clients` is that of the first one.
        state_file: the file with the number of the last finished version.
        run_version: runs a version.
        show: prints a line.

    Raises:
        ConfigError: the name is not one for job ids; or a setting is invalid.
        CorruptFileError: the state is corrupt.
    """
    if not is_identifier(standing.job_id(1)):
        raise ConfigError(f"--name {quote(standing.name)}: {IDENTIFIER_RULE}")
    settings = list(settings)
    number = _read_state(state_file)
    while not standing.versions or number < standing.versions:
        began = time.monotonic()
        version = _settings_of(standing, number + 1)
        show(f"version {number + 1}: job {standing.job_id(number + 1)} listens")
        try:
            metrics = run_version([*settings, version])
            if not metrics:
                raise LaunchError("its log has no results")
        except LaunchError as error:
            show(f"version {number + 1}: {error}")
            pause = min(RETRY_SECONDS, standing.interval)
            time.sleep(max(0.0, pause - (time.monotonic() - began)))
            continue
        number += 1
        write_atomically(state_file, f'{{"version": {number}}}\n'.encode())
        show(f"version {number}: {_count_payloads(metrics)} payloads")


def _settings_of(standing: StandingMode, number: int) -> dict[str, Scalar]:
    """Return the settings of a version that differ from the common ones."""
    settings: dict[str, Scalar] = {"job-id": standing.job_id(number)}
    if number == 1:
        return settings
    return {
        **settings,
        "continue-from": standing.job_id(number - 1),
        "new-clients": standing.new_clients,
        "join-timeout": float(standing.interval),
    }


def _count_payloads(metrics: Mapping[str, Any]) -> int:
    """Return the number of clients whose payload a run has."""
    return sum(bool(row.get("upload_bytes")) for row in metrics["clients"].values())


def _read_state(file: Path) -> int:
    """Read the number of the last version; 0 before the first.

    Raises:
        CorruptFileError: the file is corrupt.
    """
    if not file.exists():
        return 0
    number = read_json(file, hint=HINT_STATE).get("version")
    if type(number) is not int or number < 0:
        raise CorruptFileError(f"{file} is corrupt (version = {number!r}); {HINT_STATE}")
    return number
