"""Histograms of a test's scores, which a site sends beside the confusion matrix.

The score of class c is the logit of its softmax probability, log p - log(1 - p). For every class
there are two histograms of it, one of the images of the class (positives) and one of all others
(negatives), with `BINS` bins of equal width on [-LIMIT, LIMIT]; scores beyond it are in the first
or last bin. With the sums for calibration they give every figure of `osfl.metrics.figures`.

A histogram of few images is nearly a list of their scores, so one of fewer than `MIN_IMAGES` images
is left empty (`ScoreHistograms.without_small`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

BINS = 256
# The score of the probability 1 - 1.1e-7; float32's resolution below 1 is about 1e-7
LIMIT = 16.0
# The number of bins in Guo et al. (2017)
CONFIDENCE_BINS = 15
# Sums are integers in thousandths, so that the sum of one image is not its exact score
UNIT = 1000
MIN_IMAGES = 5
# Bound of the histograms' size, 2 kB per class, below what every reply may have
MAX_CLASSES = 4000


@dataclass(frozen=True)
class ScoreHistograms:
    """Counts of a test's images by score. All are int64.

    Attributes:
        positives: [C, BINS], the images of each class by its score; a row of zeros if withheld.
        negatives: [C, BINS], the images of all other classes by the same score.
        confidence: [3, CONFIDENCE_BINS] by the probability of the predicted class, in bins of equal
            width on [0, 1]: images, correct ones, and the sum of probabilities in thousandths.
        brier: [2], the sums over images of the Brier score and of its square, in thousandths.
    """

    positives: np.ndarray
    negatives: np.ndarray
    confidence: np.ndarray
    brier: np.ndarray

    def __add__(self, other: "ScoreHistograms") -> "ScoreHistograms":
        """Return the histograms of both tests' images together."""
        return ScoreHistograms(
            self.positives + other.positives,
            self.negatives + other.negatives,
            self.confidence + other.confidence,
            self.brier + other.brier,
        )

    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the (positives, negatives) of every class."""
        return list(zip(self.positives, self.negatives, strict=True))

    def without_small(self, least: int) -> "ScoreHistograms | None":
        """Empty each histogram of fewer than `least` images; None if the test has fewer."""
        if self.confidence[0].sum() < least:
            return None
        positives = _without_small_rows(self.positives, least)
        negatives = _without_small_rows(self.negatives, least)
        return ScoreHistograms(positives, negatives, self.confidence, self.brier)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as lists."""
        return {name: counts.tolist() for name, counts in vars(self).items()}


def from_json(value: Mapping[str, Any]) -> ScoreHistograms:
    """Return the histograms of `as_json`.

    Raises:
        KeyError, TypeError, ValueError: the value is not of that form.
    """
    names = ("positives", "negatives", "confidence", "brier")
    counts = [np.array(value[name], dtype=np.int64) for name in names]
    histograms = ScoreHistograms(*counts)
    shapes = [array.shape for array in counts]
    classes = len(histograms.positives)
    if shapes != [(classes, BINS), (classes, BINS), (3, CONFIDENCE_BINS), (2,)]:
        raise ValueError(f"histograms have the shapes {shapes}")
    return histograms


def pool(histograms: Sequence[ScoreHistograms]) -> ScoreHistograms:
    """Sum the histograms of at least one client."""
    return reduce(ScoreHistograms.__add__, histograms)


def _without_small_rows(rows: np.ndarray, least: int) -> np.ndarray:
    return np.where(rows.sum(axis=1, keepdims=True) < least, 0, rows)


# ---- Counting, at a site ----


def count_scores(logits: np.ndarray, labels: np.ndarray) -> ScoreHistograms | None:
    """Count images by score; None if a logit is not finite, or for more than `MAX_CLASSES` classes.

    Args:
        logits: [N, C] of at least one image.
        labels: [N] true classes.
    """
    classes = logits.shape[1]
    if classes > MAX_CLASSES or not np.isfinite(logits).all():
        return None
    log_p, scores = log_probabilities(logits)
    bins = np.floor((scores + LIMIT) * (BINS / (2 * LIMIT))).clip(0, BINS - 1).astype(np.int64)
    totals = _count_rows(bins, classes)
    positives = np.zeros_like(totals)
    np.add.at(positives, (labels, bins[np.arange(len(labels)), labels]), 1)
    confidence, brier = count_calibration(np.exp(log_p), labels)
    return ScoreHistograms(positives, totals - positives, confidence, brier)


def _count_rows(bins: np.ndarray, classes: int) -> np.ndarray:
    cells = bins + BINS * np.arange(classes)
    return np.bincount(cells.ravel(), minlength=classes * BINS).reshape(classes, BINS)


