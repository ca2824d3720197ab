"""Settings of a run that continues another one (`osfl run --continue`)."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from osfl.config import ConfigError, Scalar
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.payload_source import find_path
from osfl.settings import Setting, default_config
from osfl.util.names import is_identifier
from osfl.util.text import quote

# Keys that a continuation does not inherit
NOT_INHERITED = frozenset(
    {
        "job-id",
        "payloads-from",
        "continue-from",
        "new-clients",
        "continue-from-model",
        "replace-clients",
    }
)


def continued_settings(
    name: str,
    replaced: Sequence[str],
    settings: Iterable[Setting],
    runs: Path | None,
    connection: str,
) -> list[Setting]:
    """Return the settings of a run that continues another one, and inherits its settings.

    The folder of a real federation's run is on the server, so its settings must be given again.

    Args:
        name: the run to continue: a folder, or a job id in the folder of all runs.
        replaced: the clients that are asked for a new payload.
        settings: override the inherited ones.
        runs: folder for a simulation's runs; None for `runs`.
        connection: a SuperLink of the user's Flower configuration; "" for a simulation.

    Raises:
        ConfigError: there is no such run.
    """
    keys: dict[str, Scalar] = {"continue-from": name, "replace-clients": ",".join(replaced)}
    if connection:
        return [*settings, keys]
    folder = RunFolder(Path(name))
    if not folder.config_file.is_file() and is_identifier(name):
        folder = RunFolder(find_path(name, runs or Path("runs")))
    stored = folder.stored_config()
    if stored is None:
        raise ConfigError(f"--continue {quote(name)}: {folder.path} is not the folder of a run")
    keys["continue-from"] = str(folder.path.absolute())
    defaults = default_config()
    inherited = {
        key: value
        for key, value in stored.items()
        if key not in NOT_INHERITED and defaults.get(key) != value
    }
    return [inherited, *settings, keys]
