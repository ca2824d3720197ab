"""What synthetic images lack that real ones have; to benchmarks/tables/lacks.{md,json}.

python -m benchmarks.lacks                    # every row
python -m benchmarks.lacks "domain-vector"    # some; the table keeps its other rows

Payloads are made once, with benchmarks.left_out's recipe and a seed of their own. Each row's
images are looked at by a judge, a classifier of the same recipe that has learned the clients' real
images and the validation split's:

- on class: the share that the judge takes for their class,
- distance: Fréchet's, of the judge's features of a client's images and of the validation images of
  its domain (Heusel et al., arXiv 1706.08500, with this network in place of Inception), averaged,
- colour: the standard deviation of the images' mean colour, in shades of 255, averaged.

Then a global model learns all images, those that the judge takes for their class, and those that
`label-check = "filter"` leaves; each is tested on the validation split, which the judge has seen
and none of these models has. What only a judge can leave out is a bound and no method.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy.linalg import sqrtm

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import CLIENTS, Settings, folder_name, sent
from benchmarks.guidance import score
from benchmarks.left_out import COMMON, config_of
from benchmarks.server import drawn_by, job_in
from osfl.config import NodeConfig, RunConfig, Scalar
from osfl.data.load import Images, load_images
from osfl.models.classifiers import headless, logits_of, new_classifier, normalise
from osfl.models.kits import find_kit
from osfl.models.training import fit
from osfl.pixels import to_float
from server_app.job import ServerJob
from server_app.label_check import second_opinions, without_doubtful
from server_app.synthesis.images import SyntheticSet

WORK = Path(__file__).resolve().parent.parent / "runs" / "lacks"
CPU = torch.device("cpu")
SEED = 100  # of the payloads; no table of results has it
# Directions of the judge's features in which distances are taken: a client has few images
KEPT = 32
DEO: Settings = {"method": "feddeo", "feddeo.guidance-description": 2.0}
VECTOR: Settings = {"method": "domain-vector"}
ROWS: dict[str, Settings] = {
    "FedDEO, 150 steps": {**DEO, "feddeo.steps": 150},
    "FedDEO, 600 steps": {**DEO, "feddeo.steps": 600},
    "FedDEO, 600 steps, guidance 1": {**DEO, "feddeo.steps": 600, "feddeo.guidance-description": 1},
    "domain-vector": {**VECTOR, "domain-vector.steps": 600},
    "domain-vector, guidance 1": {
        **VECTOR,
        "domain-vector.steps": 600,
        "domain-vector.guidance": 1.0,
    },
    "domain-vector, guidance 3": {
        **VECTOR,
        "domain-vector.steps": 600,
        "domain-vector.guidance": 3.0,
    },
    "domain-vector and classes": {
        **VECTOR,
        "domain-vector.steps": 600,
        "domain-vector.class-lr": 0.03,
    },
    "domain-vector, 2,000 steps": {**VECTOR, "domain-vector.steps": 2000},
}


@cache
def real(split: str) -> list[Images]:
    """Every client's images of a split."""
    config = config_of({**COMMON, "method": "ceiling"})
    return [
        load_images(config.data, NodeConfig(partition_id=k, num_partitions=6), split, 0)
        for k in range(len(CLIENTS))
    ]


