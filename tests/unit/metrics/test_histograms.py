"""Score histograms: what is counted, what stays at the site, and what the server refuses."""

import json
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from osfl.metrics import histograms as module
from osfl.metrics.histograms import (
    BINS,
    CONFIDENCE_BINS,
    ScoreHistograms,
    check_histograms,
    count_scores,
    from_json,
    log_probabilities,
    pool,
)
from osfl.metrics.messages import pack_histograms, unpack_histograms
from osfl.payload.messages import pack_bytes
from tests.helpers.digit_scores import digit_logits

LOGITS = np.array([[40.0, 0, 0], [0, 0, math.log(2)], [1000, -1000, 0], [2, 1, 0], [-3, 1, 0]])
LABELS = np.array([0, 2, 1, 0, 0])


def counted(logits: np.ndarray = LOGITS, labels: np.ndarray = LABELS) -> ScoreHistograms:
    histograms = count_scores(logits, labels)
    assert histograms is not None
    return histograms


def matrix_of(logits: np.ndarray, labels: np.ndarray) -> list[list[int]]:
    cells = np.zeros((logits.shape[1], logits.shape[1]), dtype=int)
    np.add.at(cells, (labels, logits.argmax(axis=1)), 1)
    return cells.tolist()


def equal(one: ScoreHistograms, other: ScoreHistograms) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(np.array_equal(left, right) for left, right in pairs)


def test_the_score_is_the_logit_of_the_probability() -> None:
    """Also where 1 - p is lost in float64."""
    log_p, scores = log_probabilities(LOGITS)
    assert scores[0, 0] == pytest.approx(40 - math.log(2), rel=1e-12)
    assert scores[1] == pytest.approx([-math.log(3), -math.log(3), 0.0], abs=1e-12)
    assert scores[2] == pytest.approx([1000, -2000, -1000])
    assert np.exp(log_p[1]) == pytest.approx([0.25, 0.25, 0.5])


def test_images_are_counted_one_by_one() -> None:
    histograms = counted()
    positives, negatives = np.zeros((2, 3, BINS), dtype=int)
    confidence = np.zeros((3, CONFIDENCE_BINS))
    brier = np.zeros(2)
    for row, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        # Softmax of 1000 overflows
        powers = [math.exp(value - max(row)) for value in row]
        p = [power / sum(powers) for power in powers]
        for name in range(3):
            remainder = sum(powers) - powers[name]
            score = math.log(powers[name] / remainder) if powers[name] and remainder else -math.inf
            score = math.inf if not remainder else score
            place = (
                0
                if score < -16
                else min(int((score + 16) / 0.125), BINS - 1)
                if score < 16
                else 255
            )
            (positives if name == label else negatives)[name, place] += 1
        place = min(int(max(p) * 15), 14)
        confidence[:, place] += [1, row.index(max(row)) == label, 1000 * max(p)]
        score = sum((value - (name == label)) ** 2 for name, value in enumerate(p))
        brier += [1000 * score, 1000 * score**2]
    assert histograms.positives.tolist() == positives.tolist()
    assert histograms.negatives.tolist() == negatives.tolist()
    assert histograms.confidence.tolist() == np.rint(confidence).tolist()
    assert histograms.brier.tolist() == np.rint(brier).tolist()


