"""Check a run before a SuperLink or Ray starts, like `--dry-run` does.

The checks run in a process of their own: `osfl run` lives as long as its run, and would keep the
half a gigabyte that torch and the models' libraries occupy.
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


def main() -> int:
    """Check the run in standard input, and print the reason why it cannot work or notes on it.

    Returns:
        the exit status.
    """
    from osfl.cli.launch import LaunchError
    from osfl.config import parse_run_config
    from osfl.data.partition import DataError
    from osfl.kit.kits import KitError
    from osfl.models.classifiers import ClassifierError
    from osfl.settings import default_config

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

    Hub models that have not been downloaded are checked by their settings only. The server
    downloads them later, and shows its progress.

    Raises:
        ClassifierError, ConfigError, DataError, KitError, LaunchError, OSError: the run cannot
            work.
    """
    from osfl.cli import launch
    from osfl.cli.estimate import check_run_clients
    from osfl.kit.run_check import check_run_models
    from osfl.run_folder.layout import RunFolder
    from server_app.app import estimate_disk_bytes
    from server_app.kit import check_subject

    if RunFolder(runs / config.job_id).stored_config() is None:
        launch.check_disk(runs, estimate_disk_bytes(config))
    notes = check_data(config)
    # Before its weights are: other images need another kit, not other weights
    check_subject(config)
    if not any(place.to_fetch for place in check_run_models(config)):
        check_run_clients(config, simulated=True)
    return notes


def check_data(config: RunConfig) -> list[str]:
    """Check the images of a simulation's clients, and return notes on them.

    Raises:
        DataError: a client cannot take part, or one of the images opened is not readable.
    """
    from osfl.data.load import check_headers
    from osfl.data.parts import check_clients

    notes = check_clients(config.data, config.num_clients, config.seed)
    notes += check_headers(config.data, config.num_clients, config.seed)
    return [sanitize(note, 1000) for note in notes]


def check_architectures(config: RunConfig) -> None:
    """Check the classifiers of a run whose server and clients are on other machines.

    Raises:
        ClassifierError: an architecture does not exist.
    """
    from osfl.config import split_names
    from osfl.config.names import BACKBONES
    from osfl.data.parts import class_names
    from osfl.models.classifiers import meta_classifier

    for settings in (config.classifier, config.global_model):
        for architecture in split_names(settings.architecture):
            # A timm architecture may be one of the hub
            if not architecture.startswith(BACKBONES):
                meta_classifier(architecture, len(class_names(config.data)), settings.small_stem)


if __name__ == "__main__":
    sys.exit(main())
