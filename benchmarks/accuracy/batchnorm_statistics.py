"""Print what averaged BatchNorm statistics cost FedAvg under feature skew.

    python -m benchmarks.accuracy.batchnorm_statistics runs/tables/digits-FedAvg-s0-...

The weights stay as they are; the statistics change. The mean of six domains' variances is not the
variance of their mixture, and fits no domain. "own" gives each client the statistics of its own
training images, as FedBN (Li et al., arXiv 2102.07623) does.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import update_bn

from benchmarks.federation import accuracy, node_of
from benchmarks.harness import average, command_line
from osfl.config import parse_run_config
from osfl.data.load import load_images
from osfl.data.parts import class_names
from osfl.models.classifiers import normalize, rebuild_classifier
from osfl.util.pixels import to_float


def main() -> None:
    """Print the accuracy (%) per client and on average for each kind of statistics."""
    parser = command_line(__doc__)
    parser.add_argument(
        "run",
        type=Path,
        help="folder of a finished run on the digits: of fedavg, fedprox, feddyn or feddf",
    )
    folder = parser.parse_args().run
    saved = json.loads((folder / "config.json").read_text())
    config = parse_run_config({key: value for key, value in saved.items() if key != "kit-sha256"})
    nodes = [node_of(number, config) for number in range(config.num_clients)]
    train, test = (
        [load_images(config.data, node, split, config.seed) for node in nodes]
        for split in ("train", "test")
    )
    weights = load_file(folder / "models" / f"{config.method}.safetensors")
    architecture = config.classifier.architecture
    classes = len(class_names(config.data))
    model = rebuild_classifier(weights, architecture, classes, config.classifier.small_stem)
    show("averaged", [accuracy(model.eval(), images) for images in test])
    pixels = torch.cat([images.pixels for images in train])
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    set_statistics(model, pixels[order])
    show("mixture", [accuracy(model, images) for images in test])
    accuracies = []
    for train_images, test_images in zip(train, test, strict=True):
        set_statistics(model, train_images.pixels)
        accuracies.append(accuracy(model, test_images))
    show("own", accuracies)


def set_statistics(model: nn.Module, pixels: torch.Tensor) -> None:
    """Set the running statistics to those of images [N, 3, S, S] uint8, in place."""
    update_bn([normalize(to_float(batch)) for batch in pixels.split(100)], model)


def show(name: str, accuracies: Sequence[float]) -> None:
    """Print one line."""
    columns = " ".join(f"{value:5.1f}" for value in accuracies)
    print(f"{name:9} {columns}  average {average(accuracies)}", flush=True)


if __name__ == "__main__":
    main()
