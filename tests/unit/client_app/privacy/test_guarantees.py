"""Noise with a guarantee: the mechanism, the methods that use it, and what a site asks for."""

import hashlib
import math
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from client_app import app as client
from client_app.app import app, check_node, client_settings
from client_app.learning import conditions
from client_app.methods import classifier, domain_vector, feddeo, feddisc, fedpft, oscar
from client_app.privacy import dp_sgd, mechanisms
from client_app.privacy.mechanisms import (
    add_noise,
    clip_rows,
    mean_distance,
    private_mean,
    standard_normal,
)
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.data.load import Images
from osfl.methods import METHODS, client_module
from osfl.models.diffusion import Kit, load_embedding_noise
from osfl.models.encoders import load_image_encoder
from osfl.payload.kinds import (
    Classifier,
    DomainVector,
    Embeddings,
    FeatureMixtures,
    LatentStatistics,
)
from server_app.app import run_job
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, analytic_kit, numbers
from tests.helpers.analytic_clients import generator, images, job_of, learned_alone
from tests.helpers.client_jobs import images as digits_like
from tests.helpers.client_jobs import job_of as kit_job_of
from tests.helpers.gaussian_mechanism import least_sigma
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, nodes

APPROXIMATE = tuple(name for name, method in METHODS.items() if method.privacy == "approximate")


