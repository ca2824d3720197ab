"""DP-SGD of classifiers: step by step against NumPy, and the least noise against the definition."""

import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from client_app.app import client_settings
from client_app.methods import classifier
from client_app.privacy import dp_sgd
from client_app.privacy.dp_sgd import clipped_sum, fit_private, per_image_gradients, poisson_sample
from client_app.privacy.mechanisms import noise_multiplier
from osfl.config import ConfigError, NodeConfig, RunConfig, parse_run_config
from osfl.models.classifiers import MEAN, STD, ClassifierError, new_classifier
from osfl.util.costs import FlopMeter
from osfl.util.pixels import LazyPixels
from tests.helpers.client_jobs import images, job_of
from tests.helpers.gaussian_mechanism import least_sigma
from tests.helpers.settings import quick

CPU = torch.device("cpu")
SIDE = 3
SIZE = 3 * SIDE * SIDE
COUNT = 10


class Words:
    """Random bytes that can be had again."""

    def __init__(self, seed: int = 0) -> None:
        self.source = np.random.default_rng(seed)

    def __call__(self, count: int) -> bytes:
        # NumPy would draw for no bytes, too
        return self.source.bytes(count) if count else b""

    def whole(self, count: int) -> np.ndarray:
        return np.frombuffer(self(8 * count), dtype=np.uint64)

    def even(self, count: int) -> np.ndarray:
        return self.whole(count).astype(np.float64) / 2**64

    def normal(self, count: int) -> np.ndarray:
        """A sign, and 63 bits of the tail beyond the number."""
        words = self.whole(count)
        signs = np.where(words % 2 == 1, 1, -1)
        return signs * stats.norm.isf((words // 2 + 0.5) / 2.0**64)


def settings(**overrides: object) -> RunConfig:
    defaults = {
        "epsilon": 2.0,
        "delta": 1e-3,
        "clip_gradient": 0.4,
        "classifier__steps": 4,
        "classifier__batch_size": 4,
        "classifier__lr": 0.3,
        "classifier__momentum": 0.5,
        "classifier__weight_decay": 0.02,
        "classifier__label_smoothing": 0.2,
    }
    return parse_run_config(quick(method="local", **{**defaults, **overrides}))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (COUNT, 3, SIDE, SIDE), generator=source, dtype=torch.uint8)
    return pixels, torch.arange(COUNT) % 4


def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 4))
    with torch.no_grad():
        model[1].weight.copy_(torch.linspace(-0.1, 0.1, 4 * SIZE).view(4, SIZE))
        model[1].bias.copy_(torch.tensor([0.1, 0.0, -0.1, 0.2]))
    return model


@pytest.mark.slow
def test_the_training_is_algorithm_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear classifier: dL/dlogits is the softmax less the smoothed label, and dL/dW its outer
    product with the image. Four steps of each image with 0.4, in threes; the mean is over four.
    """
    monkeypatch.setattr(dp_sgd, "PARALLEL_IMAGES", 3)
    config = settings()
    pixels, labels = data()
    model = fit_private(
        linear(), pixels, labels, config, CPU, FlopMeter(), lambda *_: None, Words()
    )
    chance = Words()
    shares = pixels.numpy() / 255
    x = (shares - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    x = x.reshape(COUNT, SIZE)
    targets = 0.8 * np.eye(4)[labels.numpy()] + 0.2 / 4
    first = linear()
    weight = first[1].weight.detach().double().numpy().copy()
    bias = first[1].bias.detach().double().numpy().copy()
    velocity = [np.zeros_like(weight), np.zeros_like(bias)]
    sigma = 0.4 * noise_multiplier(0.4, 4, 2.0, 1e-3)
    batch_sizes = []
    cut = 0
    for step in range(4):
        rows = np.flatnonzero(chance.even(COUNT) < 0.4)
        batch_sizes.append(len(rows))
        logits = x[rows] @ weight.T + bias
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        slope = p - targets[rows]
        of_weight = slope[:, :, None] * x[rows][:, None, :]
        norms = np.sqrt((of_weight**2).sum(axis=(1, 2)) + (slope**2).sum(axis=1))
        factor = np.minimum(1, 0.4 / norms)
        cut += int((factor < 1).sum())
        total = [(of_weight * factor[:, None, None]).sum(axis=0), (slope * factor[:, None]).sum(0)]
        for index, (value, gradient) in enumerate(zip((weight, bias), total, strict=True)):
            noise = sigma * chance.normal(value.size).reshape(value.shape)
            update = (gradient + noise) / 4 + 0.02 * value
            velocity[index] = update if step == 0 else 0.5 * velocity[index] + update
            value -= 0.3 * velocity[index]
    # Some steps take other numbers of images than four, one more than a part's three
    assert len(set(batch_sizes)) > 1
    assert max(batch_sizes) > 3
    assert cut > 3
    # Four sums with noise are rounded to 2^-14 of its deviation
    slack = 4 * 0.3 * sigma / 2**14 / 4
    np.testing.assert_allclose(model[1].weight.detach(), weight, rtol=1e-4, atol=slack)
    np.testing.assert_allclose(model[1].bias.detach(), bias, rtol=1e-4, atol=slack)


@pytest.mark.slow
def test_few_images_are_all_taken_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 65 is more than there are; epochs are steps then."""
    batch_sizes: list[int] = []
    real = dp_sgd.poisson_sample

    def kept(count: int, rate: float, chance: Any) -> torch.Tensor:
        rows = real(count, rate, chance)
        batch_sizes.append(len(rows))
        return rows

    monkeypatch.setattr(dp_sgd, "poisson_sample", kept)
    config = settings(classifier__batch_size=65, classifier__steps=0, classifier__epochs=3)
    fit_private(linear(), *data(), config, CPU, FlopMeter(), lambda *_: None)
    assert batch_sizes == [COUNT] * 3
    # A pass over ten in batches of four is three steps
    batch_sizes.clear()
    config = settings(classifier__steps=0, classifier__epochs=2)
    fit_private(linear(), *data(), config, CPU, FlopMeter(), lambda *_: None)
    assert len(batch_sizes) == 6


