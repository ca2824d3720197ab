"""Feature statistics for FedCGS, in NumPy."""

import numpy as np
import torch

from osfl.payload.kinds import FeatureStatistics

WIDTH = 6
CLASSES = 4


def drawn(count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Features [N, D] of classes 0, 1 and 3, unlike in their means and not spherical."""
    draw = np.random.default_rng(0)
    labels = draw.choice([0, 1, 3], count, p=[0.2, 0.5, 0.3])
    centers = draw.normal(size=(CLASSES, WIDTH))
    mixing = draw.normal(size=(WIDTH, WIDTH))
    return centers[labels] + draw.normal(size=(count, WIDTH)) @ mixing * 0.3, labels


def statistics(features: np.ndarray, labels: np.ndarray) -> tuple[FeatureStatistics, list[int]]:
    classes = sorted(set(labels.tolist()))
    counts = [int((labels == label).sum()) for label in classes]
    sums = np.stack([features[labels == label].sum(axis=0) for label in classes])
    payload = FeatureStatistics(
        tuple(map(str, classes)),
        torch.tensor(counts),
        torch.tensor(sums).float(),
        triangle_of(torch.tensor(features.T @ features).float()),
    )
    return payload, classes


def triangle_of(moments: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a matrix on and above the diagonal, row by row."""
    return torch.cat([moments[row, row:] for row in range(len(moments))])
