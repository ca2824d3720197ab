"""Accuracy along images a class, guidance and sampling steps, with the core-seconds of each; to
benchmarks/tables/curves.{md,json,png}.

python -m benchmarks.curves                    # domain-vector's
python -m benchmarks.curves prompts-domain     # another's; the table keeps its other rows

One setting is changed at a time; the others stay at thirty images a class and client, guidance 2
and 20 steps. Payloads are made once, with benchmarks.left_out's recipe and a seed of their
own. Fewer images a class are the first ones of more, so points differ by nothing else. Every
model is trained for about 627 steps of 32 images, and is scored on the digits' validation split.
Interrupted, the same command goes on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from time import process_time

import torch

from benchmarks import (
    TABLES,
    command_line,
    guidance,
    left_out,
    listed,
    some_of,
    with_others,
    write_figure,
    write_table,
)
from benchmarks.clients import Settings, folder_name, sent
from benchmarks.guidance import score
from benchmarks.left_out import COMMON, config_of
from benchmarks.server import drawn_by, job_in
from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.models.classifiers import new_classifier
from osfl.models.training import fit
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import RunFolder
from server_app.synthesis.images import SyntheticSet

WORK = Path(__file__).resolve().parent.parent / "runs" / "curves"
CPU = torch.device("cpu")
SEED = 100  # no table of results has it
# Of benchmarks.left_out, with its settings
ROWS = ("domain-vector", "prompts-domain", "FedDEO description alone")
IMAGES = "images a class"
GUIDANCE = "guidance"
STEPS = "steps"
Point = dict[str, float]
BASE: Point = {IMAGES: 30, GUIDANCE: 2.0, STEPS: 20}
# The dearest last
CURVES: dict[str, tuple[float, ...]] = {
    GUIDANCE: (1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    STEPS: (5, 10, 20, 50),
    IMAGES: (5, 10, 30, 100, 300),
}
Record = dict[str, str | float]


def settings_of(row: str, point: Point) -> Settings:
    """A row's at a point of its curves."""
    (scale,) = guidance.ROWS[row].scales
    return {
        **COMMON,
        **left_out.ROWS[row],
        "seed": SEED,
        "synthesis.images-per-class": int(point[IMAGES]),
        "synthesis.steps": int(point[STEPS]),
        scale: point[GUIDANCE],
    }


def points() -> list[Point]:
    """Every value of every curve; the base, which is on all of them, once."""
    made = [BASE]
    for name, values in CURVES.items():
        made += [{**BASE, name: value} for value in values if value != BASE[name]]
    return made


def most_images(point: Point) -> int:
    """How many images a class are drawn: the base's for fewer, the most for more."""
    return int(BASE[IMAGES] if point[IMAGES] <= BASE[IMAGES] else max(CURVES[IMAGES]))


def drawn(settings: Settings, taken: Mapping[str, Payload]) -> tuple[SyntheticSet, float]:
    """The images of a plan, and the core-seconds that one took."""
    job = job_in(config_of(settings), folder_name(settings), tuple(taken))
    before = timed_images(job.folder)
    began = process_time()
    images = drawn_by(job, taken)
    taking = process_time() - began
    # Images that are there already are read; what they took was kept
    if made := timed_images(job.folder) - before:
        job.folder.write_json("took.json", {"seconds": taking / made})
    took = json.loads((job.folder.path / "took.json").read_text())
    return images, float(took["seconds"])


def timed_images(folder: RunFolder) -> int:
    """How many images were ever drawn in a folder."""
    if not folder.timings_file.is_file():
        return 0
    lines = folder.timings_file.read_text().splitlines()
    return sum(int(json.loads(line)["images"]) for line in lines)


