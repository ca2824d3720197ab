"""benchmarks/accuracy/sampling_hyperparameters.py: the images and settings of a curve's points."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import sampling_hyperparameters
from benchmarks.federation import CLIENTS, Settings, config_of
from osfl.methods import server_module
from osfl.payload.kinds import Domain
from osfl.settings import default_config
from osfl.util.prompts import DIGITS
from server_app.synthesis.images import SyntheticSet
from tests.helpers.settings import quick

BASE = sampling_hyperparameters.BASE
DEFAULTS = default_config()


def test_one_setting_is_changed_at_a_time_and_the_base_is_measured_once() -> None:
    points = sampling_hyperparameters.points()
    assert points[0] == {"images a class": 30, "guidance": 2.0, "steps": 20}
    for point in points[1:]:
        assert sum(point[name] != BASE[name] for name in BASE) == 1
    # 5 + 6 + 4 values, of which three are the base
    assert len(points) == 13


@pytest.mark.parametrize(("wanted", "most"), [(5, 30), (10, 30), (30, 30), (100, 300), (300, 300)])
def test_fewer_images_are_the_first_of_more(wanted: int, most: int) -> None:
    assert sampling_hyperparameters.images_drawn({**BASE, "images a class": wanted}) == most


def test_the_first_images_are_of_every_client_and_class() -> None:
    """Two clients, two classes, three images of each; image i is all i."""
    pixels = torch.arange(12, dtype=torch.uint8).view(-1, 1, 1, 1)
    labels = torch.tensor([0, 0, 0, 1, 1, 1] * 2)
    images = SyntheticSet(pixels, labels, ("a",) * 6 + ("b",) * 6)
    kept = sampling_hyperparameters.first_images(images, 3, 2)
    assert kept.pixels.flatten().tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert kept.labels.tolist() == [0, 0, 1, 1] * 2
    assert kept.clients == ("a",) * 4 + ("b",) * 4


def test_what_an_image_took_is_kept(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients' twenty images take 100 s, 5 an image; read again, they took the same."""
    clock = iter([1000.0, 1100.0, 2000.0, 2001.0])
    monkeypatch.setattr(sampling_hyperparameters, "process_time", lambda: next(clock))
    changed = quick(kit=str(tiny_kit), method="prompts-domain")
    settings = {key: value for key, value in changed.items() if DEFAULTS[key] != value}
    settings |= {"seed": 0}
    names = {client: Domain(DIGITS, "neon") for client in CLIENTS[:2]}
    images, seconds = sampling_hyperparameters.timed_synthesis(settings, names)
    assert len(images.labels) == 20
    again, same = sampling_hyperparameters.timed_synthesis(settings, names)
    assert torch.equal(again.pixels, images.pixels)
    assert seconds == same == 5.0


@pytest.mark.parametrize("row", sampling_hyperparameters.EXPERIMENT.rows)
def test_a_point_sets_what_the_method_draws_with(row: str) -> None:
    settings = sampling_hyperparameters.settings_of(
        row, {"images a class": 5, "guidance": 7.5, "steps": 50}
    )
    config = config_of(settings)
    assert callable(server_module(config.method).sampler)
    assert (config.synthesis.images_per_class, config.synthesis.steps) == (5, 50)
    assert 7.5 in settings.values()


def test_a_point_that_was_measured_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing counts the images of the point, at the seconds that one of the most took."""
    images = SyntheticSet(
        torch.zeros(60 * 30, 1, 1, 1, dtype=torch.uint8),
        torch.arange(10).repeat_interleave(30).repeat(6),
        tuple(client for client in CLIENTS for _ in range(300)),
    )
    drawn: list[Settings] = []

    def draw(settings: Settings, taken: object) -> tuple[SyntheticSet, float]:
        drawn.append(settings)
        return images, 0.5

    monkeypatch.setattr(sampling_hyperparameters, "timed_synthesis", draw)
    monkeypatch.setattr(
        sampling_hyperparameters, "trained", lambda config, pixels, labels: len(labels)
    )
    monkeypatch.setattr(sampling_hyperparameters, "validation_accuracy", lambda count: count / 10)
    point = {**BASE, "images a class": 5}
    for _ in range(2):
        found = sampling_hyperparameters.measure("domain-vector", point, {})
        assert (found["accuracy"], found["drawing"]) == (30.0, 150.0)
    (settings,) = drawn
    assert settings["synthesis.images-per-class"] == 30
    assert sampling_hyperparameters.line(found)[""] == "domain-vector, 2, 20, 5"


def test_a_curve_is_what_differs_in_one_setting_alone(tmp_path: Path) -> None:
    """Each point's accuracy is its number, and it takes 15 s."""
    lines = []
    for row, more in (("prompts-domain", 50), ("domain-vector", 0)):
        for number, point in enumerate(sampling_hyperparameters.points()):
            figures = {"accuracy": more + number, "drawing": 10.0, "training": 5.0}
            lines.append(sampling_hyperparameters.line({"row": row, **point, **figures}))
    found = sampling_hyperparameters.curve_of(lines, "domain-vector", "steps")
    # The base is number 0; five guidances come before the steps
    assert found == [(5, 6, 15), (10, 7, 15), (20, 0, 15), (50, 8, 15)]
    picture = sampling_hyperparameters.EXPERIMENT.table_file().with_suffix(".png")
    picture.parent.mkdir(parents=True)
    sampling_hyperparameters.plot(lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("count", "epochs"), [(300, 63), (1800, 11), (18_000, 1)])
def test_a_model_has_as_many_steps_whatever_the_images(
    count: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """627 steps are 63 epochs of 10 batches of 32, or 11 of 57; 563 are one, and no less."""
    monkeypatch.setattr(
        sampling_hyperparameters, "fit", lambda model, pixels, labels, settings, *more: settings
    )
    config = config_of(
        {**sampling_hyperparameters.COMMON, "method": "ceiling", "global-model.steps": 7}
    )
    pixels = torch.zeros(count, 1, 1, 1, dtype=torch.uint8).expand(-1, 3, 32, 32)
    settings: Any = sampling_hyperparameters.trained(
        config, pixels, torch.zeros(count, dtype=torch.int64)
    )
    assert (settings.epochs, settings.steps) == (epochs, 0)