def log_probabilities(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log p and log p - log(1 - p) of the softmax probabilities p, both float64 [N, C].

    The second is also accurate near p = 1, because 1 - p is summed over the other classes.
    """
    # Takes tenths of a second to import
    from scipy.special import log_softmax, logsumexp

    log_p: np.ndarray = log_softmax(logits.astype(np.float64), axis=1)
    rows = np.arange(len(log_p))
    top = log_p.argmax(axis=1)
    other_classes = log_p.copy()
    other_classes[rows, top] = -np.inf
    # For the largest p, log1p(-p) is inexact; its value is replaced below
    log_rest = np.log1p(-np.exp(np.where(np.isneginf(other_classes), -1.0, log_p)))
    log_rest[rows, top] = logsumexp(other_classes, axis=1)
    return log_p, log_p - log_rest


def count_calibration(probabilities: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    """Count images by confidence and sum their Brier scores, as `ScoreHistograms` says.

    The Brier score of an image is the sum over classes of (p - y)^2 (Brier 1950, eq. 2): from 0
    to 2.

    Args:
        probabilities: [N, C].
        labels: [N] true classes.

    Returns:
        (confidence [3, CONFIDENCE_BINS], brier [2]).
    """
    predicted = probabilities.argmax(axis=1)
    top = probabilities.max(axis=1)
    bins = np.minimum((top * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
    images = np.bincount(bins, minlength=CONFIDENCE_BINS)
    correct = np.bincount(bins[predicted == labels], minlength=CONFIDENCE_BINS)
    sums = np.bincount(bins, weights=top, minlength=CONFIDENCE_BINS)
    expected = np.zeros_like(probabilities)
    expected[np.arange(len(labels)), labels] = 1
    squares = ((probabilities - expected) ** 2).sum(axis=1, dtype=np.float64)
    brier = np.rint(UNIT * np.array([squares.sum(), (squares**2).sum()])).astype(np.int64)
    confidence = np.stack([images, correct, np.rint(UNIT * sums).astype(np.int64)])
    return confidence, brier


# ---- Checking, at the server ----


def check_histograms(histograms: ScoreHistograms, matrix: Sequence[Sequence[int]]) -> None:
    """Check that histograms from a client can be those of its test.

    Args:
        histograms: of the right shapes.
        matrix: the client's confusion matrix, already checked.

    Raises:
        ValueError: they are not counts, not of as many images as the confusion matrix, or have
            more images with p > 0.5 in a class than the matrix has predictions of it.
    """
    cells = np.array(matrix, dtype=np.int64)
    images = int(cells.sum())
    limit = UNIT * 4 * max(images, 1)
    if any((counts < 0).any() or (counts > limit).any() for counts in vars(histograms).values()):
        raise ValueError("its histograms have cells that are not counts of its test images")
    class_images = cells.sum(axis=1)
    for rows, expected in (
        (histograms.positives, class_images),
        (histograms.negatives, images - class_images),
    ):
        sums = rows.sum(axis=1)
        if ((sums != expected) & (sums != 0)).any():
            raise ValueError("its histograms are not of the images of its confusion matrix")
    _check_predictions(histograms, cells)
    _check_calibration(histograms, images, int(np.trace(cells)))


def _check_predictions(histograms: ScoreHistograms, cells: np.ndarray) -> None:
    """Check that the matrix predicts a class for all images with a probability of it above 0.5."""
    # The first bin whose scores are all above 0; the bin before it has ties at p = 0.5
    first = BINS // 2 + 1
    correct = np.diag(cells)
    incorrect = cells.sum(axis=0) - correct
    for rows, most in ((histograms.positives, correct), (histograms.negatives, incorrect)):
        if (rows[:, first:].sum(axis=1) > most).any():
            raise ValueError("its histograms are not of the predictions of its confusion matrix")


def _check_calibration(histograms: ScoreHistograms, images: int, correct: int) -> None:
    count, hits, sums = histograms.confidence
    if count.sum() != images or hits.sum() != correct or (hits > count).any():
        raise ValueError("its confidence counts are not those of its confusion matrix")
    edges = UNIT * np.arange(CONFIDENCE_BINS + 1) / CONFIDENCE_BINS
    # Rounding adds at most one unit
    if (sums < count * edges[:-1] - 1).any() or (sums > count * edges[1:] + 1).any():
        raise ValueError("its confidence sums are outside their bins")
    total, squares = (float(value) for value in histograms.brier)
    # Cauchy-Schwarz gives a lower bound on the sum of squares; scores of at most 2, an upper one
    least = total**2 / (UNIT * max(images, 1))
    slack = 1e-6 * least + 10
    if not least - slack <= squares <= 2 * total + slack:
        raise ValueError("its Brier sums cannot be true")
