"""The training recipe: schedules, smoothing, mixing, averages and augmentation, by hand."""

from dataclasses import replace
from itertools import pairwise
from math import cos, pi

import numpy as np
import pytest
import torch
from torch import nn

from osfl.config import ConfigError, parse_run_config
from osfl.models.training import ExtraLoss, _pixel_device, fit, local_recipe, new_augmentation
from osfl.util.pixels import LazyPixels
from tests.helpers.settings import plain_classifier, quick

CPU = torch.device("cpu")
STEPS = 8


class Still(nn.Module):
    """Logits that are nought whatever it is given: the loss has no gradient; and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(images), 2) + 0 * self.number


def moved(places: list[float], in_a_round: bool = False, **settings: object) -> Still:
    """A `Still` after `STEPS` steps, its number pulled down by 1 in each: by the learning rate.

    Args:
        places: gets where the number was before each step.
        in_a_round: as local training in a round of FedAvg.
    """
    model = Still()

    def pull(model: nn.Module) -> None:
        number = next(model.parameters())
        places.append(number.item())
        number.grad = torch.ones(())

    pixels = torch.zeros(2 * STEPS, 3, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(2 * STEPS, dtype=torch.long)
    config = plain_classifier(epochs=1, batch_size=2, lr=0.5, **settings)
    recipe = local_recipe(config, 1) if in_a_round else config
    return fit(model, pixels, labels, recipe, 0, CPU, extra=ExtraLoss(penalty=pull))


def rates(model: Still, places: list[float]) -> list[float]:
    """Return how far every step went, in the learning rate that the settings give."""
    path = [*places, model.number.item()]
    return [2 * (before - after) for before, after in pairwise(path)]


# Two of eight steps go up: 1/3, 2/3; then (1 + cos(pi k / 6)) / 2.
COSINE = [1 / 3, 2 / 3, *((1 + cos(pi * k / 6)) / 2 for k in range(6))]
# From 1/25 up to the step before a quarter of eight, then down to 1/25 of a ten-thousandth.
LOWEST = 1 / 25 / 1e4
ONE_CYCLE = [
    1 / 25,
    1,
    *(LOWEST + (1 - LOWEST) * (1 + cos(pi * k / 6)) / 2 for k in range(1, 7)),
]


@pytest.mark.parametrize(
    ("schedule", "warm_up", "expected"),
    [
        ("constant", 0.25, [1.0] * STEPS),
        ("cosine", 0.0, [(1 + cos(pi * k / STEPS)) / 2 for k in range(STEPS)]),
        ("cosine", 0.25, COSINE),
        ("one-cycle", 0.25, ONE_CYCLE),
    ],
)
def test_the_learning_rate_takes_its_course(
    schedule: str, warm_up: float, expected: list[float]
) -> None:
    places: list[float] = []
    model = moved(places, schedule=schedule, warm_up=warm_up)
    assert rates(model, places) == pytest.approx(expected, abs=1e-5)


def test_in_a_round_it_is_constant() -> None:
    """And the last weights are sent, not their average."""
    places: list[float] = []
    model = moved(places, in_a_round=True, schedule="one-cycle", ema=0.75)
    assert rates(model, places) == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert model.number.item() == pytest.approx(-0.5 * STEPS)


def test_the_average_of_the_weights_is_what_a_training_ends_with() -> None:
    """m_1 = w_1, m_t = d m_(t-1) + (1 - d) w_t, of the weights after each step."""
    model = moved([], ema=0.75)
    average = -0.5
    for step in range(2, STEPS + 1):
        average = 0.75 * average + 0.25 * (-0.5 * step)
    assert model.number.item() == pytest.approx(average, abs=1e-6)


class Logits(nn.Module):
    """The mean of an image, times a weight for each of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.seen: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = images.mean(dim=(1, 2, 3))
        if self.training:
            self.seen.append(means)
        return means[:, None] * self.weight


def one_step(model: Logits, **settings: object) -> np.ndarray:
    """The gradient of the weight in one step on a black image of class 0 and a white one of 2."""
    before = model.weight.detach().clone()
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    pixels[1] = 255
    config = plain_classifier(epochs=1, batch_size=2, lr=1.0, **settings)
    fit(model, pixels, torch.tensor([0, 2]), config, 0, CPU)
    return (before - model.weight.detach()).numpy()


