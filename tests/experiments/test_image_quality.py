"""benchmarks/accuracy/image_quality.py: measures with known answers, and the picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import federation, recipe
from benchmarks.accuracy import image_quality
from benchmarks.federation import CLIENTS, DOMAINS, config_of
from osfl.data.load import Images
from osfl.models.classifiers import normalize
from osfl.payload.kinds import Domain
from osfl.util.prompts import DIGITS
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet


class Shade(nn.Module):
    """Sees the class whose number the first pixel has."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shades = torch.arange(10.0).view(10, 1, 1, 1).expand(-1, 3, 1, 1) / 127.5 - 1
        levels = normalize(shades)[:, 0, 0, 0]
        return -(images[:, 0, 0, 0, None] - levels).abs()


def images(client: str, values: list[int], labels: list[int], side: int = 4) -> SyntheticSet:
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, side, side)
    return SyntheticSet(pixels.clone(), torch.tensor(labels), (client,) * len(labels))


def test_a_column_is_a_class() -> None:
    """Class 0 has the images 10 and 11, class 3 30 and 31; the third of a class is not shown."""
    grid = image_quality.in_columns(images("client-0", [30, 10, 31, 11, 32], [3, 0, 3, 0, 3]))
    assert grid.shape == (3, 2 * 5 + 1, 2 * 5 + 1)
    assert grid[0, [2, 2, 7, 7], [2, 7, 2, 7]].tolist() == [10, 30, 11, 31]
    assert grid[0, 0, 0] == 255


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
    result = image_quality.frechet_distance(gaussian(mean, deviation), gaussian(0.0, 1.0))
    assert result == pytest.approx(distance, abs=0.15)


def test_a_distance_is_along_the_real_ones_principal_directions() -> None:
    """The real features deviate by 1 in the last 32 of 40 numbers alone. Features that are 5 away
    in the first eight, and deviate there most, are as near; in the last ones 5 away is 32 times 25.
    """
    chance = np.random.default_rng(7)
    real = chance.normal(size=(5000, 40))
    real[:, :8] *= 1e-3
    assert image_quality.DIRECTIONS == 32
    beside, away = real.copy(), real.copy()
    beside[:, :8] = chance.normal(5, 5, size=(5000, 8))
    away[:, 8:] += 5
    assert image_quality.frechet_distance(beside, real) == pytest.approx(0, abs=0.01)
    assert image_quality.frechet_distance(away, real) == pytest.approx(32 * 25, rel=0.01)


def test_spread_is_of_the_seen_images_of_a_class() -> None:
    """Class 0 has the features (0, 0) and (2, 4) about (1, 2): 2 + 8 without bias, whatever class
    1 is. The image at 100 is not seen; of class 1 three are at 0, 0 and 3: 3. Of class 2 there is
    one, which says nothing.
    """
    features = np.array([[0, 0], [2, 4], [100, 0], [0, 0], [0, 0], [3, 0], [9, 9]], dtype=float)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    mask = torch.tensor([True, True, False, True, True, True, True])
    assert image_quality.spread_within(features, labels, mask) == pytest.approx((10 + 3) / 2)


def test_features_are_what_the_last_layer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of two, two and one; the classifier stays whole."""
    monkeypatch.setattr(image_quality, "BATCH", 2)
    body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(3, 10))
    shown = images("client-0", [0, 50, 100, 150, 255], [0] * 5)
    features = image_quality.features_of(model, shown)
    expected = normalize(shown.pixels / 127.5 - 1)[:, :, 0, 0]
    assert features == pytest.approx(expected.numpy(), abs=1e-5)
    assert isinstance(model[1], nn.Linear)


@pytest.fixture
def first_pixels(monkeypatch: pytest.MonkeyPatch) -> SyntheticSet:
    """A feature is an image's first pixel, and a distance that of the means; real images, whose
    features are 0 and 1.
    """

    def features_of(model: object, shown: Any) -> np.ndarray:
        return shown.pixels[:, 0, 0, :1].double().numpy()

    monkeypatch.setattr(image_quality, "features_of", features_of)
    monkeypatch.setattr(
        image_quality, "frechet_distance", lambda one, other: one.mean() - other.mean()
    )
    return images("", [0, 1], [0, 0])


def test_a_row_has_each_styles_share(first_pixels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client k's four images show class 0, and k of them say so; of six clients at most four."""
    monkeypatch.setattr(image_quality, "spread_within", lambda features, labels, seen: 1.0)
    parts = []
    for number, client in enumerate(CLIENTS):
        right = min(number, 4)
        parts.append(images(client, [0, 0, 0, 0], [0] * right + [1] * (4 - right)))
    row = image_quality.line("a row", Shade(), parts, [first_pixels] * 6)
    assert [row[style] for style in DOMAINS] == ["0.0", "25.0", "50.0", "75.0", "100.0", "100.0"]
    assert row["average"] == "58.3"
    assert row[""] == "a row"


def test_a_row_has_the_styles_mean_distance_and_spread(
    first_pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Style k's features are 10 k and 10 k + 2, and all are seen."""
    monkeypatch.setattr(
        image_quality, "correct", lambda model, shown: torch.ones(len(shown.labels)) > 0
    )
    parts = [images(client, [10 * k, 10 * k + 2], [0, 0]) for k, client in enumerate(CLIENTS)]
    row = image_quality.line("a row", Shade(), parts, [first_pixels] * 6)
    # 1, 11, ... 51 less one half; a variance of 2 beside one of 1/2
    assert (row["distance"], row["spread (%)"]) == ("25.5", "400")


def test_equally_many_real_images_of_a_class_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_quality, "SAMPLE", 2)
    originals = images("", [10, 20, 11, 21, 12, 22], [0, 1, 0, 1, 0, 1])
    selection = image_quality.first_of(Images(originals.pixels, originals.labels))
    assert selection.pixels[:, 0, 0, 0].tolist() == [10, 11, 20, 21]
    assert selection.labels.tolist() == [0, 0, 1, 1]


def test_images_are_those_of_the_main_table_with_changed_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def render(job: ServerJob, plan: list[Any], sampler: object) -> SyntheticSet:
        calls.append((job.config, job.clients, plan))
        return images("client-3", [0], [0])

    sent = {client: Domain(DIGITS, name) for client, name in zip(CLIENTS, DOMAINS, strict=True)}
    monkeypatch.setattr(image_quality, "payloads_of", lambda settings: sent)
    monkeypatch.setattr(federation, "synthesize_plan", render)
    image_quality.synthetic_set(
        "prompts-domain", ("client-3",), 2, {"prompts-domain.guidance": 4.5}
    )
    image_quality.synthetic_set("prompts-domain", CLIENTS, 3, {})
    (changed, clients, plan), (plain, every, full_plan) = calls
    usual = config_of(recipe.settings_of("prompts-domain", image_quality.SEED))
    assert changed.prompts_domain.guidance == 4.5
    assert plain.prompts_domain == usual.prompts_domain
    assert changed.synthesis.steps == plain.synthesis.steps == usual.synthesis.steps
    assert (clients, every) == (("client-3",), CLIENTS)
    assert (len(plan), len(full_plan)) == (2 * 10, 3 * 10 * 6)
    assert {planned.client for planned in plan} == {"client-3"}
