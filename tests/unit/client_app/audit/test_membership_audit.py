"""The audit: its game, its attacks, and what guesses show."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from scipy.special import logsumexp
from sklearn.mixture import GaussianMixture
from typer.testing import CliRunner

from client_app.audit import attacks, game, linear, statistics
from client_app.audit.attacks import ATTACKS, attack, denoising_errors, leverage
from client_app.audit.game import Pairs, Scores, draw_pairs, run_trial
from client_app.audit.statistics import empirical_epsilon, epsilon_lower_bound, p_value
from client_app.methods import votes
from client_app.privacy import mechanisms
from client_app.privacy.mechanisms import private_mean
from osfl.cli import audit as command
from osfl.cli.main import app as cli
from osfl.data import digits
from osfl.data.load import Images
from osfl.methods import METHODS
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import (
    KINDS,
    Captions,
    Classifier,
    Concepts,
    Descriptions,
    DomainVector,
    Encodings,
    FeatureStatistics,
    LatentMixture,
    Masked,
    Mixtures,
    Votes,
)
from osfl.util.pixels import LazyPixels
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, analytic_kit, numbers
from tests.helpers.analytic_clients import SHAPE, generator, images, job_of
from tests.helpers.system_tools import quick_arguments

COIN = torch.Generator().manual_seed(0)


def scores(members: list[float], others: list[float]) -> Scores:
    return Scores(torch.tensor(members).double(), torch.tensor(others).double())


# ---- What guesses show ----


@pytest.mark.parametrize("right", [5, 20, 100])
def test_all_guesses_right_exclude_an_epsilon(right: int) -> None:
    """(e^eps / (1 + e^eps))^v = 0.01: the odds of the v-th root."""
    chance = 0.01 ** (1 / right)
    expected = max(0.0, math.log(chance / (1 - chance)))
    assert epsilon_lower_bound(right, right, right, 0.0, 0.99) == pytest.approx(expected, abs=1e-6)


def test_half_of_the_guesses_right_exclude_nothing() -> None:
    assert epsilon_lower_bound(50, 100, 100, 0.0, 0.99) == 0
    # 62 of 100 by chance alone: 1.05 %; 63: 0.6 %
    assert epsilon_lower_bound(62, 100, 100, 0.0, 0.99) == 0
    assert epsilon_lower_bound(63, 100, 100, 0.0, 0.99) > 0


@pytest.mark.parametrize(("right", "guesses", "coins"), [(8, 10, 10), (3, 4, 12), (0, 5, 5)])
def test_a_p_value_is_the_theorems(right: int, guesses: int, coins: int) -> None:
    """Steinke et al., theorem 5.2, by sums over all outcomes."""
    epsilon = 0.7
    delta = 1e-3
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))

    def probability(count: int) -> float:
        ways = math.comb(guesses, count)
        return ways * chance**count * (1 - chance) ** (guesses - count)

    beta = sum(probability(count) for count in range(right, guesses + 1))
    shares = []
    for i in range(1, coins + 1):
        below = sum(probability(count) for count in range(max(0, right - i), right))
        shares.append(2 / i * below)
    expected = min(1.0, beta + max(shares) * coins * delta)
    assert p_value(right, guesses, coins, epsilon, delta) == pytest.approx(expected, rel=1e-9)
    assert p_value(right, guesses, coins, epsilon, 0.0) == pytest.approx(beta, rel=1e-9)


@pytest.mark.slow
def test_a_bound_holds_as_often_as_it_says() -> None:
    """Randomised response with epsilon 1 tells the truth with e / (1 + e): the tightest there is.
    Of 1,000 audits at 99 % some 10 may claim more.
    """
    draw = np.random.default_rng(1)
    truths = draw.binomial(200, math.e / (1 + math.e), 1000)
    claims = [epsilon_lower_bound(int(right), 200, 200, 0.0, 0.99) for right in truths]
    assert 0 < sum(claim > 1 for claim in claims) < 25
    assert np.mean(claims) > 0.5


def test_the_surest_guesses_count_too() -> None:
    """The 100 of 500 pairs with the largest differences are right, the others are a coin's."""
    difference = np.concatenate([np.full(100, 5.0), np.resize([1.0, -1.0], 400)])
    pair_scores = Scores(torch.from_numpy(difference), torch.zeros(500).double())
    expected = epsilon_lower_bound(100, 100, 500, 0.0, 0.995)
    assert empirical_epsilon(pair_scores, 0.0, COIN) == pytest.approx(expected)
    assert expected > 2.5
    # And all of them, where the surest say nothing
    flat = Scores(
        torch.cat([torch.full((450,), 1.0), -torch.ones(50)]).double(), pair_scores.others
    )
    flat.members[:50] = torch.tensor([5.0, -5.0] * 25)
    right = int((flat.members > 0).sum())
    assert right == 425
    assert empirical_epsilon(flat, 0.0, COIN) == pytest.approx(
        epsilon_lower_bound(right, 500, 500, 0.0, 0.995)
    )


def test_many_figures_need_higher_confidence_each() -> None:
    """Seven are looked at: each of two guesses at 1 - 0.01 / 14."""
    pair_scores = Scores(torch.ones(50).double(), torch.zeros(50).double())
    expected = epsilon_lower_bound(50, 50, 50, 0.0, 1 - 0.01 / 14)
    assert empirical_epsilon(pair_scores, 0.0, COIN, looks=7) == pytest.approx(expected)
    games = {
        "a": {"x": [pair_scores], "y": [pair_scores]},
        "b": {"x": [pair_scores], "y": [pair_scores]},
    }
    guarantees = dict.fromkeys(("x", "y"), command.Guarantee(1.0, 1e-7))
    findings = command.evaluate_trials(games, guarantees, 0)
    assert [finding.client for finding in findings] == ["x", "y", "all"] * 2
    assert findings[0].measured == pytest.approx(
        epsilon_lower_bound(50, 50, 50, 1e-7, 1 - 0.01 / 12), abs=1e-6
    )
    assert all(finding.broken for finding in findings)