def test_an_image_is_taken_with_its_rate() -> None:
    rows = poisson_sample(40_000, 0.25)
    # Four standard errors
    assert abs(len(rows) - 10_000) < 4 * math.sqrt(40_000 * 0.25 * 0.75)
    assert not torch.equal(rows, poisson_sample(40_000, 0.25))
    assert poisson_sample(100, 1.0).tolist() == list(range(100))
    # A quarter is not below a quarter; the largest number is below 1
    words = np.array([2**62, 2**62 - 2**12, 2**64 - 1, 0], dtype=np.uint64)
    assert poisson_sample(4, 0.25, lambda _: words.tobytes()).tolist() == [1, 3]
    assert poisson_sample(4, 1.0, lambda _: words.tobytes()).tolist() == [0, 1, 2, 3]


def test_a_gradient_is_cut_over_all_tensors_together() -> None:
    """Norms 13 = |(3, 4), 12|, 2, and two that are none; cut to 6.5."""
    of_each = [
        torch.tensor([[3.0, 4.0], [0, 2], [math.nan, 1], [1, 1]]),
        torch.tensor([[[12.0]], [[0]], [[1]], [[math.inf]]]),
    ]
    first, second = clipped_sum(of_each, 6.5)
    assert first.tolist() == [1.5, 4.0]
    assert second.tolist() == [[6.0]]
    none = clipped_sum([torch.zeros(2, 3)], 6.5)
    assert none[0].tolist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (8.0, 1e-4)])
@pytest.mark.parametrize("steps", [1, 9])
def test_without_sampling_the_noise_is_balle_and_wangs(
    epsilon: float, delta: float, steps: int
) -> None:
    """One image moves each of the sums by 2, and their squares add up."""
    expected = least_sigma(epsilon, delta) * 2 * math.sqrt(steps)
    multiplier = noise_multiplier(1.0, steps, epsilon, delta)
    assert expected * 0.999 < multiplier < expected * 1.005


def hockey_stick(sigma: float, rate: float, epsilon: float) -> float:
    """The delta of one step, of an image at 1 that one at -1 takes the place of: the integral of
    what one density has above exp(epsilon) times the other.
    """

    def more(x: float) -> float:
        there = (1 - rate) * stats.norm.pdf(x, 0, sigma) + rate * stats.norm.pdf(x, 1, sigma)
        neighbor = (1 - rate) * stats.norm.pdf(x, 0, sigma) + rate * stats.norm.pdf(x, -1, sigma)
        return float(max(0.0, there - math.exp(epsilon) * neighbor))

    far = 12 * sigma + 1
    return float(integrate.quad(more, -far, far, limit=500)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "epsilon", "delta"), [(0.3, 1.0, 1e-4), (0.05, 0.5, 1e-3)])