def taught(config: RunConfig, pixels: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    """A model of `config.global_model`, with about as many steps whatever the number of images."""
    settings = config.global_model
    batches = -(-len(labels) // settings.batch_size)
    settings = replace(settings, epochs=max(1, round(627 / batches)), steps=0)
    model = new_classifier(settings, 10, find_kit("digits"), config.seed, "global-model.init")
    return fit(model, pixels, labels, settings, config.seed, CPU)


def tested(model: torch.nn.Module) -> float:
    """Top-1 accuracy (%) on the validation split, average of the domains."""
    return float(np.mean(score(config_of({**COMMON, "method": "ceiling"}), model)))


@dataclass(frozen=True)
class Judge:
    """Who tells classes and domains apart.

    Attributes:
        directions: [f, k], the principal ones of the validation images' features.
    """

    model: torch.nn.Module
    directions: torch.Tensor

    def features(self, pixels: torch.Tensor) -> np.ndarray:
        """Of uint8 images, along the directions [N, k]."""
        return (features_of(self.model, pixels) @ self.directions).double().numpy()


@torch.no_grad()
def features_of(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """What goes into a classifier's last layer [N, f]."""
    body, _ = headless(deepcopy(model))
    return torch.cat([body(normalise(to_float(part), model)) for part in pixels.split(200)])


def new_judge() -> Judge:
    """Trained on all clients' and the validation split's real images, or loaded."""
    config = config_of({**COMMON, "method": "ceiling"})
    file = WORK / "judge.pt"
    parts = [*real("train"), *real("validation")]
    if file.is_file():
        model = new_classifier(config.global_model, 10, find_kit("digits"), 0, "global-model.init")
        model.load_state_dict(torch.load(file, weights_only=True))
        model.eval()
    else:
        pixels = torch.cat([part.pixels for part in parts])
        model = taught(config, pixels, torch.cat([part.labels for part in parts]))
        torch.save(model.state_dict(), file)
    seen = features_of(model, torch.cat([part.pixels for part in real("validation")]))
    directions = torch.linalg.svd(seen - seen.mean(dim=0), full_matrices=False).Vh[:KEPT].T
    return Judge(model, directions)


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """|m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)), of two sets of features [N, k]."""
    covariances = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = sqrtm(covariances[0] @ covariances[1]).real
    apart = one.mean(axis=0) - other.mean(axis=0)
    return float(apart @ apart + np.trace(covariances[0] + covariances[1] - 2 * root))


def looked_at(judge: Judge, images: SyntheticSet) -> dict[str, float]:
    """On class (%), distance and colour, averages of the clients."""
    on_class = []
    distances = []
    colours = []
    for number, client in enumerate(CLIENTS):
        own = torch.tensor([owner == client for owner in images.clients])
        pixels = images.pixels[own]
        on_class.append(100 * sees(judge, pixels, images.labels[own]).float().mean().item())
        there = judge.features(real("validation")[number].pixels)
        distances.append(frechet_distance(judge.features(pixels), there))
        colours.append(pixels.float().mean(dim=(2, 3)).std(dim=0).mean().item())
    return {
        "on class": float(np.mean(on_class)),
        "distance": float(np.mean(distances)),
        "colour": float(np.mean(colours)),
    }


def sees(judge: Judge, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which images the judge takes for their class [N]."""
    return logits_of(judge.model, pixels, CPU).argmax(dim=1) == labels


def settings_of(row: str) -> dict[str, Scalar]:
    """A row's own, over what all have."""
    return {**COMMON, **ROWS[row], "seed": SEED}


def drawn(row: str) -> tuple[ServerJob, SyntheticSet]:
    """A row's images, and the job that drew them."""
    settings = settings_of(row)
    config = config_of({**settings, "label-check": "filter"})
    job = job_in(config, folder_name(settings))
    return job, drawn_by(job, sent(settings))


def line(judge: Judge, row: str) -> dict[str, str]:
    """One row of the table."""
    file = WORK / f"{folder_name(settings_of(row))}.json"
    if not file.is_file():
        job, images = drawn(row)
        found = looked_at(judge, images)
        found["all"] = tested(taught(job.config, images.pixels, images.labels))
        good = sees(judge, images.pixels, images.labels)
        found["judged"] = tested(taught(job.config, images.pixels[good], images.labels[good]))
        checked = without_doubtful(job, images, second_opinions(job, images))
        found["checked"] = tested(taught(job.config, checked.pixels, checked.labels))
        file.write_text(json.dumps(found))
        print(row, found, flush=True)
    return {"": row, **cells(json.loads(file.read_text()))}


def cells(found: dict[str, float]) -> dict[str, str]:
    """A row's figures as text."""
    return {name: f"{figure:.1f}" for name, figure in found.items()}


def line_of_real(judge: Judge) -> dict[str, str]:
    """The clients' own images, which every synthetic one would be like."""
    parts = real("train")
    owners = [name for name, part in zip(CLIENTS, parts, strict=True) for _ in range(len(part))]
    pixels = torch.cat([part.pixels for part in parts])
    labels = torch.cat([part.labels for part in parts])
    found = looked_at(judge, SyntheticSet(pixels, labels, tuple(owners)))
    file = WORK / "real.json"
    if not file.is_file():
        config = config_of({**COMMON, "method": "ceiling", "seed": SEED})
        file.write_text(json.dumps({"all": tested(taught(config, pixels, labels))}))
    return {"": "real images", **cells({**found, **json.loads(file.read_text())})}


def table(rows: Sequence[str]) -> list[dict[str, str]]:
    """The real images, and a line for each row."""
    judge = new_judge()
    return [line_of_real(judge), *(line(judge, row) for row in rows)]


def main() -> None:
    """Make the table and keep it."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(ROWS)}; none: all")
    given = parser.parse_args()
    names = some_of(given.rows, ROWS, parser)
    WORK.mkdir(parents=True, exist_ok=True)
    rows = table(names)
    about = (
        "30 synthetic images a class and client, seed 100; real images: the clients' own, ten a "
        "class. On class (%), distance and colour by a judge; all, judged, checked: top-1 accuracy "
        "(%) on the validation split of a model of 627 steps that learned all of them, those that "
        "the judge takes for their class, and those that label-check = filter leaves. "
        "Command: `python -m benchmarks.lacks`."
    )
    order = ("real images", *ROWS)
    write_table(TABLES / "lacks", with_others(rows, TABLES / "lacks.json", about, order), about)


if __name__ == "__main__":
    main()
