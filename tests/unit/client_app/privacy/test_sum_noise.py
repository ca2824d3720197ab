"""The noise that the clients of a secure sum add together."""

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import chisquare, norm

from client_app.errors import PublicConfigError
from client_app.methods.domain_vector import noisy_mean
from client_app.privacy import sum_noise
from client_app.privacy.mechanisms import private_mean_of_class
from client_app.privacy.sum_noise import (
    MIN_DEVIATION,
    SumNoise,
    discrete_gaussian,
    discrete_gaussians,
    sum_multiplier,
)
from client_app.secure_sum import check_guarantee
from osfl.config import ConfigError, NodeConfig, RunConfig, parse_run_config
from osfl.payload.summands import Layout
from tests.helpers.settings import quick

DRAWN = 20_000
NOISE = ("oscar", 1.0, 1e-5, 1.5)


def config(**settings: object) -> RunConfig:
    options = {"method": "oscar", "secure_sum": True, "num_clients": 6, "min_clients": 4}
    return parse_run_config(quick(**{**options, "epsilon": 1.0, **settings}))


@pytest.mark.parametrize("deviation", [1, 3])
def test_draws_have_the_discrete_gaussians_probabilities(deviation: int) -> None:
    draw = random.Random(deviation)
    counts = Counter(discrete_gaussian(deviation, draw.randrange) for _ in range(DRAWN))
    numbers = range(-4 * deviation, 4 * deviation + 1)
    weights = np.array([math.exp(-(x**2) / (2 * deviation**2)) for x in numbers])
    observed = np.array([counts[x] for x in numbers])
    expected = weights / weights.sum() * observed.sum()
    often = expected > 10
    scale = observed[often].sum() / expected[often].sum()
    assert chisquare(observed[often], scale * expected[often]).pvalue > 1e-3
    assert sum(counts.values()) - observed.sum() < DRAWN / 1000


def test_wide_draws_have_their_deviation_and_both_signs() -> None:
    draw = random.Random(0)
    numbers = discrete_gaussians(50_000, 4000, draw.randrange).astype(np.int32)
    # Within four standard errors
    assert abs(numbers.std() / 50_000 - 1) < 4 / math.sqrt(2 * len(numbers))
    assert abs(numbers.mean()) < 4 * 50_000 / math.sqrt(len(numbers))
    assert 0.4 < (numbers < 0).mean() < 0.6


def epsilon_of(multiplier: float, delta: float) -> float:
    """Canonne, Kamath & Steinke, proposition 12: from Renyi divergences a / (2 z^2) to epsilon."""

    def bound(order: float) -> float:
        divergence = order / (2 * multiplier**2)
        conversion = (math.log(1 / delta) - math.log(order)) / (order - 1)
        return divergence + conversion + math.log(1 - 1 / order)

    return float(minimize_scalar(bound, bounds=(1.01, 1000), method="bounded").fun)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (8.0, 1e-5), (0.5, 1e-6)])
def test_the_multiplier_gives_epsilon(epsilon: float, delta: float) -> None:
    multiplier = sum_multiplier(epsilon, delta)
    assert epsilon_of(multiplier, delta) <= epsilon * 1.002
    assert epsilon_of(0.98 * multiplier, delta) > epsilon
    # More than the Gaussian mechanism's exact multiplier (Balle & Wang, theorem 8)
    exact = norm.cdf(0.5 / multiplier - epsilon * multiplier)
    exact -= math.exp(epsilon) * norm.cdf(-0.5 / multiplier - epsilon * multiplier)
    assert exact < delta


def layout_of(members: int, images: int = 10_000) -> Layout:
    shapes = {"counts": (2,), "vectors": (2, 3, 5)}
    return Layout(shapes, members, images, 64.0, NOISE)


def test_the_clients_deviations_make_that_of_the_sum() -> None:
    """Worked out by hand for 6 clients, of which 4 must deliver."""
    layout = layout_of(6)
    # 10,000 images up to 64, six clients, half the range: 3,840,000 / 2^30 rounded up to 2^-8
    step = 2.0**-8
    assert layout.step("vectors") == step
    limit = 7.0
    # Float32 has the mean times the images to a 2^24th of 640,000
    rounding = 1 + 2 * 640_000 * 2.0**-24 / step
    sensitivity = 2 * limit / step + rounding * math.sqrt(3 * 5)
    expected = sum_multiplier(1.0, 1e-5) * sensitivity / math.sqrt(4)
    noise = SumNoise(limit)
    assert noise.deviation(layout, "vectors", config(), 4) == math.ceil(expected)
    # A domain's vector is one row
    domain_layout = Layout({"counts": (2,), "domain": (3, 5)}, 6, 10_000, 64.0, NOISE)
    assert noise.deviation(domain_layout, "domain", config(), 4) == math.ceil(expected)


