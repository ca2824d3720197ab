"""Which images are a node's own: a part of an embedded data set, or a folder.

Imports no torch: joining takes no second.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from osfl.config import DataConfig, NodeConfig, is_identifier, split_names
from osfl.data.columns import composed
from osfl.data.named import (
    check_root,
    domain_names,
    domain_of,
    has_saved_part,
    is_named,
    left_out,
    load_rows,
)
from osfl.data.partition import DataError, check_count, cut
from osfl.data.render import CLASSES, STYLES
from osfl.util.text import name_problem, plain

# Of all clients together; `osfl.data.digits`, which takes seconds to import, draws them
_DIGITS_OF_A_CLASS = 10 * len(STYLES)
# Folders within a class's folder, such as patients' and their visits'
DEEPEST = 8
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
        DataError: there is no such folder, domain or data set, or a folder's name can be no
            client's.
    """
    if folder := simulated_folder(config, node):
        if not is_identifier(folder.name):
            raise DataError(
                f"{plain(folder, 1000)}: a client is called as its folder, and its name must be 1 "
                "to 64 letters of a to z, digits, '-' or '_', and not 'average'; rename the folder"
            )
        return folder.name
    if node.partition_id < 0:
        return ""
    # A name after the rows' domain would tell of single rows, without noise
    if has_rows(config, node) and config.partition == "domain" and not node.demands_guarantee:
        domain = domain_of(load_rows(config, node, "train", seed))
        # A part on a machine of its own does not see the other domains
        others = () if node.data_dir else domain_names(config)
        return _named_after(domain, others, node.partition_id, bool(node.data_dir))
    return f"client-{node.partition_id}"


def _named_after(domain: str, domains: Sequence[str], part: int, is_apart: bool) -> str:
    """A client's name after its domain, if no other client can have it; else its number.

    Args:
        domains: of all clients, where they are known.
        is_apart: whether they are not.
    """
    name = _client_word(domain)
    # A hospital's or a writer's number says nothing by itself
    if not is_identifier(name) or name.isdigit() or name.startswith("client-"):
        return f"client-{part}"
    alike = [other for other in domains if _client_word(other).casefold() == name.casefold()]
    if len(alike) > 1 or (is_apart and name != domain):
        return f"client-{part}"
    return name


def _client_word(domain: str) -> str:
    return _OTHERS.sub("_", domain).strip("_-")[:64]


def check_images(config: DataConfig, node: NodeConfig, seed: int) -> None:
    """Whether this node has images to train and to test on.

    Folders are listed and columns of labels read; no image is opened or drawn.

    Raises:
        DataError: as `load_images`, but for corrupt images, and for a part of the digits that is
            empty or whose classes are all too small.
    """
    if config.name == "digits":
        count = count_parts(config, node)
        if config.partition != "domain":
            check_count(config, _DIGITS_OF_A_CLASS * len(CLASSES), count)
        return
    for split in ("train", "test"):
        if has_rows(config, node):
            labels = list(load_rows(config, node, split, seed)["label"])
        else:
            labels = [label for _, label in list_folder(config, node, split)]
        if split == "train":
            of_large_classes(labels, node.min_class_images)


def check_clients(config: DataConfig, clients: int, seed: int) -> list[str]:
    """Check that every client of a simulation has images and a name; list the rows left out.

    Raises:
        DataError: one has not.
    """
    check_root(config.root)
    for part in range(clients):
        node = NodeConfig(partition_id=part, num_partitions=clients)
        check_images(config, node, seed)
        client_name(config, node, seed)
    if config.name == "digits" and config.partition == "dirichlet":
        digits = np.repeat(range(len(CLASSES)), _DIGITS_OF_A_CLASS)
        cut(config, digits, clients, seed)
    return left_out_words(config, NodeConfig())


def left_out_words(config: DataConfig, node: NodeConfig) -> list[str]:
    """In words, which rows of a node's data set are left out."""
    if not has_rows(config, node):
        return []
    source = node.data_dir or config.name
    counts = left_out(config, node)
    return [f"{source}: {count:,} rows left out, with {what}" for what, count in counts.items()]


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
    """(file, label) of everything in `<data-dir>/<split>/<class>/`, and in folders below.

    Raises:
        DataError: there is no such folder, it has other classes than the run, or no images.
    """
    root = _split_folder(config, node, split)
    names = class_names(config)
    folders = _class_folders(root, names)
    listed = []
    for label, name in enumerate(names):
        if (folder := folders.get(composed(name))) is None:
            continue
        files = list(_files_below(folder))
        if not files:
            raise DataError(
                f"{plain(folder, 1000)}: the class has no images. Remove the empty folder, or "
                "add images to it"
            )
        listed += [(file, label) for file in files]
    if not listed:
        raise DataError(f"{plain(root, 1000)}: no images. This client has no data for {split}")
    return listed


def _split_folder(config: DataConfig, node: NodeConfig, split: str) -> Path:
    """Where a node's images of a split lie, by class."""
    home = Path(node.data_dir).expanduser() if node.data_dir else simulated_folder(config, node)
    if home is None:
        raise DataError(
            "data.name = 'folder' needs node-config data-dir: the folder with train/<class>/* and "
            "test/<class>/*; in a simulation, data.root: the folder with all clients' folders"
        )
    root = home / split
    if not root.is_dir():
        raise DataError(f"{plain(home, 1000)}: there is no folder {split}/ in it")
    return root


def folder_groups(config: DataConfig, node: NodeConfig, split: str) -> set[str]:
    """The folders within classes that images lie in, such as patients'; a name is one group."""
    root = _split_folder(config, node, split)
    places = [file.relative_to(root).parts for file, _ in list_folder(config, node, split)]
    return {parts[1] for parts in places if len(parts) > 2}


def _class_folders(root: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """The folders of the classes, by their names as these are compared.

    Raises:
        DataError: a folder that is none of the run's classes, or two that are one.
    """
    known = {composed(name) for name in names}
    folders: dict[str, Path] = {}
    for folder in sorted(root.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        name = composed(folder.name)
        if name not in known:
            raise DataError(
                f"{plain(root, 1000)}: {plain(folder.name, 120)!r} is not one of data.classes "
                f"({plain(', '.join(names), 500)}){_why_unknown(folder.name, names)}"
            )
        if name in folders:
            raise DataError(
                f"{plain(root, 1000)}: two folders are called {plain(name, 120)!r}, and differ in "
                "the Unicode of their accents alone; move the images into one of them"
            )
        folders[name] = folder
    return folders


def _files_below(folder: Path, depth: int = 0) -> Iterator[Path]:
    """The files of a class, those in folders within it too; what is hidden is passed over.

    Raises:
        DataError: the folders are too deep, as those of a link to a folder above are.
    """
    if depth > DEEPEST:
        raise DataError(
            f"{plain(folder, 1000)}: more than {DEEPEST} folders deep within a class; move the "
            "images up, or remove a link to a folder above"
        )
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_below(path, depth + 1)
        else:
            yield path


def _why_unknown(folder: str, names: tuple[str, ...]) -> str:
    if problem := name_problem(folder):
        return f"; it {problem}, so no run can have it as a class: rename the folder"
    if "," in folder:
        return "; it has a comma, which separates the names in data.classes: rename the folder"
    if folder != folder.strip():
        return f"; it has a blank at an end: rename the folder to {folder.strip()!r}"
    alike = [name for name in names if _spelled(name) == _spelled(folder)]
    if alike:
        return f"; rename the folder to {alike[0]!r}"
    return "; add it to data.classes, or remove the folder"


def _spelled(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold().replace(" ", "_")


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
