"""benchmarks/accuracy/image_quality.py: measures with known answers, and the picture."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import federation, harness, recipe
from benchmarks.accuracy import image_quality
from benchmarks.federation import CLIENTS, DOMAINS, config_of, merged
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
        known = normalize(shades)[:, 0, 0, 0]
        return -(images[:, 0, 0, 0, None] - known).abs()


def images(client: str, values: list[int], labels: list[int], side: int = 4) -> SyntheticSet:
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, side, side)
    return SyntheticSet(pixels.clone(), torch.tensor(labels), (client,) * len(labels))


def test_a_column_is_a_class() -> None:
    """Of class 0 the images 10 and 11, of class 3 30 and 31; a third of a class is not shown."""
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
    found = image_quality.frechet_distance(gaussian(mean, deviation), gaussian(0.0, 1.0))
    assert found == pytest.approx(distance, abs=0.15)


def test_a_distance_is_along_the_real_ones_principal_directions() -> None:
    """Of 40 numbers the real ones deviate by 1 in the last 32 alone. What is 5 away in the first
    eight, and deviates there most, is as near as they are; in the last ones it is 32 times 25 away.
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
    seen = torch.tensor([True, True, False, True, True, True, True])
    assert image_quality.spread_within(features, labels, seen) == pytest.approx((10 + 3) / 2)


def test_features_are_what_the_last_layer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of two, two and one; the classifier stays whole."""
    monkeypatch.setattr(image_quality, "BATCH", 2)
    body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(3, 10))
    shown = images("client-0", [0, 50, 100, 150, 255], [0] * 5)
    found = image_quality.features_of(model, shown)
    expected = normalize(shown.pixels / 127.5 - 1)[:, :, 0, 0]
    assert found == pytest.approx(expected.numpy(), abs=1e-5)
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
    found = image_quality.line("a row", Shade(), parts, [first_pixels] * 6)
    assert [found[style] for style in DOMAINS] == ["0.0", "25.0", "50.0", "75.0", "100.0", "100.0"]
    assert found["average"] == "58.3"
    assert found[""] == "a row"


def test_a_row_has_the_styles_mean_distance_and_spread(
    first_pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Style k's features are 10 k and 10 k + 2, and all are seen."""
    monkeypatch.setattr(
        image_quality, "correct", lambda model, shown: torch.ones(len(shown.labels)) > 0
    )
    parts = [images(client, [10 * k, 10 * k + 2], [0, 0]) for k, client in enumerate(CLIENTS)]
    found = image_quality.line("a row", Shade(), parts, [first_pixels] * 6)
    # 1, 11, ... 51 less one half; a variance of 2 beside one of 1/2
    assert (found["distance"], found["spread (%)"]) == ("25.5", "400")


def test_as_many_real_images_of_a_class_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_quality, "SAMPLE", 2)
    own = images("", [10, 20, 11, 21, 12, 22], [0, 1, 0, 1, 0, 1])
    found = image_quality.first_of(Images(own.pixels, own.labels))
    assert found.pixels[:, 0, 0, 0].tolist() == [10, 11, 20, 21]
    assert found.labels.tolist() == [0, 0, 1, 1]


def test_what_is_drawn_is_the_main_tables_row_but_for_what_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def render(job: ServerJob, plan: list[Any], sampler: object) -> SyntheticSet:
        seen.append((job.config, job.clients, plan))
        return images("client-3", [0], [0])

    sent = {client: Domain(DIGITS, name) for client, name in zip(CLIENTS, DOMAINS, strict=True)}
    monkeypatch.setattr(image_quality, "payloads_of", lambda settings: sent)
    monkeypatch.setattr(federation, "synthesize_plan", render)
    image_quality.synthetic_set(
        "prompts-domain", ("client-3",), 2, {"prompts-domain.guidance": 4.5}
    )
    image_quality.synthetic_set("prompts-domain", CLIENTS, 3, {})
    (changed, one, plan), (plain, every, whole) = seen
    usual = config_of(recipe.settings_of("prompts-domain", image_quality.SEED))
    assert changed.prompts_domain.guidance == 4.5
    assert plain.prompts_domain == usual.prompts_domain
    assert changed.synthesis.steps == plain.synthesis.steps == usual.synthesis.steps
    assert (one, every) == (("client-3",), CLIENTS)
    assert (len(plan), len(whole)) == (2 * 10, 3 * 10 * 6)
    assert {planned.client for planned in plan} == {"client-3"}