def test_only_the_means_get_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ones(deviation: int, count: int) -> np.ndarray:
        asked.append((deviation, count))
        return np.ones(count, dtype=np.uint32)

    monkeypatch.setattr(sum_noise, "discrete_gaussians", ones)
    layout = layout_of(6)
    noise = SumNoise(7.0).draw(layout, config(), 4)
    assert noise.tolist() == [0, 0] + 30 * [1]
    ((deviation, count),) = asked
    assert count == 30
    assert deviation == SumNoise(7.0).deviation(layout, "vectors", config(), 4)


def test_numbers_too_coarse_for_the_noise_are_refused() -> None:
    layout = layout_of(6, images=10**6)
    with pytest.raises(ConfigError, match="secure-sum-images = 10000: .* too coarse .* lower it"):
        SumNoise(0.01).deviation(layout, "vectors", config(epsilon=20.0), 4)
    assert MIN_DEVIATION >= 20


def test_noise_beyond_the_range_is_refused() -> None:
    layout = layout_of(6, images=1)
    with pytest.raises(ConfigError, match="the noise of epsilon = 0.1 exceeds .* raise it"):
        SumNoise(500.0).deviation(layout, "vectors", config(epsilon=0.1), 4)


def test_the_bound_is_kept_beside_the_payload(tmp_path: Path) -> None:
    assert SumNoise.load(tmp_path) is None
    SumNoise(3.5).store(tmp_path)
    assert SumNoise.load(tmp_path) == SumNoise(3.5)


def test_means_without_noise_state_their_bound() -> None:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randn(4, 3, 5, generator=draw)
    rows = prompts[1] + 9 * torch.randn(6, 3, 5, generator=draw)
    run = config(clip_norm=0.5)
    centered = (prompts - prompts.mean(dim=0)).flatten(1)
    limit = 0.5 * float(centered.double().norm(dim=1).mean())
    differences = (rows - prompts[1]).flatten(1)
    factors = (limit / differences.norm(dim=1)).clamp(max=1)
    clipped = (factors[:, None] * differences).mean(dim=0).view(3, 5)
    noise = SumNoise()
    mean = private_mean_of_class(rows, prompts, 1, run, sum_noise=noise)
    torch.testing.assert_close(mean, prompts[1] + clipped)
    assert noise.limit == pytest.approx(limit)
    assert bool((factors < 1).any())
    # A domain's vector has the center 0, and with one for all tokens a bound for their mean
    vectors = rows - prompts[1]
    domain = noisy_mean(vectors, prompts, run, noise)
    torch.testing.assert_close(domain, clipped)
    assert noise.limit == pytest.approx(limit)
    shared = config(method="domain-vector", domain_vector__tokens="all", clip_norm=0.5)
    assert noisy_mean(vectors, prompts, shared, noise).shape == (1, 5)
    assert noise.limit == pytest.approx(limit / math.sqrt(3))


def test_a_site_agrees_to_common_noise() -> None:
    run = config(epsilon=2.0)
    agreeing = NodeConfig(epsilon=3.0, secure_sum=True)
    check_guarantee(run, agreeing, 2.0, run.delta)
    check_guarantee(run, NodeConfig(), 2.0, run.delta)
    with pytest.raises(
        PublicConfigError, match="node-config secure-sum = false: .* set secure-sum"
    ):
        check_guarantee(run, NodeConfig(epsilon=3.0), 2.0, run.delta)
    # A site's stronger guarantee would be weakened by the noise of the others
    with pytest.raises(PublicConfigError, match="node-config epsilon = 1, .* the run has 2 "):
        check_guarantee(run, NodeConfig(epsilon=1.0, secure_sum=True), 1.0, run.delta)
    with pytest.raises(PublicConfigError, match="must have at most this site's"):
        check_guarantee(run, NodeConfig(secure_sum=True), 2.0, 1e-7)
    check_guarantee(config(secure_sum=False), NodeConfig(epsilon=1.0), 1.0, 1e-7)
    # A delta means nothing without an epsilon, or beside that of votes
    for pure in (config(method="fedcgs", epsilon=0.0), config(method="votes")):
        check_guarantee(pure, NodeConfig(), pure.epsilon, 1e-7)
