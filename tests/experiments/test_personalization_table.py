"""benchmarks/accuracy/personalization.py: what each client fine-tunes, and the table."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import federation, harness, recipe
from benchmarks.accuracy import personalization
from benchmarks.federation import CLIENTS, DOMAINS, config_of
from osfl.config import RunConfig
from osfl.data.load import Images


@pytest.mark.parametrize("start", personalization.STARTS)
def test_every_row_is_one_of_the_main_tables(start: str) -> None:
    """The training is as long, but for images drawn in six steps and bfloat16."""
    config = config_of(personalization.settings_of(start, 3))
    if start != personalization.ALONE:
        theirs = config_of(recipe.settings_of(start, 3))
        assert config.global_model.steps == theirs.global_model.steps
        assert config.synthesis.images_per_class == theirs.synthesis.images_per_class
        assert config.epsilon == theirs.epsilon
        assert (config.personalization.steps, config.personalization.lr) == (200, 0.01)
    else:
        # As long as a global model learns, and by its rate
        assert config.personalization.steps == config.global_model.steps == 627
        assert config.personalization.lr == config.global_model.lr
    assert config.personalization.batch_size == 32
    assert (config.synthesis.solver, config.synthesis.steps) == ("unipc", 6)
    long = config.global_model.steps == 2508
    assert personalization.reference_of(start) == ("ceiling, as long" if long else "ceiling")
    alone = start == personalization.ALONE
    assert len(personalization.seeds_of(start)) == (1 if alone else 5 if long else 3)


class Told(nn.Module):
    """Says for every image the class that its number is."""

    def __init__(self, said: int = 0):
        super().__init__()
        self.said = nn.Parameter(torch.tensor(float(said)))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clients with a training image of class k and ten test images, k of them of class k + 1."""

    def real(split: str) -> list[Images]:
        parts = []
        for number in range(len(CLIENTS)):
            labels = torch.tensor([number])
            if split != "train":
                labels = torch.tensor([0] * (10 - number) + [number + 1] * number)
            parts.append(Images(torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8), labels))
        return parts

    def logits(model: Told, pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
        predictions = torch.full((len(pixels),), int(model.said))
        return nn.functional.one_hot(predictions, 10).float()

    def adapt(
        model: Told, images: Images, config: RunConfig, client: str, device: torch.device
    ) -> Told:
        assert client == f"client-{int(images.labels)}"
        # From what all had: 0 + k + 1
        model.said.data += images.labels[0] + 1
        return model

    monkeypatch.setattr(personalization, "client_images", real)
    monkeypatch.setattr(federation, "compute_logits", logits)
    monkeypatch.setattr(personalization, "personalize", adapt)
    return harness.BENCHMARKS / "accuracy" / "tables"


def test_each_client_begins_with_the_global_model_and_tests_on_its_own_domain(work: Path) -> None:
    model = Told()
    config = config_of(personalization.settings_of("ceiling", 0))
    accuracies = personalization.fine_tuned(model, config, "test")  # type: ignore[arg-type]
    assert accuracies == {
        "before": [100.0, 90.0, 80.0, 70.0, 60.0, 50.0],
        "after": [0.0, 10.0, 20.0, 30.0, 40.0, 50.0],
    }
    assert model.said == 0


def test_the_table_holds_each_row_against_the_ceiling_of_as_many_steps(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds by hand: the ceiling has 80 and 82, adapted 81 and 83; domain-vector 70 and 74,
    adapted 79 and 83. Adapted, domain-vector is −2 and 0 to the ceiling adapted, and −1 and +1 to
    the ceiling as it came.
    """
    figures = {
        ("ceiling", 0): (80.0, 81.0),
        ("ceiling", 1): (82.0, 83.0),
        ("domain-vector", 0): (70.0, 79.0),
        ("domain-vector", 1): (74.0, 83.0),
        (personalization.ALONE, 0): (10.0, 60.0),
    }

    def cell(start: str, seed: int, split: str, own: Any = None) -> dict[str, list[float]]:
        assert split == "test"
        before, after = figures[start, seed]
        return {"before": [before] * 6, "after": [after - 5, after + 5] * 3}

    monkeypatch.setattr(personalization, "cell", cell)
    monkeypatch.setattr(
        sys, "argv", ["adaptation", "domain-vector", "ceiling", personalization.ALONE]
    )
    monkeypatch.setattr(personalization, "SEEDS", (0, 1))
    personalization.main()
    table = json.loads((work / "personalization.json").read_text())
    ceiling, vector, alone = table["rows"]
    # Of one seed, and so without an interval
    assert (alone["as it came"], alone["adapted"], alone["painting"]) == ("10.0", "60.0", "65.0")
    assert not any("ceiling" in key or key in ("gain", "standard error") for key in alone)
    assert (ceiling[""], vector[""]) == ("ceiling", "domain-vector")
    assert (vector["as it came"], vector["adapted"]) == ("72.0", "81.0")
    # Half of the difference of two
    assert vector["standard error"] == "2.00"
    assert vector["gain"].startswith("+9.0")
    assert vector["adapted, to the ceiling adapted"].startswith("-1.0")
    assert vector["adapted, to the ceiling as it came"].startswith("+0.0")
    assert ceiling["adapted, to the ceiling adapted"] == ""
    assert ceiling["adapted, to the ceiling as it came"] == "+1.0 [+1.0, +1.0] *"
    assert [vector[domain] for domain in DOMAINS] == ["76.0", "86.0"] * 3
    assert vector["as it came, by seed"] == "70.00, 74.00"
    assert vector["adapted, by seed"] == "79.00, 83.00"
    assert (vector["seeds"], alone["seeds"]) == ("2", "1")


def test_the_tuning_is_on_the_validation_split(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cell(start: str, seed: int, split: str, own: Any = None) -> dict[str, list[float]]:
        asked.append((start, seed, split))
        return {"before": [90.0] * 6, "after": [100 * own["personalization.lr"]] * 6}

    monkeypatch.setattr(personalization, "cell", cell)
    monkeypatch.setattr(sys, "argv", ["adaptation", "--tuning"])
    personalization.main()
    rows = json.loads((work / "personalization-tuning.json").read_text())["rows"]
    assert {call[2] for call in asked} == {"validation"}
    assert [row["ceiling, adapted"] for row in rows] == ["1.0", "0.3", "1.0", "3.0"]
    assert [row["steps"] for row in rows] == ["60", "200", "200", "200"]
