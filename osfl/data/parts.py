"""Which images are a node's own: a part of an embedded data set, or a folder.

Imports no torch: joining takes no second.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from osfl.config import DataConfig, NodeConfig, is_identifier, split_names
from osfl.data.named import check_root, domain_of, has_saved_part, is_named, load_rows
from osfl.data.partition import DataError
from osfl.data.render import CLASSES, STYLES
from osfl.words import name_problem, plain

# What a client's name, which becomes a file's, cannot have
_OTHERS = re.compile(r"[^A-Za-z0-9_-]+")


def class_names(config: DataConfig) -> tuple[str, ...]:
    """The run's class names, in order; an image's label is its class's index here."""
    if config.name == "digits":
        return CLASSES
    names = split_names(config.classes)
    if is_named(config) and len(names) < 2:
        raise DataError(
            "data.classes: no class names; `osfl run` and `osfl compare` take them from the data "
            "set, and Flower's own commands must be given them"
        )
    return names


def client_name(config: DataConfig, node: NodeConfig, seed: int) -> str:
    """What a client is called that does not name itself; "" where the data has no name for it.

    Its folder's name; of a data set that is cut by domain, its domain's.

    Raises:
        DataError: there is no such folder, domain or data set.
    """
    if folder := simulated_folder(config, node):
        return folder.name
    if node.partition_id < 0:
        return ""
    if has_rows(config, node) and config.partition == "domain":
        name = _OTHERS.sub("_", domain_of(load_rows(config, node, "train", seed))).strip("_-")[:64]
        # A hospital's or a writer's number says nothing by itself
        if is_identifier(name) and not name.isdigit():
            return name
    return f"client-{node.partition_id}"


def check_images(config: DataConfig, node: NodeConfig, seed: int) -> None:
    """Whether this node has images to train and to test on.

    Folders are listed and columns of labels read; no image is opened or drawn.

    Raises:
        DataError: as `load_images`, but for corrupt images, and for a part of the digits that is
            empty or whose classes are all too small.
    """
    if config.name == "digits":
        count_parts(config, node)
        return
    for split in ("train", "test"):
        if has_rows(config, node):
            labels = list(load_rows(config, node, split, seed)["label"])
        else:
            labels = [label for _, label in list_folder(config, node, split)]
        if split == "train":
            of_large_classes(labels, node.min_class_images)


def of_large_classes(labels: Sequence[int], least: int) -> list[int]:
    """The rows of the images whose class has at least `least` images.

    Raises:
        DataError: no class has.
    """
    counts = Counter(labels)
    rows = [row for row, label in enumerate(labels) if counts[label] >= least]
    if not rows:
        raise DataError(
            f"node-config min-class-images = {least}: no class here has as many; lower it, or "
            "leave this client out"
        )
    return rows


def has_rows(config: DataConfig, node: NodeConfig) -> bool:
    """Whether this node's images are rows of a data set, and no files of a folder."""
    if config.name == "digits":
        return False
    return has_saved_part(node) or (is_named(config) and not node.data_dir)


def list_folder(config: DataConfig, node: NodeConfig, split: str) -> list[tuple[Path, int]]:
    """(file, label) of everything in `<data-dir>/<split>/<class>/`."""
    home = Path(node.data_dir).expanduser() if node.data_dir else simulated_folder(config, node)
    if home is None:
        raise DataError(
            "data.name = 'folder' needs node-config data-dir: the folder with train/<class>/* and "
            "test/<class>/*; in a simulation, "
            "data.root: the folder with all clients' folders"
        )
    root = home / split
    if not root.is_dir():
        raise DataError(f"{plain(home, 1000)}: there is no folder {split}/ in it")
    names = class_names(config)
    folders = sorted(p.name for p in root.iterdir() if p.is_dir())
    if unknown := sorted(set(folders) - set(names)):
        raise DataError(
            f"{plain(root, 1000)}: {plain(unknown[0], 120)!r} is not one of the run's classes "
            f"({plain(', '.join(names), 500)}){_why_unknown(unknown[0], names)}"
        )
    listed = []
    for label, name in enumerate(names):
        files = sorted(p for p in (root / name).glob("*") if not p.name.startswith("."))
        if name in folders and not files:
            raise DataError(
                f"{plain(root / name, 1000)}: the class has no images. Remove the empty folder, or "
                "add images to it"
            )
        listed += [(file, label) for file in files]
    if not listed:
        raise DataError(f"{plain(root, 1000)}: no images. This client has no data for {split}")
    return listed


def _why_unknown(folder: str, names: tuple[str, ...]) -> str:
    if problem := name_problem(folder):
        return f"; it {problem}, so no run can have it as a class: rename the folder"
    alike = [name for name in names if name.casefold() == folder.casefold()]
    return f"; rename the folder to {alike[0]!r}" if alike else ""


def simulated_folder(config: DataConfig, node: NodeConfig) -> Path | None:
    """Where a simulated client finds its images.

    The folder number `partition-id` of `data.root`, alphabetically.

    Returns:
        None if the node has a `data-dir` of its own, or the data are no folders.

    Raises:
        DataError: `data.root` has no such folder.
    """
    if config.name != "folder" or node.data_dir or not config.root or node.partition_id < 0:
        return None
    check_root(config.root)
    root = Path(config.root).expanduser()
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if node.partition_id >= len(folders):
        raise DataError(
            f"data.root = {config.root!r} has {len(folders)} clients' folders; set num-clients to "
            "at most that"
        )
    return folders[node.partition_id]


def count_parts(config: DataConfig, node: NodeConfig) -> int:
    """Into how many parts the digits are cut, one of which is this node's.

    Raises:
        DataError: it is not.
    """
    if node.partition_id < 0:
        raise DataError(
            "data.name = 'digits' needs node-config partition-id (0, 1, ...): which client this "
            "node is"
        )
    count = len(STYLES) if config.partition == "domain" else node.num_partitions or len(STYLES)
    if node.partition_id >= count:
        raise DataError(
            f"partition-id = {node.partition_id}: the data has {count} parts (0 to {count - 1}), "
            "so this client has no data. "
            f"Use at most {count} clients, or another data.partition"
        )
    return count