@pytest.mark.parametrize("style", ["", "neon"])
def test_the_picture_and_the_table(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real images first, then every guidance. With a style's name there is its picture alone."""
    asked: list[tuple[str, tuple[str, ...], int, dict[str, float]]] = []

    def drawn(row: str, clients: Any, count: int, own: Any) -> SyntheticSet:
        asked.append((row, tuple(clients), count, own))
        # Of every second client the second image shows the first class
        made = [images(client, [0, 1 - int(client[-1]) % 2], [0, 1]) for client in clients]
        pixels = torch.cat([one.pixels for one in made])
        owners = tuple(client for client in clients for _ in range(2))
        return SyntheticSet(pixels, torch.tensor([0, 1] * len(clients)), owners)

    def one_right(split: str) -> list[Any]:
        part = images("", {"test": [0, 0], "validation": [7, 7]}[split], [0, 1])
        return [Images(part.pixels, part.labels)] * 6

    def reconstructed(own: SyntheticSet, config: Any) -> SyntheticSet:
        return replace(own, pixels=own.pixels + 100)

    # The real images have ten times their client's number
    parts = [images(client, [10 * k, 10 * k], [0, 1]) for k, client in enumerate(CLIENTS)]
    whole = merged(parts)
    monkeypatch.setattr(image_quality, "synthetic_set", drawn)
    monkeypatch.setattr(image_quality, "client_images", one_right)
    monkeypatch.setattr(image_quality, "real_set", lambda: whole)
    monkeypatch.setattr(image_quality, "reconstructed", reconstructed)
    monkeypatch.setattr(image_quality, "classifier", Shade)
    # A distance says what was compared with, and a spread what was looked at
    monkeypatch.setattr(
        image_quality, "features_of", lambda model, shown: shown.pixels.double().numpy()
    )
    monkeypatch.setattr(image_quality, "frechet_distance", lambda one, other: other.mean())
    monkeypatch.setattr(
        image_quality, "spread_within", lambda features, labels, seen: features.mean()
    )
    monkeypatch.setattr("sys.argv", ["styles", *([style] if style else [])])
    tables = harness.BENCHMARKS / "accuracy" / "tables"
    tables.mkdir(parents=True)
    image_quality.main()
    client = "client-2" if style else "client-3"
    shown = [("domain-vector", (client,), 2, {}), ("prompts-domain", (client,), 2, {})]
    assert asked[:2] == shown
    # Four sets one above the other, each with an image of two classes: real, through the
    # autoencoder, and what is drawn
    picture = Image.open(tables / f"image-quality-{style or 'painting'}.png")
    assert picture.size == (image_quality.SCALE * 11, image_quality.SCALE * 4 * 6)
    own = 10 * int(client[-1])
    columns = [
        [
            picture.getpixel((image_quality.SCALE * x + 1, image_quality.SCALE * y + 1))[0]
            for y in (2, 8, 14, 20)
        ]
        for x in (2, 7)
    ]
    assert columns[0] == [own, own + 100, 0, 0]
    assert columns[1] == [own, own + 100, int(client[-1]) % 2 == 0, int(client[-1]) % 2 == 0]
    if style:
        assert len(asked) == 2
        assert not (tables / "image-quality.json").exists()
        return
    rows = json.loads((tables / "image-quality.json").read_text())["rows"]
    assert [rows[0][""], rows[0]["average"]] == ["real images", "50.0"]
    assert {row["distance"] for row in rows} == {"7.0"}
    # Of 0 and, in every second style, 1: a half of two styles in four, beside 7
    assert [row["spread (%)"] for row in rows] == ["0"] + ["4"] * (len(rows) - 1)
    for row in rows[1:]:
        assert [row[name] for name in DOMAINS] == ["100.0", "50.0"] * 3
        assert row["average"] == "75.0"
    assert [row[""] for row in rows[1:]] == [
        f"{row}, guidance {guidance:g}"
        for row, figures in image_quality.GUIDANCE.items()
        for guidance in figures
    ]
    scales = {"FedDEO description alone": "feddeo.guidance-description"}
    assert [one[3] for one in asked[2:]] == [
        {scales.get(row, f"{row}.guidance"): guidance}
        for row, figures in image_quality.GUIDANCE.items()
        for guidance in figures
    ]
    assert {one[1:3] for one in asked[2:]} == {(CLIENTS, 10)}