def gradient(means: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean cross-entropy of `Logits`: the mean of x (softmax(x w) -
    target).
    """
    logits = means[:, None] * np.array([0.3, -0.2, 0.1])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return (means[:, None] * (shares - targets)).mean(axis=0)


def test_smoothed_labels_are_spread_over_all_classes() -> None:
    """(1 - s) of the label and s / C of each of the C classes."""
    model = Logits()
    moved_by = one_step(model, label_smoothing=0.3)
    means = model.seen[0].numpy()
    labels = np.where(means[:, None] < 0, np.eye(3)[0], np.eye(3)[2])
    expected = gradient(means, 0.7 * labels + 0.1)
    assert moved_by == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
def test_mixed_images_have_mixed_labels(mixing: str) -> None:
    """A label has the share of its image, which the mixed images' means show."""
    black, white = one_mean(0), one_mean(255)
    model = Logits()
    moved_by = one_step(model, mixing=mixing)
    means = model.seen[0].numpy()
    whites = (means - black) / (white - black)
    assert whites.sum() == pytest.approx(1, abs=1e-5)
    assert 0.01 < whites.min() < 0.49
    targets = (1 - whites)[:, None] * np.eye(3)[0] + whites[:, None] * np.eye(3)[2]
    assert moved_by == pytest.approx(gradient(means, targets), abs=1e-6)


def one_mean(value: int) -> float:
    """Return what `Logits` sees of an image of one gray."""
    model = Logits()
    pixels = torch.full((2, 3, 8, 8), value, dtype=torch.uint8)
    config = plain_classifier(epochs=1, batch_size=2, lr=1.0)
    fit(model, pixels, torch.tensor([0, 1]), config, 0, CPU)
    return model.seen[0][0].item()


def picture() -> torch.Tensor:
    """A bright corner at the upper left, fading."""
    ramp = torch.linspace(255, 0, 32)
    return (ramp[:, None] * ramp / 255).round().to(torch.uint8).expand(3, 32, 32).contiguous()


def mirrored(image: torch.Tensor) -> bool:
    """Return whether the bright corner is at the right."""
    return bool(image[:, :, 16:].float().mean() > image[:, :, :16].float().mean())


@pytest.mark.parametrize(
    ("name", "flips"),
    [("flip-crop", True), ("affine-color", False), ("randaugment", True), ("trivialaugment", True)],
)
def test_an_image_is_another_each_time(name: str, flips: bool) -> None:
    augment = new_augmentation(name, 32)
    assert augment is not None
    torch.manual_seed(0)
    images = [augment(picture()) for _ in range(40)]
    assert {(image.dtype, tuple(image.shape)) for image in images} == {(torch.uint8, (3, 32, 32))}
    assert len({image.numpy().tobytes() for image in images}) > 20
    assert any(mirrored(image) for image in images) == flips


def test_a_flip_and_a_crop_invent_no_colour() -> None:
    """Shifted by an eighth at most: the middle of the image is always in it."""
    augment = new_augmentation("flip-crop", 32)
    image = picture()
    image[:, 14:18, 14:18] = torch.tensor([7, 8, 9])[:, None, None]
    colors = set(image.unique().tolist())
    torch.manual_seed(0)
    for _ in range(20):
        variant = augment(image)  # type: ignore[misc]
        assert set(variant.unique().tolist()) <= colors
        assert int((variant[0] == 7).sum()) >= 16


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(196, 3)
    )


