"""What each switch of training gives, for synthetic and for real images; to
benchmarks/tables/switches.{md,json}.

python -m benchmarks.switches                  # every row
python -m benchmarks.switches "plain SGD"      # some; the table keeps its other rows

A row changes one thing of the recipe of benchmarks.main_table, and "plain SGD" four. Images are
those of its row domain-vector, with its payloads; beside them, for what can be had with real
images, the ceiling's. One row has the ceiling's images as the kit's autoencoder gives them back:
what a kit cannot encode it cannot draw either. Models are scored on the digits' validation split.
Interrupted, the same command goes on.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from scipy import stats

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import CLIENTS, Settings, folder_name, real, sent
from benchmarks.guidance import score
from benchmarks.left_out import against
from benchmarks.main_table import config_of, settings_of
from benchmarks.server import drawn_by, job_in
from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.util.files import make_private_folder, write_atomically
from osfl.util.pixels import to_float, to_uint8
from server_app.pipeline import train_global_model
from server_app.synthesis.engine import load_engine
from server_app.synthesis.images import SyntheticSet

WORK = Path(__file__).resolve().parent.parent / "runs" / "switches"
SEEDS = (0, 1, 2)
RECIPE = "the recipe"
# Of images of either kind
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
# Of synthetic images alone
SYNTHETIC: dict[str, Settings] = {
    "doubtful images left out": {"label-check": "filter"},
    "soft labels": {"label-check": "soft"},
    "guidance 1.5": {"domain-vector.guidance": 1.5},
    "100 images a class": {"synthesis.images-per-class": 100},
}
# Of real images alone
RECONSTRUCTED = "through the kit's autoencoder"
REAL: dict[str, Settings] = {RECONSTRUCTED: {}}
ROWS = {**TRAINING, **SYNTHETIC, **REAL}
SOURCES = ("domain-vector", "ceiling")
BATCH = 50


def drawn(settings: Settings) -> SyntheticSet:
    """Domain-vector's images, which rows share that differ in their training alone."""
    own = {
        key: value
        for key, value in settings.items()
        if not key.startswith(("global-model.", "label-check"))
    }
    return drawn_by(job_in(config_of(own), f"images-{folder_name(own)}"), sent(own))


def sources_of(row: str) -> tuple[str, ...]:
    """Whose images its models learn."""
    if row in TRAINING:
        return SOURCES
    return SOURCES[1:] if row in REAL else SOURCES[:1]


@torch.no_grad()
def reconstructed(images: SyntheticSet, config: RunConfig) -> SyntheticSet:
    """Encoded and decoded by the run's kit; a latent is the mean of its posterior."""
    kit = load_engine(find_kit(config.sampling_kit), torch.device("cpu"), config.synthesis)
    parts = [
        to_uint8(kit.decode(kit.encode(to_float(part))[0])) for part in images.pixels.split(BATCH)
    ]
    return replace(images, pixels=torch.cat(parts))


def of_clients() -> SyntheticSet:
    """The clients' own images, as a set with owners."""
    parts = real("train")
    owners = [name for name, part in zip(CLIENTS, parts, strict=True) for _ in range(len(part))]
    pixels = torch.cat([part.pixels for part in parts])
    return SyntheticSet(pixels, torch.cat([part.labels for part in parts]), tuple(owners))


def cell(source: str, row: str, seed: int) -> float:
    """Average accuracy (%) of the domains' validation images."""
    settings = {**settings_of(source, seed), **ROWS[row]}
    name = f"{'reconstructed-' if row == RECONSTRUCTED else ''}{folder_name(settings)}"
    result = WORK / f"{name}.json"
    if not result.is_file():
        config = config_of(settings)
        images = of_clients() if source == "ceiling" else drawn(settings)
        if row == RECONSTRUCTED:
            images = reconstructed(images, config)
        (model,) = train_global_model(job_in(config, f"switches-{name}"), {}, images).values()
        found = mean(score(config, model.model))
        write_atomically(result, json.dumps(found).encode())
        print(source, row, seed, f"{found:.1f}", flush=True)
    return float(json.loads(result.read_text()))


def line(row: str, seeds: Sequence[int]) -> dict[str, str]:
    """A row of the table, for synthetic images and, where they can have it, for real ones."""
    made = {"": row}
    found = {}
    for source in sources_of(row):
        found[source] = {seed: cell(source, row, seed) for seed in seeds}
        recipe = {seed: cell(source, RECIPE, seed) for seed in seeds}
        made[source] = f"{mean(found[source].values()):.1f}"
        made[f"{source}, standard error"] = f"{stats.sem(list(found[source].values())):.2f}"
        same = row == RECIPE
        made[f"{source}, to the recipe"] = "" if same else against(found[source], recipe)
    if len(found) == 2:
        made["synthetic to real"] = against(*found.values())
    return made


def main() -> None:
    """Make the table, and keep it; it grows row by row."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(ROWS)}; none: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    given = parser.parse_args()
    rows = some_of(given.rows, ROWS, parser)
    make_private_folder(WORK)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    about = (
        "Top-1 accuracy (%) on the digits' validation split, mean of the seeds "
        f"{given.seeds}; the recipe is benchmarks.main_table's, and each row changes one thing of "
        "it, plain SGD four. Differences are paired by seed, with a 95 % interval by Student's t, "
        "and a star where that excludes 0. "
        f"Command: `python -m benchmarks.switches --seeds {given.seeds}`."
    )
    for row in rows:
        lines = with_others([line(row, seeds)], TABLES / "switches.json", about, ROWS)
        write_table(TABLES / "switches", lines, about)


if __name__ == "__main__":
    main()
