"""Whether synthetic images lie nearer to the images that they were made from than to others.

A generator that copies does not only draw what its training images are like, but themselves: then
its images are nearer to them than to other images of the same class and client. Distances are those
of an image encoder's embeddings.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

SWAPS = 500  # times that training and test images change places by chance


@dataclass(frozen=True)
class Nearness:
    """Of one client's synthetic images.

    Attributes:
        images: synthetic ones.
        nearer: the share that lies nearer to a training image than to any test image.
        by_chance: 95 % of that share where both are alike: from, to.
        closest: the least distance to any training image of its class, over the median distance
            between a training image and the nearest test image.
    """

    images: int
    nearer: float
    by_chance: tuple[float, float]
    closest: float

    @property
    def copied(self) -> bool:
        """Whether more are nearer than chance brings."""
        return self.nearer > self.by_chance[1]


@dataclass(frozen=True)
class Embedded:
    """Images as an encoder sees them: embeddings [N, e] and labels [N]."""

    embeddings: torch.Tensor
    labels: torch.Tensor


def nearness(
    drawn: Embedded, train: Embedded, test: Embedded, generator: torch.Generator
) -> Nearness:
    """How near synthetic images are to training images, against as many test images of each class.

    If the images were as near to both, a training image and a test image could change places: all
    of them do so by chance, many times, and what comes of it is what chance brings. More than that
    comes of copies; but also of anything else that fits the training images better, and of test
    images from elsewhere.

    Raises:
        ValueError: no class has all three.
    """
    classes = list(_distances(drawn, train, test, generator))
    if not classes:
        raise ValueError("no class has synthetic, training and test images")
    count = sum(len(one.ours) for one in classes)
    nearer = sum(_nearer(one.ours, one.others) for one in classes) / count
    shares = []
    for _ in range(SWAPS):
        total = 0.0
        for one in classes:
            swap = torch.rand(one.ours.shape[1], generator=generator) < 0.5
            ours = torch.where(swap, one.others, one.ours)
            total += _nearer(ours, torch.where(swap, one.ours, one.others))
        shares.append(total / count)
    low, high = torch.tensor(shares).quantile(torch.tensor([0.025, 0.975])).tolist()
    closest = min(one.closest for one in classes)
    between = torch.cat([one.gaps for one in classes]).median()
    return Nearness(count, nearer, (low, high), closest / max(float(between), 1e-12))


@dataclass(frozen=True)
class _Distances:
    """Of one class.

    Attributes:
        ours: from each synthetic image to M training images, [N, M].
        others: from each synthetic image to as many test images, [N, M].
        gaps: from each of these training images to the nearest of these test images, [M].
        closest: from a synthetic image to any training image, the least.
    """

    ours: torch.Tensor
    others: torch.Tensor
    gaps: torch.Tensor
    closest: float


def _distances(
    drawn: Embedded, train: Embedded, test: Embedded, generator: torch.Generator
) -> Iterator[_Distances]:
    for label in drawn.labels.unique():
        own, ours, others = (part.embeddings[part.labels == label] for part in (drawn, train, test))
        count = min(len(ours), len(others))
        if count == 0:
            continue
        closest = float(torch.cdist(own, ours).min())
        ours = ours[torch.randperm(len(ours), generator=generator)[:count]]
        others = others[torch.randperm(len(others), generator=generator)[:count]]
        gaps = torch.cdist(ours, others).amin(dim=1)
        yield _Distances(torch.cdist(own, ours), torch.cdist(own, others), gaps, closest)


def _nearer(ours: torch.Tensor, others: torch.Tensor) -> float:
    """How many are nearer to one of ours; equally near ones count half."""
    gap = others.amin(dim=1) - ours.amin(dim=1)
    return float((gap > 0).sum() + (gap == 0).sum() / 2)
