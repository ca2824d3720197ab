"""benchmarks/teachers.py: who is tested on what, and what a row says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import teachers
from osfl.data.load import Images


@pytest.mark.parametrize("row", teachers.ROWS)
def test_every_row_is_a_run_of_fedlmg(row: str) -> None:
    config = teachers.config_of(teachers.settings_of(row, 1))
    assert (config.method, config.seed) == ("fedlmg", 1)
    assert config.data.partition == ("label" if "label" in row else "domain")
    # As many steps as the papers' epochs are: twenty of a hundred images in batches of eight
    by_recipe = "recipe" in row
    assert (config.classifier.steps or 20 * 13) == 260
    assert (config.classifier.schedule == "one-cycle") == by_recipe


def test_softened_logits_are_a_quarter() -> None:
    softened = teachers.Softened(nn.Identity())
    assert softened(torch.tensor([[8.0, -4.0]])).tolist() == [[2.0, -1.0]]


def test_clients_are_tested_on_images_of_their_own_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two clients. The first holds classes 0 and 1, of which its model takes 0 for 0 and 1 for 0;
    the second holds 2, which its model knows. Images of other classes do not count.
    """
    held = {0: [0, 0, 1], 1: [2]}

    def load(data: object, node: Any, split: str, seed: int) -> Images:
        labels = torch.tensor(held[node.partition_id] if split == "train" else [0, 1, 2, 0, 0])
        pixels = labels.view(-1, 1, 1, 1).expand(-1, 3, 2, 2).byte()
        return Images(pixels, labels)

    def logits(model: dict[int, int], pixels: torch.Tensor, device: object) -> torch.Tensor:
        said = torch.tensor([model[label] for label in pixels[:, 0, 0, 0].tolist()])
        return nn.functional.one_hot(said, 3).float()

    monkeypatch.setattr(teachers, "CLIENTS", ("a", "b"))
    monkeypatch.setattr(teachers, "load_images", load)
    monkeypatch.setattr(teachers, "logits_of", logits)
    models: Any = {"a": {0: 0, 1: 0, 2: 2}, "b": {0: 1, 1: 1, 2: 2}}
    found = teachers.on_own(teachers.settings_of("by label", 0), models)
    # Three of four, and one of one
    assert found == pytest.approx(100 * (3 / 4 + 1) / 2)


def test_a_row_is_paired_with_plain_fine_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SD is 1, 2 and 3 points above FT: mean 2, s = 1, t(2) = 4.3027; 4.3027 / sqrt(3) = 2.5."""
    monkeypatch.setattr(teachers, "WORK", tmp_path)
    for seed in (0, 1, 2):
        found = {
            "FT": 50.0 + seed,
            "MD": 50.0 + seed,
            "SD": 51.0 + 2 * seed,
            "MD softened": 40.0 + seed,
            "SD softened": 60.0 + seed,
            "entropy": 0.25,
            "as labelled": 80.0,
            "teachers, on own": 70.0,
            "FT, on own": 60.0,
        }
        name = teachers.folder_name(teachers.settings_of("by domain", seed))
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    line = teachers.line("by domain", (0, 1, 2))
    assert line["FT"] == "51.0"
    assert line["SD, to FT"] == "+2.0 [-0.5, +4.5]"
    assert line["MD softened, to FT"] == "-10.0 [-10.0, -10.0] *"
    assert (line["teacher's entropy (nats)"], line["teacher says the label (%)"]) == ("0.25", "80")
    assert line["teachers, on images like their own"] == "70.0"


def test_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FT learns without a teacher; SD from the image's own client, sure of its class; and softened
    from the same divided by four.
    """

    class Sure(nn.Module):
        def __init__(self, label: int) -> None:
            super().__init__()
            self.label = label

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 8.0 * nn.functional.one_hot(torch.full((len(images),), self.label), 3)

    pixels = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 1, 1])
    images = SimpleNamespace(pixels=pixels, labels=labels, clients=("a", "a", "b", "b"))
    taught: dict[str, torch.Tensor | None] = {}

    def train(
        job: object, name: str, pixels: object, labels: object, target: Any, weight: float
    ) -> SimpleNamespace:
        assert weight == 1.0
        taught[name] = target
        return SimpleNamespace(model=name)

    networks = {"a": SimpleNamespace(model=Sure(0)), "b": SimpleNamespace(model=Sure(1))}
    job = SimpleNamespace(
        device=torch.device("cpu"), held=lambda payloads: {"a": [0, 1], "b": [1, 2]}
    )
    monkeypatch.setattr(teachers, "WORK", tmp_path)
    monkeypatch.setattr(teachers, "sent", lambda settings: {})
    monkeypatch.setattr(teachers, "job_in", lambda *_: job)
    monkeypatch.setattr(teachers, "plan_held_classes", lambda *_: [])
    monkeypatch.setattr(teachers, "synthesize", lambda *_: images)
    monkeypatch.setattr(teachers.fedlmg, "teachers_of", lambda *_: networks)
    monkeypatch.setattr(teachers, "train_global", train)
    monkeypatch.setattr(teachers, "score", lambda config, model: [float(len(model))])
    monkeypatch.setattr(teachers, "on_own", lambda settings, models: float(len(models)))
    found = teachers.measured(teachers.settings_of("by domain", 0))
    assert list(taught) == list(teachers.STRATEGIES)
    assert taught["FT"] is None
    own = torch.tensor([[8.0, 0, 0], [8, 0, 0], [0, 8, 0], [0, 8, 0]])
    torch.testing.assert_close(taught["SD"], own.softmax(1))
    torch.testing.assert_close(taught["SD softened"], (own / 4).softmax(1))
    # Class 0 of a alone, 2 of b alone, and 1 of both
    for name, scale in (("MD", 1), ("MD softened", 4)):
        p = (own / scale).softmax(1)
        both = torch.stack([p[0, 0], (p[0, 1] + p[2, 1]) / 2, p[2, 2]])
        torch.testing.assert_close(taught[name], (both / both.sum()).expand(4, 3))
    p = own.softmax(1)
    # The teacher of the second image says another class
    assert found["as labelled"] == 75.0
    entropy = -(p[0] * p[0].log()).sum().item()
    assert found["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["FT"] == 2.0
    assert found["SD softened"] == 11.0
    assert (found["FT, on own"], found["teachers, on own"]) == (6.0, 2.0)
