"""Whole sampling runs with the analytic denoiser, against what its closed form says.

One DDIM step from a to a' multiplies the distance to the mean and keeps the mean. With
u = z - sqrt(a) mu and v = a s^2 + 1 - a,

    eps* = sqrt(1 - a) u / v,    x0hat = mu + sqrt(a) s^2 u / v,
    u'   = sqrt(a') (x0hat - mu) + sqrt(1 - a') eps*
         = u (sqrt(a a') s^2 + sqrt((1 - a)(1 - a'))) / v.

eps* is linear in mu, so guidance by scales g_i is guidance towards mu_0 + sum_i g_i (mu_i - mu_0).
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMInverseScheduler

from osfl.config import RunConfig, parse_run_config
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, ddim_step
from osfl.payload.kinds import Concepts, Mixtures
from server_app.methods import espresso, fedbip, feddeo, feddisc, prompts_only
from server_app.synthesis.plan import plan_images
from server_app.synthesis.samplers import ddim, ddim_schedule, z_sampling
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, DEVIATION, analytic_kit, numbers
from tests.helpers.analytic_sampling import (
    HELD,
    LABELS,
    PLAN,
    SHAPE,
    assert_made,
    empty_mean,
    noise_of,
)
from tests.helpers.settings import quick


def settings(**overrides: object) -> RunConfig:
    return parse_run_config(quick(**overrides))


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def step(z: np.ndarray, a: float, a_prev: float, mean: np.ndarray) -> np.ndarray:
    """One step towards N(mean, s^2), by the factor above."""
    u = z - np.sqrt(a) * mean
    factor = np.sqrt(a * a_prev) * DEVIATION**2 + np.sqrt((1 - a) * (1 - a_prev))
    return np.sqrt(a_prev) * mean + factor / analytic.variance(a) * u


def sampled(z: np.ndarray, steps: int, mean: np.ndarray) -> np.ndarray:
    """A whole DDIM run."""
    for _, a, a_prev in analytic.step_down(steps):
        z = step(z, a, a_prev, mean)
    return z


# ---- The schedule ----


def spaced(spacing: str, one: bool) -> Kit:
    """The analytic kit with another spacing of its timesteps and another last level."""
    kit = analytic_kit()
    scheduler = type(kit.scheduler).from_config(
        kit.scheduler.config, timestep_spacing=spacing, set_alpha_to_one=one
    )
    return replace(kit, scheduler=scheduler)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("steps", [2, 7, 10, 50, 61, 103, 999])
@pytest.mark.parametrize("spacing", ["linspace", "leading", "trailing"])
def test_a_step_ends_where_the_next_begins(spacing: str, steps: int, one: bool) -> None:
    """61 and 103: diffusers' trailing spacing has a step more, at t = -1."""
    rows = ddim_schedule(spaced(spacing, one), steps)
    assert len(rows) == steps
    timesteps = [t for t, _, _ in rows]
    assert timesteps == sorted(set(timesteps), reverse=True)
    a = analytic.alphas_cumprod()
    ends = [float(a_prev) for _, _, a_prev in rows]
    assert ends == pytest.approx([*a[timesteps[1:]], 1.0 if one else a[0]], rel=1e-5)
    assert [float(a_t) for _, a_t, _ in rows] == pytest.approx(a[timesteps], rel=1e-5)


@pytest.mark.parametrize("steps", [10, 50, 250])
def test_an_even_schedule_is_what_it_was(steps: int) -> None:
    """Bit for bit: t - T / steps is the next timestep where that is whole."""
    for spacing in ("leading", "trailing"):
        kit = spaced(spacing, True)
        gap = 1000 // steps
        for t, a_t, a_prev in ddim_schedule(kit, steps):
            assert torch.equal(a_t, kit.alphas_cumprod[t])
            before = kit.alphas_cumprod[t - gap] if t >= gap else torch.tensor(1.0)
            assert torch.equal(a_prev, before)


