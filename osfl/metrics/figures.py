"""Figures of a test with 95 % intervals: AUROC, sensitivity, calibration error and Brier score.

All take counts of positive and negative images by score, in ascending order of the score: those of
a histogram, or one entry for each distinct raw score (`count_raw_scores`), which is exact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from osfl.metrics.histograms import (
    CONFIDENCE_BINS,
    UNIT,
    ScoreHistograms,
    count_calibration,
    log_probabilities,
)

LEVEL = 0.95
# The 97.5 % quantile of the normal distribution
Z = 1.959963984540054
SPECIFICITY = 0.95
DRAWS = 2000

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def count_raw_scores(scores: np.ndarray, is_positive: np.ndarray) -> Pair:
    """Return the numbers of positive and of negative images at each distinct score, ascending."""
    values, position = np.unique(scores, return_inverse=True)
    positives = np.bincount(position[is_positive], minlength=len(values))
    return positives, np.bincount(position[~is_positive], minlength=len(values))


def auroc(positives: np.ndarray, negatives: np.ndarray) -> Estimate | None:
    """Compute the area under the ROC curve; None without a positive or a negative image.

    It is the share of pairs (positive, negative) in which the positive has the higher score; ties
    count one half (Hanley and McNeil 1982). The interval inverts their variance in the manner of
    Wilson, which needs no raw scores, and unlike DeLong's it does not shrink to a point at an area
    of 1 (Newcombe 2006, Statistics in Medicine 25:559, method 5).
    """
    m = int(positives.sum())
    n = int(negatives.sum())
    if not (m and n):
        return None
    # Negatives below each score, and half of those at it
    below = np.cumsum(negatives) - negatives / 2
    area = float(positives @ below) / (m * n)
    low, high = _area_limits(area, m, n)
    return Estimate(area, low, high)


def _area_limits(area: float, m: int, n: int) -> tuple[float, float]:
    from scipy.optimize import brentq

    half = (m + n) / 2 - 1

    def excess(theta: float) -> float:
        spread = 1 + half * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return float((area - theta) ** 2 - Z**2 * theta * (1 - theta) * spread / (m * n))

    # The ends 0 and 1 are roots, too, if the area is one of them
    low = brentq(excess, 0, min(area, 1 - 1e-12)) if area > 0 else 0.0
    high = brentq(excess, max(area, 1e-12), 1) if area < 1 else 1.0
    return float(low), float(high)


def binning_error(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Bound the difference between the AUROC of binned and of raw scores.

    Only pairs in the same bin can be ordered otherwise, and each of them counts one half: the
    bound is half of their share.
    """
    pairs = int(positives.sum()) * int(negatives.sum())
    return float(positives.astype(float) @ negatives) / (2 * pairs) if pairs else 0.0


def roc_curve(positives: np.ndarray, negatives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the false- and true-positive rates at each threshold, from (0, 0) to (1, 1)."""
    rates = []
    for counts in (negatives, positives):
        above = np.cumsum(counts[::-1])
        rates.append(np.concatenate([[0.0], above / max(above[-1], 1)]))
    return rates[0], rates[1]


def sensitivity(
    positives: np.ndarray, negatives: np.ndarray, specificity: float = SPECIFICITY
) -> Estimate | None:
    """Compute the sensitivity at the lowest threshold with at least this specificity.

    None without a positive or a negative image. The interval is a Bayesian bootstrap's (Gu, Ghosal
    and Roy 2008), which needs counts alone: the number of negatives above the population's
    threshold is binomial, and given a threshold the sensitivity has the Beta distribution of
    Jeffreys' prior.
    """
    m = int(positives.sum())
    n = int(negatives.sum())
    if not (m and n):
        return None
    # Images at or above each threshold, from above the highest score down
    false_positives = np.concatenate([[0], np.cumsum(negatives[::-1])])
    true_positives = np.concatenate([[0], np.cumsum(positives[::-1])])
    share = 1 - specificity
    hits = int(true_positives[_last_threshold(false_positives, n * share)])
    rng = np.random.default_rng(0)
    allowances = rng.binomial(n, share, size=DRAWS)
    resampled_hits = true_positives[_last_threshold(false_positives, allowances)]
    shares = rng.beta(resampled_hits + 0.5, m - resampled_hits + 0.5)
    low, high = np.quantile(shares, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = hits / m
    return Estimate(value, min(float(low), value), max(float(high), value))


def _last_threshold(false_positives: np.ndarray, allowed: Any) -> Any:
    """Return the index of the lowest threshold with at most a number of false positives."""
    # An allowance of 5 may be computed as 4.9999999
    return np.searchsorted(false_positives, np.asarray(allowed) + 1e-9, side="right") - 1


def placement_variance(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Return the part of an AUROC's variance that the positives cause (DeLong et al. 1988).

    It is the variance of their placements, the shares of negatives below each, over their number;
    0 for one positive.
    """
    m = int(positives.sum())
    placements = (np.cumsum(negatives) - negatives / 2) / negatives.sum()
    mean = positives @ placements / m
    return float(positives @ (placements - mean) ** 2) / max(m - 1, 1) / m


