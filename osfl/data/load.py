"""A client's own images: a part of an embedded data set, or a folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from osfl.config import DataConfig, NodeConfig, split_names
from osfl.data.render import CLASSES, STYLES

if TYPE_CHECKING:
    from datasets import Dataset  # seconds to import, and only the embedded digits need it


class DataError(ValueError):
    """Images that cannot be used; the message names the file or folder and the fix."""


@dataclass(frozen=True)
class Images:
    """Decoded images of one size."""

    pixels: torch.Tensor  # [N, 3, S, S] uint8 RGB
    labels: torch.Tensor  # [N] int64, indices into the run's classes

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """The images as floats in [-1, 1], what the kit's encoder takes; [<=size, 3, S, S] at a time."""
        for part in self.pixels.split(size):
            yield part.float() / 127.5 - 1

    def held(self) -> list[int]:
        """The labels that occur, ascending."""
        return sorted(set(self.labels.tolist()))


def class_names(config: DataConfig) -> tuple[str, ...]:
    """The run's class names, in order; an image's label is its class's index here."""
    if named := split_names(config.classes):
        return named
    return CLASSES


def domain_name(config: DataConfig, node: NodeConfig) -> str:
    """The name of a simulated client's domain: the digits' style, or the client's folder; "" where nobody knows it."""
    if config.name == "digits" and config.partition == "domain" and node.partition_id >= 0:
        return str(_digits_partition(config, node, "test", 0)[0]["domain"])
    folder = simulated_folder(config, node)
    return folder.name if folder else ""


def load_images(config: DataConfig, node: NodeConfig, split: str, seed: int, size: int | None = None) -> Images:
    """The images of one node.

    Args:
        config: the run's data section.
        node: says which part (`partition-id`) or which folder (`data-dir`).
        split: `train` or `test`.
        seed: of the Dirichlet, label and iid partitions.
        size: pixels on a side; None: `data.image-size`.

    Raises:
        DataError: no data for this node, a missing folder, a class nobody knows, a corrupt image.
    """
    size = size or config.image_size
    if config.name == "folder":
        return _load_folder(config, node, split, size)
    rows = _digits_partition(config, node, split, seed)
    return Images(torch.stack([to_pixels(image, size) for image in rows["image"]]), torch.tensor(rows["label"]))


@lru_cache(maxsize=16)  # a message needs its partition several times, and cutting takes longer than reading it
def _digits_partition(config: DataConfig, node: NodeConfig, split: str, seed: int) -> "Dataset":
    """Cut the embedded digits with flwr-datasets: by domain is feature skew, by label or Dirichlet is label skew.

    A node's test images are its own domain's; under the other partitions, its equal share of all domains' test images.
    """
    from flwr_datasets import partitioner as cut

    from osfl.data import digits

    count = _digits_parts(config, node)
    whole = digits.load_split("private" if split == "train" else "test")
    chosen: cut.Partitioner
    if config.partition == "domain":
        chosen = cut.NaturalIdPartitioner(partition_by="domain")
    elif split == "test" or config.partition == "iid":
        chosen = cut.IidPartitioner(num_partitions=count)
    elif config.partition == "label":
        chosen = cut.ShardPartitioner(count, "label", num_shards_per_partition=config.shards_per_client, seed=seed)
    else:
        chosen = cut.DirichletPartitioner(count, "label", config.alpha, min_partition_size=1, seed=seed)
    # The split lies class by class and domain by domain: a run of one class's rows would be one domain's.
    chosen.dataset = whole if config.partition == "domain" else whole.shuffle(seed=seed)
    return chosen.load_partition(node.partition_id)


def _digits_parts(config: DataConfig, node: NodeConfig) -> int:
    """Into how many parts the digits are cut, one of which is this node's.

    Raises:
        DataError: it is not.
    """
    if node.partition_id < 0:
        raise DataError("data.name = 'digits' needs node-config partition-id (0, 1, ...): which client this node is")
    count = len(STYLES) if config.partition == "domain" else node.num_partitions or len(STYLES)
    if node.partition_id >= count:
        raise DataError(
            f"partition-id = {node.partition_id}: the data has {count} parts (0 to {count - 1}), so this client has no data. "
            f"Use at most {count} clients, or another data.partition"
        )
    return count


