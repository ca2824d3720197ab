"""The records of a reply to `evaluate` with a test's histograms."""

from typing import cast

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from osfl.metrics.histograms import BINS, CONFIDENCE_BINS, ScoreHistograms
from osfl.payload.messages import pack_bytes, size_of, unpack_bytes

HISTOGRAMS = "histograms"
CALIBRATION = "calibration"
# Counts are at most MAX_IMAGES of osfl.payload.messages
COUNT = np.dtype("<u4")


def pack_histograms(histograms: ScoreHistograms) -> dict[str, ArrayRecord | MetricRecord]:
    """Pack histograms as two records: counts by score in 2 kB per class, and calibration."""
    counts = np.stack([histograms.positives, histograms.negatives]).astype(COUNT)
    calibration = {
        "confidence": histograms.confidence.ravel().tolist(),
        "brier": histograms.brier.tolist(),
    }
    return {
        HISTOGRAMS: pack_bytes(counts.tobytes(), "osfl.histograms.v1"),
        CALIBRATION: MetricRecord(calibration),
    }


def unpack_histograms(content: RecordDict, classes: int) -> ScoreHistograms | None:
    """Return the histograms of a reply; None if it has none, as from an older client.

    Raises:
        ValueError: they are malformed. `check_histograms` checks their counts.
    """
    if HISTOGRAMS not in content.array_records:
        return None
    record = content.array_records[HISTOGRAMS]
    if size_of(record) != 2 * classes * BINS * COUNT.itemsize:
        raise ValueError("its histograms have the wrong size")
    try:
        counts = np.frombuffer(unpack_bytes(record), COUNT).astype(np.int64)
        calibration = content.metric_records[CALIBRATION]
        confidence = _integers(calibration["confidence"], 3 * CONFIDENCE_BINS)
        brier = _integers(calibration["brier"], 2)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its histograms lack {error}") from None
    positives, negatives = counts.reshape(2, classes, BINS)
    return ScoreHistograms(positives, negatives, confidence.reshape(3, CONFIDENCE_BINS), brier)


def _integers(values: object, count: int) -> np.ndarray:
    cells = cast(list[int], values)
    # Below the largest int64, so that sums do not overflow
    if len(cells) != count or not all(type(cell) is int and abs(cell) < 2**53 for cell in cells):
        raise ValueError("its calibration sums have the wrong number, or are not integers")
    return np.array(cells, dtype=np.int64)
