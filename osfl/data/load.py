"""Load and decode a client's images."""

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
from osfl.data.partition import DataError, cut_parts
from osfl.data.parts import (
    count_parts,
    has_rows,
    list_folder,
    select_large_classes,
    simulated_folder,
)
from osfl.data.pictures import (
    FileTraits,
    Fit,
    check_range,
    open_image,
    open_stored_image,
    to_pixels,
    traits_of,
)
from osfl.util.pixels import LazyPixels, Pixels, to_float
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from osfl.data.digits import Digits


# Seconds that the check before a run spends on opening images
HEADER_SECONDS = 5
# Maximum bytes of pixels that are decoded up front; larger sets are decoded as they are used
MAX_DECODED_BYTES = 2**30


@dataclass(frozen=True)
class Images:
    """Decoded images of one size.

    Attributes:
        pixels: [N, 3, S, S] uint8 RGB.
        labels: [N] int64, indices into the run's classes.
    """

    pixels: Pixels
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """Yield the images as float32 in [-1, 1], in batches of [<=size, 3, S, S]."""
        for part in self.pixels.split(size):
            yield to_float(part)

    def held(self) -> list[int]:
        """Return the distinct labels, ascending."""
        return sorted(set(self.labels.tolist()))


def domain_name(config: DataConfig, node: NodeConfig, seed: int) -> str:
    """Return the name of a simulated client's domain, or "" if it is unknown.

    It is the style of the digits, the domain of the rows, or the name of the client's folder.
    """
    if config.name == "digits" and config.partition == "domain" and node.partition_id >= 0:
        return str(_digits_partition(config, node, "test", 0).domains[0])
    if has_rows(config, node):
        return domain_of(load_rows(config, node, "train", seed))
    folder = simulated_folder(config, node)
    return folder.name if folder else ""


def load_images(
    config: DataConfig, node: NodeConfig, split: str, seed: int, fit: Fit | None = None
) -> Images:
    """Load the images of one node.

    Args:
        config: the run's data section.
        node: its part (`partition-id`) or folder (`data-dir`).
        split: `train` or `test`, or for the digits also `validation`.
        seed: of the Dirichlet, label and iid partitions.
        fit: resizes the images; None for `data.image-size`.

    Raises:
        DataError: the node has no data, a folder is missing, a class is unknown, or an image is
            corrupt.
    """
    opened = open_images(config, node, split, seed)
    return _decoded(opened, fit or config.image_size)


@dataclass(frozen=True)
class OpenedImages:
    """One node's images, before decoding.

    Attributes:
        labels: one per image.
        read: opens an image by its number.
        name: returns an image's name in messages by its number.
    """

    labels: list[int]
    read: Callable[[int], Image.Image]
    name: Callable[[int], str]

    def file_traits(self, number: int) -> FileTraits:
        """Return an image file's traits that its pixels do not show.

        Raises:
            DataError: the image is unreadable.
        """
        with _named(self.name(number)), self.read(number) as image:
            return traits_of(image)

    def check_header(self, number: int) -> None:
        """Open an image without decoding it.

        Raises:
            DataError: it is not an image, or has unsupported pixels.
        """
        with _named(self.name(number)), self.read(number) as image:
            check_range(image)

    def pixels(self, fit: Fit, number: int) -> torch.Tensor:
        """Decode an image to [3, S, S] uint8.

        Raises:
            DataError: the image is unreadable.
        """
        with _named(self.name(number)), self.read(number) as image:
            return to_pixels(image, fit)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    # For corrupt files Pillow raises many kinds of errors, such as struct.error or IndexError
    except Exception as error:
        raise DataError(
            f"{name}: not a readable image ({sanitize(error)}). Remove or replace it"
        ) from error


def open_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> OpenedImages:
    """Return the images of one node, without decoding them.

    Raises:
        DataError: as `load_images`, except for corrupt images.
    """
    opened = _all_images(config, node, split, seed)
    if split != "train":
        return opened
    rows = select_large_classes(opened.labels, node.min_class_images)
    return OpenedImages(
        [opened.labels[row] for row in rows],
        lambda number: opened.read(rows[number]),
        lambda number: opened.name(rows[number]),
    )