def macro(estimates: Iterable[Estimate | None], variances: Sequence[float]) -> Estimate | None:
    """Average a figure over the classes that have it; None without any.

    Classes share their images, and histograms do not say how their errors correlate. The standard
    error is bounded instead. An image is a positive of one class alone, so that the errors by
    positives are independent; those by negatives may add up. It is at most the mean of the
    classes' standard errors in any case. The mean of the classes' intervals is shrunk to the
    bound.

    Args:
        variances: for each class that has the figure, the part of its variance that the positives
            cause.
    """
    rows = [row for row in estimates if row is not None]
    if not rows:
        return None
    limits = np.array([[row.value, row.low, row.high] for row in rows])
    value, low, high = (float(mean) for mean in limits.mean(axis=0))
    errors = (limits[:, 2] - limits[:, 1]) / (2 * Z)
    positive_variances = np.minimum(variances, errors**2)
    negative_errors = np.sqrt(errors**2 - positive_variances)
    bound = np.sqrt(positive_variances.sum()) + negative_errors.sum()
    ratio = min(1.0, float(bound / errors.sum()))
    return Estimate(value, value - ratio * (value - low), value + ratio * (high - value))


@dataclass(frozen=True)
class ConfidenceBin:
    """A bar of a reliability diagram.

    Attributes:
        images: the images whose predicted class has a probability in this bin.
        confidence: the mean of that probability.
        accuracy: the share of correct ones, with its interval (Wilson 1927).
    """

    images: int
    confidence: float
    accuracy: Estimate


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Compute the score interval of a proportion at the level of 95 % (Wilson 1927, JASA 22:209).

    SciPy's `binomtest` computes the same, but its import takes seconds of every report.

    Args:
        trials: at least 1.
    """
    share = successes / trials
    center = share + Z**2 / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2)
    scale = 1 + Z**2 / trials
    # The ends are exact, which rounding would miss
    low = (center - half) / scale if successes else 0.0
    high = (center + half) / scale if successes < trials else 1.0
    return low, high


def reliability(confidence: np.ndarray) -> list[ConfidenceBin]:
    """Return the bins of a reliability diagram that have images.

    Args:
        confidence: as in `ScoreHistograms`.
    """
    bins = []
    for images, correct, total in confidence.T.tolist():
        if images:
            accuracy = Estimate(correct / images, *wilson_interval(correct, images))
            bins.append(ConfidenceBin(images, total / UNIT / images, accuracy))
    return bins


def calibration_error(confidence: np.ndarray) -> Estimate | None:
    """Compute the expected calibration error (Guo et al. 2017, eq. 3); None without an image.

    Sampling errors do not cancel in a sum of absolute values, so that the estimate is too high, and
    a resampled one twice as much. The interval, a bootstrap of the counts, is therefore the
    pivotal one (Efron and Tibshirani 1993, ch. 13). It begins at 0 if a calibrated model would
    often have such an estimate (consistency resampling, Broecker and Smith 2007).
    """
    images, correct, sums = confidence
    total = int(images.sum())
    if not total:
        return None
    means = np.clip(sums / UNIT / np.maximum(images, 1), 0, 1)
    value = float(_calibration_errors(images, correct, means))
    rng = np.random.default_rng(0)
    cells = np.stack([correct, images - correct]).ravel()
    draws = rng.multinomial(total, cells / total, size=DRAWS).reshape(DRAWS, 2, CONFIDENCE_BINS)
    resampled = _calibration_errors(draws.sum(axis=1), draws[:, 0], means)
    lower, upper = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    calibrated = rng.binomial(images, means, size=(DRAWS, CONFIDENCE_BINS))
    chance = np.quantile(_calibration_errors(images, calibrated, means), (1 + LEVEL) / 2)
    low = 0.0 if value <= chance else min(max(2 * value - float(upper), 0.0), value)
    return Estimate(value, low, max(2 * value - float(lower), value))


def _calibration_errors(images: np.ndarray, correct: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Sum |accuracy - confidence| over the bins [..., bin], weighted by their images."""
    gaps: np.ndarray = np.abs(correct - images * means).sum(axis=-1) / images.sum(axis=-1)
    return gaps


