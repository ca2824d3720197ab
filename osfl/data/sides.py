"""Keep near-duplicates on one side of training and test (`data.split-by`).

This module does not import torch, so that a client joins in less than a second once its groups are
in the cache.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from osfl.util.files import CorruptFileError, make_private_folder, read_record, write_record

FOLDER = "near-duplicates"


def near_duplicate_groups(
    key: str, count: int, read: Callable[[int], Image.Image], cache_dir: str
) -> np.ndarray:
    """Return the number of each image's group of near-duplicates, [count], from the site's cache.

    An unreadable image is a group of its own; a run refuses it later, by its name.

    Args:
        key: a digest of the images' contents, in order.
        read: opens an image by its number.
        cache_dir: the node's; "" for the default.
    """
    cache = Path(cache_dir or os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser()
    record = cache / FOLDER / f"{key}.json"
    with suppress(OSError, CorruptFileError, KeyError):
        groups = np.array(read_record(record)["groups"], dtype=np.int64)
        if len(groups) == count:
            return groups
    groups = _computed_groups(count, read)
    # On a full disk every message computes them again
    with suppress(OSError):
        make_private_folder(record.parent)
        write_record(record, {"groups": groups.tolist()})
    return groups


def _computed_groups(count: int, read: Callable[[int], Image.Image]) -> np.ndarray:
    import torch

    from osfl.data.near_duplicates import SIDE, group_near_duplicates, thumbnails
    from osfl.data.pictures import to_pixels

    rows = torch.zeros(count, thumbnails(torch.zeros(1, 3, SIDE, SIDE)).shape[1])
    for number in range(count):
        # For corrupt files Pillow raises many kinds of errors
        with suppress(Exception), read(number) as image:
            rows[number] = thumbnails(to_pixels(image, SIDE)[None])[0]
    return group_near_duplicates(rows)


def content_key(parts: list[bytes]) -> str:
    """Return a digest of images' contents, or of what stands for them, in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def merge_groups(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the numbers [N] of the finest groups that contain whole groups of both kinds."""
    # Takes part of a second to import
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    _, columns = np.unique(second, return_inverse=True)
    _, rows = np.unique(first, return_inverse=True)
    size = rows.max(initial=-1) + 1
    # A graph of all groups, with an edge for each image
    total = size + columns.max(initial=-1) + 1
    edges = coo_matrix((np.ones(len(rows)), (rows, columns + size)), shape=(total, total))
    merged: np.ndarray = connected_components(edges, directed=False)[1][rows]
    return merged


def training_mask(groups: np.ndarray, train: int) -> np.ndarray:
    """Return which images are training images, [N] bool: whole groups that contain one.

    Args:
        groups: [N], of the training images, then the test images.
        train: number of training images.
    """
    return np.isin(groups, groups[:train])
