"""Measure the memory of a client with 60,000 images at 224 px.

python -m benchmarks.speed.client_memory --photos FOLDER

FOLDER has photographs in folders of their classes. A client's folder of links to them is made below
runs/. Its images are counted as when it joins, and then it trains for some steps; each is a process
of its own, whose peak is measured.
"""

import itertools
import json
import os
import resource
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import Experiment, command_line, last_line_of
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import image_labels, load_images
from osfl.models.classifiers import new_classifier
from osfl.models.training import fit
from osfl.settings import resolve_config

IMAGES = 60_000
STEPS = 30
BATCH = 32  # as in the papers
EXPERIMENT = Experiment(
    __file__,
    caption=f"A client with {IMAGES:,} photographs in a folder, at 224 px: "
    f"{IMAGES * 3 * 224**2 / 1e9:.0f} GB if all were decoded. A ShuffleNet, batches of {BATCH}.",
    options="--photos FOLDER",
)
WORK = EXPERIMENT.work


class Enough(Exception):
    """Stop training after `STEPS` steps."""


def build(photos: Path) -> list[str]:
    """Make a client's folder of links, and return the names of its classes."""
    shutil.rmtree(WORK, ignore_errors=True)
    classes = sorted(folder for folder in photos.iterdir() if folder.is_dir())
    for split, count in (("train", IMAGES // len(classes)), ("test", 2)):
        for folder in classes:
            place = WORK / "client-0" / split / folder.name
            place.mkdir(parents=True)
            files = sorted(file for file in folder.iterdir() if file.is_file())
            for number, file in zip(range(count), itertools.cycle(files), strict=False):
                os.symlink(file.resolve(), place / f"{number:06d}{file.suffix}")
    return [folder.name for folder in classes]


def configuration(classes: str) -> RunConfig:
    """Return the configuration of a client that trains a ShuffleNet at 224 px."""
    words = [f"data.root={WORK}", f"data.classes={classes}", "data.name=folder", "num-clients=1"]
    words += ["method=local", "data.image-size=224", "classifier.init=none"]
    words += ["classifier.architecture=shufflenet_v2_x0_5", "classifier.small-stem=false"]
    config, _ = resolve_config([*words, f"classifier.batch-size={BATCH}"])
    return config


def measure(step: str, classes: str) -> None:
    """Print a step's images, seconds and peak memory."""
    config = configuration(classes)
    node = NodeConfig(partition_id=0, num_partitions=1)
    start = time.monotonic()
    count = len(list(image_labels(config.data, node, "train", 0)))
    if step == "train":
        images = load_images(config.data, node, "train", 0)
        model = new_classifier(config.classifier, len(classes.split(",")), "", 0)

        def stop(steps: int, total: int) -> None:
            if steps == STEPS:
                raise Enough

        start = time.monotonic()
        settings = replace(config.classifier, epochs=1)
        device = torch.device("cpu")
        with suppress(Enough):
            fit(model, images.pixels, images.labels, settings, 0, device, progress=stop)
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"images": count, "seconds": seconds, "bytes": peak}))


def table(photos: Path) -> None:
    """Make the table: each step in a process of its own."""
    classes = ",".join(build(photos))
    rows = []
    for step, name in (("count", "counting, as when it joins"), ("train", f"{STEPS} steps")):
        module = "benchmarks.speed.client_memory"
        result = json.loads(last_line_of(module, step, "--classes", classes))
        rows.append(
            {
                "": name,
                "images": f"{result['images']:,}",
                "seconds": f"{result['seconds']:.1f}",
                "peak memory": f"{result['bytes'] / 1e9:.2f} GB",
            }
        )
    EXPERIMENT.write_all(rows)
    shutil.rmtree(WORK)


def main() -> None:
    """Make the table, or measure one step."""
    parser = command_line(__doc__)
    parser.add_argument("step", nargs="?", choices=("table", "count", "train"), default="table")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--classes", default="")
    arguments = parser.parse_args()
    if arguments.step != "table":
        measure(arguments.step, arguments.classes)
        return
    if arguments.photos is None or not arguments.photos.is_dir():
        parser.error(f"--photos = {arguments.photos}: set it to a folder")
    table(arguments.photos)


if __name__ == "__main__":
    main()