def pixels_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (10, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(10) % 3


def trained(pixels: torch.Tensor | LazyPixels | None = None, **settings: object) -> torch.Tensor:
    images, labels = pixels_and_labels()
    config = plain_classifier(**{"epochs": 3, "batch_size": 4, "lr": 0.05, **settings})
    model = fit(network(), images if pixels is None else pixels, labels, config, 0, CPU)
    return torch.cat([value.flatten().float() for value in model.state_dict().values()])


FULL = {
    "schedule": "cosine",
    "warm_up": 0.2,
    "label_smoothing": 0.1,
    "augmentation": "trivialaugment",
    "mixing": "cutmix",
    "ema": 0.9,
}


def test_every_part_of_the_recipe_counts_and_is_seeded() -> None:
    """Each changes the weights, and the same seed gives the same ones."""
    plain = trained()
    for key in FULL:
        assert not torch.equal(trained(**{key: FULL[key]}), plain) or key == "warm_up", key
    assert not torch.equal(trained(**FULL), trained(**{**FULL, "warm_up": 0.0}))
    torch.manual_seed(5)
    again = trained(**FULL)
    assert torch.equal(trained(**FULL), again)


def test_steps_take_the_place_of_epochs() -> None:
    """Three passes over ten images in batches of four are nine steps; the course of the learning
    rate is as long.
    """
    for settings in ({}, {"schedule": "one-cycle", "warm_up": 0.3}):
        in_steps = trained(steps=9, **{"epochs": 1, **settings})
        assert torch.equal(in_steps, trained(**settings))
        assert not torch.equal(trained(steps=8, **settings), in_steps)


def test_steps_are_counted_without_batches_of_one_and_not_in_a_round() -> None:
    pixels, labels = pixels_and_labels()
    reports: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        reports.append((done, total))

    for count, per_pass in ((9, 2), (10, 3), (8, 2), (3, 1)):
        for steps, epochs, expected in ((7, None, 7), (1, None, 1), (7, 3, 3 * per_pass)):
            config = plain_classifier(epochs=1, batch_size=4, lr=0.01, steps=steps)
            part = pixels[:count], labels[:count]
            recipe = local_recipe(config, epochs) if epochs else config
            fit(network(), *part, recipe, 0, CPU, progress=note)
            assert reports[-1] == (expected, expected)


def test_images_that_are_decoded_ahead_are_the_same_ones() -> None:
    pixels, _ = pixels_and_labels()
    asked: list[int] = []

    def read(row: int) -> torch.Tensor:
        asked.append(row)
        return pixels[row]

    lazy = LazyPixels(read, len(pixels))
    assert torch.equal(trained(lazy, **FULL), trained(**FULL))
    # And no image more often than it is trained on, but for a look at its size and the classes
    assert len(asked) <= 30 + 3


def test_images_of_a_batch_are_augmented_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[torch.Tensor] = []

    def watched(model: nn.Module, given: tuple[torch.Tensor]) -> None:
        batches.append(given[0])

    model = network()
    model.register_forward_pre_hook(watched)
    pixels = picture()[:, ::2, ::2].repeat(8, 1, 1, 1)
    config = plain_classifier(epochs=1, batch_size=8, lr=0.01, augmentation="flip-crop")
    fit(model, pixels, torch.arange(8) % 3, config, 0, CPU)
    assert len({image.numpy().tobytes() for image in batches[0]}) > 4


@pytest.mark.parametrize("method", ["fedlmg", "fedcado"])
def test_teachers_bear_no_mixed_images(method: str) -> None:
    config = quick(method=method)
    config |= {f"{method}.strategies": "ft,md", "global-model.mixing": "mixup"}
    with pytest.raises(ConfigError, match=r"global-model.mixing = 'mixup': must be none with"):
        parse_run_config(config)
    parse_run_config({**config, f"{method}.strategies": "ft"})
    parse_run_config({**config, "global-model.mixing": "none", "classifier.mixing": "mixup"})


def test_the_recipe_reaches_clients_and_the_global_model() -> None:
    config = parse_run_config(
        quick(classifier__augmentation="flip-crop", global_model__schedule="cosine")
    )
    assert config.classifier.augmentation == "flip-crop"
    assert config.global_model == replace(config.global_model, schedule="cosine")


def test_batch_norms_statistics_are_averaged_too() -> None:
    """m_1 = v_1, m_t = d m_(t-1) + (1 - d) v_t, of the mean of the first channel's inputs."""
    images, labels = pixels_and_labels()
    passed: list[float] = []

    def note(norm: nn.Module, given: object, made: object) -> None:
        passed.append(norm.running_mean[0].item())  # type: ignore[union-attr, index]

    model = network()
    model[1].register_forward_hook(note)
    config = plain_classifier(epochs=2, batch_size=4, lr=0.05, ema=0.75)
    fit(model, images, labels, config, 0, CPU)
    average = passed[0]
    for value in passed[1:]:
        average = 0.75 * average + 0.25 * value
    mean = model[1].running_mean[0].item()  # type: ignore[index]
    assert mean == pytest.approx(average, abs=1e-6)


@pytest.mark.parametrize(
    ("free", "augmentation", "expected"),
    [(384, "none", "cuda"), (383, "none", "cpu"), (10**6, "flip-crop", "cpu")],
)
def test_a_gpu_holds_images_in_half_of_its_free_memory(
    free: int, augmentation: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image has 192 bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    config = plain_classifier(augmentation=augmentation)
    assert _pixel_device(pixels, config, torch.device("cuda")).type == expected
    assert _pixel_device(pixels, config, CPU) == CPU
