"""A second opinion on synthetic images: who gives it, what is left out, what is taught."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from osfl.config import ConfigError, parse_run_config
from server_app import pipeline
from server_app.context import GlobalModel
from server_app.defenses import label_filter
from server_app.synthesis.images import SyntheticSet
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start

LABELS = (0, 0, 0, 1, 1, 1, 2, 2)


def numbered(count: int = len(LABELS)) -> SyntheticSet:
    """Images whose every pixel is their number."""
    pixels = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    clients = tuple("aabbaabb"[:count])
    return SyntheticSet(pixels.clone(), torch.tensor(LABELS[:count]), clients)


class Says(nn.Module):
    """Logits (0, ln 3) for images of an even number, (ln 3, 0) for odd, whatever they show."""

    def __init__(self, first: bool):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))
        self.first = first

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        row = [0.0, float(np.log(3))] if self.first else [float(np.log(3)), 0.0]
        return torch.tensor(row).expand(len(images), 2)


def job_of(check: str = "filter") -> Any:
    return SimpleNamespace(
        classes=("zero", "one"),
        device=torch.device("cpu"),
        config=parse_run_config(
            quick(method="prompts-only", label_filter=check, synthesis__images_per_class=2)
        ),
        status=SimpleNamespace(add_warning=lambda text: warnings.append(text)),
    )


warnings: list[str] = []


def test_no_model_checks_its_training_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model learns from every other image, and checks the rest."""
    learned: dict[str, tuple[list[int], list[int]]] = {}

    def train(
        job: Any, name: str, pixels: torch.Tensor, labels: torch.Tensor, continues: bool
    ) -> GlobalModel:
        assert not continues
        learned[name] = (pixels[:, 0, 0, 0].tolist(), labels.tolist())
        return GlobalModel(Says(name == "opinion-1"), "resnet18", True)

    monkeypatch.setattr(label_filter, "train_global", train)
    opinions = label_filter.cross_fitted_predictions(job_of(), numbered())
    assert learned == {
        "opinion-1": ([0, 2, 4, 6], [0, 0, 1, 2]),
        "opinion-2": ([1, 3, 5, 7], [0, 1, 1, 2]),
    }
    expected = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).repeat(4, 1)
    torch.testing.assert_close(opinions, expected)


def test_images_predicted_as_another_class_are_dropped() -> None:
    """Class 2, of which no image would stay, keeps all."""
    warnings.clear()
    rows = [[0.6, 0.3, 0.1], [0.4, 0.6, 0.0], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1]]
    rows += [[0.5, 0.2, 0.3], [0.3, 0.4, 0.3], [0.9, 0.0, 0.1], [0.0, 0.6, 0.4]]
    opinions = torch.tensor(rows)
    remainder = label_filter.drop_noisy_labels(job_of(), numbered(), opinions)
    assert remainder.pixels[:, 0, 0, 0].tolist() == [0, 2, 3, 5, 6, 7]
    assert remainder.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert remainder.clients == ("a", "b", "b", "a", "b", "b")
    assert "2 of 8 synthetic images" in warnings[0]


@pytest.mark.parametrize("check", ["none", "filter", "soft"])
def test_the_global_model_learns_what_was_asked(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opinions = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.4, 0.6]])
    trained: list[tuple] = []
    monkeypatch.setattr(label_filter, "cross_fitted_predictions", lambda job, images: opinions)
    monkeypatch.setattr(pipeline, "train_global", lambda job, *given: trained.append(given))
    pipeline.train_global_model(job_of(check), {}, numbered(4))
    ((name, pixels, labels, teacher, weight),) = trained
    rows = pixels[:, 0, 0, 0].tolist()
    assert (name, weight) == ("FT", 1.0)
    assert rows == ([0, 2, 3] if check == "filter" else [0, 1, 2, 3])
    assert labels.tolist() == [LABELS[row] for row in rows]
    assert torch.equal(teacher, opinions) if check == "soft" else teacher is None


@pytest.mark.slow
def test_a_run_reports_dropped_images(home: Path, tiny_kit: Path) -> None:
    config = quick(
        method="prompts-only",
        kit=str(tiny_kit),
        label_filter="filter",
        synthesis__images_per_class=2,
    )
    start(config)
    results = metrics(home)
    (warning,) = results["warnings"]
    drawn = len((home / "runs" / "job" / "manifest.jsonl").read_text().splitlines())
    record = json.loads((home / "runs" / "job" / "models" / "FT.json").read_text())
    drop_count = int(warning.split()[1])
    assert f"of {drawn} synthetic images" in warning
    assert record["images"] == drawn - drop_count
    assert results["server"]["trained_images"]["FT"] == drawn - drop_count
    page = (home / "runs" / "job" / "report.html").read_text()
    assert re.search(rf"s of training FT on {drawn - drop_count} images", page)
    assert set(results["accuracy"]) == {"FT"}
    # The checking classifiers stay with the server: a client fetches the global model alone
    size = (home / "runs" / "job" / "models" / "FT.safetensors").stat().st_size
    assert {client["download_bytes"] for client in results["clients"].values()} == {size}


@pytest.mark.parametrize("method", ["fedlmg", "fedcado", "fedcgs", "local", "fedavg"])
def test_methods_with_teachers_or_without_images_have_no_label_filter(method: str) -> None:
    with pytest.raises(ConfigError, match="label-filter = 'soft'"):
        parse_run_config(quick(method=method, label_filter="soft"))


def test_a_label_filter_requires_an_image_for_each_half() -> None:
    """With one image a class, every other image would be every other class."""
    with pytest.raises(ConfigError, match="images-per-class to be at least 2"):
        parse_run_config(
            quick(method="prompts-only", label_filter="soft", synthesis__images_per_class=1)
        )
