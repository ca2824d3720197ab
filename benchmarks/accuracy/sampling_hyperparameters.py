"""Sweep images per class, guidance and sampling steps: accuracy, and the core-seconds of each.

python -m benchmarks.accuracy.sampling_hyperparameters domain-vector   # the row of the table
python -m benchmarks.accuracy.sampling_hyperparameters prompts-domain  # another; others stay

One setting changes at a time; the others stay at thirty images per class and client, guidance 2 and
20 steps. Payloads are made once, with a seed of their own. Fewer images per class are the first
ones of more, so that points differ in nothing else. Every model trains for about 627 steps of 32
images. The digits' validation split tests.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from time import process_time

import torch

from benchmarks.accuracy import guidance_scale
from benchmarks.accuracy.domain_generalization import COMMON
from benchmarks.federation import (
    CPU,
    Settings,
    cell_name,
    config_of,
    payloads_of,
    server_job,
    synthesize,
    validation_accuracies,
)
from benchmarks.harness import Experiment, Line, write_figure
from benchmarks.recipe import SYSTEMS
from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.models.classifiers import new_classifier
from osfl.models.training import fit
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import RunFolder
from server_app.synthesis.images import SyntheticSet

SEED = 100  # no table of results has it
IMAGES = "images a class"
GUIDANCE = "guidance"
STEPS = "steps"
Point = dict[str, float]
BASE: Point = {IMAGES: 30, GUIDANCE: 2.0, STEPS: 20}
# The most expensive last
CURVES: dict[str, tuple[float, ...]] = {
    GUIDANCE: (1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    STEPS: (5, 10, 20, 50),
    IMAGES: (5, 10, 30, 100, 300),
}
Record = dict[str, str | float]
EXPERIMENT = Experiment(
    __file__,
    ("domain-vector", "prompts-domain", "FedDEO description alone"),
    "Top-1 accuracy (%) on the digits' validation split, average of the domains, of one model of "
    f"about 627 steps; seed {SEED}. Six clients; synthesis and training in core-seconds: a busy "
    "machine changes these by a quarter, and wall-clock seconds by more.",
)


def settings_of(row: str, point: Point) -> Settings:
    """Return a row's settings at a point of its curves."""
    (scale,) = guidance_scale.ROWS[row].scales
    return {
        **COMMON,
        **SYSTEMS[row],
        "seed": SEED,
        "synthesis.images-per-class": int(point[IMAGES]),
        "synthesis.steps": int(point[STEPS]),
        scale: point[GUIDANCE],
    }


def points() -> list[Point]:
    """Return every value of every curve; the base, which is on all of them, once."""
    every = [BASE]
    for name, values in CURVES.items():
        every += [{**BASE, name: value} for value in values if value != BASE[name]]
    return every


def images_drawn(point: Point) -> int:
    """Return how many images per class are drawn for a point: the base's, or the most."""
    return int(BASE[IMAGES] if point[IMAGES] <= BASE[IMAGES] else max(CURVES[IMAGES]))


def timed_synthesis(
    settings: Settings, payloads: Mapping[str, Payload]
) -> tuple[SyntheticSet, float]:
    """Return the images of a plan, and the core-seconds of one."""
    job = server_job(config_of(settings), cell_name(settings), tuple(payloads))
    before = timed_images(job.folder)
    start = process_time()
    images = synthesize(job, payloads)
    seconds = process_time() - start
    # Existing images are read; their cost was kept
    if count := timed_images(job.folder) - before:
        job.folder.write_json("took.json", {"seconds": seconds / count})
    record = json.loads((job.folder.path / "took.json").read_text())
    return images, float(record["seconds"])


def timed_images(folder: RunFolder) -> int:
    """Count the images that were ever drawn in a folder."""
    if not folder.timings_file.is_file():
        return 0
    lines = folder.timings_file.read_text().splitlines()
    return sum(int(json.loads(line)["images"]) for line in lines)


