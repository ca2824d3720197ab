"""A classifier's outputs on real handwritten digits."""

from functools import cache

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


@cache
def digit_logits(training_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, 10] and labels of the digits that a logistic regression was not trained on."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    train = order[:training_images]
    test = order[training_images:]
    model = LogisticRegression(max_iter=200).fit(pixels[train] / 16, labels[train])
    return model.decision_function(pixels[test] / 16), labels[test]
