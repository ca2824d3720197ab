"""Memorization test: whether synthetic images are closer to their training images than to others.

A generator that memorizes reproduces its training images rather than images like them. Its images
are then closer to them than to other images of the same class and client. Distances are between
embeddings of an image encoder.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Permutations that randomly exchange training and test images
NUM_PERMUTATIONS = 500


@dataclass(frozen=True)
class Memorization:
    """Memorization test of one client's synthetic images.

    Attributes:
        images: number of synthetic images.
        nearer: the share that is closer to a training image than to any test image.
        by_chance: 95 % interval of that share under the null hypothesis: low, high.
        closest: the smallest distance to a training image of the same class, divided by the median
            distance between a training image and the nearest test image.
    """

    images: int
    nearer: float
    by_chance: tuple[float, float]
    closest: float

    @property
    def copied(self) -> bool:
        """Evidence of copies: more images are closer than chance explains."""
        return self.nearer > self.by_chance[1]


@dataclass(frozen=True)
class Embeddings:
    """An encoder's embeddings [N, e] of images, and their labels [N]."""

    embeddings: torch.Tensor
    labels: torch.Tensor


def measure_memorization(
    drawn: Embeddings, train: Embeddings, test: Embeddings, generator: torch.Generator
) -> Memorization:
    """Compare synthetic images' distances to training images and to equally many test images.

    A permutation test, class by class. Under the null hypothesis the images are as close to both,
    so a training image and a test image are exchangeable: random exchanges give the share that
    chance explains. A larger share indicates copies, but also anything else that fits the training
    images better, or test images from elsewhere.

    Raises:
        ValueError: no class has synthetic, training and test images.
    """
    classes = list(_distances(drawn, train, test, generator))
    if not classes:
        raise ValueError("no class has synthetic, training and test images")
    count = sum(len(distances.train) for distances in classes)
    nearer = sum(_count_nearer(distances.train, distances.test) for distances in classes) / count
    shares = []
    for _ in range(NUM_PERMUTATIONS):
        total = 0.0
        for distances in classes:
            swap = torch.rand(distances.train.shape[1], generator=generator) < 0.5
            first = torch.where(swap, distances.test, distances.train)
            second = torch.where(swap, distances.train, distances.test)
            total += _count_nearer(first, second)
        shares.append(total / count)
    low, high = torch.tensor(shares).quantile(torch.tensor([0.025, 0.975])).tolist()
    closest = min(distances.closest for distances in classes)
    median_gap = torch.cat([distances.gaps for distances in classes]).median()
    return Memorization(count, nearer, (low, high), closest / max(float(median_gap), 1e-12))


@dataclass(frozen=True)
class _Distances:
    """Distances of one class.

    Attributes:
        train: from each synthetic image to M training images, [N, M].
        test: from each synthetic image to as many test images, [N, M].
        gaps: from each of these training images to the nearest of these test images, [M].
        closest: the smallest distance from a synthetic image to any training image.
    """

    train: torch.Tensor
    test: torch.Tensor
    gaps: torch.Tensor
    closest: float


def _distances(
    drawn: Embeddings, train: Embeddings, test: Embeddings, generator: torch.Generator
) -> Iterator[_Distances]:
    for label in drawn.labels.unique():
        synthetic, members, others = (
            part.embeddings[part.labels == label] for part in (drawn, train, test)
        )
        count = min(len(members), len(others))
        if count == 0:
            continue
        closest = float(torch.cdist(synthetic, members).min())
        members = members[torch.randperm(len(members), generator=generator)[:count]]
        others = others[torch.randperm(len(others), generator=generator)[:count]]
        gaps = torch.cdist(members, others).amin(dim=1)
        yield _Distances(
            torch.cdist(synthetic, members), torch.cdist(synthetic, others), gaps, closest
        )


def _count_nearer(first: torch.Tensor, second: torch.Tensor) -> float:
    """Count the rows whose minimum is smaller in `first` than in `second`; ties count half."""
    gap = second.amin(dim=1) - first.amin(dim=1)
    return float((gap > 0).sum() + (gap == 0).sum() / 2)