def test_a_single_pair_and_equal_scores_have_an_area() -> None:
    assert statistics.auc(scores([1], [0])) == (1, 0, 1)
    assert statistics.auc(scores([2, 2], [2, 2])) == (0.5, 0.5, 0.5)


@pytest.mark.slow
def test_a_mean_of_one_image_fails_the_audit_and_a_noisy_one_passes() -> None:
    """600 pairs of 20 numbers: the mean of one image is that image; with epsilon 1 it is none."""
    source = torch.Generator().manual_seed(3)
    members = torch.randn(600, 20, generator=source)
    nonmembers = torch.randn(600, 20, generator=source)

    def guessed(sent: torch.Tensor) -> Scores:
        near, far = (-(rows - sent).square().sum(dim=1) for rows in (members, nonmembers))
        return Scores(near.double(), far.double())

    assert empirical_epsilon(guessed(members), 0.0, COIN) > 3
    centre = torch.zeros(20)
    noised = [private_mean(row[None], centre, 4.0, 1.0, 1e-5) for row in members]
    assert empirical_epsilon(guessed(torch.stack(noised)), 1e-5, COIN) < 1


def test_equal_scores_are_guessed_by_a_coin() -> None:
    guesses = statistics.correct_guesses(
        scores([1, 2, 0] + [0] * 1000, [0, 3, 0] + [0] * 1000), COIN
    )
    assert guesses[:2].tolist() == [True, False]
    assert 400 < int(guesses.sum()) < 600


def test_the_area_under_the_curve() -> None:
    """Members 3, 1 and others 2, 1: of four pairs two are above, one is level: 2.5 / 4."""
    area, low, high = statistics.auc(scores([3, 1], [2, 1]))
    assert area == pytest.approx(0.625)
    assert low <= area <= high
    many = scores(np.linspace(0, 2, 300).tolist(), np.linspace(0, 1, 300).tolist())
    area, low, high = statistics.auc(many)
    assert area == pytest.approx(0.75, abs=0.01)
    assert low < area - 0.01
    assert high > area + 0.01


def test_an_interval_knows_that_pairs_are_alike() -> None:
    """Each member is a little above its partner: less is left to chance than among strangers."""
    nonmembers = torch.randn(200, generator=torch.Generator().manual_seed(1)).double()
    near = Scores(nonmembers + 0.2, nonmembers)
    strange = Scores(nonmembers.flip(0) + 0.2, nonmembers)
    widths = []
    for pair_scores in (near, strange):
        area, low, high = statistics.auc(pair_scores)
        assert area == statistics.auc(near)[0]
        widths.append(high - low)
    assert widths[0] < widths[1] / 3


def test_true_positives_at_one_false_one_in_a_thousand() -> None:
    """The second highest of 1,000 others is 998; above it are 998.5 and 2,000, beside one false."""
    nonmembers = list(map(float, range(1000)))
    members = [0.0] * 997 + [998.0, 998.5, 2000.0]
    assert statistics.true_positives(scores(members, nonmembers)) == (2, 1000)
    assert statistics.true_positives(scores(members[:999], nonmembers[:999])) is None


def test_an_interval_is_clopper_and_pearsons() -> None:
    low, high = statistics.share_interval(7, 20)
    assert stats.binom.sf(6, 20, low) == pytest.approx(0.025)
    assert stats.binom.cdf(7, 20, high) == pytest.approx(0.025)


# ---- The game ----


def test_pairs_are_of_one_class_and_every_image_is_in_one_at_most() -> None:
    train = torch.tensor([0, 1, 0, 1, 1, 2, 0])
    test = torch.tensor([1, 0, 1, 0, 0, 0, 3])
    coins = []
    for seed in range(40):
        pairs = draw_pairs(train, test, torch.Generator().manual_seed(seed))
        assert torch.equal(train[pairs.members], test[pairs.others])
        assert torch.bincount(train[pairs.members]).tolist() == [3, 2]
        assert len(set(pairs.members.tolist())) == len(set(pairs.others.tolist())) == 5
        coins += pairs.canary_bits.tolist()
    assert 70 < sum(coins) < 130


