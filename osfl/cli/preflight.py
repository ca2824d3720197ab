"""The checks of `osfl run` before a SuperLink or Ray starts: those of `--dry-run`.

They run in a process of their own. `osfl run` lasts as long as its run, and would keep the half a
gigabyte that torch and the models' libraries take.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from osfl.config import ConfigError, RunConfig, Scalar
from osfl.util.text import sanitize, sanitize_lines

# The exit status of a run that cannot work; a check that breaks down ends with another one
REFUSED = 3


def check_run(overrides: Mapping[str, Scalar], runs: Path | None) -> list[str]:
    """Check that a run can work, and return what a user should know of its data.

    Args:
        overrides: of the run-config's defaults.
        runs: where a simulation's runs are kept; None: server and clients are elsewhere, and only
            what can be known here is checked.

    Raises:
        ConfigError: it cannot work, and why.
    """
    request = json.dumps(
        {"overrides": dict(overrides), "runs": None if runs is None else str(runs)}
    )
    # -P: no module of the folder where the command was given takes the place of a library's
    command = [sys.executable, "-P", "-m", "osfl.cli.preflight"]
    # torch leaves a folder where temporary files go
    with tempfile.TemporaryDirectory(prefix="osfl-", ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(command, input=request.encode(), capture_output=True, env=environment)
    if done.returncode == REFUSED:
        raise ConfigError(sanitize_lines(done.stdout.strip()))
    if done.returncode:
        raise ConfigError(f"the check of this run failed:\n{sanitize_lines(done.stderr.strip())}")
    return sanitize_lines(done.stdout.strip()).splitlines()


def main() -> int:
    """Check the run that standard input describes; print why it cannot work, or notes on its data.

    Returns:
        the exit status.
    """
    from osfl.cli.launch import LaunchError, default_config
    from osfl.config import parse_run_config
    from osfl.data.partition import DataError
    from osfl.kit.kits import KitError
    from osfl.models.classifiers import ClassifierError

    request = json.load(sys.stdin)
    config = parse_run_config({**default_config(), **request["overrides"]})
    try:
        if request["runs"] is None:
            check_architectures(config)
        else:
            for note in check_simulation(config, Path(request["runs"])):
                sys.stdout.buffer.write(f"{note}\n".encode(errors="replace"))
    except (ClassifierError, ConfigError, DataError, KitError, LaunchError, OSError) as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace"))
        return REFUSED
    return 0


def check_simulation(config: RunConfig, runs: Path) -> list[str]:
    """Check a run whose server and clients are on this machine, and return notes on its data.

    Models of the hub that are not here yet are the server's to fetch, which shows how far it is.
    Until then their settings are checked, and all other models.

    Raises:
        ClassifierError, ConfigError, DataError, KitError, LaunchError, OSError: the run cannot
            work.
    """
    from osfl.cli import launch
    from osfl.cli.estimate import checked_clients
    from osfl.kit.run_check import check_run_models
    from osfl.run_folder.layout import RunFolder
    from server_app.app import estimate_disk_bytes

    if RunFolder(runs / config.job_id).stored_config() is None:
        launch.check_disk(runs, estimate_disk_bytes(config))
    notes = check_data(config)
    if not any(place.to_fetch for place in check_run_models(config)):
        checked_clients(config, simulated=True)
    return notes


def check_data(config: RunConfig) -> list[str]:
    """Check the images of a simulation's clients, and return notes on them.

    Raises:
        DataError: a client cannot take part, or an image that was opened cannot be read.
    """
    from osfl.data.load import check_headers
    from osfl.data.parts import check_clients

    notes = check_clients(config.data, config.num_clients, config.seed)
    notes += check_headers(config.data, config.num_clients, config.seed)
    return [sanitize(note, 1000) for note in notes]


def check_architectures(config: RunConfig) -> None:
    """Check the classifiers of a run whose server and clients are elsewhere.

    Raises:
        ClassifierError: there is no such architecture.
    """
    from osfl.config import split_names
    from osfl.config.names import BACKBONES
    from osfl.data.parts import class_names
    from osfl.models.classifiers import blank_classifier

    for settings in (config.classifier, config.global_model):
        for architecture in split_names(settings.architecture):
            # Those of timm may be of the hub
            if not architecture.startswith(BACKBONES):
                blank_classifier(architecture, len(class_names(config.data)), settings.small_stem)


if __name__ == "__main__":
    sys.exit(main())
