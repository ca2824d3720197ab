"""A client's own images, decoded."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from osfl.config import DataConfig, NodeConfig
from osfl.data.named import domain_of, load_rows
from osfl.data.partition import DataError, cut
from osfl.data.parts import (
    count_parts,
    has_rows,
    list_folder,
    of_large_classes,
    simulated_folder,
)
from osfl.data.pictures import (
    FileTraits,
    Fit,
    check_range,
    open_picture,
    stored_picture,
    to_pixels,
    traits_of,
)
from osfl.util.pixels import LazyPixels, Pixels, to_float
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from datasets import Dataset  # seconds to import, and only the embedded digits need it


HEADER_SECONDS = 5  # that the check before a run spends on opening images
MOST_BYTES = 2**30  # of pixels that are decoded at once and held; more are decoded as they are used


@dataclass(frozen=True)
class Images:
    """Decoded images of one size."""

    pixels: Pixels  # [N, 3, S, S] uint8 RGB
    labels: torch.Tensor  # [N] int64, indices into the run's classes

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """The images as floats in [-1, 1], what the kit's encoder takes.

        [<=size, 3, S, S] at a time.
        """
        for part in self.pixels.split(size):
            yield to_float(part)

    def held(self) -> list[int]:
        """The labels that occur, ascending."""
        return sorted(set(self.labels.tolist()))


def domain_name(config: DataConfig, node: NodeConfig, seed: int) -> str:
    """The name of a simulated client's domain: the digits' style, or the client's folder.

    "" where nobody knows it.
    """
    if config.name == "digits" and config.partition == "domain" and node.partition_id >= 0:
        return str(_digits_partition(config, node, "test", 0)[0]["domain"])
    if has_rows(config, node):
        return domain_of(load_rows(config, node, "train", seed))
    folder = simulated_folder(config, node)
    return folder.name if folder else ""


def load_images(
    config: DataConfig, node: NodeConfig, split: str, seed: int, fit: Fit | None = None
) -> Images:
    """The images of one node.

    Args:
        config: the run's data section.
        node: says which part (`partition-id`) or which folder (`data-dir`).
        split: `train` or `test`; of the digits also `validation`.
        seed: of the Dirichlet, label and iid partitions.
        fit: how pictures become equal in size; None: to `data.image-size`.

    Raises:
        DataError: no data for this node, a missing folder, a class nobody knows, a corrupt image.
    """
    opened = open_images(config, node, split, seed)
    return _decoded(opened, fit or config.image_size)


@dataclass(frozen=True)
class Opened:
    """One node's images, none of them decoded.

    Attributes:
        labels: one an image.
        read: image number -> the picture.
        name: image number -> what messages call it.
    """

    labels: list[int]
    read: Callable[[int], Image.Image]
    name: Callable[[int], str]

    def file_traits(self, number: int) -> FileTraits:
        """What a run does not see of a picture that can be read.

        Raises:
            DataError: it cannot be read.
        """
        with _named(self.name(number)), self.read(number) as image:
            return traits_of(image)

    def check_header(self, number: int) -> None:
        """Open a picture without decoding it.

        Raises:
            DataError: it is no picture, or has pixels that a run refuses.
        """
        with _named(self.name(number)), self.read(number) as image:
            check_range(image)

    def pixels(self, fit: Fit, number: int) -> torch.Tensor:
        """A picture as [3, S, S] uint8.

        Raises:
            DataError: it cannot be read.
        """
        with _named(self.name(number)), self.read(number) as image:
            return to_pixels(image, fit)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    # Damaged files make Pillow raise errors of many kinds, such as struct.error or IndexError
    except Exception as error:
        raise DataError(
            f"{name}: not a readable image ({sanitize(error)}). Remove or replace it"
        ) from error


def open_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> Opened:
    """The images of one node, not decoded.

    Raises:
        DataError: as `load_images`, but for corrupt images.
    """
    opened = _all_images(config, node, split, seed)
    if split != "train":
        return opened
    rows = of_large_classes(opened.labels, node.min_class_images)
    return Opened(
        [opened.labels[row] for row in rows],
        lambda number: opened.read(rows[number]),
        lambda number: opened.name(rows[number]),
    )


def check_headers(config: DataConfig, clients: int, seed: int) -> list[str]:
    """Open a simulation's files without decoding them, in random order, for some seconds.

    Returns:
        a note if there was no time for all.

    Raises:
        DataError: one of them is no picture.
    """
    if config.name != "folder":
        return []
    began = time.monotonic()
    pictures = []
    for part in range(clients):
        node = NodeConfig(partition_id=part, num_partitions=clients)
        for split in ("train", "test"):
            opened = open_images(config, node, split, seed)
            pictures += [(opened, number) for number in range(len(opened.labels))]
    random.Random(seed).shuffle(pictures)
    for count, (opened, number) in enumerate(pictures):
        if time.monotonic() - began > HEADER_SECONDS:
            return [
                f"{count:,} of {len(pictures):,} images were opened; `osfl data check` opens all"
            ]
        opened.check_header(number)
    return []


def small_classes(config: DataConfig, node: NodeConfig, seed: int) -> list[int]:
    """The labels that this node has and leaves out, ascending."""
    counts = Counter(_all_labels(config, node, "train", seed))
    return sorted(label for label, count in counts.items() if count < node.min_class_images)


def _all_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> Opened:
    if config.name != "digits" and not has_rows(config, node):
        files = list_folder(config, node, split)
        return Opened(
            [label for _, label in files],
            lambda number: open_picture(files[number][0]),
            lambda number: sanitize(files[number][0], 1000),
        )
    if has_rows(config, node):
        rows = load_rows(config, node, split, seed)
        source = sanitize(node.data_dir or config.name, 1000)
    else:
        rows = _digits_partition(config, node, split, seed)
        source = "digits"
    images = rows.select_columns(["image"])
    mode = getattr(images.features["image"], "mode", None)
    return Opened(
        list(rows["label"]),
        lambda number: stored_picture(images[number]["image"], mode),
        lambda number: f"{source}, {split} image {number} of this client",
    )


def _decoded(opened: Opened, fit: Fit) -> Images:
    """All of them now, or when they are taken where they are many."""
    labels = torch.tensor(opened.labels)
    read = partial(opened.pixels, fit)
    first = read(0)
    if len(labels) * first.nbytes > MOST_BYTES:
        return Images(LazyPixels(read, len(labels)), labels)
    pixels = [first]
    for number in range(1, len(labels)):
        pixels.append(read(number))
    return Images(torch.stack(pixels), labels)


# A message needs its partition several times, and cutting takes longer than reading it
@lru_cache(maxsize=16)
def _digits_partition(config: DataConfig, node: NodeConfig, split: str, seed: int) -> "Dataset":
    """Cut the embedded digits with flwr-datasets.

    By domain is feature skew, by label or Dirichlet is label skew.

    A node's test and validation images are its own domain's; under the other partitions, its equal
    share of all domains'.
    """
    from osfl.data import digits

    count = count_parts(config, node)
    whole = digits.load_split("private" if split == "train" else split)
    if config.partition == "domain":
        from flwr_datasets.partitioner import NaturalIdPartitioner

        by_domain = NaturalIdPartitioner(partition_by="domain")
        by_domain.dataset = whole
        return by_domain.load_partition(node.partition_id)
    parts = cut(config, np.asarray(whole["label"]), count, seed, even=split != "train")
    return whole.select(parts[node.partition_id])


def count_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> int:
    """How many images this node has; none is opened."""
    return len(image_labels(config, node, split, seed))


def image_labels(config: DataConfig, node: NodeConfig, split: str, seed: int) -> list[int]:
    """The labels of this node's images, one an image; none is opened.

    Raises:
        DataError: as `open_images`.
    """
    labels = _all_labels(config, node, split, seed)
    if split != "train":
        return labels
    return [labels[row] for row in of_large_classes(labels, node.min_class_images)]


def _all_labels(config: DataConfig, node: NodeConfig, split: str, seed: int) -> list[int]:
    if has_rows(config, node):
        return list(load_rows(config, node, split, seed)["label"])
    if config.name != "digits":
        return [label for _, label in list_folder(config, node, split)]
    return list(_digits_partition(config, node, split, seed)["label"])
