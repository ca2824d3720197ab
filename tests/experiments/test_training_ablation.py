"""benchmarks/accuracy/training_ablation.py: what rows change, on which images, and the table."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import federation, harness, recipe
from benchmarks.accuracy import training_ablation
from benchmarks.federation import CLIENTS, cell_name, config_of, real_set, reconstructed
from osfl.payload.kinds import DomainVector
from osfl.util.prompts import DIGITS
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet

FEW = SyntheticSet(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.arange(2), CLIENTS[:2])


@pytest.mark.parametrize("row", training_ablation.ROWS)
def test_every_row_can_be_run_and_changes_something(row: str) -> None:
    settings = {**recipe.settings_of("domain-vector", 0), **training_ablation.ROWS[row]}
    config_of(settings)
    changed = {
        key for key, value in training_ablation.ROWS[row].items() if recipe.COMMON.get(key) != value
    }
    assert changed == set(training_ablation.ROWS[row])
    assert (row in (training_ablation.RECIPE, training_ablation.RECONSTRUCTED)) == (not changed)
    # What real images can have, too, is of their training alone
    training_only = all(key.startswith("global-model.") for key in changed)
    assert (row in training_ablation.TRAINING or row in training_ablation.REAL) == training_only


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, SyntheticSet]]:
    """Configurations and images of trainings that do not happen; their accuracies are 1, 2, ..."""
    trainings: list[tuple[Any, SyntheticSet]] = []

    def train(job: ServerJob, payloads: object, images: SyntheticSet) -> dict[str, Any]:
        trainings.append((job.config, images))
        return {"FT": SimpleNamespace(model=len(trainings))}

    def render(job: ServerJob, plan: object, sampler: object) -> SyntheticSet:
        return FEW

    payload = DomainVector(DIGITS, torch.zeros(16, 64))
    monkeypatch.setattr(
        training_ablation, "payloads_of", lambda settings: dict.fromkeys(CLIENTS, payload)
    )
    monkeypatch.setattr(federation, "synthesize_plan", render)
    monkeypatch.setattr(training_ablation, "train_global_model", train)
    monkeypatch.setattr(
        training_ablation, "validation_accuracies", lambda config, model: [float(model)] * 6
    )
    return trainings


def test_a_cell_trains_with_its_switch_and_is_made_once(trained: list[Any]) -> None:
    assert training_ablation.cell("domain-vector", "with mixup", 3) == 1.0
    (config, images) = trained[0]
    assert (config.global_model.mixing, config.seed) == ("mixup", 3)
    assert images is FEW
    assert training_ablation.cell("ceiling", "with mixup", 3) == 2.0
    (config, images) = trained[1]
    assert config.global_model.mixing == "mixup"
    # Ten of each class and client
    assert len(images.labels) == len(images.clients) == 600
    assert images.clients[0] == "client-0"
    assert images.clients[-1] == "client-5"
    assert training_ablation.cell("domain-vector", "with mixup", 3) == 1.0
    assert len(trained) == 2


@pytest.mark.slow
def test_the_ceilings_images_go_through_the_runs_own_autoencoder(trained: list[Any]) -> None:
    """Twenty of them: what the kit gives back is like each, and is not it; labels are theirs. It
    is no cell of the recipe's.
    """
    images = real_set()
    rows = list(range(0, 600, 30))
    some = images.select(rows)
    config = config_of(recipe.settings_of("ceiling", 0))
    copies = reconstructed(some, config)
    assert torch.equal(copies.labels, some.labels)
    assert copies.clients == some.clients
    assert copies.pixels.dtype == torch.uint8
    apart = (copies.pixels.float() - some.pixels.float()).square().flatten(1).mean(dim=1)
    baseline = (
        (copies.pixels.float() - some.pixels.roll(1, 0).float()).square().flatten(1).mean(dim=1)
    )
    assert (apart > 0).all()
    assert (apart < baseline / 4).all()
    assert training_ablation.sources_of(training_ablation.RECONSTRUCTED) == ("ceiling",)
    assert training_ablation.cell("ceiling", training_ablation.RECONSTRUCTED, 0) == 1.0
    assert training_ablation.cell("ceiling", training_ablation.RECIPE, 0) == 2.0
    (_, learned), (_, plain) = trained
    assert not torch.equal(learned.pixels[rows], some.pixels)
    # In other batches a number may be rounded otherwise
    assert (learned.pixels[rows].int() - copies.pixels.int()).abs().max() <= 1
    assert torch.equal(plain.pixels[rows], some.pixels)


def test_rows_share_images_where_they_differ_in_their_training(
    trained: list[Any], tmp_path: Path
) -> None:
    for row in ("the recipe", "plain SGD", "soft labels", "guidance 1.5", "100 images a class"):
        training_ablation.cell("domain-vector", row, 0)
    assert len(list((harness.RUNS / "jobs").glob("images-*"))) == 3
    assert len(list((harness.RUNS / "jobs").glob("ablation-*"))) == 5


def test_the_table_holds_each_row_against_the_recipe(
    trained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds: synthetic 80 and 82, real 90 and 92; with mixup 81 and 85, and 90 and 90."""

    def keep(source: str, row: str, seed: int, figure: float) -> None:
        settings = {**recipe.settings_of(source, seed), **training_ablation.ROWS[row]}
        training_ablation.EXPERIMENT.cell(cell_name(settings), lambda: figure)

    for seed in (0, 1):
        keep("domain-vector", training_ablation.RECIPE, seed, 80.0 + 2 * seed)
        keep("ceiling", training_ablation.RECIPE, seed, 90.0 + 2 * seed)
        keep("domain-vector", "with mixup", seed, 81.0 + 4 * seed)
        keep("ceiling", "with mixup", seed, 90.0)
        keep("domain-vector", "soft labels", seed, 79.0 + 2 * seed)
    rows = ["the recipe", "soft labels", "with mixup"]
    monkeypatch.setattr("sys.argv", ["switches", *rows, "--seeds", "0,1"])
    training_ablation.EXPERIMENT.main(None, training_ablation.line)
    assert not trained
    tables = harness.BENCHMARKS / "accuracy" / "tables"
    baseline, mixup, soft = json.loads((tables / "training-ablation-seeds-0-1.json").read_text())[
        "rows"
    ]
    assert [baseline["domain-vector"], baseline["ceiling"]] == ["81.0", "91.0"]
    assert baseline["domain-vector, to the recipe"] == ""
    assert baseline["synthetic to real"] == "-10.0 [-10.0, -10.0] *"
    # 1 and 3: the mean 2 with a standard error of 1; Student's t of one degree of freedom is 12.7
    assert mixup["domain-vector, to the recipe"] == "+2.0 [-10.7, +14.7]"
    assert mixup["ceiling, to the recipe"] == "-1.0 [-13.7, +11.7]"
    assert mixup["domain-vector, standard error"] == "2.00"
    assert soft["domain-vector, to the recipe"] == "-1.0 [-1.0, -1.0] *"
    assert "ceiling" not in soft
    assert "synthetic to real" not in soft
