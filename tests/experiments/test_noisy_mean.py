"""benchmarks/privacy/noisy_mean.py: what a guarantee's noise leaves of a domain's vector."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.federation import config_of
from benchmarks.privacy import noisy_mean
from benchmarks.privacy.noisy_mean import Point, Style
from benchmarks.recipe import settings_of
from osfl.data.load import Images
from osfl.models.conditioning import Conditioning


@pytest.fixture
def style(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A style of 300 images; errors are the squared distance from a vector of (1, 0), and
    2 more.
    """
    config = config_of(settings_of(noisy_mean.ROW, 0))
    monkeypatch.setattr(
        noisy_mean,
        "error_under",
        lambda style, moved: 2 + float((moved.mean(dim=0) - torch.tensor([1.0, 0])).square().sum()),
    )
    images = Images(torch.zeros(300, 3, 8, 8, dtype=torch.uint8), torch.arange(300) % 10)
    prompts = Conditioning(torch.tensor([[[0.0, 0]], [[0, 2]]]))
    kit: Any = SimpleNamespace(text=lambda texts: prompts)
    job: Any = SimpleNamespace(config=config, classes=("zero", "one"))
    return Style(0, kit, job, images)


def test_the_share_is_of_the_gain_over_the_prompt(
    style: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is 1 away, the clean mean of (0.8, 0) 0.04: a gain of 0.96. One at (0.6, 0) gains
    0.84 of it, and (-0.2, 0) loses.
    """
    vectors = torch.tensor([[[0.9, 0.0]], [[0.7, 0.0]]])
    noisy_mean.EXPERIMENT.tensors("vectors-0-2", lambda: vectors)
    asked: list[tuple[str, float, float]] = []
    draws = iter([0.6, -0.2, 0.8])

    def noised(vectors: torch.Tensor, prompts: torch.Tensor, config: Any) -> torch.Tensor:
        asked.append((config.domain_vector.tokens, config.epsilon, config.clip_norm))
        return torch.tensor([[next(draws), 0.0]])

    monkeypatch.setattr(noisy_mean, "noisy_mean", noised)
    gains = noisy_mean.benefits(style, Point("each", 2, 4.0, 0.5))
    assert gains == pytest.approx([100 * 0.84 / 0.96, 100 * -0.44 / 0.96, 100], abs=1e-3)
    assert asked == [("each", 4.0, 0.5)] * 3


def test_the_table_has_the_worst_style_and_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means of the styles are 80, 50 and 30; the worst draw -20."""
    shares = [[90.0, 70.0], [50.0, 50.0], [80.0, -20.0]]
    results = dict.fromkeys(noisy_mean.POINTS, shares)
    monkeypatch.setattr(noisy_mean, "measure", lambda points: results)
    monkeypatch.setattr("sys.argv", ["noise"])
    tables = harness.BENCHMARKS / "privacy" / "tables"
    noisy_mean.main()
    rows = json.loads((tables / "noisy-mean.json").read_text())["rows"]
    assert len(rows) == len(set(noisy_mean.POINTS))
    assert rows[0]["gain kept (%)"] == "53"
    assert (rows[0]["worst style"], rows[0]["worst draw"]) == ("30", "-20")
    assert (tables / "noisy-mean.png").stat().st_size > 5_000


def test_held_out_images_are_not_trained_on() -> None:
    assert max(noisy_mean.COUNTS) + noisy_mean.HELD_OUT <= 300