def check_headers(config: DataConfig, clients: int, seed: int) -> list[str]:
    """Open a simulation's files without decoding them, in random order, for some seconds.

    Returns:
        a note if there was not enough time for all files.

    Raises:
        DataError: a file is not an image.
    """
    if config.name != "folder":
        return []
    start = time.monotonic()
    images = []
    for part in range(clients):
        node = NodeConfig(partition_id=part, num_partitions=clients)
        for split in ("train", "test"):
            opened = open_images(config, node, split, seed)
            images += [(opened, number) for number in range(len(opened.labels))]
    random.Random(seed).shuffle(images)
    for count, (opened, number) in enumerate(images):
        if time.monotonic() - start > HEADER_SECONDS:
            return [f"{count:,} of {len(images):,} images were opened; `osfl data check` opens all"]
        opened.check_header(number)
    return []


def small_classes(config: DataConfig, node: NodeConfig, seed: int) -> list[int]:
    """Return the labels that this node leaves out for too few images, ascending."""
    counts = Counter(_all_labels(config, node, "train", seed))
    return sorted(label for label, count in counts.items() if count < node.min_class_images)


def _all_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> OpenedImages:
    if config.name != "digits" and not has_rows(config, node):
        files = list_folder(config, node, split)
        return OpenedImages(
            [label for _, label in files],
            lambda number: open_image(files[number][0]),
            lambda number: sanitize(files[number][0], 1000),
        )
    if not has_rows(config, node):
        digits = _digits_partition(config, node, split, seed)
        return OpenedImages(
            digits.labels.tolist(),
            lambda number: Image.fromarray(digits.images[number]),
            lambda number: f"digits, {split} image {number} of this client",
        )
    rows = load_rows(config, node, split, seed)
    source = sanitize(node.data_dir or config.name, 1000)
    images = rows.select_columns(["image"])
    mode = getattr(images.features["image"], "mode", None)
    return OpenedImages(
        list(rows["label"]),
        lambda number: open_stored_image(images[number]["image"], mode),
        lambda number: f"{source}, {split} image {number} of this client",
    )


def _decoded(opened: OpenedImages, fit: Fit) -> Images:
    """Decode all images now, or if they are many, as they are used."""
    labels = torch.tensor(opened.labels)
    read = partial(opened.pixels, fit)
    first = read(0)
    if len(labels) * first.nbytes > MAX_DECODED_BYTES:
        return Images(LazyPixels(read, len(labels)), labels)
    pixels = [first]
    for number in range(1, len(labels)):
        pixels.append(read(number))
    return Images(torch.stack(pixels), labels)


# Each message needs its partition several times, and cutting is slower than reading
@lru_cache(maxsize=16)
def _digits_partition(config: DataConfig, node: NodeConfig, split: str, seed: int) -> "Digits":
    """Cut the embedded digits: by domain, in the order of their names, or by flwr-datasets.

    A node's test and validation images are those of its domain, or under the other partitions, an
    equal share of all domains.
    """
    from osfl.data import digits

    count = count_parts(config, node)
    rows = digits.load_split("private" if split == "train" else split)
    if config.partition == "domain":
        domain = sorted(set(rows.domains))[node.partition_id]
        return rows.select(np.flatnonzero(np.array(rows.domains) == domain))
    parts = cut_parts(config, rows.labels, count, seed, even=split != "train")
    return rows.select(parts[node.partition_id])


def count_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> int:
    """Return the number of this node's images, without opening them."""
    return len(image_labels(config, node, split, seed))


def image_labels(config: DataConfig, node: NodeConfig, split: str, seed: int) -> list[int]:
    """Return the labels of this node's images, one per image, without opening them.

    Raises:
        DataError: as `open_images`.
    """
    labels = _all_labels(config, node, split, seed)
    if split != "train":
        return labels
    return [labels[row] for row in select_large_classes(labels, node.min_class_images)]


def _all_labels(config: DataConfig, node: NodeConfig, split: str, seed: int) -> list[int]:
    if has_rows(config, node):
        return list(load_rows(config, node, split, seed)["label"])
    if config.name != "digits":
        return [label for _, label in list_folder(config, node, split)]
    return list(_digits_partition(config, node, split, seed).labels.tolist())