def trained(config: RunConfig, pixels: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    """Train a model for about as many steps whatever the number of images."""
    settings = config.global_model
    batches = -(-len(labels) // settings.batch_size)
    settings = replace(settings, epochs=max(1, round(627 / batches)), steps=0)
    model = new_classifier(settings, 10, find_kit("digits"), config.seed, "global-model.init")
    return fit(model, pixels, labels, settings, config.seed, CPU)


def validation_accuracy(model: torch.nn.Module) -> float:
    """Return the top-1 accuracy (%) on the validation split, average of the domains."""
    return mean(validation_accuracies(config_of({**COMMON, "method": "ceiling"}), model))


def first_images(images: SyntheticSet, drawn: int, count: int) -> SyntheticSet:
    """Return the first `count` of each client's and class's `drawn` images."""
    first = torch.arange(len(images.labels)) % drawn < count
    return images.select(first.nonzero().flatten().tolist())


def measure(row: str, point: Point, payloads: Mapping[str, Payload]) -> Record:
    """Return the accuracy (%) at a point, and the core-seconds of synthesis and training."""
    settings = settings_of(row, point)

    def compute() -> Record:
        count = images_drawn(point)
        images, seconds = timed_synthesis(settings_of(row, {**point, IMAGES: count}), payloads)
        images = first_images(images, count, int(point[IMAGES]))
        start = process_time()
        model = trained(config_of(settings), images.pixels, images.labels)
        return {
            "row": row,
            **point,
            "training": process_time() - start,
            "drawing": seconds * len(images.labels),
            "accuracy": validation_accuracy(model),
        }

    record: Record = EXPERIMENT.cell(cell_name(settings), compute)
    return record


def lines_of(row: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a line for every point."""
    payloads = payloads_of({**COMMON, **SYSTEMS[row], "seed": SEED})
    for point in points():
        yield line(measure(row, point, payloads))


def line(record: Record) -> Line:
    """Return a record as text."""
    return {
        "": ", ".join((str(record["row"]), *(f"{record[name]:g}" for name in CURVES))),
        "row": str(record["row"]),
        **{name: f"{record[name]:g}" for name in CURVES},
        "accuracy": f"{record['accuracy']:.1f}",
        "drawing (s)": f"{record['drawing']:.0f}",
        "training (s)": f"{record['training']:.0f}",
    }


def curve_of(lines: Sequence[Line], row: str, name: str) -> list[tuple[float, float, float]]:
    """Return (value, accuracy, core-seconds) of a row's lines in which only `name` changes."""
    others = [other for other in CURVES if other != name]
    curve = []
    for one in lines:
        if one["row"] == row and all(float(one[other]) == BASE[other] for other in others):
            seconds = float(one["drawing (s)"]) + float(one["training (s)"])
            curve.append((float(one[name]), float(one["accuracy"]), seconds))
    return sorted(curve)


def plot(lines: Sequence[Line]) -> None:
    """Plot the accuracy along each curve, and below it the core-seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6))
    panels = figure.subplots(2, len(CURVES), sharey="row", sharex="col")
    for column, name in enumerate(CURVES):
        for row in dict.fromkeys(one["row"] for one in lines):
            values, accuracies, seconds = zip(*curve_of(lines, row, name), strict=True)
            panels[0, column].plot(values, accuracies, marker="o", label=row)
            panels[1, column].plot(values, seconds, marker="o")
        for panel in panels[:, column]:
            panel.grid(alpha=0.3)
        panels[1, column].set(xlabel=name, xscale="linear" if name == GUIDANCE else "log")
        panels[1, column].set_xticks(CURVES[name], [f"{value:g}" for value in CURVES[name]])
        panels[1, column].minorticks_off()
    panels[0, 0].set_ylabel("top-1 accuracy (%), validation")
    panels[1, 0].set(ylabel="core-seconds, drawing and training", yscale="log")
    panels[0, 0].legend(frameon=False, fontsize=9)
    write_figure(EXPERIMENT.table_file(), figure)


if __name__ == "__main__":
    plot(EXPERIMENT.main(__doc__, lines_of, row_of=lambda one: one["row"]))
