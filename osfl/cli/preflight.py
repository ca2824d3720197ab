"""The check of a run, in the process that `osfl.launch.checks` starts for it."""

import json
import sys
from pathlib import Path

from osfl.config import ConfigError, RunConfig
from osfl.launch.checks import REFUSED
from osfl.util.text import sanitize


def main() -> int:
    """Check the run in standard input, and print the reason why it cannot work or notes on it.

    Returns:
        the exit status.
    """
    from osfl.config import parse_run_config
    from osfl.data.partition import DataError
    from osfl.kit.folder import KitError
    from osfl.launch.flower import LaunchError
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
    from osfl.cli.estimate import check_run_clients
    from osfl.config import split_names
    from osfl.kit.run_check import check_run_models
    from osfl.launch import flower
    from osfl.run_folder.layout import RunFolder
    from osfl.tracking.track import check_trackers
    from server_app.app import estimate_disk_bytes
    from server_app.kit import check_subject

    if RunFolder(runs / config.job_id).stored_config() is None:
        flower.check_disk(runs, estimate_disk_bytes(config))
    check_trackers(split_names(config.tracking), config.mlflow_uri)
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
    from osfl.data.parts import class_names
    from osfl.models.classifiers import meta_classifier
    from osfl.util.names import BACKBONES

    for settings in (config.classifier, config.global_model):
        for architecture in split_names(settings.architecture):
            # A timm architecture may be one of the hub
            if not architecture.startswith(BACKBONES):
                meta_classifier(architecture, len(class_names(config.data)), settings.small_stem)


if __name__ == "__main__":
    sys.exit(main())