def check_images(config: DataConfig, node: NodeConfig) -> None:
    """Whether this node has images to train and to test on; folders are listed, no image is opened or drawn.

    Raises:
        DataError: as `load_images`, but for corrupt images, and for a part of the digits that is empty.
    """
    if config.name == "digits":
        _digits_parts(config, node)
        return
    for split in ("train", "test"):
        count_images(config, node, split, seed=0)


def count_images(config: DataConfig, node: NodeConfig, split: str, seed: int) -> int:
    """How many images this node has; none is opened."""
    return len(_list_folder(config, node, split) if config.name == "folder" else _digits_partition(config, node, split, seed))


def _list_folder(config: DataConfig, node: NodeConfig, split: str) -> list[tuple[Path, int]]:
    """(file, label) of everything in `<data-dir>/<split>/<class>/`."""
    home = Path(node.data_dir).expanduser() if node.data_dir else simulated_folder(config, node)
    if home is None:
        raise DataError(
            "data.name = 'folder' needs node-config data-dir: the folder with train/<class>/* and test/<class>/*; in a simulation, "
            "data.root: the folder with all clients' folders"
        )
    root = home / split
    if not root.is_dir():
        raise DataError(f"{home}: there is no folder {split}/ in it")
    names = class_names(config)
    folders = sorted(p.name for p in root.iterdir() if p.is_dir())
    if unknown := set(folders) - set(names):
        raise DataError(f"{root}: {sorted(unknown)[0]!r} is not one of the run's classes ({', '.join(names)})")
    listed = []
    for label, name in enumerate(names):
        files = sorted(p for p in (root / name).glob("*") if not p.name.startswith("."))
        if name in folders and not files:
            raise DataError(f"{root / name}: the class has no images. Remove the empty folder, or add images to it")
        listed += [(file, label) for file in files]
    if not listed:
        raise DataError(f"{root}: no images. This client has no data for {split}")
    return listed


def simulated_folder(config: DataConfig, node: NodeConfig) -> Path | None:
    """Where a simulated client finds its images: the folder number `partition-id` of `data.root`, alphabetically.

    Returns:
        None if the node has a `data-dir` of its own, or the data are no folders.

    Raises:
        DataError: `data.root` has no such folder.
    """
    if config.name != "folder" or node.data_dir or not config.root or node.partition_id < 0:
        return None
    root = Path(config.root).expanduser()
    if not root.is_dir():
        raise DataError(f"data.root = {config.root!r}: no such folder")
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if node.partition_id >= len(folders):
        raise DataError(f"data.root = {config.root!r} has {len(folders)} clients' folders; set num-clients to at most that")
    return folders[node.partition_id]


def _load_folder(config: DataConfig, node: NodeConfig, split: str, size: int) -> Images:
    pixels, labels = [], []
    for file, label in _list_folder(config, node, split):
        try:
            with Image.open(file) as image:
                pixels.append(to_pixels(image, size))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{file}: not a readable image ({error}). Remove or replace it") from error
        labels.append(label)
    return Images(torch.stack(pixels), torch.tensor(labels))


def to_pixels(image: Image.Image, size: int) -> torch.Tensor:
    """A picture of any mode and shape as [3, size, size] uint8 RGB: upright, transparent on white, short side resized, centre cropped.

    16 bits a channel are taken for the whole range, 0 to 65,535.

    Raises:
        ValueError: floating-point pixels, whose range nobody can know.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits, as X-rays and microscopes save; Pillow would clip them to white
        image = Image.fromarray((np.asarray(image).astype(np.float64) / 257).clip(0, 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image)
    tensor = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
    if tensor.shape[1:] == (size, size):
        return tensor
    from torchvision.transforms.v2 import functional  # seconds to import, and the digits need no resizing

    return functional.center_crop(functional.resize(tensor, [size], antialias=True), [size, size])
