"""Real and synthetic images together (`real-and-synthetic`): do synthetic ones add to the real?

The centralized upper bound (`ceiling`) with the synthetic images of a finished run beside the
clients' real ones, trained for as many steps as the bound alone takes. No real server has the data.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from osfl.config import ConfigError, RunConfig, flatten
from osfl.models.training import split_batches
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import RunFolder, image_digest, read_image, read_rows, runs_root
from osfl.util.files import CorruptFileError
from osfl.util.names import is_identifier
from osfl.util.pixels import concatenate
from osfl.util.text import quote, sanitize
from server_app.context import GlobalModel, ServerJob
from server_app.methods.ceiling import real_images
from server_app.synthesis.images import resize
from server_app.training import train_global

NAME = "real-and-synthetic"
# Settings that decide which images the clients have, beside [data]
_DATA_KEYS = ("seed", "num-clients", "held-out")


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """Train one global model on the real images and another run's synthetic ones.

    Raises:
        ConfigError: `real-and-synthetic.images-from` names no run with synthetic images and the
            same data; or as `ceiling`.
        CorruptFileError: an image of that run is missing or corrupt.
    """
    source = source_run(job.config)
    pixels, labels = real_images(job)
    drawn, drawn_labels = synthetic_images(job, source)
    settings = job.config.global_model
    # Of the real images alone
    steps = len(split_batches(len(labels), settings, job.config.seed))
    config = replace(job.config, global_model=replace(settings, steps=steps))
    all_pixels = concatenate([pixels, drawn])
    all_labels = torch.cat([labels, drawn_labels])
    return {NAME: train_global(replace(job, config=config), NAME, all_pixels, all_labels)}


def source_run(config: RunConfig) -> RunFolder:
    """Return the folder of the run whose images are added.

    Raises:
        ConfigError: there is no such run, it synthesized no images, or it has other data.
    """
    name = config.real_and_synthetic.images_from
    key = f"real-and-synthetic.images-from = {quote(name)}"
    path = runs_root(config) / name if is_identifier(name) else Path(name).expanduser()
    folder = RunFolder(path)
    stored = folder.stored_config() if path.is_absolute() else None
    if stored is None or not folder.manifest_file.is_file():
        raise ConfigError(
            f"{key}: must be the job id or the absolute folder of a run with synthetic images"
        )
    for setting, value in flatten(config).items():
        is_of_data = setting.startswith("data.") and setting != "data.root"
        if (is_of_data or setting in _DATA_KEYS) and stored.get(setting) != value:
            raise ConfigError(
                f"{key}: that run has {setting} = {quote(stored.get(setting))}, and this one "
                f"{quote(value)}; set it to the same"
            )
    return folder


def synthetic_images(job: ServerJob, folder: RunFolder) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a run's synthetic images: uint8 [N, 3, S, S] at the classifiers' size, and labels [N].

    Raises:
        CorruptFileError: an image is missing or differs from its digest.
    """
    pictures = []
    labels = []
    for row in read_rows(folder.manifest_file):
        picture = read_image(folder.path / row["file"])
        if picture is None or image_digest(picture) != row["sha256"]:
            file = sanitize(folder.path / row["file"], 1000)
            raise CorruptFileError(f"{file} is missing or corrupt; repeat that run")
        pictures.append(resize(picture, job.config.data.image_size))
        labels.append(job.classes.index(row["class"]))
    return torch.stack(pictures), torch.tensor(labels)