def test_outputs_that_are_no_numbers_have_no_histograms(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (math.nan, math.inf):
        assert count_scores(np.where(LOGITS == 40, value, LOGITS), LABELS) is None
    monkeypatch.setattr(module, "MAX_CLASSES", 2)
    assert count_scores(LOGITS, LABELS) is None


def test_a_histogram_of_few_images_stays() -> None:
    """The three classes have 36, 20 and 4 images."""
    labels = np.repeat([0, 1, 2], [36, 20, 4])
    logits = np.random.default_rng(0).normal(size=(60, 3))
    full = counted(logits, labels)
    sent = full.without_small(5)
    assert sent is not None
    assert sent.positives.sum(axis=1).tolist() == [36, 20, 0]
    assert sent.negatives.tolist() == full.negatives.tolist()
    exactly = full.without_small(20)
    assert exactly is not None
    assert exactly.positives.sum(axis=1).tolist() == [36, 20, 0]
    strict = full.without_small(25)
    assert strict is not None
    assert strict.positives.sum(axis=1).tolist() == [36, 0, 0]
    assert strict.negatives.sum(axis=1).tolist() == [0, 40, 56]
    assert full.without_small(60) is not None
    assert full.without_small(61) is None
    check_histograms(sent, matrix_of(logits, labels))


def test_histograms_arrive_as_they_were_sent() -> None:
    histograms = counted(*digit_logits(100))
    content = RecordDict({"metrics": MetricRecord({"seconds": 1.0}), **pack_histograms(histograms)})
    received = unpack_histograms(content, 10)
    assert received is not None
    assert equal(received, histograms)
    assert equal(from_json(json.loads(json.dumps(histograms.as_json()))), histograms)
    both = pool([histograms, counted(*digit_logits(200))])
    assert both.positives.sum() == 1697 + 1597
    # An older client
    assert unpack_histograms(RecordDict({"metrics": MetricRecord({"seconds": 1.0})}), 10) is None


@pytest.mark.parametrize(
    "records",
    [
        {"histograms": pack_bytes(bytes(2 * 3 * BINS * 4 - 1), "x")},
        {"histograms": ArrayRecord()},
        {"calibration": MetricRecord({"brier": [0, 0]})},
        {"calibration": MetricRecord({"brier": [0, 0], "confidence": [0] * 44})},
        {"calibration": MetricRecord({"brier": [0.0, 0.0], "confidence": [0] * 45})},
        {"calibration": MetricRecord({"brier": [0, 2**60], "confidence": [0] * 45})},
        {"calibration": MetricRecord({"brier": 3, "confidence": [0] * 45})},
    ],
)
def test_malformed_histograms_are_refused(records: dict[str, Any]) -> None:
    content = RecordDict({**pack_histograms(counted()), **records})
    with pytest.raises(ValueError, match=r"its (histograms|calibration sums)"):
        unpack_histograms(content, 3)


def moved(array: np.ndarray, source: tuple[int, ...], target: tuple[int, ...]) -> np.ndarray:
    """Move one count."""
    changed = array.copy()
    changed[source] -= 1
    changed[target] += 1
    return changed


def test_possible_histograms_pass_and_impossible_ones_do_not() -> None:
    logits, labels = digit_logits(100)
    true = counted(logits, labels)
    matrix = matrix_of(logits, labels)
    check_histograms(true, matrix)
    used = (0, int(true.positives[0].argmax()))
    check_histograms(replace(true, positives=moved(true.positives, used, (0, 3))), matrix)
    full = int(true.confidence[0].argmax())
    fewer = np.zeros_like(true.confidence)
    fewer[1, full] = 1
    wrong = {
        "negative": replace(true, positives=moved(true.positives, (0, 0), (0, 1))),
        "another class": replace(true, positives=moved(true.positives, used, (1, 200))),
        "negatives": replace(true, negatives=true.negatives * 2),
        "too large": replace(true, brier=true.brier * 10**9),
        "images": replace(true, confidence=true.confidence + 1),
        "correct": replace(true, confidence=true.confidence - fewer),
        "more correct": replace(true, confidence=moved(true.confidence, (1, full), (1, 0))),
        "low": replace(true, confidence=true.confidence * [[1], [1], [0]]),
        "high": replace(true, confidence=true.confidence * [[1], [1], [2]]),
        "brier": replace(true, brier=np.array([2001, 4000]) * len(labels)),
        "squares below": replace(true, brier=np.array([true.brier[0], 100])),
        "squares above": replace(true, brier=np.array([true.brier[0], 2 * true.brier[0] + 99])),
    }
    accepted: list[str] = []
    for name, histograms in wrong.items():
        with suppress(ValueError):
            check_histograms(histograms, matrix)
            accepted.append(name)
    assert accepted == []


def test_probable_classes_are_the_predicted_ones() -> None:
    """Each class on its own: one image of another above 0.5, and one that misses it."""
    logits = np.array([[3.0, 0, 0], [0, 3, 0], [0, 0, 3], [3, 0, 0], [1, 1, -9], [0.2, 0.1, 0]])
    labels = np.array([0, 1, 2, 1, 0, 2])
    true = counted(logits, labels)
    matrix = matrix_of(logits, labels)
    check_histograms(true, matrix)
    mirrored = replace(true, positives=true.positives[:, ::-1], negatives=true.negatives[:, ::-1])
    # The image of class 1 with p = 0.05, and one of the negatives of class 2
    missed = int(true.positives[1].argmax())
    low = int(true.negatives[2].argmax())
    wrong = [
        mirrored,
        replace(true, positives=moved(true.positives, (1, missed), (1, 129))),
        replace(true, negatives=moved(true.negatives, (2, low), (2, 129))),
    ]
    for histograms in wrong:
        with pytest.raises(ValueError, match="not of the predictions"):
            check_histograms(histograms, matrix)
    for place in (127, 128):
        possible = moved(true.positives, (1, missed), (1, place))
        check_histograms(replace(true, positives=possible), matrix)


def test_no_test_image_at_all_is_possible() -> None:
    nothing = ScoreHistograms(
        *np.zeros((2, 3, BINS), dtype=int), np.zeros((3, 15), dtype=int), np.zeros(2, dtype=int)
    )
    check_histograms(nothing, [[0] * 3] * 3)
    with pytest.raises(ValueError, match="shapes"):
        from_json({**nothing.as_json(), "brier": [0]})