@pytest.mark.parametrize("lazy", [False, True])
def test_the_coins_say_who_is_in_the_payload(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """Five training images; the second and the fourth are paired, the fourth is swapped."""
    train = images(0, 1, 0, 1, 0)
    test = images(1, 0, 1)
    if lazy:
        pixels = train.pixels
        train = Images(LazyPixels(lambda row: pixels[row], 5), train.labels)
    pairs = Pairs(torch.tensor([1, 3]), torch.tensor([2, 0]), torch.tensor([False, True]))
    image_sets: dict[str, Images] = {}

    def make_payload(job: Any) -> str:
        image_sets["members"] = job.load(8)
        return "payload"

    def scored(job: Any, payload: str) -> dict[str, torch.Tensor]:
        assert payload == "received payload"
        image_sets["asked"] = job.load(8)
        return {"it": torch.tensor([1.0, 2, 3, 4])}

    monkeypatch.setattr(game, "client_module", lambda _: SimpleNamespace(make_payload=make_payload))

    def all_known(job: Any, payload: str, pairs: int) -> dict[str, torch.Tensor]:
        assert (payload, pairs) == ("received payload", 2)
        image_sets["known"] = job.load(8)
        return {"means": torch.tensor([1.0, -2, -1, 2])}

    monkeypatch.setattr(game, "attack", scored)
    monkeypatch.setattr(game, "linear_attack", all_known)
    job = replace(job_of(train), load=lambda fit: train)
    results = run_trial(job, lambda fit: test, pairs, lambda payload: f"received {payload}")

    def all_of(some: Images) -> torch.Tensor:
        return torch.cat(list(some.pixels.split(2)))

    both = torch.cat([all_of(train), all_of(test)])
    assert torch.equal(all_of(image_sets["members"]), both[[0, 1, 2, 5 + 0, 4]])
    assert torch.equal(image_sets["members"].labels, train.labels)
    assert torch.equal(all_of(image_sets["asked"]), both[[1, 3, 5 + 2, 5 + 0]])
    # The linear attack knows the images that are always there, too
    assert torch.equal(all_of(image_sets["known"]), both[[1, 3, 5 + 2, 5 + 0, 0, 2, 4]])
    assert results["means"].members.tolist() == [1, 2]
    # Of the first pair ours is in, 1 against 3; of the second the other one, 4 against 2
    assert results["it"].members.tolist() == [1, 4]
    assert results["it"].others.tolist() == [3, 2]


# ---- The attacks ----


class Named(SimpleNamespace):
    """A model that is a function."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function=function, fit=8)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def test_every_kind_of_payload_is_attacked() -> None:
    # A masked payload is random numbers; its audit is that of the open one
    assert set(ATTACKS) | set(linear.CONTRIBUTIONS) == set(KINDS.values()) - {Masked}


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    test_kit = analytic_kit()
    monkeypatch.setattr(attacks, "load_kit", lambda *_: test_kit)
    return test_kit


def errors_by_hand(job: Any, latents: np.ndarray, conditions: np.ndarray) -> np.ndarray:
    """Ten timesteps, 50, 150, ... 950, and one noise at each for all."""
    source = generator(job.config.seed, "audit", "noise")
    a = analytic.alphas_cumprod()
    total = np.zeros(len(latents))
    for t in range(50, 1000, 100):
        noise = numbers(torch.randn(SHAPE, generator=source))
        z = np.sqrt(a[t]) * latents + np.sqrt(1 - a[t]) * noise
        e = analytic.eps(z, a[t], analytic.mu(conditions))
        total += ((noise - e) ** 2).mean(axis=(1, 2, 3)) / 10
    return total


def test_a_condition_is_held_against_the_prompt(kit: Kit) -> None:
    """The error under the prompt less that under what was sent, of each image's class; a FedDEO
    description as well.
    """
    data = images(2, 0, 2)
    job = job_of(data, method="domain-vector")
    draw = np.random.default_rng(0)
    prompts = numbers(kit.text([f"an image of {name}" for name in CLASSES]))[[2, 0, 2]]
    vector = draw.normal(size=prompts.shape[1:])
    offsets = draw.normal(size=(2, 1, *vector.shape))
    sent = DomainVector(("zero", "two"), torch.tensor(vector), torch.tensor(offsets))
    latents = numbers(attacks.posteriors(kit, data, job)[0])
    conditions = prompts + vector + offsets[[1, 0, 1], 0]
    expected = errors_by_hand(job, latents, prompts) - errors_by_hand(job, latents, conditions)
    scores = attack(job, sent)
    np.testing.assert_allclose(scores["vector"], expected, rtol=1e-3, atol=1e-5)
    described = Descriptions(("zero", "two"), torch.tensor(conditions[[1, 0]]))
    scores = attack(job_of(data, method="feddeo"), described)
    np.testing.assert_allclose(scores["descriptions"], expected, rtol=1e-3, atol=1e-5)
    beside = Descriptions(("zero", "two"), torch.tensor(vector + offsets[:, 0]))
    scores = attack(job_of(data, method="feddeo", feddeo__tokens="all"), beside)
    np.testing.assert_allclose(scores["descriptions"], expected, rtol=1e-3, atol=1e-5)
    plain = replace(sent, offsets=None)
    expected = errors_by_hand(job, latents, prompts)
    expected -= errors_by_hand(job, latents, prompts + vector)
    np.testing.assert_allclose(attack(job, plain)["vector"], expected, rtol=1e-3, atol=1e-5)


def test_the_best_existing_cluster_of_a_class_counts(kit: Kit) -> None:
    """Each class has two clusters; the third, whose share is 0, does not count."""
    data = images(2, 0, 2)
    job = job_of(data, method="espresso")
    draw = np.random.default_rng(0)
    prompts = numbers(kit.text([f"an image of {name}" for name in CLASSES]))
    conditions = prompts[[0, 2]][:, None] + 3 * draw.normal(size=(2, 3, *prompts.shape[1:]))
    # It would win: it is the prompt's, with an error far below the others'
    conditions[:, 2] = prompts[[0, 2]]
    weights = torch.tensor([[0.5, 0.5, 0], [0.25, 0.75, 0]])
    sent = Mixtures(("zero", "two"), torch.tensor(conditions), weights)
    latents = numbers(attacks.posteriors(kit, data, job)[0])
    by_cluster = [errors_by_hand(job, latents, conditions[[1, 0, 1], j]) for j in range(3)]
    assert (by_cluster[2] < np.minimum(by_cluster[0], by_cluster[1])).all()
    expected = errors_by_hand(job, latents, prompts[[2, 0, 2]])
    expected -= np.minimum(by_cluster[0], by_cluster[1])
    np.testing.assert_allclose(attack(job, sent)["conditions"], expected, rtol=1e-3, atol=1e-5)


def test_errors_are_the_same_in_any_company(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(2, 0, 2)
    job = job_of(data)
    latents, _ = attacks.posteriors(kit, data, job)
    conditions = kit.text(["an image of two", "an image of zero", "an image of two"])
    together = denoising_errors(kit, latents, conditions, job)
    monkeypatch.setattr(attacks, "BATCH", 2)
    torch.testing.assert_close(denoising_errors(kit, latents, conditions, job), together)
    alone = denoising_errors(kit, latents[1:2], conditions[1:2], job)
    torch.testing.assert_close(alone[0], together[1])


def likeness_by_hand(data: Images, latents: np.ndarray, labels: list[int]) -> list[float]:
    """PSNR in dB of each image to the most like of its class's decoded latents."""
    pixels = data.pixels.numpy() / 255
    drawn = np.clip(analytic.decode(latents), -1, 1) / 2 + 0.5
    psnrs = []
    for x, label in zip(pixels, data.labels.tolist(), strict=True):
        errors = [((drawn[m] - x) ** 2).mean() for m, owner in enumerate(labels) if owner == label]
        psnrs.append(-10 * math.log10(min(errors)))
    return psnrs


def test_pictures_are_decoded_from_fedbips_latents(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of class two, one of class zero; each of an image with a little noise, or of none."""
    data = images(2, 0, 2)
    job = job_of(data, method="fedbip")
    monkeypatch.setattr(attacks, "_gain", lambda *_: torch.zeros(3))
    latents = numbers(attacks.posteriors(kit, data, job)[0])
    draw = np.random.default_rng(0)
    sent = np.stack([latents[0], latents[2], draw.normal(size=latents[0].shape), latents[1]])
    sent = sent + 0.1 * draw.normal(size=sent.shape)
    labels = [2, 2, 2, 0]
    means = torch.tensor(sent).float()
    width = kit.text.shape[1]
    payload = Concepts(
        ("zero", "two"),
        torch.zeros(width),
        torch.zeros(2, width),
        torch.tensor(labels),
        means,
        torch.ones_like(means),
    )
    psnrs = attack(job, payload)["pictures"]
    expected = likeness_by_hand(data, sent, labels)
    np.testing.assert_allclose(psnrs, expected, rtol=1e-3)
    # Beyond what a picture can have, as white or black as it can be
    bright = replace(payload, means=20 * means)
    np.testing.assert_allclose(
        attack(job, bright)["pictures"], likeness_by_hand(data, 20 * sent, labels), rtol=1e-3
    )
    # The whole of the other class's are no candidates
    swapped = replace(payload, labels=torch.tensor([0, 0, 0, 2]))
    swapped_psnrs = likeness_by_hand(data, sent, [0, 0, 0, 2])
    np.testing.assert_allclose(attack(job, swapped)["pictures"], swapped_psnrs, rtol=1e-3)


def test_words_are_held_against_the_prompt_and_latents_by_their_distance(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedBiP's: under its words an image that helped is denoised better, and near it is a latent,
    of whatever class.
    """
    data = images(2, 0, 2)
    job = job_of(data, method="fedbip")
    latents = numbers(attacks.posteriors(kit, data, job)[0])
    draw = np.random.default_rng(0)
    prompts = numbers(kit.text([f"an image of {name}" for name in CLASSES]))[[2, 0, 2]]
    domain = draw.normal(size=prompts.shape[-1])
    words = draw.normal(size=(2, prompts.shape[-1]))

    def filled(domain: torch.Tensor, vectors: torch.Tensor) -> Conditioning:
        return Conditioning(torch.tensor(prompts) + domain + 2 * vectors.unsqueeze(1))

    monkeypatch.setattr(
        attacks, "encode_concept_prompt", lambda text: SimpleNamespace(filled=filled)
    )
    sent = np.stack([latents[0] + 0.3, latents[1] - 0.2])
    means = torch.tensor(sent).float()
    payload = Concepts(
        ("zero", "two"),
        torch.tensor(domain),
        torch.tensor(words),
        torch.tensor([2, 0]),
        means,
        torch.ones_like(means),
    )
    scores = attack(job, payload)
    conditions = prompts + domain + 2 * words[[1, 0, 1]][:, None]
    expected = errors_by_hand(job, latents, prompts) - errors_by_hand(job, latents, conditions)
    np.testing.assert_allclose(scores["words"], expected, rtol=1e-3, atol=1e-5)
    apart = np.sqrt(((latents[:, None] - sent[None]) ** 2).sum(axis=(2, 3, 4)))
    np.testing.assert_allclose(scores["latents"], -apart.min(axis=1), rtol=1e-4)


def test_pictures_are_decoded_from_espressos_components(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means are of latents that the first timestep has scaled down by sqrt(a)."""
    data = images(2, 0, 2)
    job = job_of(data, method="espresso", synthesis__steps=4)
    monkeypatch.setattr(attacks, "_gain", lambda *_: torch.zeros(3))
    latents = numbers(attacks.posteriors(kit, data, job)[0])
    draw = np.random.default_rng(0)
    # Two components of each class; of zero the second is not there, which would be the best
    clean = np.stack([latents[1] + 0.2, latents[1], latents[0], latents[2]])
    clean[0::2] += 0.1 * draw.normal(size=clean[0::2].shape)
    a = analytic.alphas_cumprod()[analytic.step_down(4)[0][0]]
    means = torch.tensor(np.sqrt(a) * clean).float()
    payload = Mixtures(
        ("zero", "two"),
        torch.zeros(2, 1, *kit.text.shape),
        torch.ones(2, 1),
        torch.tensor([[1.0, 0], [0.5, 0.5]]),
        means.view(2, 2, *means.shape[1:]),
        torch.ones_like(means).view(2, 2, *means.shape[1:]),
    )
    scores = attack(job, payload)
    # log sum_k w_k N(sqrt(a) x_0; m_k, I), of each image's own class
    x = np.sqrt(a) * latents
    expected_logs = []
    for image, label in zip(x, (2, 0, 2), strict=True):
        parts = [(1.0, 0)] if label == 0 else [(0.5, 2), (0.5, 3)]
        logs = [
            math.log(weight) + stats.norm.logpdf(image, loc=numbers(means[row])).sum()
            for weight, row in parts
        ]
        expected_logs.append(logsumexp(logs))
    np.testing.assert_allclose(scores["latents"], expected_logs, rtol=1e-5)
    psnrs = scores["pictures"]
    there = clean[[0, 2, 3]]
    np.testing.assert_allclose(psnrs, likeness_by_hand(data, there, [0, 2, 2]), rtol=2e-2)


def test_fedlds_components_belong_to_images_of_all_classes(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = images(2, 0, 2)
    job = job_of(data, method="fedld", synthesis__steps=4)
    latents = numbers(attacks.posteriors(kit, data, job)[0])
    a = analytic.alphas_cumprod()[analytic.step_down(4)[0][0]]
    # The third component is not there, which would be the best for the last image
    means = torch.tensor(np.sqrt(a) * (latents + np.array([2.0, -2.0, 0])[:, None, None, None]))
    weights = torch.tensor([0.25, 0.75, 0])
    sent = LatentMixture(("zero", "two"), weights, means.float(), torch.full(means.shape, 0.5))
    scores = attack(job, sent)
    assert list(scores) == ["latents", "pictures"]
    expected_logs = [
        logsumexp(
            [
                math.log(weight)
                + stats.norm.logpdf(image, loc=numbers(means[row]), scale=0.5**0.5).sum()
                for row, weight in enumerate((0.25, 0.75))
            ]
        )
        for image in np.sqrt(a) * latents
    ]
    np.testing.assert_allclose(scores["latents"], expected_logs, rtol=1e-5)
    clean = numbers(means[:2]) / np.sqrt(a)
    pooled = replace(data, labels=torch.zeros(3, dtype=torch.int64))
    expected = likeness_by_hand(pooled, clean, [0, 0])
    np.testing.assert_allclose(scores["pictures"], expected, rtol=2e-2)


def test_a_finding_says_how_like_the_pictures_are() -> None:
    """Medians of members and others; of no other attack."""
    scores = Scores(torch.tensor([30.0, 20, 25]).double(), torch.tensor([10.0, 12, 11]).double())
    games = {"pictures": {"a": [scores]}, "latents": {"a": [scores]}}
    pictures, latents = command.evaluate_trials(games, {"a": command.Guarantee(0.0, 0.0)}, 0)
    assert pictures.likeness == (25.0, 11.0)
    assert latents.likeness is None
    assert command.format_finding(pictures)["likeness"] == "25.0 dB, non-members 11.0"
    assert command.format_finding(latents)["likeness"] == ""


def test_shares_have_intervals_and_the_command_says_what_they_hold_for(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """143 of 1,200: Clopper and Pearson's 95 %."""
    low = stats.beta.ppf(0.025, 143, 1058)
    high = stats.beta.ppf(0.975, 144, 1057)
    assert command.format_share(143, 1200, digits=1) == f"11.9% [{low:.1%}, {high:.1%}]"
    pair_scores = Scores(torch.ones(1000).double(), torch.zeros(1000).double())
    games = {"x": {"a": [pair_scores]}}
    (finding,) = command.evaluate_trials(games, {"a": command.Guarantee(0.0, 0.0)}, 0)
    rate = command.format_finding(finding)["TPR at 0.1 % FPR"]
    assert rate == command.format_share(1000, 1000, digits=1) == "100.0% [99.6%, 100.0%]"
    monkeypatch.chdir(home)
    output = " ".join(audited(tiny_kit, method="prompts-domain").output.split())
    assert "intervals are for these images and payloads" in output
    # Two clients and both together, each with all guesses and the surest fifth
    assert "99 % confidence for all 6 statistics together" in output


def test_a_mixtures_likelihood_is_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(30, 3))
    fitted = GaussianMixture(2, covariance_type="diag", random_state=0).fit(rows)
    parts = (fitted.weights_, fitted.means_, fitted.covariances_)
    # A third component with weight 0, where EM would have left zeros
    extra = (np.zeros(1), np.zeros((1, 3)), np.zeros((1, 3)))
    mixture = [
        torch.tensor(np.concatenate(both)).expand(30, *np.concatenate(both).shape)
        for both in zip(parts, extra, strict=True)
    ]
    log_likelihood = attacks.mixture_log_likelihood(torch.tensor(rows), *mixture)
    np.testing.assert_allclose(log_likelihood, fitted.score_samples(rows), rtol=1e-6)


def test_moments_of_few_features_contain_them() -> None:
    """Ten features of 50 numbers: f^T B^-1 f sums up to the rank, each at most 1."""
    source = torch.Generator().manual_seed(0)
    members = torch.randn(10, 50, generator=source).double()
    nonmembers = torch.randn(10, 50, generator=source).double()
    moments = (members.T @ members).float().double()
    inside = leverage(members, moments)
    assert float(inside.sum()) == pytest.approx(10, abs=0.1)
    assert float(inside.max()) <= 1
    assert float(leverage(nonmembers, moments).min()) > 100


# ---- The linear attack ----


def in_or_out(x: np.ndarray, y: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """The rows that a payload is made of: of each pair x where the coin is 1, y where it is -1."""
    return np.where(coins[:, None] > 0, x, y)


def test_coins_without_noise_are_numpys_least_squares() -> None:
    draw = np.random.default_rng(0)
    differences = draw.normal(size=(30, 50)) * np.logspace(0, 3, 50)
    coins = draw.choice([-1.0, 1], 30)
    residual = coins @ differences
    expected = np.linalg.lstsq(differences.T, residual, rcond=None)[0]
    bits = linear.estimate_canary_bits(torch.tensor(differences), torch.tensor(residual))
    np.testing.assert_allclose(bits, expected, atol=1e-6)
    np.testing.assert_allclose(bits, coins, atol=1e-6)


def test_coins_under_noise_are_a_ridges_that_finds_its_variance() -> None:
    """(D D^T + v I)^-1 D residual with the true v, in NumPy; plain least squares guess worse."""
    draw = np.random.default_rng(1)
    right = {"ridge": 0, "plain": 0, "flat": 0}
    for _ in range(20):
        differences = draw.normal(size=(30, 400)) @ np.diag(np.logspace(0, -2, 400))
        coins = draw.choice([-1.0, 1], 30)
        residual = coins @ differences + 4 * draw.normal(size=400)
        gram = differences @ differences.T
        expected = np.linalg.solve(gram + 16 * np.eye(30), differences @ residual)
        plain = np.linalg.lstsq(differences.T, residual, rcond=None)[0]
        bits = linear.estimate_canary_bits(
            torch.tensor(differences), torch.tensor(residual)
        ).numpy()
        np.testing.assert_allclose(bits, expected, atol=0.15)
        for name, guess in (("ridge", bits), ("plain", plain), ("flat", differences @ residual)):
            right[name] += int((np.sign(guess) == coins).sum())
    assert right["ridge"] > max(right["plain"], right["flat"])


def test_images_that_are_the_same_say_nothing() -> None:
    zeros = torch.zeros(3, 5).double()
    assert linear.estimate_canary_bits(zeros, torch.ones(5).double()).tolist() == [0, 0, 0]


def test_scores_are_the_coins_of_each_mean_with_its_own_number_of_images() -> None:
    """Two classes of 5 and 7 pairs, and three images of the first and one of the second that are
    always there; against the least squares of the whole system at once.
    """
    draw = np.random.default_rng(2)
    labels = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1])
    x, y = 4 + draw.normal(size=(2, 12, 20))
    always, owners = draw.normal(size=(4, 20)), np.array([0, 1, 0, 0])
    coins = draw.choice([-1.0, 1], 12)
    inside = np.concatenate([in_or_out(x, y, coins), always])
    inside_labels = np.concatenate([labels, owners])
    sent = np.stack([inside[inside_labels == group].mean(axis=0) for group in (0, 1)])
    rows = torch.tensor(np.concatenate([x, y, always]))
    groups = torch.tensor(np.concatenate([labels, labels, owners]))
    scores = linear.canary_scores(linear.Means(torch.tensor(sent), rows, groups), 12)
    # sum of what is in = sum of y + always + t (x - y), where t = (1 + s) / 2
    system = np.zeros((12, 2, 20))
    system[np.arange(12), labels] = x - y
    sums = sent * np.array([[8], [8]])
    for group in (0, 1):
        sums[group] -= y[labels == group].sum(axis=0) + always[owners == group].sum(axis=0)
    solution = np.linalg.lstsq(system.reshape(12, 40).T, sums.ravel(), rcond=None)[0]
    np.testing.assert_allclose(solution, (1 + coins) / 2, atol=1e-8)
    np.testing.assert_allclose(scores[:12], 2 * solution - 1, atol=1e-5)
    np.testing.assert_allclose(scores[12:], 1 - 2 * solution, atol=1e-5)


def test_sums_of_features_are_a_system_in_the_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedCGS: two pairs of class zero, one of class one; its image 6 is always there."""
    draw = np.random.default_rng(3)
    features = draw.normal(size=(7, 4))
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 1])
    monkeypatch.setattr(
        linear, "features_and_labels", lambda job, _=0: (torch.tensor(features), labels)
    )
    # Of the pairs (0, 3), (1, 4) and (2, 5) the images 3, 1 and 2 are in
    sums = np.stack([features[3] + features[2], features[1] + features[6]])
    sent = FeatureStatistics(
        ("zero", "one"), torch.tensor([2, 2]), torch.tensor(sums).float(), torch.ones(10)
    )
    scores = linear.linear_attack(job_of(images(*labels.tolist())), sent, 3)["means"]
    np.testing.assert_allclose(scores, [-1, 1, 1, 1, -1, -1], atol=1e-4)


@pytest.mark.parametrize("method", ["oscar", "oscar-pooled"])
def test_means_of_captions_are_a_system_in_the_coins(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Encodings (k, k^2) of images k. Pairs (1, 2) of class zero and (3, 4) of class two; images
    2 and 3 are in, beside 5 of class zero, which is always there.
    """
    captioner = Named(lambda pixels, meter: [str(int(x)) for x in pixels[:, 0, 0, 0]])

    def encoded(texts: list[str]) -> torch.Tensor:
        # A prompt is at the origin
        numbers = [float(t) if t.isdigit() else 0.0 for t in texts]
        return torch.tensor([[x, x**2] for x in numbers])

    text = SimpleNamespace(pooled=encoded, states=lambda texts: encoded(texts).unsqueeze(1))
    monkeypatch.setattr(linear, "load_captioner", lambda *_: captioner)
    monkeypatch.setattr(linear, "load_text_encoder", lambda *_: text)
    pixels = torch.tensor([1, 3, 2, 4, 5], dtype=torch.uint8).view(5, 1, 1, 1)
    data = Images(pixels.expand(5, 3, 8, 8), torch.tensor([0, 2, 0, 2, 0]))
    means = torch.tensor([[3.5, 14.5], [3, 9]])
    sent = Encodings(("zero", "two"), means if "pooled" in method else means.unsqueeze(1))
    scores = linear.linear_attack(job_of(data, method=method), sent, 2)["means"]
    np.testing.assert_allclose(scores, [-1, 1, 1, -1], atol=1e-4)


def test_a_ridge_of_unknown_scale_is_numpys_at_the_likeliest_variances() -> None:
    """Coefficients of deviation 0.01, of which half are 0, in three sums at once."""
    draw = np.random.default_rng(4)
    rows = draw.normal(size=(20, 60))
    coefficients = 0.01 * draw.normal(size=(20, 3)) * (np.arange(20) < 10)[:, None]
    sums = coefficients.T @ rows
    estimate = linear.ridge(torch.tensor(rows), torch.tensor(sums), unit=False)
    expected = np.linalg.lstsq(rows.T, sums.T, rcond=None)[0]
    np.testing.assert_allclose(estimate, expected, atol=1e-8)
    np.testing.assert_allclose(estimate, coefficients, atol=1e-8)


def test_a_vote_is_for_its_classes_winner_or_not(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of two, zero and two vote for 1, 1 and 0; zero elected 1, and two 0."""
    errors = 1 - torch.nn.functional.one_hot(torch.tensor([1, 1, 0]), 2).float()
    monkeypatch.setattr(attacks.votes, "candidate_errors", lambda *_: errors)
    sent = Votes(("zero", "two"), torch.tensor([1, 0], dtype=torch.uint8))
    job = job_of(images(2, 0, 2), method="votes")
    assert attack(job, sent)["winners"].tolist() == [0, 1, 1]


def test_a_caption_is_among_its_classes_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = Named(lambda pixels, meter: ["a dog", "a dog", "a cat"][: len(pixels)])
    monkeypatch.setattr(attacks, "load_captioner", lambda *_: captioner)
    sent = Captions(("zero", "two"), (("a cat",), ("a fox", "a dog")))
    job = job_of(images(2, 0, 0), method="fgl")
    assert attack(job, sent)["captions"].tolist() == [1, 0, 1]


def test_confidence_is_liras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities 0.7, 0.2, 0.1 and label 0: log(0.7 / 0.3); label 2: log(0.1 / 0.9)."""
    logits = torch.tensor([[0.7, 0.2, 0.1, 1e-9]]).log().repeat(2, 1)
    monkeypatch.setattr(attacks, "compute_logits", lambda *_: logits)
    monkeypatch.setattr(attacks, "rebuild_classifier", lambda *_: None)
    scores = attack(job_of(images(0, 2)), Classifier(CLASSES, "x", {}))
    expected = [math.log(7 / 3), math.log(1 / 9)]
    np.testing.assert_allclose(scores["confidence"], expected, rtol=1e-5)


# ---- The command ----


def audited(kit: Path, *more: str, **settings: object) -> Any:
    return CliRunner().invoke(cli, ["audit", *quick_arguments(kit, **settings), *more])


EXPECTED = {
    "feddeo": ["descriptions"],
    "domain-vector": ["vector"],
    "espresso": ["conditions", "latents", "pictures"],
    "fedld": ["latents", "pictures"],
    "latent-gaussian": ["latents", "pictures", "means"],
    "fedbip": ["words", "latents", "pictures"],
    "oscar": ["means"],
    "oscar-pooled": ["means"],
    "fgl": ["captions"],
    "votes": ["winners"],
    "prompts-domain": ["name"],
    "fedcgs": ["moments", "means"],
    "fedpft": ["mixture", "means"],
    "local": ["confidence"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", EXPECTED)
def test_payloads_of_every_method_are_audited(
    method: str, home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    result = audited(tiny_kit, "--out", "found.json", method=method)
    assert result.exit_code == 0, result.output
    findings = json.loads((home / "found.json").read_text())
    rows = [(finding["client"], finding["attacked"]) for finding in findings]
    names = ("client-0", "client-1", "all")
    assert rows == [(name, attacked) for attacked in EXPECTED[method] for name in names]
    for finding in findings:
        # Three training images of each class, two test images
        assert finding["pairs"] == (40 if finding["client"] == "all" else 20)
        assert finding["promised"] == 0
    # What decodes to each image, and what spans them
    if method in ("fedbip", "fedcgs"):
        assert [finding["right"] for finding in findings[3:6]] == [20, 20, 40]
        assert findings[5]["auc"][0] == 1
    # Three images and two components: one image is a component
    if method == "fedpft":
        assert findings[2]["right"] > 30
        assert findings[5]["right"] == 40


def test_feddiscs_centres_are_audited(
    home: Path, tiny_kit: Path, tiny_unclip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image a cluster: each is its own centre, but for the noise of the lowest level.

    The noise is the operating system's, so a few guesses may fail; a coin's 36 of 40 are p = 1e-7.
    """
    monkeypatch.chdir(home)
    settings = {"feddisc__kit": str(tiny_unclip), "feddisc__noise_level": 0}
    result = audited(
        tiny_kit, "--out", "found.json", method="feddisc", feddisc__clusters=3, **settings
    )
    assert result.exit_code == 0, result.output
    findings = json.loads((home / "found.json").read_text())
    assert [finding["attacked"] for finding in findings] == ["centres"] * 3 + ["means"] * 3
    assert findings[2]["right"] >= 36
    assert findings[5]["right"] >= 36


def test_an_audit_goes_on_where_it_was(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another payload of the same images has other coins."""
    monkeypatch.chdir(home)
    trials: list[str] = []
    real = command._run_trial

    def counted(player: Any, repeat: int, *rest: Any) -> Any:
        trials.append(f"{player.name} {repeat}")
        if len(trials) == 2:
            raise KeyboardInterrupt
        return real(player, repeat, *rest)

    monkeypatch.setattr(command, "_run_trial", counted)
    assert audited(tiny_kit, "--repeats", "2", method="prompts-domain").exit_code == 130
    assert audited(tiny_kit, "--repeats", "2", method="prompts-domain").exit_code == 0
    expected = ["client-0 0", "client-0 1", "client-0 1", "client-1 0", "client-1 1"]
    assert trials == expected
    again = audited(tiny_kit, "--repeats", "2", method="prompts-domain")
    assert trials == expected
    assert "client-0" in again.output
    assert audited(tiny_kit, method="prompts-domain", seed=8).exit_code == 0
    assert len(trials) == 7
    # Scores of another version of the attacks are not used
    monkeypatch.setattr(command, "VERSION", 0)
    assert audited(tiny_kit, method="prompts-domain", seed=8).exit_code == 0
    assert len(trials) == 9


@pytest.mark.slow
def test_a_node_is_audited_by_its_own_config(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    node = 'partition-id=1 num-partitions=2 client-id="ward-7" epsilon=0.5'
    result = audited(tiny_kit, "--node-config", node, "--out", "found.json", method="votes")
    assert result.exit_code == 0, result.output
    (finding,) = json.loads((home / "found.json").read_text())
    assert (finding["client"], finding["promised"]) == ("ward-7", 0.5)


@pytest.mark.slow
def test_a_payload_with_a_delta_is_audited_with_it(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas: list[float] = []
    real = statistics.empirical_epsilon

    def kept(found: Scores, delta: float, *rest: Any) -> float:
        deltas.append(delta)
        return real(found, delta, *rest)

    monkeypatch.chdir(home)
    monkeypatch.setattr(statistics, "empirical_epsilon", kept)
    result = audited(tiny_kit, method="domain-vector", epsilon=1.0, delta=1e-6)
    assert result.exit_code == 0, result.output
    assert deltas == [1e-6] * 3


def leave_out_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(shape: torch.Size, *_: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def largest(counts: list[int], *_: Any) -> int:
        return counts.index(max(counts))

    monkeypatch.setattr(mechanisms, "standard_normal", nothing)
    # The rounding, which is part of the noise
    monkeypatch.setattr(mechanisms, "GRID", 2**40)
    monkeypatch.setattr(votes, "permute_and_flip", largest)


def one_image_a_class(folder: Path) -> dict[str, object]:
    """Two clients' neon digits to train on and painted ones to test on, whose votes differ."""
    for split, source, style in (("train", "private", "neon"), ("test", "test", "painting")):
        rows = digits.load_split(source)
        for client in range(2):
            for label, name in enumerate(digits.CLASSES):
                kinds = zip(rows.labels, rows.domains, strict=True)
                same = [row for row, kind in enumerate(kinds) if kind == (label, style)]
                file = folder / f"client-{client}" / split / name / "0.png"
                file.parent.mkdir(parents=True)
                Image.fromarray(rows.images[same[client]]).save(file)
    classes = ",".join(digits.CLASSES)
    return {"data__name": "folder", "data__root": str(folder), "data__classes": classes}


GUARANTEED = [name for name, method in METHODS.items() if method.privacy]
# Payloads of each client, where one shows too little
REPEATS = {"votes": 3, "oscar": 4, "oscar-pooled": 4}


@pytest.mark.slow
@pytest.mark.parametrize("noise", [True, False], ids=["noised", "noise left out"])
@pytest.mark.parametrize("method", GUARANTEED)
def test_an_audit_finds_noise_that_was_left_out(
    method: str,
    noise: bool,
    home: Path,
    tiny_kit: Path,
    tiny_unclip: Path,
    shipped_kit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else is changed: the client clips, averages and sends as it does."""
    monkeypatch.chdir(home)
    if not noise:
        leave_out_the_noise(monkeypatch)
    settings: dict[str, object] = {"method": method, "epsilon": 1.0}
    if method == "feddisc":
        settings["feddisc__kit"] = str(tiny_unclip)
    kit = tiny_kit
    if method == "votes":
        # Random weights find the same word for every image
        kit = shipped_kit
        settings |= one_image_a_class(home / "images")
    result = audited(kit, "--repeats", str(REPEATS.get(method, 2)), **settings)
    assert result.exit_code == (0 if noise else 1), result.output
    assert ("the guarantee is refuted" in result.output) != noise


@pytest.mark.parametrize(("epsilon", "code"), [(1.0, 1), (0.0, 0)])
def test_a_broken_guarantee_fails_the_audit(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, epsilon: float, code: int
) -> None:
    """A mechanism that sends what it should not: every guess is right."""

    def all_right(*_: Any) -> dict[str, Scores]:
        return {"winners": Scores(torch.ones(40).double(), torch.zeros(40).double())}

    monkeypatch.chdir(home)
    monkeypatch.setattr(command, "run_trial", all_right)
    result = audited(tiny_kit, "--out", "found.json", method="votes", epsilon=epsilon)
    assert result.exit_code == code, result.output
    assert ("the guarantee is refuted: client-0, client-1, all" in result.output) == bool(code)
    findings = json.loads((home / "found.json").read_text())
    assert [finding["broken"] for finding in findings] == [bool(code)] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ceiling"}, "method = 'ceiling': its clients send no payload"),
        ({"method": "fedavg"}, "method = 'fedavg': its clients send no payload"),
        ({"method": "feddeo", "kit": "/nowhere"}, "no such folder"),
    ],
)
def test_an_impossible_audit_is_refused(
    settings: dict[str, str],
    message: str,
    home: Path,
    tiny_kit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(home)
    kit = Path(settings.pop("kit", str(tiny_kit)))
    result = audited(kit, **settings)
    assert result.exit_code == 1
    assert message in result.output


def test_the_weakest_guarantee_holds_for_all() -> None:
    def of(*epsilons: float) -> tuple[float, float]:
        games: dict[str, dict[str, list[Scores]]] = {"it": {}}
        guarantees = {}
        for number, epsilon in enumerate(epsilons):
            games["it"][f"c{number}"] = [scores([1, 0], [0, 1])]
            guarantees[f"c{number}"] = command.Guarantee(epsilon, 0.0)
        return command.evaluate_trials(games, guarantees, 0)[-1].promised

    assert of(0.5, 2.0) == 2.0
    assert of(0.5, 0.0) == 0.0


@pytest.mark.slow
def test_codes_are_attacked_as_they_arrive(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bits are attacked when the run sends four bits."""
    monkeypatch.chdir(home)
    payloads: list[DomainVector] = []
    pick: Callable[..., Any] = attacks.ATTACKS[DomainVector]

    def kept(job: Any, payload: Any) -> Any:
        payloads.append(payload)
        return pick(job, payload)

    monkeypatch.setitem(ATTACKS, DomainVector, kept)
    result = audited(tiny_kit, method="domain-vector", payload_codec="int4")
    assert result.exit_code == 0, result.output
    levels = {len(sent.domain.flatten()[:64].unique()) for sent in payloads}
    assert max(levels) <= 16
