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
    centres = draw.normal(size=(CLASSES, WIDTH))
    mixing = draw.normal(size=(WIDTH, WIDTH))
    return centres[labels] + draw.normal(size=(count, WIDTH)) @ mixing * 0.3, labels


def statistics(features: np.ndarray, labels: np.ndarray) -> tuple[FeatureStatistics, list[int]]:
    held = sorted(set(labels.tolist()))
    counts = [int((labels == label).sum()) for label in held]
    sums = np.stack([features[labels == label].sum(axis=0) for label in held])
    payload = FeatureStatistics(
        tuple(map(str, held)),
        torch.tensor(counts),
        torch.tensor(sums).float(),
        torch.tensor(features.T @ features).float(),
    )
    return payload, held
