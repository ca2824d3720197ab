"""What memory a client takes that holds 60,000 images at 224 px.

python -m benchmarks.many_images --photos FOLDER   # to benchmarks/tables/many-images.md

FOLDER has photographs in folders of their classes. A client's folder of links to them is made below
runs/. Its images are counted as when it joins, and then it trains for some steps; each is a process
of its own, whose peak is read.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import TABLES, write_table
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import image_labels, load_images
from osfl.models.classifiers import new_classifier
from osfl.models.training import fit
from osfl.settings import resolve_config

WORK = Path(__file__).resolve().parent.parent / "runs" / "many-images"
IMAGES = 60_000
STEPS = 30
BATCH = 32  # the papers'


class Enough(Exception):
    """So many steps are done."""


def build(photos: Path) -> list[str]:
    """A client's folder of links, and the names of its classes."""
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
    """A client's that trains a ShuffleNet at 224 px."""
    given = [f"data.root={WORK}", f"data.classes={classes}", "data.name=folder", "num-clients=1"]
    given += ["method=local", "data.image-size=224", "classifier.init=none"]
    given += ["classifier.architecture=shufflenet_v2_x0_5", "classifier.small-stem=false"]
    config, _ = resolve_config([*given, f"classifier.batch-size={BATCH}"])
    return config


def measure(what: str, classes: str) -> None:
    """Print one step's images, seconds and peak memory."""
    config = configuration(classes)
    node = NodeConfig(partition_id=0, num_partitions=1)
    began = time.monotonic()
    count = len(list(image_labels(config.data, node, "train", 0)))
    if what == "train":
        images = load_images(config.data, node, "train", 0)
        model = new_classifier(config.classifier, len(classes.split(",")), "", 0)

        def stop(done: int, total: int) -> None:
            if done == STEPS:
                raise Enough

        began = time.monotonic()
        settings = replace(config.classifier, epochs=1)
        device = torch.device("cpu")
        with suppress(Enough):
            fit(model, images.pixels, images.labels, settings, 0, device, progress=stop)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"images": count, "seconds": seconds, "bytes": peak}))


def table(photos: Path) -> None:
    """Both steps, each in a process of its own."""
    classes = ",".join(build(photos))
    rows = []
    for what, name in (("count", "counting, as when it joins"), ("train", f"{STEPS} steps")):
        command = [sys.executable, "-m", "benchmarks.many_images", what, "--classes", classes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.strip().split("\n")[-1])
        rows.append(
            {
                "": name,
                "images": f"{found['images']:,}",
                "seconds": f"{found['seconds']:.1f}",
                "peak memory": f"{found['bytes'] / 1e9:.2f} GB",
            }
        )
    about = (
        f"A client with {IMAGES:,} photographs in a folder, at 224 px: "
        f"{IMAGES * 3 * 224**2 / 1e9:.0f} GB if all were decoded. "
        f"A ShuffleNet, batches of {BATCH}. "
        "Command: `python -m benchmarks.many_images --photos FOLDER`."
    )
    write_table(TABLES / "many-images", rows, about)
    shutil.rmtree(WORK)


def main() -> None:
    """All of it, or one step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("table", "count", "train"), default="table")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--classes", default="")
    given = parser.parse_args()
    if given.what != "table":
        measure(given.what, given.classes)
        return
    if given.photos is None or not given.photos.is_dir():
        parser.error(f"--photos = {given.photos}: give a folder")
    table(given.photos)


if __name__ == "__main__":
    main()
