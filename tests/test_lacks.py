"""benchmarks/lacks.py: what is said of synthetic images, on sets whose answer is known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import lacks
from osfl.methods import METHODS
from server_app.synthesis.images import SyntheticSet


def gaussian(mean: float, deviation: float, count: int = 50_000) -> np.ndarray:
    return np.random.default_rng(3).normal(mean, deviation, size=(count, 4))


@pytest.mark.parametrize(
    ("mean", "deviation", "distance"),
    [
        (0.0, 1.0, 0.0),
        # |m|^2 of four numbers
        (2.0, 1.0, 16.0),
        # (1 - 3)^2 a direction
        (0.0, 3.0, 16.0),
    ],
)
def test_frechets_distance_of_gaussians(mean: float, deviation: float, distance: float) -> None:
    found = lacks.frechet_distance(gaussian(0.0, 1.0), gaussian(mean, deviation))
    assert found == pytest.approx(distance, abs=0.15)


def test_a_set_is_looked_at_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six clients of two images: of k those of k of classes are seen, and colours are k apart."""
    clients = tuple(client for client in lacks.CLIENTS for _ in range(2))
    shades = torch.tensor([shade for k in range(6) for shade in (100, 100 + 2 * k)])
    pixels = shades.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    labels = torch.arange(12) % 10
    monkeypatch.setattr(lacks, "sees", lambda judge, pixels, labels: labels < 5)
    monkeypatch.setattr(lacks, "frechet_distance", lambda one, other: float(one.mean()))
    monkeypatch.setattr(lacks, "real", lambda split: [SimpleNamespace(pixels=pixels)] * 6)
    judge: Any = SimpleNamespace(features=lambda pixels: pixels.double().numpy())
    found = lacks.looked_at(judge, SyntheticSet(pixels, labels, clients))
    # Labels 0 1, 2 3, 4 5, 6 7, 8 9, 0 1: all, all, half, none, none, all
    assert found["on class"] == pytest.approx(100 * 3.5 / 6)
    assert found["distance"] == pytest.approx(np.mean([100 + k for k in range(6)]))
    # Two numbers 2 k apart deviate by sqrt(2) k
    assert found["colour"] == pytest.approx(2**0.5 * 2.5, rel=1e-5)


@pytest.mark.parametrize("row", lacks.ROWS)
def test_rows_are_configurations_of_methods_that_can_be_drawn(row: str) -> None:
    config = lacks.config_of({**lacks.COMMON, **lacks.ROWS[row]})
    assert METHODS[config.method].samples
