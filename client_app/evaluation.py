"""Score histograms of a client's test, which it sends, and predictions, which it keeps."""

import csv
import hashlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord

from osfl.config import NodeConfig, RunConfig
from osfl.data.load import open_images
from osfl.data.parts import class_names
from osfl.metrics.histograms import MIN_IMAGES, count_scores, log_probabilities
from osfl.metrics.messages import pack_histograms
from osfl.util.files import write_atomically

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class ModelTest:
    """A model's test on this client's images.

    Attributes:
        logits: [N, C].
        labels: [N] true classes.
        matrix: confusion matrix, true classes by predicted classes.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    matrix: list[list[int]]


def histogram_records(
    test: ModelTest, config: RunConfig, node: NodeConfig
) -> dict[str, ArrayRecord | MetricRecord]:
    """Return the histograms that a reply to `evaluate` adds to the confusion matrix.

    They reveal more than the matrix, so a site with a DP guarantee never sends them, and any other
    can refuse (`test-results = "confusion"`). A histogram of fewer images than `min-class-images`,
    or than `MIN_IMAGES`, is empty: it would nearly list their scores.
    """
    if config.epsilon or node.requires_guarantee or not node.sends_exact_results:
        return {}
    histograms = count_scores(test.logits.numpy(), test.labels.numpy())
    if histograms is not None:
        histograms = histograms.without_small(max(MIN_IMAGES, node.min_class_images))
    return {} if histograms is None else pack_histograms(histograms)


def write_predictions(test: ModelTest, config: RunConfig, node: NodeConfig, name: str) -> None:
    """Write the probabilities of every test image to the site's `predictions-dir`, if it has one.

    A failure is logged, because the test result must not be lost with it.

    Args:
        name: of the file, without its extension.
    """
    if not node.predictions_dir:
        return
    file = Path(node.predictions_dir).expanduser() / f"{name}.csv"
    try:
        write_atomically(file, _predictions(test, config, node).encode())
    # A DataError, which is a ValueError, if the test images have disappeared
    except (OSError, ValueError) as error:
        log.error("predictions-dir = %s: cannot be written: %s", file.parent, error)
    else:
        log.info("the predictions are saved in %s", file)


def _predictions(test: ModelTest, config: RunConfig, node: NodeConfig) -> str:
    """Return the CSV file; the SHA-256 of an image's name stands for the name."""
    classes = class_names(config.data)
    probabilities = np.exp(log_probabilities(test.logits.numpy())[0])
    opened = open_images(config.data, node, "test", config.seed)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["sha256", "true", "class", *(f"p({name})" for name in classes)])
    for number, row in enumerate(probabilities):
        digest = hashlib.sha256(opened.name(number).encode()).hexdigest()
        true_class = classes[int(test.labels[number])]
        texts = [f"{value:.9g}" for value in row]
        rows.writerow([digest, true_class, classes[int(row.argmax())], *texts])
    return text.getvalue()
