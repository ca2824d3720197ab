"""Figures of a test against scikit-learn, against definitions, and against each other."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import auc, roc_auc_score

from osfl.metrics.figures import (
    Estimate,
    auroc,
    binning_error,
    brier_score,
    calibration_error,
    count_raw_scores,
    figures_of,
    figures_of_raw,
    macro,
    placement_variance,
    reliability,
    roc_curve,
    sensitivity,
    wilson_interval,
)
from osfl.metrics.histograms import count_scores, log_probabilities
from tests.helpers.digit_scores import digit_logits

POSITIVES = np.array([1, 0, 2, 4])
NEGATIVES = np.array([5, 3, 2, 1])


@pytest.mark.parametrize("training_images", [60, 100, 900])
def test_areas_of_real_digits_are_those_of_scikit_learn(training_images: int) -> None:
    """A poor, a fair and a good model: at most 0.002, and within the bound that is stated."""
    logits, labels = digit_logits(training_images)
    log_p, scores = log_probabilities(logits)
    histograms = count_scores(logits, labels)
    assert histograms is not None
    exact = [roc_auc_score(labels == label, scores[:, label]) for label in range(10)]
    bounds = []
    for pair, area in zip(histograms.pairs(), exact, strict=True):
        binned = auroc(*pair)
        assert binned is not None
        bounds.append(binning_error(*pair))
        assert abs(binned.value - area) <= bounds[-1] + 1e-12
        assert abs(binned.value - area) <= 0.002
    figures = figures_of(histograms)
    assert figures["auroc"]["value"] == pytest.approx(np.mean(exact), abs=0.002)
    assert figures["binning_error"] == pytest.approx(np.mean(bounds))
    raw = figures_of_raw(logits, labels)
    assert raw["auroc"]["value"] == pytest.approx(
        roc_auc_score(labels, np.exp(log_p), multi_class="ovr"), abs=1e-9
    )
    assert raw["images"] == figures["images"] == len(labels)
    for key in ("auroc", "sensitivity", "ece", "brier"):
        for limit in ("value", "low", "high"):
            assert raw[key][limit] == pytest.approx(figures[key][limit], abs=0.02)
        assert figures[key]["low"] <= figures[key]["value"] <= figures[key]["high"]


def test_saturated_probabilities_are_no_ties() -> None:
    """Float32 probabilities of 1 are many here, also float64 ones; the margins are all distinct."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    margins = (40 * rng.normal(1.3 * (2 * labels - 1), 1)).astype(np.float32)
    logits = np.stack([np.zeros_like(margins), margins], axis=1)
    figures = figures_of_raw(logits, labels)
    assert figures["auroc"]["value"] == pytest.approx(roc_auc_score(labels, margins), abs=1e-9)


def test_an_area_is_the_share_of_pairs_in_order() -> None:
    pairs = 0.0
    ties = 0
    for score, count in enumerate(POSITIVES):
        for negative, number in enumerate(NEGATIVES):
            pairs += count * number * (1.0 if score > negative else 0.5 if score == negative else 0)
            ties += count * number * (score == negative)
    area = auroc(POSITIVES, NEGATIVES)
    assert area is not None
    assert area.value == pytest.approx(pairs / 77)
    assert binning_error(POSITIVES, NEGATIVES) == pytest.approx(ties / 2 / 77)
    assert auc(*roc_curve(POSITIVES, NEGATIVES)) == pytest.approx(area.value)
    assert auroc(POSITIVES, 0 * NEGATIVES) is None
    assert auroc(0 * POSITIVES, NEGATIVES) is None


@pytest.mark.parametrize("spread", [[1, 0, 2, 4], [0, 0, 0, 9], [9, 0, 0, 0]])
def test_the_limits_of_an_area_are_those_it_is_z_errors_from(spread: list[int]) -> None:
    """Newcombe's method 5, with the variance of Hanley and McNeil at the limit itself."""
    negatives = np.array([5, 3, 2, 0]) if spread[-1] == 9 else np.array([0, 3, 2, 5])
    area = auroc(np.array(spread), negatives)
    assert area is not None
    m, n = sum(spread), 10
    for limit in {area.low, area.high} - {0.0, 1.0}:
        q1, q2 = limit / (2 - limit), 2 * limit**2 / (1 + limit)
        middle = (m + n) / 2 - 1
        variance = (limit * (1 - limit) + middle * (q1 - limit**2) + middle * (q2 - limit**2)) / (
            m * n
        )
        assert abs(area.value - limit) == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-4)
    assert area.low < area.high
    assert (area.high == 1) == (area.value == 1)
    assert (area.low == 0) == (area.value == 0)


def test_raw_scores_are_counted_at_each_value() -> None:
    scores = np.array([0.3, 0.1, 0.3, 0.7, 0.3])
    positives, negatives = count_raw_scores(scores, np.array([True, False, False, True, True]))
    assert positives.tolist() == [0, 2, 1]
    assert negatives.tolist() == [1, 1, 0]


