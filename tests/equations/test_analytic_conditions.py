"""Conditions that clients learn through the diffusion model, stepwise against float64 NumPy.

The analytic denoiser says e = sqrt(1 - a) / v (z - sqrt(a) mu(c)). The loss of a row is the mean of
(eps - e)^2 over its D numbers, so that

    d loss / d mu = 2 / D (eps - e) sqrt(1 - a) sqrt(a) / v,

which mu, linear in c, passes on to c. The random numbers are drawn again from the seeds that the
product documents.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from client_app.learning import conditions
from client_app.methods import espresso as espresso_half
from client_app.methods import fedbip as fedbip_half
from client_app.methods import feddeo as feddeo_half
from osfl.data.load import Images
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Concepts
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, TIMESTEPS, Adam, analytic_kit, numbers
from tests.helpers.analytic_clients import (
    SHAPE,
    SIZE,
    generator,
    gradient_for_the_mean,
    images,
    job_of,
    learned_alone,
    normal,
)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    bundle = analytic_kit()
    for half in (feddeo_half, espresso_half, fedbip_half):
        monkeypatch.setattr(half, "load_kit_for_training", lambda job: bundle)
    return bundle


# ---- Images ----


def test_the_encoder_sees_minus_one_to_one() -> None:
    # 0 is -1, 255 is 1, 51 is -0.6, 204 is 0.6
    pixels = torch.tensor([0, 51, 204, 255], dtype=torch.uint8).view(4, 1, 1, 1)
    data = Images(pixels.expand(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
    (batch,) = data.batches(8)
    assert torch.allclose(batch[:, 0, 0, 0], torch.tensor([-1.0, -0.6, 0.6, 1.0]))


def test_posteriors_are_the_scaled_latents_mean_and_log_variance(kit: Kit) -> None:
    """More images than one batch; sigma f is the scaled latents' deviation, so their log-variance
    has 2 ln f more.
    """
    data = images(*[0] * 11)
    mean, logvar = conditions.posteriors(kit, data, job_of(data))
    expected, deviation = analytic.encode(data.pixels.numpy())
    np.testing.assert_allclose(numbers(mean), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(logvar), 2 * np.log(deviation), rtol=1e-5, atol=1e-6)


# ---- Descriptions ----


@pytest.mark.parametrize("tokens", ["each", "all"])
@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_feddeos_descriptions_are_adams_whole_way(kit: Kit, at_once: int, tokens: str) -> None:
    """Classes with 5, 2 and 1 images in batches of 2: 12, 4 and 4 steps, some of one image. One
    vector for all tokens goes by the sum of their gradients.
    """
    data = images(2, 0, 2, 2, 3, 0, 2, 2)
    job = job_of(
        data,
        method="feddeo",
        feddeo__epochs=4,
        feddeo__batch_size=2,
        feddeo__lr=0.05,
        feddeo__conditions_per_batch=at_once,
        feddeo__tokens=tokens,
    )
    payload = feddeo_half.make_payload(job)
    assert payload.classes == ("zero", "two", "three")
    mean, deviation = analytic.encode(data.pixels.numpy())
    start = numbers(analytic.prompts(kit))
    for vector, label in zip(payload.vectors, (0, 2, 3), strict=True):
        rows = data.labels.numpy() == label
        source = generator(job.config.seed, "feddeo", "client-0", CLASSES[label])
        alike = tokens == "all"
        inputs = (start[label], mean[rows], deviation[rows])
        expected = learned_alone(*inputs, 4, 2, 0.05, source, alike)
        moved = expected if alike else expected - start[label]
        assert np.abs(moved).max() > 0.05  # it went somewhere
        np.testing.assert_allclose(numbers(vector), expected, atol=2e-5)


def test_espressos_conditions_are_learned_alike(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a class's clusters over its own images, under the method's own settings and names."""
    data = images(1, 1, 1, 1, 1, 3)
    job = job_of(
        data,
        method="espresso",
        espresso__epochs=3,
        espresso__batch_size=2,
        espresso__lr=0.05,
        espresso__gmm=False,
    )
    encoder = SimpleNamespace(image_size=8)
    see = lambda pixels: pixels.float().mean(dim=(2, 3))  # noqa: E731
    monkeypatch.setattr(
        espresso_half, "load_image_encoder", lambda *args, **named: Seen(encoder.image_size, see)
    )
    clusters = [torch.tensor([0, 2, 3]), torch.tensor([1, 4])]
    monkeypatch.setattr(
        espresso_half,
        "cluster_features",
        lambda features, count: clusters if len(features) == 5 else [torch.tensor([0])],
    )
    payload = espresso_half.make_payload(job)
    mean, deviation = analytic.encode(data.pixels.numpy())
    start = numbers(analytic.prompts(kit))
    for row, number, label, rows in ((0, 0, 1, [0, 2, 3]), (0, 1, 1, [1, 4]), (1, 0, 3, [5])):
        source = generator(job.config.seed, "espresso", "client-0", f"{CLASSES[label]}/{number}")
        expected = learned_alone(start[label], mean[rows], deviation[rows], 3, 2, 0.05, source)
        np.testing.assert_allclose(numbers(payload.conditions[row, number]), expected, atol=2e-5)