@pytest.mark.parametrize(
    ("spacing", "steps"), [("linspace", 10), ("linspace", 61), ("trailing", 61)]
)
def test_no_noise_is_left_whatever_the_spacing(spacing: str, steps: int) -> None:
    """Samples of a narrow distribution N(mu, 0.05^2) have the deviation of the closed form. With
    diffusers' fixed gap it would be 0.092 in place of 0.027 after ten steps of linspace.
    """
    kit = spaced(spacing, True)
    s = 0.05
    a = kit.alphas_cumprod.double()

    def exact(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (1 - a[t]).sqrt() / (a[t] * s**2 + 1 - a[t]) * (z - a[t].sqrt() * 3)

    # It begins about sqrt(a_T) mu, as if all of the noise had been added
    first = ddim_schedule(kit, steps)[0][0]
    samples = ddim(kit, drawn(4000, *SHAPE) + 3 * a[first].sqrt(), steps, exact)
    timesteps = [t for t in kit.scheduler.timesteps.tolist() if t >= 0]
    levels = np.array([*a[timesteps], 1.0])
    now, then = levels[:-1], levels[1:]
    factors = np.sqrt(now * then) * s**2 + np.sqrt((1 - now) * (1 - then))
    assert float(samples.std()) == pytest.approx(
        np.prod(factors / (now * s**2 + 1 - now)), rel=0.02
    )
    assert float(samples.std()) < s
    assert float(samples.mean()) == pytest.approx(3, abs=0.001)


# ---- The denoiser ----


def test_the_denoiser_by_hand() -> None:
    # a = 0.64, s = 0.7: v = 0.64 * 0.49 + 0.36 = 0.6736.
    # At z = 2 and mu = 1: eps = 0.6 / 0.6736 * (2 - 0.8) = 1.0689
    value = analytic.eps(np.array(2.0), 0.64, np.array(1.0))
    assert value == pytest.approx(0.6 / 0.6736 * 1.2)


@pytest.mark.parametrize("a", [0.95, 0.5, 0.05])
def test_the_denoiser_is_the_best_one(a: float) -> None:
    """The remaining noise has mean 0 and no correlation with z: nothing linear is better. x0, eps
    and z are jointly Gaussian, so the best prediction of all is linear.
    """
    draw = np.random.default_rng(0)
    count = 200_000
    mean = 1.5
    noise = draw.normal(size=count)
    z = np.sqrt(a) * (mean + DEVIATION * draw.normal(size=count)) + np.sqrt(1 - a) * noise
    residual = noise - analytic.eps(z, a, np.array(mean))
    assert abs(residual.mean()) < 4 / np.sqrt(count)
    assert abs((residual * (z - z.mean())).mean()) < 4 * z.std() / np.sqrt(count)
    # its square is 1 - (1 - a) / v
    assert (residual**2).mean() == pytest.approx(1 - (1 - a) / analytic.variance(a), rel=0.02)


@pytest.mark.parametrize("predicts_v", [False, True])
def test_the_kit_predicts_the_noise_at_every_rows_own_timestep(predicts_v: bool) -> None:
    kit = analytic_kit(predicts_v)
    t = torch.tensor([0, 1, 300, 999])
    z = drawn(4, *SHAPE)
    c = Conditioning(drawn(4, analytic.LENGTH, analytic.WIDTH, seed=2))
    a = analytic.alphas_cumprod()[t.numpy()].reshape(-1, 1, 1, 1)
    expected = analytic.eps(numbers(z), a, analytic.mu(numbers(c)))
    np.testing.assert_allclose(numbers(kit.eps(z, t, c)), expected, rtol=1e-4, atol=1e-5)


def test_a_step_and_its_inverse_with_one_prediction_cancel() -> None:
    z = drawn(2, *SHAPE)
    e = drawn(2, *SHAPE, seed=2)
    a = torch.tensor(0.3)
    a_prev = torch.tensor(0.8)
    assert torch.allclose(ddim_step(ddim_step(z, e, a, a_prev), e, a_prev, a), z, atol=1e-6)


# ---- Whole runs ----


@pytest.mark.parametrize("predicts_v", [False, True])
@pytest.mark.parametrize("steps", [3, 7, 50])
def test_prompts_only(steps: int, predicts_v: bool) -> None:
    kit = analytic_kit(predicts_v)
    c = analytic.prompts(kit)[LABELS]
    pictures = prompts_only.sample(kit, PLAN, c, 2.5, steps)
    mean = 2.5 * analytic.mu(numbers(c)) - 1.5 * empty_mean(kit)
    assert_made(kit, pictures, sampled(noise_of(PLAN), steps, mean))


def test_without_guidance_images_have_the_distribution_that_was_asked_for() -> None:
    """400 images of 50 steps have mean mu and deviation s, up to a_0 and the steps' size."""
    kit = analytic_kit()
    plan = plan_images("m", 0, {"a": [2]}, 400)
    c = analytic.prompts(kit)[[2]]
    prompts_only.sample(kit, plan, c.expand(400), 1.0, 50)
    decoded: Any = kit.vae.decoded
    residuals = numbers(decoded) * analytic.SCALING - analytic.mu(numbers(c))
    assert np.abs(residuals.mean()) < 0.05
    assert residuals.std() == pytest.approx(DEVIATION, abs=0.05)


def test_a_negative_prompt_is_what_is_guided_away_from() -> None:
    kit = analytic_kit()
    c = analytic.prompts(kit)[LABELS]
    nothing = Conditioning(drawn(1, analytic.LENGTH, analytic.WIDTH))
    pictures = prompts_only.sample(kit, PLAN, c, 2.5, 5, nothing)
    mean = 2.5 * analytic.mu(numbers(c)) - 1.5 * analytic.mu(numbers(nothing))
    assert_made(kit, pictures, sampled(noise_of(PLAN), 5, mean))


@pytest.mark.parametrize("scales", [(1.5, 2.5), (0.0, 2.0), (3.0, 0.0)])
def test_feddeo_composes_prompt_and_description(scales: tuple[float, float]) -> None:
    kit = analytic_kit()
    texts = analytic.prompts(kit)
    learned = {
        (client, label): drawn(analytic.LENGTH, analytic.WIDTH, seed=10 + label)
        for client, labels in HELD.items()
        for label in labels
    }
    pictures = feddeo.sample(kit, PLAN, texts, learned, scales, 6)
    descriptions = torch.stack([learned[job.client, job.label] for job in PLAN])
    nothing = empty_mean(kit)
    to_text = analytic.mu(numbers(texts[LABELS])) - nothing
    to_description = analytic.mu(numbers(descriptions)) - nothing
    mean = nothing + scales[0] * to_text + scales[1] * to_description
    assert_made(kit, pictures, sampled(noise_of(PLAN), 6, mean))


def test_feddisc_composes_a_centre_and_the_mean_and_nothing_has_no_image() -> None:
    """The centres of a class in turn, and again from the first; both branches have the class's
    prompt, the empty one an image condition of zeros.
    """
    kit = analytic_kit()
    texts = analytic.prompts(kit)
    vectors = {
        (client, label): drawn(3, analytic.EMBEDDING, seed=20 + label)  # two centres, the mean
        for client, labels in HELD.items()
        for label in labels
    }
    config = settings(feddisc__guidance_cluster=1.5, feddisc__guidance_domain=2.5).feddisc
    pictures = feddisc.sample(kit, PLAN, texts, vectors, config, 5)
    centres = torch.stack([vectors[job.client, job.label][job.index % 2] for job in PLAN])
    means = torch.stack([vectors[job.client, job.label][2] for job in PLAN])
    text = numbers(texts[LABELS])
    nothing = empty_mean(kit)
    mean = nothing
    mean = mean + 1.5 * (analytic.mu(text, numbers(centres)) - nothing)
    mean = mean + 2.5 * (analytic.mu(text, numbers(means)) - nothing)
    assert_made(kit, pictures, sampled(noise_of(PLAN), 5, mean))


# ---- Espresso ----


def mixtures(clusters: int = 2, components: int = 2) -> Mixtures:
    """Mixtures of the classes 1 and 3; shares differ, also between the two kinds."""
    shares = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    component_shares = torch.tensor([[0.4, 0.6], [0.9, 0.1]])
    return Mixtures(
        (CLASSES[1], CLASSES[3]),
        drawn(2, clusters, analytic.LENGTH, analytic.WIDTH, seed=30).float(),
        shares,
        component_shares,
        drawn(2, components, *SHAPE, seed=31).float(),
        drawn(2, components, *SHAPE, seed=32).float().square() + 0.1,
    )


def zig_zagged(
    z: np.ndarray, steps: int, threshold: int, strong: np.ndarray, weak: np.ndarray
) -> np.ndarray:
    """Above the threshold: down with the strong mean; up again with the noise that the weak one
    predicts below; down again.
    """
    for t, a, a_prev in analytic.step_down(steps):
        if t > threshold:
            lower = step(z, a, a_prev, strong)
            e = analytic.eps(lower, a, weak)
            z = np.sqrt(a) * analytic.x0_of(lower, e, a_prev) + np.sqrt(1 - a) * e
        z = step(z, a, a_prev, strong)
    return z


@pytest.mark.parametrize("weak_guidance", [0.0, 1.5])
@pytest.mark.parametrize("threshold", [0, 501, 1000])
def test_espressos_zig_zags(threshold: int, weak_guidance: float) -> None:
    """Six steps are at 831, 665, 499 ...: threshold 501 has two zig-zags, 0 six and 1000 none."""
    kit = analytic_kit()
    payload = replace(mixtures(), weights=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    plan = PLAN[:6]
    rows = [0, 0, 0, 1, 1, 1]
    config = settings(
        espresso__gmm=False,
        espresso__z_sampling=True,
        espresso__z_threshold=threshold,
        espresso__guidance=2.5,
        espresso__inversion_guidance=weak_guidance,
    ).espresso
    sources = [(payload, row) for row in rows]
    pictures = espresso.sample(kit, plan, analytic.prompts(kit), sources, config, 6)
    nothing = empty_mean(kit)
    towards = analytic.mu(numbers(payload.conditions[rows, rows])) - nothing
    strong = nothing + 2.5 * towards
    weak = nothing + weak_guidance * towards
    expected = zig_zagged(noise_of(plan), 6, threshold, strong, weak)
    assert_made(kit, pictures, expected)


def test_a_zig_zag_goes_up_as_diffusers_inverse_scheduler() -> None:
    """And down as its DDIM scheduler, at every step of a whole run."""
    kit = analytic_kit()
    steps = 8
    c = analytic.prompts(kit)[LABELS]
    c0 = kit.text([""]).expand(len(PLAN))
    start = drawn(len(PLAN), *SHAPE)

    def strong(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return kit.eps(z, t, c)

    def weak(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return kit.eps(z, t, c0)

    ours = z_sampling(kit, start, steps, strong, weak, threshold=400)
    up = DDIMInverseScheduler.from_config(kit.scheduler.config)
    up.set_timesteps(steps)
    kit.scheduler.set_timesteps(steps)
    z = start
    for t in kit.scheduler.timesteps:
        if t > 400:
            lower = kit.scheduler.step(strong(z, t), t, z).prev_sample
            z = up.step(weak(lower, t), t, lower).prev_sample
        z = kit.scheduler.step(strong(z, t), t, z).prev_sample
    assert torch.allclose(ours, z, rtol=1e-5, atol=1e-5)


def test_espresso_starts_from_its_mixtures() -> None:
    """Every image begins at mean_m + sqrt(variance_m) z_T under the condition j.

    m and j come up as often as the payload says, independently: within 4 sqrt(n p (1 - p)) of n p.
    """
    kit = analytic_kit()
    payload = mixtures()
    count = 600
    plan = plan_images("m", 0, {"a": [1, 3]}, count)
    config = settings(
        espresso__gmm=True, espresso__z_sampling=False, espresso__guidance=1.5
    ).espresso
    rows = [0] * count + [1] * count
    sources = [(payload, row) for row in rows]
    espresso.sample(kit, plan, analytic.prompts(kit), sources, config, 2)
    unet: Any = kit.unet
    z, _, c = unet.calls[0]  # the empty prompt's branch, then the conditions'
    starts = numbers(z[len(plan) :])
    embeddings = numbers(c[len(plan) :])
    noise = noise_of(plan)
    means = numbers(payload.component_means)
    variances = numbers(payload.component_variances)
    conditions = numbers(payload.conditions)
    for row in (0, 1):
        chosen: Counter[tuple[int, int]] = Counter()
        for image in range(row * count, (row + 1) * count):
            js = [j for j in range(2) if np.allclose(embeddings[image], conditions[row, j])]
            candidates = means[row] + np.sqrt(variances[row]) * noise[image]
            ms = [m for m in range(2) if np.allclose(starts[image], candidates[m], atol=1e-5)]
            assert len(js) == len(ms) == 1
            chosen[js[0], ms[0]] += 1
        for j in range(2):
            for m in range(2):
                p = float(payload.weights[row, j] * payload.component_weights[row, m])
                assert abs(chosen[j, m] - count * p) < 4 * np.sqrt(count * p * (1 - p)), (j, m)


# ---- FedBiP ----


def concepts(deviation: float) -> Concepts:
    """Three images of class 1, whose means are far apart, and one of class 3."""
    return Concepts(
        (CLASSES[1], CLASSES[3]),
        drawn(analytic.WIDTH, seed=40).float(),
        drawn(2, analytic.WIDTH, seed=41).float(),
        torch.tensor([1, 1, 1, 3]),
        5 * drawn(4, *SHAPE, seed=42).float(),
        torch.full((4, *SHAPE), deviation),
    )


def fedbip_starts(payload: Concepts, count: int) -> tuple[Kit, np.ndarray, torch.Tensor]:
    """Return the starts of `count` images of class 1 without z_T, and the images.

    A start is (z - sqrt(1 - a) z_T) / sqrt(a) at the first level.
    """
    kit = analytic_kit()
    plan = plan_images("m", 0, {"a": [1]}, count)
    config = settings(fedbip__guidance=2.5, fedbip__domain_noise=0.3).fedbip
    pictures = fedbip.sample(kit, plan, CLASSES, {"a": payload}, config, 5)
    unet: Any = kit.unet
    first, a, _ = analytic.step_down(5)[0]
    z, t, _ = unet.calls[0]
    assert set(t.tolist()) == {first}
    return kit, analytic.x0_of(numbers(z[count:]), noise_of(plan), a), pictures


def test_fedbip_starts_between_two_images_of_the_class() -> None:
    """Without deviation: on the line between two of the class's three means, anywhere on it alike.

    The share is uniform on [0, 1]: of n, its mean is within 4 / sqrt(12 n) of 1/2 and its variance
    near 1/12.
    """
    payload = concepts(0.0)
    count = 400
    _, starts, _ = fedbip_starts(payload, count)
    means = numbers(payload.means)
    # type: ignore[var-annotated]
    shares = []
    pairs = Counter()
    for start in starts:
        for i, j in ((0, 1), (0, 2), (1, 2)):
            line = means[i] - means[j]
            share = ((start - means[j]) * line).sum() / (line**2).sum()
            if np.allclose(start, means[j] + share * line, atol=1e-3):
                shares.append(share)
                pairs[i, j] += 1
    assert len(shares) == count
    assert min(shares) >= -1e-3
    assert max(shares) <= 1 + 1e-3
    assert np.mean(shares) == pytest.approx(0.5, abs=4 / np.sqrt(12 * count))
    assert np.var(shares) == pytest.approx(1 / 12, rel=0.2)
    assert min(pairs.values()) > count / 3 - 4 * np.sqrt(count * 2 / 9)


def test_fedbips_starts_deviate_as_the_posteriors() -> None:
    """Equal deviations of 2 about equal means: whatever the shares are, the start deviates by 2."""
    payload = replace(concepts(2.0), means=torch.ones(4, *SHAPE))
    _, starts, _ = fedbip_starts(payload, 400)
    numbers_drawn = starts.size
    assert starts.mean() == pytest.approx(1, abs=4 * 2 / np.sqrt(numbers_drawn))
    assert starts.std() == pytest.approx(2, rel=4 / np.sqrt(2 * numbers_drawn))


def test_a_class_with_one_image_has_no_other_to_mix_with() -> None:
    kit = analytic_kit()
    payload = concepts(0.0)
    plan = plan_images("m", 0, {"a": [3]}, 3)
    fedbip.sample(kit, plan, CLASSES, {"a": payload}, settings().fedbip, 5)
    unet: Any = kit.unet
    _, a, _ = analytic.step_down(5)[0]
    start = analytic.x0_of(numbers(unet.calls[0][0][3:]), noise_of(plan), a)
    np.testing.assert_allclose(start, numbers(payload.means[[3] * 3]), atol=1e-4)


def test_fedbip_denoises_under_its_words_with_noise_on_the_domains() -> None:
    """The condition that the UNet was given is the same at every step, and guides by
    `fedbip.guidance`; S has noise of its deviation.
    """
    payload = concepts(0.5)
    count = 200
    kit, _, pictures = fedbip_starts(payload, count)
    unet: Any = kit.unet
    embeddings = numbers(unet.calls[0][2][count:])
    for _, _, c in unet.calls:
        assert np.array_equal(numbers(c[count:]), embeddings)
    # the empty prompt's at the condition's own length, as diffusers' pipeline makes it
    nothing = analytic.mu(numbers(kit.text([""]))[:, : embeddings.shape[1]])
    mean = 2.5 * analytic.mu(embeddings) - 1.5 * nothing
    assert_made(kit, pictures, sampled(numbers(unet.calls[0][0][count:]), 5, mean))
    word = numbers(payload.vectors[0])
    assert all((np.abs(row - word).max(axis=1) < 1e-6).any() for row in embeddings)
    # the one place that differs between the images has S, and noise of deviation 0.3 about it
    (place,) = np.flatnonzero(embeddings.std(axis=0).max(axis=1) > 1e-6)
    noise = embeddings[:, place] - numbers(payload.domain)
    again, _, _ = fedbip_starts(payload, 3)
    calls: Any = again.unet.calls
    # an image's noise is its own, whoever draws it and whenever
    assert np.array_equal(numbers(calls[0][2][3:]), embeddings[:3])
    assert noise.mean() == pytest.approx(0, abs=4 * 0.3 / np.sqrt(noise.size))
    assert noise.std() == pytest.approx(0.3, rel=4 / np.sqrt(2 * noise.size))
