"""Ablate the training recipe: each row changes one part of it, "plain SGD" changes four.

python -m benchmarks.accuracy.training_ablation              # every row
python -m benchmarks.accuracy.training_ablation "plain SGD"  # some; the table keeps its other rows

Models train on the synthetic images of the row domain-vector and, where a row can have them, on the
clients' real images. One row trains on real images reconstructed by the kit's autoencoder: a kit
cannot draw what it cannot encode. The digits' validation split tests.
"""

from collections.abc import Sequence
from statistics import mean

from benchmarks.federation import (
    Settings,
    cell_name,
    config_of,
    payloads_of,
    real_set,
    reconstructed,
    server_job,
    synthesize,
    validation_accuracies,
)
from benchmarks.harness import PAIRED, Experiment, Line, average, difference, standard_error
from benchmarks.recipe import settings_of
from server_app.pipeline import train_global_model
from server_app.synthesis.images import SyntheticSet

RECIPE = "the recipe"
# For synthetic and real images
TRAINING: dict[str, Settings] = {
    RECIPE: {},
    "plain SGD": {
        "global-model.lr": 0.01,
        "global-model.schedule": "constant",
        "global-model.label-smoothing": 0.0,
        "global-model.augmentation": "none",
    },
    "a constant rate of 0.01": {"global-model.lr": 0.01, "global-model.schedule": "constant"},
    "without label smoothing": {"global-model.label-smoothing": 0.0},
    "without augmentation": {"global-model.augmentation": "none"},
    "with mixup": {"global-model.mixing": "mixup"},
    "with CutMix": {"global-model.mixing": "cutmix"},
    "with an average of the weights": {"global-model.ema": 0.99},
    "four times as many steps": {"global-model.steps": 2508},
}
SYNTHETIC: dict[str, Settings] = {
    "suspicious images dropped": {"label-filter": "filter"},
    "soft labels": {"label-filter": "soft"},
    "guidance 1.5": {"domain-vector.guidance": 1.5},
    "100 images a class": {"synthesis.images-per-class": 100},
}
RECONSTRUCTED = "through the kit's autoencoder"
REAL: dict[str, Settings] = {RECONSTRUCTED: {}}
ROWS = {**TRAINING, **SYNTHETIC, **REAL}
SOURCES = ("domain-vector", "ceiling")
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "Top-1 accuracy (%) on the digits' validation split, mean of the seeds {seeds}; the recipe is "
    "benchmarks.accuracy.method_comparison's, and each row changes one part of it, plain SGD four. "
    f"{PAIRED}",
    (0, 1, 2),
)


def synthetic_set(settings: Settings) -> SyntheticSet:
    """Return domain-vector's images; rows that differ only in training share them."""
    drawing = {
        key: value
        for key, value in settings.items()
        if not key.startswith(("global-model.", "label-filter"))
    }
    job = server_job(config_of(drawing), f"images-{cell_name(drawing)}")
    return synthesize(job, payloads_of(drawing))


def sources_of(row: str) -> tuple[str, ...]:
    """Return the sources of the images that a row trains on."""
    if row in TRAINING:
        return SOURCES
    return SOURCES[1:] if row in REAL else SOURCES[:1]


def cell(source: str, row: str, seed: int) -> float:
    """Return the average accuracy (%) on the domains' validation images."""
    settings = {**settings_of(source, seed), **ROWS[row]}
    name = f"{'reconstructed-' if row == RECONSTRUCTED else ''}{cell_name(settings)}"

    def compute() -> float:
        config = config_of(settings)
        images = real_set() if source == "ceiling" else synthetic_set(settings)
        if row == RECONSTRUCTED:
            images = reconstructed(images, config)
        (result,) = train_global_model(server_job(config, f"ablation-{name}"), {}, images).values()
        return mean(validation_accuracies(config, result.model))

    return float(EXPERIMENT.cell(name, compute))


def line(row: str, seeds: Sequence[int]) -> Line:
    """Return a row for synthetic images and, where it can have them, for real ones."""
    columns = {"": row}
    by_source = {}
    for source in sources_of(row):
        values = {seed: cell(source, row, seed) for seed in seeds}
        recipe = {seed: cell(source, RECIPE, seed) for seed in seeds}
        by_source[source] = values
        columns[source] = average(values.values())
        columns[f"{source}, standard error"] = standard_error(values.values())
        columns[f"{source}, to the recipe"] = "" if row == RECIPE else difference(values, recipe)
    if len(by_source) == 2:
        columns["synthetic to real"] = difference(*by_source.values())
    return columns


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
