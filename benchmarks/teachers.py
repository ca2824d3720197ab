"""What teachers (FedLMG's MD and SD) give over fine-tuning alone (FT), and what they say; to
benchmarks/tables/teachers.{md,json}.

python -m benchmarks.teachers                   # every row
python -m benchmarks.teachers "by domain"       # some; the table keeps its other rows

FedLMG's images are drawn once for each row and seed, with the recipe of benchmarks.main_table. On
the same images a global model is trained alone, with its teachers as the method has them, and with
their outputs softened: at a temperature of 4, where a teacher says more than the class that it is
sure of. Rows differ in how images are parted among clients, and in how the clients' classifiers are
trained: as in the papers, or with as many steps of the recipe, but for its label smoothing, which
may make better teachers.
Accuracies are of the digits' validation split. Interrupted, the same command goes on.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import cast

import torch
from torch import nn

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import CLIENTS, Settings, folder_name, sent
from benchmarks.guidance import score
from benchmarks.left_out import SYSTEMS, against
from benchmarks.main_table import COMMON, PARTITIONS, config_of
from benchmarks.server import job_in
from osfl.config import NodeConfig
from osfl.data.load import load_images
from osfl.models.classifiers import logits_of
from osfl.payload.kinds import Classifier
from osfl.util.files import make_private_folder, write_atomically
from server_app.methods import fedlmg
from server_app.pipeline import plan_held_classes
from server_app.synthesis.images import synthesize
from server_app.training import mean_teacher, specific_teacher, train_global

WORK = Path(__file__).resolve().parent.parent / "runs" / "teachers"
SEEDS = (0, 1, 2)
TEMPERATURE = 4.0
# A client's hundred images, twenty times, are 260 steps of eight; of the recipe as many
RECIPE: Settings = {
    "classifier.steps": 260,
    "classifier.lr": 0.05,
    "classifier.batch-size": 32,
    "classifier.schedule": "one-cycle",
    "classifier.warm-up": 0.3,
    "classifier.augmentation": "affine-color",
}
ROWS: dict[str, Settings] = {
    "by domain": {},
    "by domain, clients by the recipe": RECIPE,
    "by label": PARTITIONS["label"],
    "by label, clients by the recipe": {**PARTITIONS["label"], **RECIPE},
}
STRATEGIES = ("FT", "MD", "SD", "MD softened", "SD softened")
Cell = dict[str, float]


class Softened(nn.Module):
    """A classifier whose logits are divided by `TEMPERATURE`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [B, C]."""
        logits: torch.Tensor = self.model(images) / TEMPERATURE
        return logits


def settings_of(row: str, seed: int) -> Settings:
    """A row's own, over what all have."""
    return {**COMMON, **SYSTEMS["FedLMG"], **ROWS[row], "seed": seed}


def cell(row: str, seed: int) -> Cell:
    """The strategies' accuracies (%), and what the teachers say of the images that they guided."""
    settings = settings_of(row, seed)
    result = WORK / f"{folder_name(settings)}.json"
    if not result.is_file():
        found = measured(settings)
        write_atomically(result, json.dumps(found).encode())
        print(row, seed, found, flush=True)
    made: Cell = json.loads(result.read_text())
    return made


def measured(settings: Settings) -> Cell:
    """A cell."""
    config = config_of(settings)
    payloads = cast(dict[str, Classifier], sent(settings))
    job = job_in(config, f"teachers-{folder_name(settings)}")
    draw = partial(fedlmg.sampler, settings=config.fedlmg, sample=fedlmg.sample)
    images = synthesize(
        job, plan_held_classes(job, payloads), lambda device: draw(job, device, payloads)
    )
    networks = {client: one.model for client, one in fedlmg.teachers_of(job, payloads).items()}
    softened = {client: Softened(one) for client, one in networks.items()}
    held = job.held(payloads)
    own = specific_teacher(networks, images.clients, images.pixels, job.device)
    targets = {
        "FT": None,
        "MD": mean_teacher(networks, held, images.pixels, job.device, plain=False),
        "SD": own,
        "MD softened": mean_teacher(softened, held, images.pixels, job.device, plain=False),
        "SD softened": specific_teacher(softened, images.clients, images.pixels, job.device),
    }
    found = {
        "entropy": torch.special.entr(own).sum(dim=1).mean().item(),
        "as labelled": 100 * (own.argmax(dim=1) == images.labels).double().mean().item(),
    }
    for name, target in targets.items():
        weight = config.fedlmg.distillation_weight
        model = train_global(job, name, images.pixels, images.labels, target, weight).model
        found[name] = mean(score(config, model))
        if name == "FT":
            found["FT, on own"] = on_own(settings, dict.fromkeys(CLIENTS, model))
    found["teachers, on own"] = on_own(settings, networks)
    return found


def on_own(settings: Settings, models: dict[str, nn.Module]) -> float:
    """Accuracy (%) of each client's model on the validation images that are like the client's own:
    of its classes, and of its domain where it has one.
    """
    config = config_of(settings)
    figures = []
    for number, client in enumerate(CLIENTS):
        node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
        held = set(load_images(config.data, node, "train", config.seed).labels.tolist())
        images = load_images(config.data, node, "validation", config.seed)
        rows = [row for row, label in enumerate(images.labels.tolist()) if label in held]
        pixels = images.pixels[torch.tensor(rows)]
        said = logits_of(models[client], pixels, torch.device("cpu")).argmax(dim=1)
        figures.append(100 * (said == images.labels[rows]).double().mean().item())
    return mean(figures)


def line(row: str, seeds: Sequence[int]) -> dict[str, str]:
    """A row of the table."""
    cells = {seed: cell(row, seed) for seed in seeds}

    def average(name: str) -> float:
        return mean(one[name] for one in cells.values())

    plain = {seed: one["FT"] for seed, one in cells.items()}
    made = {"": row, "FT": f"{average('FT'):.1f}"}
    for name in STRATEGIES[1:]:
        strategy = {seed: one[name] for seed, one in cells.items()}
        made[f"{name}, to FT"] = against(strategy, plain)
    made["teacher's entropy (nats)"] = f"{average('entropy'):.2f}"
    made["teacher says the label (%)"] = f"{average('as labelled'):.0f}"
    made["teachers, on images like their own"] = f"{average('teachers, on own'):.1f}"
    made["FT, on the same"] = f"{average('FT, on own'):.1f}"
    return made


def main() -> None:
    """Make the table, and keep it; it grows row by row."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(ROWS)}; none: all")
    given = parser.parse_args()
    rows = some_of(given.rows, ROWS, parser)
    make_private_folder(WORK)
    about = (
        "FedLMG: top-1 accuracy (%) on the digits' validation split of a global model without a "
        "teacher (FT), and what the mean of the teachers (MD) or the image's own client's (SD) "
        "adds, as the method has them and with the teachers' logits divided by "
        f"{TEMPERATURE:g}; paired by seed, with a 95 % interval by Student's t, and a star where "
        "that excludes 0. Entropy, and how often the label is what it says: of an image's own "
        "client's classifier. Images like their own: of a client's classes, and of its domain "
        "where it has one. Seeds "
        f"{SEEDS}; the recipe is benchmarks.main_table's. Command: `python -m benchmarks.teachers`."
    )
    for row in rows:
        lines = with_others([line(row, SEEDS)], TABLES / "teachers.json", about, ROWS)
        write_table(TABLES / "teachers", lines, about)


if __name__ == "__main__":
    main()