def test_with_sampling_the_noise_is_the_least_that_the_definition_lets(
    rate: float, epsilon: float, delta: float
) -> None:
    multiplier = noise_multiplier(rate, 1, epsilon, delta)
    assert hockey_stick(multiplier, rate, epsilon) <= delta * 1.001
    assert hockey_stick(multiplier * 0.98, rate, epsilon) > delta
    # Far less than without it
    assert multiplier < 0.7 * noise_multiplier(1.0, 1, epsilon, delta)


@pytest.mark.slow
def test_more_steps_need_more_noise() -> None:
    once, often = (noise_multiplier(0.1, steps, 1.0, 1e-5) for steps in (10, 1000))
    assert often > 3 * once


@pytest.mark.slow
def test_gradients_are_each_images_own() -> None:
    """A ResNet in evaluation mode, where BatchNorm mixes nothing, has the gradients of single
    images.
    """
    config = parse_run_config(quick(method="local", classifier__init="none"))
    model = new_classifier(config.classifier, 10, "", 0).eval()
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, 3, 32, 32, generator=draw)
    labels = torch.tensor([0, 3, 9])
    of_each = per_image_gradients(model, pixels, labels, 0.1)
    names = [name for name, _ in model.named_parameters()]
    assert len(of_each) == len(names)
    for row in range(3):
        model.zero_grad()
        loss = nn.functional.cross_entropy(
            model(pixels[row : row + 1]), labels[row : row + 1], label_smoothing=0.1
        )
        loss.backward()
        for g, (name, p) in zip(of_each, model.named_parameters(), strict=True):
            scale = float(p.grad.abs().max()) + 1e-6
            torch.testing.assert_close(g[row], p.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


# ---- On a client ----


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all", "head"])
def test_a_private_classifier_keeps_the_initial_statistics(tiny_kit: Path, trained: str) -> None:
    """And the head alone where that is asked for; its noise is of the operating system, not of a
    seed. FLOPs are counted.
    """
    overrides = {"classifier__trained": trained, "classifier__steps": 2, "epsilon": 1.0}
    job = job_of(tiny_kit, images(3, 3, 8, 8), method="local", **overrides)
    first, second = (classifier.make_payload(job).state for _ in range(2))
    initial = new_classifier(job.config.classifier, 10, job.kit, job.config.seed).state_dict()
    learned = {
        name for name, _ in new_classifier(job.config.classifier, 10, job.kit, 0).named_parameters()
    }
    if trained == "head":
        learned = {"fc.weight", "fc.bias"}
    for name, value in first.items():
        if name in learned:
            assert not torch.equal(value, second[name])
        else:
            assert torch.equal(value, initial[name])
    assert job.meter.total > 0


@pytest.mark.parametrize("method", ["local", "fedlmg", "fedcado"])
def test_mixed_images_have_no_gradient_of_their_own(method: str) -> None:
    mixed = {"method": method, "classifier__mixing": "mixup"}
    parse_run_config(quick(**mixed))
    with pytest.raises(ConfigError, match=r"classifier.mixing = 'mixup': must be none with"):
        parse_run_config(quick(**mixed, epsilon=1.0))
    site = NodeConfig(partition_id=0, num_partitions=2, epsilon=1.0)
    with pytest.raises(ConfigError, match="node-config epsilon = 1: this site .* 'mixup'"):
        client_settings(parse_run_config(quick(**mixed)), site)
    # Clients do not train it where they train nothing
    parse_run_config(quick(method="feddeo", classifier__mixing="mixup", epsilon=1.0))


@pytest.mark.slow
def test_a_training_that_diverges_is_named() -> None:
    """Weights that decay by more than they are, a hundred times."""
    config = settings(classifier__lr=100.0, classifier__weight_decay=1.0, classifier__steps=50)
    model = linear()
    with pytest.raises(ClassifierError, match=r"training diverged; lower classifier.lr = 100"):
        fit_private(model, *data(), config, CPU, FlopMeter(), lambda *_: None)


def test_noisy_gradients_have_no_bits_of_the_exact_ones() -> None:
    """Whole multiples of 2^-14 of the deviation, here 1, which a sum of floats would not be."""
    layer = nn.Linear(100, 100)
    parameters = list(layer.parameters())
    sums = [torch.rand(p.shape) for p in parameters]
    dp_sgd._set_noisy_gradients(parameters, sums, 1.0, 4.0, Words())
    multiples = torch.cat([p.grad.flatten() for p in parameters]) * 4 * 2**14  # type: ignore[union-attr]
    assert torch.equal(multiples, multiples.round())
    assert len(multiples.unique()) > 1000


@pytest.mark.slow
def test_an_average_of_the_weights_ends_the_training() -> None:
    """With decay 0.99 it hardly moves, while the last weights do."""
    config = settings(classifier__ema=0.99, classifier__lr=0.1)
    averaged = fit_private(linear(), *data(), config, CPU, FlopMeter(), lambda *_: None, Words())
    plain = settings(classifier__lr=0.1)
    last = fit_private(linear(), *data(), plain, CPU, FlopMeter(), lambda *_: None, Words())
    first = linear()
    moved = float((averaged[1].weight - first[1].weight).norm())
    assert 0 < moved < float((last[1].weight - first[1].weight).norm()) * 0.9


@pytest.mark.slow
def test_the_learning_rate_has_its_course(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine to zero moves less than a constant rate, by the same noise."""
    ends = []
    for schedule in ("constant", "cosine"):
        config = settings(classifier__schedule=schedule, classifier__warm_up=0.0)
        model = fit_private(linear(), *data(), config, CPU, FlopMeter(), lambda *_: None, Words())
        ends.append(float((model[1].weight - linear()[1].weight).norm()))
    assert ends[1] < 0.9 * ends[0]


@pytest.mark.slow
def test_each_image_is_augmented_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stream for all, the second image would show whether the first is in the batch."""
    batches: list[torch.Tensor] = []
    real = dp_sgd.per_image_gradients

    def kept(model: nn.Module, images: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        batches.append(images)
        return real(model, images, *more)

    def white(augment: Any, image: torch.Tensor, chance: Any) -> torch.Tensor:
        assert chance is secrets.token_bytes
        return torch.full_like(image, 255)

    monkeypatch.setattr(dp_sgd, "per_image_gradients", kept)
    monkeypatch.setattr(dp_sgd, "augment_separately", white)
    config = settings(classifier__augmentation="affine-color")
    fit_private(linear(), *data(), config, CPU, FlopMeter(), lambda *_: None)
    every = torch.cat(batches)
    assert len(every) > 5
    # White in ImageNet's mean and deviation
    assert torch.allclose(every[:, 0], torch.tensor((1 - MEAN[0]) / STD[0]))


def test_an_image_is_augmented_by_chance_of_its_own() -> None:
    """Equally many random bytes, whatever the state of torch's generator, which does not change."""
    image = torch.arange(27).view(3, 3, 3).float()
    words = np.array([10, 10, 20], dtype=">u8").tobytes()
    asked = iter([words[:8], words[8:16], words[16:]])

    def noise(image: torch.Tensor) -> torch.Tensor:
        return image + torch.rand(())

    torch.manual_seed(1)
    state = torch.get_rng_state()
    outputs = [
        dp_sgd.augment_separately(noise, image, lambda count: next(asked)[:count]) for _ in range(3)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    first, second = (dp_sgd.augment_separately(noise, image, secrets.token_bytes) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", ["none", "affine-color"])
def test_a_step_may_take_no_image(monkeypatch: pytest.MonkeyPatch, augmentation: str) -> None:
    """Then there is noise alone. Images that are decoded when asked for know no empty part."""
    none = torch.empty(0, dtype=torch.int64)
    monkeypatch.setattr(dp_sgd, "poisson_sample", lambda *_: none)
    pixels, labels = data()
    config = settings(classifier__augmentation=augmentation)
    for some in (pixels, LazyPixels(lambda row: pixels[row], COUNT)):
        model = fit_private(linear(), some, labels, config, CPU, FlopMeter(), lambda *_: None)
        assert not torch.equal(model[1].weight, linear()[1].weight)


@pytest.mark.slow
def test_flops_do_not_tell_how_many_images_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = set()
    for rows in ([0], [0, 1, 2, 3, 4, 5]):
        monkeypatch.setattr(dp_sgd, "poisson_sample", lambda *_, rows=rows: torch.tensor(rows))
        meter = FlopMeter()
        fit_private(linear(), *data(), settings(), CPU, meter, lambda *_: None)
        totals.add(meter.total)
    (total,) = totals
    # Of one image: forward and the weight's gradient are 2 x 27 x 4 each, and four steps of four
    assert total == 4 * 4 * 2 * (2 * SIZE * 4)


def test_the_norm_of_many_numbers_is_not_too_small() -> None:
    """A ResNet-18's largest tensor has as many numbers; in 32 bits their norm is 4e-5 too small."""
    many = torch.randn(1, 2_400_000, generator=torch.Generator().manual_seed(0))
    (cut,) = clipped_sum([many], 1.0)
    assert float(cut.double().norm()) <= 1 + 1e-5
