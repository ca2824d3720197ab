"""Why FedAvg is low under feature skew.

Its model with other BatchNorm statistics than the clients' averaged ones, all weights as they are.

    python -m benchmarks.batchnorm runs/tables/digits-FedAvg-s0-...

The mean of six domains' variances is not the variance of their mixture, and fits no domain. "own"
gives each client the statistics of its own training images, as FedBN (Li et al., arXiv 2102.07623)
keeps them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import update_bn

from benchmarks import command_line
from osfl.config import NodeConfig, parse_run_config
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names
from osfl.models.classifiers import logits_of, normalise, rebuild
from osfl.util.pixels import to_float

CPU = torch.device("cpu")


def main() -> None:
    """Print accuracy (%) per client and on average for each kind of statistics."""
    parser = command_line(__doc__)
    parser.add_argument(
        "run",
        type=Path,
        help="folder of a finished run on the digits: of fedavg, fedprox, feddyn or feddf",
    )
    folder = parser.parse_args().run
    saved = json.loads((folder / "config.json").read_text())
    config = parse_run_config({key: value for key, value in saved.items() if key != "kit-sha256"})
    nodes = [
        NodeConfig(partition_id=k, num_partitions=config.num_clients)
        for k in range(config.num_clients)
    ]
    train, test = (
        [load_images(config.data, node, split, config.seed) for node in nodes]
        for split in ("train", "test")
    )
    weights = load_file(folder / "models" / f"{config.method}.safetensors")
    model = rebuild(
        weights,
        config.classifier.architecture,
        len(class_names(config.data)),
        config.classifier.small_stem,
    )
    show("averaged", [accuracy(model.eval(), images) for images in test])
    pixels = torch.cat([images.pixels for images in train])
    settle(model, pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))])
    show("mixture", [accuracy(model, images) for images in test])
    settled = []
    for client_images, images in zip(train, test, strict=True):
        settle(model, client_images.pixels)
        settled.append(accuracy(model, images))
    show("own", settled)


def settle(model: nn.Module, pixels: torch.Tensor) -> None:
    """Set the running statistics to those of some images [N, 3, S, S] uint8, in place."""
    update_bn([normalise(to_float(batch)) for batch in pixels.split(100)], model)


def accuracy(model: nn.Module, images: Images) -> float:
    """Top-1 accuracy in %."""
    return (
        100
        * (logits_of(model, images.pixels, CPU).argmax(1) == images.labels).float().mean().item()
    )


def show(name: str, accuracies: Sequence[float]) -> None:
    """One line."""
    print(
        f"{name:9}",
        *(f"{value:5.1f}" for value in accuracies),
        f" average {np.mean(accuracies):.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