def test_the_sensitivity_is_that_of_the_lowest_threshold_specific_enough() -> None:
    """At or above the thresholds are 1, 3, 6, 11 of 11 negatives, and 4, 6, 6, 7 of 7 positives."""
    for specificity, hits in ((0.95, 0), (10 / 11, 4), (8 / 11, 6), (0.5, 6)):
        estimate = sensitivity(POSITIVES, NEGATIVES, specificity)
        assert estimate is not None
        assert estimate.value == pytest.approx(hits / 7)
    assert sensitivity(POSITIVES, 0 * NEGATIVES) is None
    perfect = sensitivity(np.array([0, 20]), np.array([200, 0]))
    assert perfect is not None
    assert (perfect.value, perfect.high) == (1.0, 1.0)
    # Jeffreys' lower limit of 20 of 20
    assert perfect.low == pytest.approx(0.88, abs=0.02)


def test_the_interval_of_a_sensitivity_covers_the_true_one() -> None:
    rng = np.random.default_rng(1)
    grid = np.linspace(-5, 7, 257)
    # Of normal scores with means 2 and 0: 1 - Phi(1.645 - 2)
    true = 0.639
    covered = 0
    for _ in range(200):
        positives = np.histogram(rng.normal(2, 1, 40), grid)[0]
        estimate = sensitivity(positives, np.histogram(rng.normal(0, 1, 200), grid)[0])
        assert estimate is not None
        covered += estimate.low <= true <= estimate.high
    assert 0.92 <= covered / 200 <= 0.995


def test_placements_vary_as_delong_says() -> None:
    """Shares of 11 negatives below each of the seven positives, ties by half."""
    placements = [2.5 / 11, *[9 / 11] * 2, *[10.5 / 11] * 4]
    assert placement_variance(POSITIVES, NEGATIVES) == pytest.approx(np.var(placements, ddof=1) / 7)
    assert placement_variance(np.array([0, 1]), np.array([1, 1])) == 0


def test_a_mean_over_classes_has_at_most_the_mean_of_the_limits() -> None:
    rows = [Estimate(0.8, 0.7, 0.88), None, Estimate(0.9, 0.86, 0.94)]
    mean = macro(rows, [0.0, 0.0])
    assert mean is not None
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.85, 0.78, 0.91))
    errors = np.array([0.18, 0.08]) / 3.919928
    # All of the variance is the positives', which are independent
    narrow = macro(rows, list(errors**2))
    assert narrow is not None
    ratio = math.hypot(*errors) / sum(errors)
    assert narrow.low == pytest.approx(0.85 - 0.07 * ratio, rel=1e-4)
    assert narrow.high == pytest.approx(0.85 + 0.06 * ratio, rel=1e-4)
    # A quarter of it
    part = macro(rows, list(errors**2 / 4))
    assert part is not None
    ratio = math.hypot(*errors) / 2 / sum(errors) + math.sqrt(0.75)
    assert part.low == pytest.approx(0.85 - 0.07 * min(1, ratio), rel=1e-4)
    assert macro([None], []) is None


CONFIDENCE = np.zeros((3, 15), dtype=np.int64)
CONFIDENCE[:, 5] = (10, 2, 3600)
CONFIDENCE[:, 14] = (90, 81, 88200)


def test_the_calibration_error_is_the_mean_gap() -> None:
    error = calibration_error(CONFIDENCE)
    assert error is not None
    assert error.value == pytest.approx((10 * abs(0.2 - 0.36) + 90 * abs(0.9 - 0.98)) / 100)
    # A calibrated model would hardly have it
    assert 0 < error.low < error.value < error.high
    bins = reliability(CONFIDENCE)
    assert [(row.images, row.confidence, row.accuracy.value) for row in bins] == [
        (10, pytest.approx(0.36), 0.2),
        (90, pytest.approx(0.98), 0.9),
    ]
    # Wilson's interval of 2 in 10
    assert (bins[0].accuracy.low, bins[0].accuracy.high) == pytest.approx(
        (0.0567, 0.5098), abs=1e-4
    )
    assert calibration_error(0 * CONFIDENCE) is None


def test_a_calibrated_model_may_have_no_calibration_error() -> None:
    """The estimate is not 0, as counts vary."""
    rng = np.random.default_rng(0)
    means = (np.arange(15) + 0.5) / 15
    covered = 0
    for _ in range(20):
        correct = rng.binomial(40, means)
        images = np.full(15, 40)
        error = calibration_error(np.stack([images, correct, np.rint(40000 * means)]).astype(int))
        assert error is not None
        assert error.value > 0.02
        covered += error.low == 0
    # 95 % of 20 on average
    assert covered >= 18


def test_the_brier_score_is_a_mean_with_its_standard_error() -> None:
    scores = np.array([0.1, 0.5, 0.5, 1.2])
    sums = np.array([2300, 1000 * (scores**2).sum()])
    score = brier_score(4, sums)
    assert score is not None
    half = 1.959964 * np.std(scores, ddof=1) / 2
    assert score.value == pytest.approx(0.575)
    assert score.high == pytest.approx(0.575 + half, abs=1e-6)
    assert score.low == pytest.approx(0.575 - half, abs=1e-6)
    assert brier_score(0, np.zeros(2)) is None


@pytest.mark.parametrize("trials", [1, 2, 3, 10, 57, 1000, 123_457, 10**9])
def test_an_interval_of_a_share_is_scipys(trials: int) -> None:
    counts = {*range(min(trials, 40) + 1), trials // 3, trials // 2, trials - 1, trials}
    for successes in counts:
        expected = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, trials) == pytest.approx(
            (expected.low, expected.high), rel=0, abs=1e-12
        )
    assert wilson_interval(0, trials)[0] == 0
    assert wilson_interval(trials, trials)[1] == 1