def no_noise(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Takes the noise away; the shapes of what would have been drawn."""
    asked: list[torch.Size] = []

    def nothing(shape: torch.Size, chance: object = None) -> torch.Tensor:
        asked.append(shape)
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr(mechanisms, "standard_normal", nothing)
    # Exact means, which are rounded to a part of the noise's deviation with it
    monkeypatch.setattr(mechanisms, "GRID", 2**40)
    return asked


# ---- The mechanism ----


def test_draws_are_normal() -> None:
    draws = standard_normal(torch.Size((200, 500)))
    assert draws.dtype == torch.float64
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-5
    # And independent of their neighbours
    assert abs(float((draws[:, 1:] * draws[:, :-1]).mean())) < 0.02
    assert not torch.equal(standard_normal(draws.shape), draws)


def test_a_draw_is_the_quantile_of_its_bytes() -> None:
    """The last bit is the sign; the others, of 2^64, the tail beyond the number. A tail below 2^44
    parts has 64 bits more.
    """
    words = np.array([2**63 + 1, 2**63, 2**64 - 1, 2 * 2**44, 2**45 - 1, 1], dtype=np.uint64)
    fractions = np.array([2**63, 0], dtype=np.uint64)
    asked = []

    def chance(count: int) -> bytes:
        asked.append(count)
        return (words if len(asked) == 1 else fractions).tobytes()

    drawn = standard_normal(torch.Size((2, 3)), chance)
    assert asked == [48, 16]
    quarter = stats.norm.isf(0.25)
    coarse = stats.norm.isf((2**44 + 0.5) / 2**64)
    fine = stats.norm.isf((2**44 - 1 + 0.5) / 2**64)
    farthest = stats.norm.isf(0.5 / 2**128)
    expected = [[quarter, -quarter, 0], [-coarse, fine, farthest]]
    np.testing.assert_allclose(drawn, expected, rtol=1e-12, atol=1e-12)
    assert 13 < farthest < 13.2


@pytest.mark.parametrize("sigma", [0.75, 3.0, 1e-6])
def test_a_noisy_number_does_not_tell_the_exact_one(sigma: float) -> None:
    """A multiple of a power of two, between 2^-15 and 2^-14 of the deviation, whose
    neighbors are as likely: a float would have gaps where an exact value cannot lead.
    """
    values = torch.full((50_000,), sigma / 3)
    noisy = add_noise(values, sigma)
    step = 2.0 ** (math.floor(math.log2(sigma)) - 14)
    assert bool((noisy / step == (noisy / step).round()).all())
    z = (noisy - values.double()) / sigma
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-5
    multiples = (noisy / step).round().to(torch.int64)
    even = float((multiples % 2 == 0).double().mean())
    assert even == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(50_000))
    # The float32 that is sent is the same number near zero, where a float has the most bits
    small = noisy[noisy.abs() < sigma]
    assert torch.equal(small.float().double(), small)


def test_chance_comes_from_the_operating_system() -> None:
    """And not from a seed, which the server knows."""
    rows = torch.ones(3, 4)

    def drawn() -> torch.Tensor:
        torch.manual_seed(0)
        np.random.seed(0)
        return private_mean(rows, torch.zeros(4), 1.0, 1.0, 1e-5)

    assert not torch.equal(drawn(), drawn())


def test_differences_are_cut_to_the_limit() -> None:
    """Norms 5, 1 and 0, and two that are no numbers; cut to 2."""
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0, 0], [math.nan, 1], [math.inf, 0]])
    cut = clip_rows(rows.double().view(5, 1, 2), 2.0)
    expected = [[1.2, 1.6], [0.6, 0.8], [0, 0], [0, 0], [0, 0]]
    np.testing.assert_allclose(cut.view(5, 2), expected, rtol=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.5, 1e-3), (8.0, 1e-6)])
def test_the_mean_is_noised_as_balle_and_wang_say(epsilon: float, delta: float) -> None:
    """centre + mean of (1.2, 1.6), (0.6, 0.8) + sigma 2 C / n z, with C = 2 and n = 2."""
    centre = torch.tensor([10.0, -20.0])
    rows = centre + torch.tensor([[3.0, 4.0], [0.6, 0.8]])
    # An even word is below zero; half of it is a quarter of 2^64
    words = np.array([2**63, 2**63 + 1], dtype=np.uint64)
    mean = private_mean(rows, centre, 2.0, epsilon, delta, lambda n: words.tobytes()[:n])
    sigma = least_sigma(epsilon, delta) * (2 * 2 / 2)
    noise = sigma * stats.norm.ppf([0.25, 0.75])
    expected = np.array([10.9, -18.8]) + noise
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=sigma / 2**15)
    assert mean.dtype == torch.float32


def test_one_row_moves_the_mean_by_at_most_what_the_noise_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_noise(monkeypatch)
    source = torch.Generator().manual_seed(0)
    largest = 0.0
    for trial in range(50):
        rows = torch.randn(5, 3, 4, generator=source) * 10 ** (trial % 5 - 2)
        neighbor = rows.clone()
        # The worst that can be: as far on the other side
        neighbor[2] = -rows[2] * 10 ** (trial % 3)
        here, there = (private_mean(r, rows[0], 1.5, 1.0, 1e-5) for r in (rows, neighbor))
        largest = max(largest, float((here - there).norm()))
    assert 0.9 * 2 * 1.5 / 5 < largest <= 2 * 1.5 / 5 + 1e-6


def test_the_spread_of_prompts() -> None:
    """(0, 0), (6, 0), (0, 6), (6, 6) around (3, 3): the root of 18."""
    corners = torch.tensor([[0.0, 0], [6, 0], [0, 6], [6, 6]])
    assert mean_distance(corners.view(4, 1, 2)) == pytest.approx(18**0.5)
    assert mean_distance(torch.tensor([[3.0, 4.0]])) == pytest.approx(5)


# ---- The methods ----


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    test_kit = analytic_kit()
    for half in (feddeo, domain_vector):
        monkeypatch.setattr(half, "load_kit_for_training", lambda job: test_kit)
    return test_kit


def learned_by_each(kit: Kit, data: Any, method: str, passes: int, lr: float) -> np.ndarray:
    """Return what each image learns by itself, less the encoding of its class's prompt
    [N, L, d].
    """
    prompts = numbers(kit.text([f"an image of {name}" for name in CLASSES]))
    mean, logvar = conditions.posteriors(kit, data, job_of(data))
    differences = []
    for row, label in enumerate(data.labels.tolist()):
        start = prompts[label]
        name = hashlib.sha256(data.pixels[row].numpy().tobytes()).hexdigest()
        source = generator(0, method, "client-0", name)
        span = slice(row, row + 1)
        deviation = np.exp(0.5 * numbers(logvar[span]))
        end = learned_alone(start, numbers(mean[span]), deviation, passes, 1, lr, source)
        differences.append(end - start)
    return np.stack(differences)


def cut(rows: np.ndarray, limit: float) -> np.ndarray:
    norms = np.sqrt((rows**2).sum(axis=(1, 2), keepdims=True))
    return rows * np.minimum(1, limit / norms)


def prompts_and_spread(kit: Kit) -> tuple[np.ndarray, float]:
    prompts = numbers(kit.text([f"an image of {name}" for name in CLASSES]))
    around = prompts - prompts.mean(axis=0)
    return prompts, float(np.sqrt((around**2).sum(axis=(1, 2))).mean())


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("clip", [0.02, 1e3])
@pytest.mark.parametrize("tokens", ["each", "all"])
def test_a_private_description_is_the_mean_of_what_each_image_learns(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, tokens: str, clip: float, steps: int
) -> None:
    """Three passes over each, whatever the steps; of two classes, whose limits are the same. One
    vector for all tokens is the mean over them, without the prompt, and counts once for each.
    """
    asked = no_noise(monkeypatch)
    data = images(2, 0, 2, 0, 2)
    settings = {
        "feddeo__epochs": 3,
        "feddeo__steps": steps,
        "feddeo__batch_size": 2,
        "feddeo__lr": 0.05,
        "feddeo__tokens": tokens,
        "clip_norm": clip,
        "epsilon": 1.0,
    }
    payload = feddeo.make_payload(job_of(data, method="feddeo", **settings))
    each = learned_by_each(kit, data, "feddeo", 3, 0.05)
    prompts, unit = prompts_and_spread(kit)
    if tokens == "all":
        each = np.broadcast_to(each.mean(axis=1, keepdims=True), each.shape)
    norms = np.sqrt((each**2).sum(axis=(1, 2)))
    assert (norms > clip * unit).all() == (clip < 1)
    clipped_rows = cut(each, clip * unit)
    expected = np.stack([clipped_rows[[1, 3]].mean(0), clipped_rows[[0, 2, 4]].mean(0)])
    expected = expected[:, :1] if tokens == "all" else expected + prompts[[0, 2]]
    assert payload.classes == ("zero", "two")
    np.testing.assert_allclose(payload.vectors, expected, rtol=1e-4, atol=1e-5)
    assert asked == [payload.vectors.shape[1:]] * 2


@pytest.mark.parametrize("tokens", ["each", "all"])
@pytest.mark.parametrize("steps", [0, 7])
def test_a_private_vector_is_the_mean_over_all_classes(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, steps: int, tokens: str
) -> None:
    """Two passes over each, whatever the steps. One vector for all tokens is the mean over them,
    and counts once for each.
    """
    no_noise(monkeypatch)
    data = images(2, 0, 2, 0, 2)
    settings = {
        "method": "domain-vector",
        "domain_vector__epochs": 2,
        "domain_vector__steps": steps,
        "domain_vector__batch_size": 2,
        "domain_vector__lr": 0.05,
        "domain_vector__tokens": tokens,
        "clip_norm": 0.05,
        "epsilon": 1.0,
    }
    payload = domain_vector.make_payload(job_of(data, **settings))
    each = learned_by_each(kit, data, "domain-vector", 2, 0.05)
    _, unit = prompts_and_spread(kit)
    if tokens == "all":
        alike = np.broadcast_to(each.mean(axis=1, keepdims=True), each.shape)
        expected = cut(alike, 0.05 * unit).mean(axis=0)[:1]
    else:
        expected = cut(each, 0.05 * unit).mean(axis=0)
    np.testing.assert_allclose(payload.domain, expected, rtol=1e-4, atol=1e-6)
    assert payload.offsets is None


def hardly_cut(half: Any, data: Images) -> torch.Tensor:
    """Return the payload of a client of one class with an epsilon, after two passes."""
    name = half.__name__.rpartition(".")[2].replace("_", "-")
    settings = {"method": name, "epsilon": 1.0, "clip_norm": 1e6}
    settings |= {"feddeo__epochs": 2, "domain_vector__epochs": 2}
    payload = half.make_payload(job_of(data, **settings))
    return payload.domain if half is domain_vector else payload.vectors[0]


@pytest.mark.parametrize("half", [feddeo, domain_vector])
def test_an_images_contribution_depends_on_no_other_image_and_no_position(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, half: Any
) -> None:
    """The mean of three images, whose order changes; and one in a class with another."""
    no_noise(monkeypatch)

    def sent(rows: list[int], label: int) -> torch.Tensor:
        pixels = analytic.random_pixels(4)[rows]
        return hardly_cut(half, Images(pixels, torch.full((len(rows),), label)))

    torch.testing.assert_close(sent([0, 1, 2], 1), sent([2, 0, 1], 1), rtol=1e-4, atol=1e-5)
    three = 3 * sent([0, 1, 2], 1)
    two = 2 * sent([0, 1], 1)
    torch.testing.assert_close(three - two, sent([2], 1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("half", [feddeo, domain_vector])
def test_an_image_that_diverges_stops_nothing(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, half: Any
) -> None:
    """A client that fails for one image would say that it is there. Here it gives nothing."""
    no_noise(monkeypatch)
    real = conditions.posteriors

    def broken(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mean, logvar = real(*arguments)
        mean[1] = math.nan
        return mean, logvar

    data = images(2, 2)
    alone = hardly_cut(half, Images(data.pixels[:1], data.labels[:1]))
    monkeypatch.setattr(half, "posteriors", broken)
    prompt = 0 if half is domain_vector else kit.text.states(["an image of two"])[0].float()
    torch.testing.assert_close(
        2 * (hardly_cut(half, data) - prompt), alone - prompt, rtol=1e-3, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["oscar", "oscar-pooled"])
def test_a_private_mean_of_captions_is_cut_around_the_prompts(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    no_noise(monkeypatch)
    data = digits_like(3, 3, 3, 8)

    def sent(**settings: object) -> torch.Tensor:
        return oscar.make_payload(kit_job_of(tiny_kit, data, method=method, **settings)).vectors

    plain = sent()
    torch.testing.assert_close(sent(epsilon=1.0, clip_norm=1e6), plain, rtol=1e-4, atol=1e-5)
    text = oscar.load_text_encoder(str(tiny_kit), torch.device("cpu"), torch.float32)
    encode = text.pooled if method == "oscar-pooled" else text.states
    names = kit_job_of(tiny_kit, data).classes
    prompts = encode([f"an image of {name}" for name in names])
    near = sent(epsilon=1.0, clip_norm=0.01)
    moved = (near - prompts[[3, 8]]).flatten(1).norm(dim=1)
    # One class has three captions that are cut to as much, the other one
    limit = 0.01 * mean_distance(prompts)
    assert (moved <= limit * 1.001).all()
    assert float(moved[1]) == pytest.approx(limit, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", APPROXIMATE)
def test_a_private_payload_is_another_one_each_time(
    tiny_kit: Path, tiny_unclip: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each release has the run's epsilon and delta; of a client there is one, or one a class."""
    data = digits_like(3, 3, 8)
    half = client_module(method)
    asked: list[tuple[float, ...]] = []
    real = mechanisms.private_mean
    real_multiplier = mechanisms.noise_multiplier

    def kept(rows: Any, centre: Any, limit: float, epsilon: float, delta: float) -> Any:
        asked.append((epsilon, delta))
        return real(rows, centre, limit, epsilon, delta)

    def multiplier(rate: float, steps: int, epsilon: float, delta: float) -> float:
        asked.append((epsilon, delta))
        return real_multiplier(rate, steps, epsilon, delta)

    for place in (mechanisms, domain_vector, feddisc, fedpft):
        monkeypatch.setattr(place, "private_mean", kept)
    monkeypatch.setattr(dp_sgd, "noise_multiplier", multiplier)
    kit = tiny_unclip if method == "feddisc" else tiny_kit
    settings = {"feddisc__kit": str(tiny_unclip), "classifier__steps": 1}
    job = kit_job_of(kit, data, method=method, **settings, epsilon=2.0, delta=1e-4)
    first, second = (noised_numbers(half.make_payload(job)) for _ in range(2))
    # Rounded to a part of the deviation, one in some ten thousand is the same
    assert (first != second).double().mean() > 0.999
    once = 1 if half in (domain_vector, classifier) else 2
    assert asked == [(2.0, 1e-4)] * (2 * once)


def noised_numbers(payload: Any) -> torch.Tensor:
    match payload:
        case DomainVector():
            return payload.domain
        case FeatureMixtures():
            return payload.means[:, 0]
        case LatentStatistics():
            return payload.sums
        case Classifier():
            return payload.state["fc.weight"]
        case Embeddings():
            # The other half says the noise level
            return payload.vectors[..., : payload.vectors.shape[-1] // 2]
    numbers: torch.Tensor = payload.vectors
    return numbers


# ---- What a site asks for ----


@pytest.mark.parametrize(("run", "site", "expected"), [(1e-5, 1e-6, 1e-6), (1e-7, 1e-5, 1e-7)])
def test_the_lower_delta_holds(run: float, site: float, expected: float) -> None:
    config = parse_run_config(quick(method="oscar", epsilon=1.0, delta=run))
    node = NodeConfig(partition_id=0, num_partitions=2, delta=site)
    assert client_settings(config, node)[0].delta == expected


def test_a_site_accepts_no_larger_delta_than_its_own() -> None:
    config = parse_run_config(quick(method="oscar", epsilon=1.0, delta=0.01))
    site_config, _, _ = client_settings(config, NodeConfig(partition_id=0, num_partitions=2))
    assert site_config.delta == 1e-5


@pytest.mark.parametrize("method", APPROXIMATE)
def test_a_delta_is_reported_with_its_guarantee(method: str, tiny_kit: Path) -> None:
    config = parse_run_config(quick(method=method, epsilon=1.0))
    assert config.guaranteed_delta == 1e-5
    assert replace(config, epsilon=0.0).guaranteed_delta == 0
    assert parse_run_config(quick(method="votes", epsilon=1.0)).guaranteed_delta == 0


@pytest.mark.parametrize("clip", [0.7, 1e3])
def test_feddiscs_private_centres_are_the_mean_at_its_level(
    tiny_unclip: Path, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    """Embeddings are scaled, cut to clip sqrt(e), averaged, and scaled back; the level leaves
    sqrt(a) of what is scaled. No noise of the run's seed is in it.
    """
    asked = no_noise(monkeypatch)
    data = digits_like(3, 3, 3, 8)
    settings = {"feddisc__kit": str(tiny_unclip), "feddisc__noise_level": 400}
    job = kit_job_of(tiny_unclip, data, method="feddisc", **settings, clip_norm=clip, epsilon=1.0)
    payload = feddisc.make_payload(job)
    encoder = load_image_encoder(str(tiny_unclip), torch.device("cpu"))
    add_noise = load_embedding_noise(str(tiny_unclip))
    embeddings = encoder(job.load(encoder.fit).pixels).double().numpy()
    mean = add_noise.normalizer.mean.double().numpy()
    std = add_noise.normalizer.std.double().numpy()
    scaled = (embeddings - mean) / std
    norms = np.sqrt((scaled**2).sum(axis=1, keepdims=True))
    limit = clip * scaled.shape[1] ** 0.5
    assert (norms > limit).any() == (clip < 1)
    cut_rows = scaled * np.minimum(1, limit / norms)
    signal_rate = float(add_noise.scheduler.alphas_cumprod[400]) ** 0.5
    assert payload.classes == ("three", "eight")
    for row, centre in enumerate((cut_rows[:3].mean(axis=0), cut_rows[3])):
        expected = signal_rate * centre * std[0] + mean[0]
        for vector in payload.vectors[row]:
            np.testing.assert_allclose(vector[: len(expected)], expected, rtol=1e-3, atol=1e-4)
    assert payload.vectors.shape[1] == job.config.feddisc.clusters + 1
    # The level's encoding is as without
    plain = feddisc.make_payload(kit_job_of(tiny_unclip, data, method="feddisc", **settings))
    width = scaled.shape[1]
    torch.testing.assert_close(payload.vectors[..., width:], plain.vectors[..., width:])
    assert asked == [torch.Size([width])] * 2


@pytest.mark.parametrize("covariance", ["spherical", "diag"])
@pytest.mark.parametrize("clip", [0.02, 50.0])
def test_fedpfts_private_gaussian_has_the_cut_features_moments(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, clip: float, covariance: str
) -> None:
    """E x and E x^2 - (E x)^2 of each class, in the first of three places."""
    no_noise(monkeypatch)
    data = digits_like(3, 3, 3, 8)
    settings = {"fedpft__covariance": covariance, "fedpft__components": 3, "clip_norm": clip}
    job = kit_job_of(tiny_kit, data, method="fedpft", **settings, epsilon=1.0)
    monkeypatch.setattr(fedpft, "noise_deviation", lambda *_: 0.0)
    # This network's features are small
    monkeypatch.setattr(fedpft, "width_and_features", wide_features)
    payload = fedpft.make_payload(job)
    features = wide_features(job, data)[1][0][1].numpy()
    width = features.shape[1]
    norms = np.sqrt((features**2).sum(axis=1, keepdims=True))
    limit = clip * width**0.5
    assert (norms > limit).all() == (clip < 1)
    clipped_rows = features * np.minimum(1, limit / norms)
    assert payload.counts.tolist() == [3, 1]
    assert payload.weights.tolist() == [[1, 0, 0]] * 2
    for row, class_rows in enumerate((clipped_rows[:3], clipped_rows[3:])):
        np.testing.assert_allclose(payload.means[row, 0], class_rows.mean(axis=0), rtol=1e-4)
        variance = class_rows.var(axis=0)
        if covariance == "spherical":
            variance = variance.mean(keepdims=True)
        scale = float((class_rows**2).max())
        np.testing.assert_allclose(payload.variances[row, 0], variance, atol=1e-5 * scale)
    assert payload.means[:, 1:].abs().sum() == 0


def wide_features(job: Any, images: Any) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(16, one batch of all rows), of numbers about 2."""
    rows = torch.arange(len(images))
    source = torch.Generator().manual_seed(0)
    return 16, [(rows, 2 + torch.randn(len(rows), 16, generator=source, dtype=torch.float64))]


@pytest.mark.parametrize("covariance", ["spherical", "diag"])
def test_one_image_moves_fedpfts_numbers_by_at_most_what_the_noise_is_for(
    monkeypatch: pytest.MonkeyPatch, covariance: str
) -> None:
    """The noisy mean's input has at most the limit's norm, and nearly so for the worst."""
    asked = []

    def kept(rows: torch.Tensor, centre: torch.Tensor, limit: float, *more: float) -> torch.Tensor:
        assert not centre.any()
        # clip-norm sqrt(D), and the mean squares beside
        assert limit == pytest.approx(0.5 * 4 * math.sqrt(2))
        assert more == (1.0, 1e-5)
        asked.append((rows.norm(dim=1) / limit).max().item())
        return rows.mean(dim=0).float()

    monkeypatch.setattr(fedpft, "private_mean", kept)
    config = parse_run_config(
        quick(method="fedpft", fedpft__covariance=covariance, epsilon=1.0, clip_norm=0.5)
    )
    one_large = torch.zeros(4, 16, dtype=torch.float64)
    one_large[:, 3] = torch.tensor([1e3, 0.1, -5, 1])
    fedpft.private_gaussian(one_large, config, config.fedpft.covariance, 1)
    fedpft.private_gaussian(
        torch.randn(200, 16, dtype=torch.float64) * 3, config, config.fedpft.covariance, 1
    )
    assert asked[0] == pytest.approx(1)
    assert max(asked) <= 1 + 1e-9


@pytest.mark.parametrize("covariance", ["spherical", "diag"])
def test_the_noise_of_the_mean_is_not_taken_for_variance(covariance: str) -> None:
    """Features of variance 1, by forty draws; the noise of a mean has the variance 0.46."""
    config = parse_run_config(
        quick(method="fedpft", fedpft__covariance=covariance, epsilon=2.0, clip_norm=1.5)
    )
    source = torch.Generator().manual_seed(0)
    features = torch.randn(100, 64, generator=source, dtype=torch.float64)
    noise = (least_sigma(2.0, 1e-5) * 2 * 1.5 * 8 * 2**0.5 / 100) ** 2
    assert noise > 0.4
    estimates = []
    for _ in range(40):
        _, _, variances = fedpft.private_gaussian(features, config, config.fedpft.covariance, 1)
        estimates.append(float(variances[0].mean()))
    truth = float(features.var(dim=0).mean())
    if covariance == "spherical":
        assert np.mean(estimates) == pytest.approx(truth, abs=0.1)
    # Each feature's own mean square has a noise of 8, of which half is cut off at 0
    else:
        assert np.mean(estimates) > truth


@pytest.mark.parametrize(("covariance", "most"), [("spherical", 1.5**2), ("diag", 16 * 1.5**2)])
def test_a_variance_is_within_what_cut_features_can_have(
    monkeypatch: pytest.MonkeyPatch, covariance: str, most: float
) -> None:
    """Sixteen numbers whose squares add up to (1.5 x 4)^2: one can have it all, their mean not."""
    config = parse_run_config(
        quick(method="fedpft", fedpft__covariance=covariance, epsilon=1.0, clip_norm=1.5)
    )
    monkeypatch.setattr(fedpft, "noise_deviation", lambda *_: 0.0)
    for value, expected in ((-1e6, 0.0), (1e6, most)):
        monkeypatch.setattr(
            fedpft,
            "private_mean",
            lambda rows, *more, value=value: torch.tensor(
                [*[0.0] * 16, *[value] * (rows.shape[1] - 16)]
            ),
        )
        _, _, variances = fedpft.private_gaussian(
            torch.ones(3, 16, dtype=torch.float64), config, config.fedpft.covariance, 1
        )
        assert (variances[0] == expected).all()


def test_classes_add_nothing_to_a_private_vector() -> None:
    settings = {"method": "domain-vector", "domain_vector__class_lr": 0.1}
    parse_run_config(quick(**settings))
    with pytest.raises(ConfigError, match=r"class-lr = 0.1: must be 0 with epsilon"):
        parse_run_config(quick(**settings, epsilon=1.0))
    site = NodeConfig(partition_id=0, num_partitions=2, epsilon=1.0)
    with pytest.raises(ConfigError, match="node-config epsilon = 1: this site .*class-lr = 0.1"):
        client_settings(parse_run_config(quick(**settings)), site)


def test_a_total_needs_a_name_that_stays() -> None:
    config = parse_run_config(quick(method="votes", epsilon=1.0))
    site = NodeConfig(partition_id=0, num_partitions=2, epsilon_total=5.0)
    with pytest.raises(ConfigError, match="epsilon-total = 5: requires a client-id"):
        client_settings(config, site)
    assert client_settings(config, replace(site, client_id="ward-7"))[2] == "ward-7"


def test_a_node_without_the_accountant_says_what_to_install(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeConfig(partition_id=0, num_partitions=2)
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    for settings in ({"method": "oscar"}, {"method": "votes", "epsilon": 1.0}):
        check_node(parse_run_config(quick(kit=str(tiny_kit), **settings)), node)
    with pytest.raises(ConfigError, match=r"'oscar' this node requires .* 'osfl\[privacy\]'"):
        check_node(parse_run_config(quick(kit=str(tiny_kit), method="oscar", epsilon=1.0)), node)


def test_every_method_says_what_could_be_learned() -> None:
    for name, method in METHODS.items():
        assert bool(method.reveals) == bool(method.payload or method.rounds), name


@pytest.mark.slow
def test_a_run_says_its_delta(home: Path, tiny_kit: Path) -> None:
    config = quick(method="oscar-pooled", kit=str(tiny_kit), epsilon=2.0, delta=1e-6)
    run_job(LoopGrid(app, config, nodes(2)), parse_run_config(config), "job")
    results = metrics(home)
    assert [record["delta"] for record in results["clients"].values()] == [1e-6] * 2
    page = (home / "runs" / "job" / "report.html").read_text()
    method = METHODS["oscar-pooled"]
    protection = "Without the protection by differential privacy, it would reveal"
    text = f"Each client sent {method.sends}. {protection} {method.reveals}."
    assert text in unescape(page)
    assert (
        "with ε = 2 and δ = 1e-06. The guarantee does not cover which classes a client sends"
        in page
    )
    # Images, seconds, compute and memory of two clients
    assert page.count("<td>not sent</td>") == 8
    assert "each sent its costs" not in page
    assert not {"images", "seconds", "flops"} & set(results["clients"]["client-0"])


def test_the_runs_seed_does_not_take_feddiscs_noise_away(tiny_unclip: Path) -> None:
    """One image per class: the server knows the seed, and would know the embedding."""
    settings = {"feddisc__kit": str(tiny_unclip), "feddisc__noise_level": 900}
    data = digits_like(3, 8)
    sent = [
        feddisc.make_payload(kit_job_of(tiny_unclip, data, method="feddisc", **settings)).vectors
        for _ in range(2)
    ]
    width = sent[0].shape[-1] // 2
    assert not torch.allclose(sent[0][..., :width], sent[1][..., :width], atol=1e-3)
    # The level's own encoding is no secret
    torch.testing.assert_close(sent[0][..., width:], sent[1][..., width:])