def taught(config: RunConfig, pixels: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    """A model of `config.global_model`, with about as many steps whatever the number of images."""
    settings = config.global_model
    batches = -(-len(labels) // settings.batch_size)
    settings = replace(settings, epochs=max(1, round(627 / batches)), steps=0)
    model = new_classifier(settings, 10, find_kit("digits"), config.seed, "global-model.init")
    return fit(model, pixels, labels, settings, config.seed, CPU)


def tested(model: torch.nn.Module) -> float:
    """Top-1 accuracy (%) on the validation split, average of the domains."""
    return mean(score(config_of({**COMMON, "method": "ceiling"}), model))


def first_images(images: SyntheticSet, most: int, wanted: int) -> SyntheticSet:
    """The first `wanted` of each client's and class's `most` images."""
    kept = torch.arange(len(images.labels)) % most < wanted
    return images.select(kept.nonzero().flatten().tolist())


def measured(row: str, point: Point, taken: Mapping[str, Payload]) -> Record:
    """Accuracy (%) at a point, and the core-seconds of drawing and training."""
    settings = settings_of(row, point)
    file = WORK / f"{folder_name(settings)}.json"
    if not file.is_file():
        most = most_images(point)
        images, seconds = drawn(settings_of(row, {**point, IMAGES: most}), taken)
        images = first_images(images, most, int(point[IMAGES]))
        began = process_time()
        model = taught(config_of(settings), images.pixels, images.labels)
        found = {
            "training": process_time() - began,
            "drawing": seconds * len(images.labels),
            "accuracy": tested(model),
        }
        file.write_text(json.dumps({"row": row, **point, **found}))
        print(row, point, found, flush=True)
    record: Record = json.loads(file.read_text())
    return record


def name_of(row: object, point: Mapping[str, object]) -> str:
    """Of a line, by which a table keeps it."""
    return ", ".join((str(row), *(f"{point[name]:g}" for name in CURVES)))


def line(record: Record) -> dict[str, str]:
    """A record as text."""
    return {
        "": name_of(record["row"], record),
        "row": str(record["row"]),
        **{name: f"{record[name]:g}" for name in CURVES},
        "accuracy": f"{record['accuracy']:.1f}",
        "drawing (s)": f"{record['drawing']:.0f}",
        "training (s)": f"{record['training']:.0f}",
    }


def curve_of(
    lines: Sequence[Mapping[str, str]], row: str, name: str
) -> list[tuple[float, float, float]]:
    """(value, accuracy, core-seconds) of a row's lines where nothing but `name` is changed."""
    others = [other for other in CURVES if other != name]
    found = []
    for one in lines:
        if one["row"] == row and all(float(one[other]) == BASE[other] for other in others):
            seconds = float(one["drawing (s)"]) + float(one["training (s)"])
            found.append((float(one[name]), float(one["accuracy"]), seconds))
    return sorted(found)


def plot(lines: Sequence[Mapping[str, str]], file: Path) -> None:
    """Above, accuracy along each curve; below, the core-seconds of drawing and training."""
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
        ticks = [f"{value:g}" for value in CURVES[name]]
        panels[1, column].set_xticks(CURVES[name], ticks)
        panels[1, column].minorticks_off()
    panels[0, 0].set_ylabel("top-1 accuracy (%), validation")
    panels[1, 0].set(ylabel="core-seconds, drawing and training", yscale="log")
    panels[0, 0].legend(frameon=False, fontsize=9)
    write_figure(file, figure)


def main() -> None:
    """Make the table and the plot, and keep them."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(ROWS)}; none: {ROWS[0]}")
    given = parser.parse_args()
    rows = some_of(given.rows or ROWS[:1], ROWS, parser)
    WORK.mkdir(parents=True, exist_ok=True)
    about = (
        "Top-1 accuracy (%) on the digits' validation split, average of the domains, of one "
        f"model of about 627 steps; seed {SEED}. Six clients; drawing and training in core-"
        "seconds: a busy machine changes these by a quarter, and the clock's more. "
        "Command: `python -m benchmarks.curves`."
    )
    order = [name_of(row, point) for row in ROWS for point in points()]
    made = []
    for row in rows:
        taken = sent({**COMMON, **left_out.ROWS[row], "seed": SEED})
        for point in points():
            made.append(line(measured(row, point, taken)))
            # The table grows point by point
            lines = with_others(made, TABLES / "curves.json", about, order)
            write_table(TABLES / "curves", lines, about)
    plot(lines, TABLES / "curves.png")


if __name__ == "__main__":
    main()