def brier_score(images: int, sums: np.ndarray) -> Estimate | None:
    """Compute the mean Brier score, from 0 to 2; None without an image.

    The interval is that of a mean, by the central limit theorem.

    Args:
        sums: as in `ScoreHistograms`.
    """
    if not images:
        return None
    total, squares = (float(value) / UNIT for value in sums)
    value = total / images
    variance = max(squares - total * value, 0.0) / max(images - 1, 1)
    half = Z * float(np.sqrt(variance / images))
    return Estimate(value, max(value - half, 0.0), min(value + half, 2.0))


def figures_of(histograms: ScoreHistograms, specificity: float = SPECIFICITY) -> dict[str, Any]:
    """Compute all figures of histograms, as in `metrics.json`."""
    return _figures(histograms.pairs(), histograms.confidence, histograms.brier, specificity)


def figures_of_raw(
    logits: np.ndarray, labels: np.ndarray, specificity: float = SPECIFICITY
) -> dict[str, Any]:
    """Compute all figures of logits [N, C] and true classes [N], without binned scores."""
    log_p, scores = log_probabilities(logits)
    pairs = [
        count_raw_scores(scores[:, label], labels == label) for label in range(scores.shape[1])
    ]
    confidence, brier = count_calibration(np.exp(log_p), labels)
    figures = _figures(pairs, confidence, brier, specificity)
    # Ties of raw scores are true ties
    return {**figures, "binning_error": 0.0}


def _figures(
    pairs: Sequence[Pair], confidence: np.ndarray, brier: np.ndarray, specificity: float
) -> dict[str, Any]:
    images = int(confidence[0].sum())
    areas = [auroc(*pair) for pair in pairs]
    shares = [sensitivity(*pair, specificity) for pair in pairs]
    tested = [pair for pair, area in zip(pairs, areas, strict=True) if area is not None]
    errors = [binning_error(*pair) for pair in tested]
    placements = [placement_variance(*pair) for pair in tested]
    hits = [
        share.value * (1 - share.value) / int(positives.sum())
        for share, (positives, _) in zip(filter(None, shares), tested, strict=True)
    ]
    classes = [
        {"auroc": _as_dict(area), "sensitivity": _as_dict(share)}
        for area, share in zip(areas, shares, strict=True)
    ]
    return {
        "images": images,
        "auroc": _as_dict(macro(areas, placements)),
        "binning_error": float(np.mean(errors)) if errors else 0.0,
        "specificity": specificity,
        "sensitivity": _as_dict(macro(shares, hits)),
        "ece": _as_dict(calibration_error(confidence)),
        "brier": _as_dict(brier_score(images, brier)),
        "classes": classes,
    }


def _as_dict(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else asdict(estimate)