class Seen:
    """An image encoder by a function."""

    def __init__(self, image_size: int, see: Any):
        self.image_size = image_size
        self.see = see

    def fit(self, picture: torch.Tensor) -> torch.Tensor:
        return picture

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.see(pixels)


# ---- What the UNet is told ----


def implied_noise(kit: Kit, x0: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(t, eps) of every row that the UNet was given: its z_t at the level of the t that it was
    told, where x0 is known.
    """
    unet: Any = kit.unet
    z = np.concatenate([numbers(call[0]) for call in unet.calls])
    t = np.concatenate([call[1].numpy() for call in unet.calls])
    a = analytic.alphas_cumprod()[t].reshape(-1, 1, 1, 1)
    return t, (z - np.sqrt(a) * x0) / np.sqrt(1 - a)


def assert_noised_at_the_told_timesteps(kit: Kit, x0: np.ndarray, told: int) -> None:
    """z_t is sqrt(a_t) x0 + sqrt(1 - a_t) eps, with standard normal eps at every t; t is uniform.

    Of n numbers, the mean is within 4 / sqrt(n) of 0 and the deviation within 4 / sqrt(2 n) of 1.
    Of `told` timesteps a bin of 1/20 has told/20 within 4 sqrt(told / 20); with 20 T timesteps, one
    of them is never drawn with probability T e^-20.
    """
    t, noise = implied_noise(kit, x0)
    assert len(t) == told >= 20 * TIMESTEPS
    for tenth in range(10):
        noise_of_tenth = noise[t * 10 // TIMESTEPS == tenth]
        assert abs(noise_of_tenth.mean()) < 4 / np.sqrt(noise_of_tenth.size), tenth
        assert abs(noise_of_tenth.std() - 1) < 4 / np.sqrt(2 * noise_of_tenth.size), tenth
        # the image is no part of it
        share = (noise_of_tenth * x0).mean() / (x0**2).mean()
        assert abs(share) < 4 / np.sqrt(noise_of_tenth.size * (x0**2).mean()), tenth
    counts = np.bincount(t * 20 // TIMESTEPS, minlength=20)
    assert np.abs(counts - told / 20).max() < 4 * np.sqrt(told / 20)
    assert set(t.tolist()) == set(range(TIMESTEPS))


def one_known_latent(count: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Posteriors of `count` images that are all one latent without deviation, and that latent."""
    x0 = torch.linspace(-2, 3, SIZE, dtype=torch.float64).view(1, *SHAPE)
    return x0.repeat(count, 1, 1, 1), torch.full((count, *SHAPE), -200.0), numbers(x0)


def test_conditions_are_learned_at_the_unets_timesteps(kit: Kit) -> None:
    mean, logvar, x0 = one_known_latent(500)
    job = job_of(images(0), method="feddeo", feddeo__epochs=40, feddeo__batch_size=500)
    start = analytic.prompts(kit)[:1]
    conditions.train_conditions(
        kit, start, mean, logvar, [torch.arange(500)], ["zero"], job.config.feddeo, job
    )
    assert_noised_at_the_told_timesteps(kit, x0, 20_000)


def test_words_are_learned_at_the_unets_timesteps(kit: Kit) -> None:
    mean, logvar, x0 = one_known_latent(500)
    job = job_of(images(0), method="fedbip", fedbip__epochs=40, fedbip__batch_size=500)
    owner = torch.zeros(500, dtype=torch.int64)
    fedbip_half.learn_words(kit, ["zero"], owner, mean, logvar, job)
    assert_noised_at_the_told_timesteps(kit, x0, 20_000)


def test_latents_are_drawn_from_their_posteriors(kit: Kit) -> None:
    """At a low level z_t is x0 but for eps: 20,000 draws about mean 3 with log-variance ln 4 have
    deviation 2.
    """
    count = 500
    mean = torch.full((count, *SHAPE), 3.0, dtype=torch.float64)
    logvar = torch.full((count, *SHAPE), float(np.log(4.0)))
    job = job_of(images(0), method="feddeo", feddeo__epochs=40, feddeo__batch_size=count)
    conditions.train_conditions(
        kit,
        analytic.prompts(kit)[:1],
        mean,
        logvar,
        [torch.arange(count)],
        ["zero"],
        job.config.feddeo,
        job,
    )
    unet: Any = kit.unet
    z = np.concatenate([numbers(call[0]) for call in unet.calls])
    t = np.concatenate([call[1].numpy() for call in unet.calls])
    a = analytic.alphas_cumprod()[t].reshape(-1, 1, 1, 1)
    # z_t about sqrt(a) 3 has variance 4 a + 1 - a
    scaled = (z - np.sqrt(a) * 3) / np.sqrt(4 * a + 1 - a)
    assert abs(scaled.mean()) < 4 / np.sqrt(scaled.size)
    assert abs(scaled.std() - 1) < 4 / np.sqrt(2 * scaled.size)
    low = scaled[t < 100]
    assert abs(low.std() - 1) < 4 / np.sqrt(2 * low.size)


# ---- FedBiP ----


def test_fedbips_words_are_adams_whole_way(kit: Kit) -> None:
    """S by every image's gradient, V by those of its class. The words begin, and stand, where the
    first prompts have them.
    """
    data = images(3, 1, 1, 3, 1, 0, 3)
    job = job_of(data, method="fedbip", fedbip__epochs=5, fedbip__batch_size=3, fedbip__lr=0.05)
    payload = fedbip_half.make_payload(job)
    assert payload.classes == ("zero", "one", "three")
    assert payload.labels.tolist() == [0, 1, 1, 1, 3, 3, 3]
    assert_posteriors(payload, data)
    mean = numbers(payload.means)
    deviation = numbers(payload.deviations)
    owner = np.array([0, 1, 1, 1, 2, 2, 2])

    source = generator(job.config.seed, "fedbip", "client-0")
    order = [torch.randperm(7, generator=source).split(3) for _ in range(5)]
    schedule = [batch.numpy() for batches in order for batch in batches]
    base, places = prompts_and_places(kit, [owner[batch] for batch in schedule])
    domain = Adam(base[0][places[0][0]], 0.05)
    words = Adam(np.stack([base[k][places[k][1]] for k in range(3)]), 0.05)
    for batch in schedule:
        t = torch.randint(TIMESTEPS, (len(batch),), generator=source).numpy()
        noise = normal(len(batch), source)
        x0 = mean[batch] + deviation[batch] * normal(len(batch), source)
        conditions = [base[k].copy() for k in owner[batch]]
        for condition, k in zip(conditions, owner[batch], strict=True):
            condition[places[k][0]] = domain.value
            condition[places[k][1]] = words.value[k]
        back = gradient_for_the_mean(
            x0, noise, t, np.concatenate([analytic.mu(c[None]) for c in conditions])
        )
        for_domain = np.zeros_like(domain.value)
        for_words = np.zeros_like(words.value)
        for condition, row, k in zip(conditions, back, owner[batch], strict=True):
            gradient = analytic.mu_backward(row[None], len(condition))[0]
            for_domain += gradient[places[k][0]]
            for_words[k] += gradient[places[k][1]]
        domain.step(for_domain)
        words.step(for_words)
    assert np.abs(domain.value - base[0][places[0][0]]).max() > 0.05
    np.testing.assert_allclose(numbers(payload.domain), domain.value, atol=2e-5)
    np.testing.assert_allclose(numbers(payload.vectors), words.value, atol=2e-5)


def assert_posteriors(payload: Concepts, data: Images) -> None:
    """Mean and deviation of every image, class by class, as the client's pixels say."""
    order = np.argsort(data.labels.numpy(), kind="stable")
    mean, deviation = analytic.encode(data.pixels.numpy()[order])
    np.testing.assert_allclose(numbers(payload.means), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numbers(payload.deviations), deviation, rtol=1e-5, atol=1e-6)


def prompts_and_places(
    kit: Kit, owners: list[np.ndarray]
) -> tuple[dict[int, np.ndarray], dict[int, tuple[int, int]]]:
    """Every class's condition as it was first given to the UNet, and the two places that changed
    later: S comes before V.
    """
    unet: Any = kit.unet
    base: dict[int, np.ndarray] = {}
    changed: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    assert len(unet.calls) == len(owners)
    for (_, _, c), owner in zip(unet.calls, owners, strict=True):
        for condition, k in zip(numbers(c), owner.tolist(), strict=True):
            first = base.setdefault(k, condition)
            changed[k] |= set(np.flatnonzero(np.abs(condition - first).max(axis=1)).tolist())
    # what a class's first condition has of S was learned since, unless it was in the first batch
    prompts = {k: np.array(condition) for k, condition in base.items()}
    places = {}
    for k, positions in changed.items():
        s, v = sorted(positions)
        places[k] = (s, v)
    begin = numbers(unet.calls[0][2])[0][places[owners[0][0]][0]]
    for k, (s, _) in places.items():
        prompts[k][s] = begin
    return prompts, places
