"""Find near-duplicates: images whose thumbnails correlate, also mirrored.

Public sets share images with the sets that stand for clients, and splits by file leave copies of
training images among the test images. The same rule serves the corpus of a kit, `data.split-by`
and `osfl data check`.
"""

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch.nn import functional as F

THUMBNAIL = 16
# Side of the images that thumbnails are made from, in pixels
SIDE = 64
# Above this correlation, two images are near-duplicates
MIN_CORRELATION = 0.98
# Images of a block; a block of correlations has BLOCK^2 float32 numbers, 64 MB
BLOCK = 4096


def thumbnails(pixels: torch.Tensor) -> torch.Tensor:
    """Return each image's thumbnail, centered and of norm 1, so that products are correlations.

    Args:
        pixels: [N, 3, S, S] uint8, with S at least 16.

    Returns:
        [N, 768] float32; zeros for a gray image of one level, which correlates with nothing.
    """
    small = F.adaptive_avg_pool2d(pixels.float(), THUMBNAIL).flatten(1)
    centered = small - small.mean(dim=1, keepdim=True)
    return F.normalize(centered, dim=1, eps=1.0)


def mirrored(rows: torch.Tensor) -> torch.Tensor:
    """Return the thumbnails of the mirrored images."""
    return rows.view(-1, 3, THUMBNAIL, THUMBNAIL).flip(3).flatten(1)


def highest_correlation(public: torch.Tensor, clients: torch.Tensor) -> torch.Tensor:
    """Return each public image's highest correlation with a client's image or its mirror image.

    Args:
        public: thumbnails [N, 768].
        clients: thumbnails [M, 768].

    Returns:
        [N] float32; -1 without any client's images.
    """
    return most_similar(public, clients)[0]


def most_similar(images: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each image's highest correlation with another or its mirror image, and which it is.

    Args:
        images: thumbnails [N, 768].
        others: thumbnails [M, 768].

    Returns:
        [N] float32 and [N] int64; -1 and 0 without others.
    """
    highest = torch.full((len(images),), -1.0)
    nearest = torch.zeros(len(images), dtype=torch.long)
    for start in range(0, len(images), BLOCK):
        rows = images[start : start + BLOCK]
        for first in range(0, len(others), BLOCK):
            values, places = _correlations(rows, others[first : first + BLOCK]).max(dim=1)
            better = values > highest[start : start + BLOCK]
            highest[start : start + BLOCK][better] = values[better]
            nearest[start : start + BLOCK][better] = places[better] + first
    return highest, nearest


def group_near_duplicates(images: torch.Tensor) -> np.ndarray:
    """Return the number of each image's group: near-duplicates, and theirs, have the same one.

    Args:
        images: thumbnails [N, 768].

    Returns:
        [N], from 0, in the order of the groups' first images.
    """
    first: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)]
    second = list(first)
    for start in range(0, len(images), BLOCK):
        rows = images[start : start + BLOCK]
        for column in range(start, len(images), BLOCK):
            correlations = _correlations(rows, images[column : column + BLOCK])
            pairs = (correlations > MIN_CORRELATION).nonzero()
            first.append(pairs[:, 0] + start)
            second.append(pairs[:, 1] + column)
    ends = (torch.cat(first).numpy(), torch.cat(second).numpy())
    edges = coo_matrix((np.ones(len(ends[0])), ends), shape=(len(images), len(images)))
    groups: np.ndarray = connected_components(edges, directed=False)[1]
    return groups


def _correlations(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return [N, M], of the images or of one of them mirrored, whichever is higher."""
    return torch.maximum(rows @ others.T, rows @ mirrored(others).T)
