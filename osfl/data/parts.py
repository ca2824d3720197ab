"""Locate a node's images: a part of a data set, or a folder.

This module does not import torch, so that a client joins in less than a second.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from osfl.config import DataConfig, NodeConfig, is_identifier, split_names
from osfl.data.columns import normalize_name
from osfl.data.named import (
    check_root,
    count_left_out,
    domain_names,
    domain_of,
    has_saved_part,
    is_named,
    load_rows,
)
from osfl.data.partition import DataError, Rows, check_count, cut_parts
from osfl.data.render import CLASSES, STYLES
from osfl.data.shares import group_numbers, split_rows
from osfl.data.sides import content_key, merge_groups, near_duplicate_groups, training_mask
from osfl.util.text import name_problem, quote, sanitize

if TYPE_CHECKING:
    from PIL import Image

# Over all clients; as in `osfl.data.digits`, which takes seconds to import
_DIGITS_PER_CLASS = 10 * len(STYLES)
# Maximum depth of folders in a class's folder, such as those of patients and their visits
MAX_DEPTH = 8
# Files and folders that Windows, macOS archives, Linux and network storage create
SYSTEM_FILES = frozenset(
    (
        "thumbs.db",
        "ehthumbs.db",
        "ehthumbs_vista.db",
        "desktop.ini",
        "$recycle.bin",
        "system volume information",
        "icon\r",
        "__macosx",
        "lost+found",
        "@eadir",
        "#recycle",
        "#snapshot",
    )
)
# Maximum number of overlapping groups that are named
MAX_NAMED_GROUPS = 10
# Characters that are not allowed in a client's name, which is part of file names
_INVALID = re.compile(r"[^A-Za-z0-9_-]+")


def class_names(config: DataConfig) -> tuple[str, ...]:
    """Return the run's class names; a label is an index into them."""
    if config.name == "digits":
        return CLASSES
    names = split_names(config.classes)
    if is_named(config) and len(names) < 2:
        raise DataError(
            "data.classes: must contain class names. `osfl run` and `osfl compare` read them from "
            "the data set; for Flower's own commands, set data.classes"
        )
    return names


def client_name(config: DataConfig, node: NodeConfig, seed: int) -> str:
    """Return the name of a client that does not name itself, or "" if the data has none.

    It is the name of its folder, or of its domain in a data set that is partitioned by domain.

    Raises:
        DataError: the folder, domain or data set does not exist, or the folder's name is invalid
            for a client.
    """
    if folder := simulated_folder(config, node):
        if not is_identifier(folder.name):
            raise DataError(
                f"{sanitize(folder, 1000)}: a folder's name is its client's name, and must be 1 "
                "to 64 "
                "letters of a to z, digits, '-' or '_', and not 'average'; rename the folder"
            )
        return folder.name
    if node.partition_id < 0:
        return ""
    # The domain's name would reveal information about single rows, without noise
    if has_rows(config, node) and config.partition == "domain" and not node.requires_guarantee:
        domain = domain_of(load_rows(config, node, "train", seed))
        # A node with a part of its own does not know the other domains
        all_domains = () if node.data_dir else domain_names(config)
        return _named_after(domain, all_domains, node.partition_id, bool(node.data_dir))
    return f"client-{node.partition_id}"


def _named_after(domain: str, domains: Sequence[str], part: int, is_apart: bool) -> str:
    """Name a client after its domain, or by its number if the name may not be unique.

    Args:
        domain: the client's domain.
        domains: of all clients, if they are known.
        part: the client's number.
        is_apart: whether the other clients' domains are unknown.
    """
    name = _as_client_name(domain)
    # A number alone, such as a hospital's or a writer's, would be unclear
    if not is_identifier(name) or name.isdigit() or name.startswith("client-"):
        return f"client-{part}"
    equal = [other for other in domains if _as_client_name(other).casefold() == name.casefold()]
    if len(equal) > 1 or (is_apart and name != domain):
        return f"client-{part}"
    return name


def _as_client_name(domain: str) -> str:
    return _INVALID.sub("_", domain).strip("_-")[:64]


def check_images(config: DataConfig, node: NodeConfig, seed: int) -> None:
    """Check that this node has images to train and to test on; only the latter if it only tests.

    This lists folders and reads label columns, but does not open or render images.

    Raises:
        DataError: as `load_images`, except for corrupt images, and for parts of the digits that
            are empty or only have classes below `min-class-images`.
    """
    if config.name == "digits":
        count = count_parts(config, node)
        if config.partition != "domain":
            check_count(config, _DIGITS_PER_CLASS * len(CLASSES), count)
        return
    for split in ("test",) if node.tests_only else ("train", "test"):
        if has_rows(config, node):
            labels = list(load_rows(config, node, split, seed)["label"])
        else:
            labels = [label for _, label in list_folder(config, node, split)]
        if split == "train":
            select_large_classes(labels, node.min_class_images)


def check_clients(config: DataConfig, clients: int, seed: int) -> list[str]:
    """Check that every client of a simulation has images and a name; return notes on its data.

    Raises:
        DataError: a client has no images or no valid name.
    """
    check_root(config.root)
    nodes = {}
    for part in range(clients):
        node = NodeConfig(partition_id=part, num_partitions=clients)
        check_images(config, node, seed)
        nodes[client_name(config, node, seed)] = node
    if config.name == "digits" and config.partition == "dirichlet":
        digits = np.repeat(range(len(CLASSES)), _DIGITS_PER_CLASS)
        cut_parts(config, digits, clients, seed)
    return [*left_out_notes(config, NodeConfig()), *folder_notes(config, nodes)]


def left_out_notes(config: DataConfig, node: NodeConfig) -> list[str]:
    """Return notes on the rows that are left out of a node's data set."""
    if not has_rows(config, node):
        return []
    source = node.data_dir or config.name
    counts = count_left_out(config, node)
    return [f"{source}: {count:,} rows left out, with {reason}" for reason, count in counts.items()]


def select_large_classes(labels: Sequence[int], least: int) -> list[int]:
    """Return the indices of the images whose class has at least `least` images.

    Raises:
        DataError: there is no such class.
    """
    counts = Counter(labels)
    rows = [row for row, label in enumerate(labels) if counts[label] >= least]
    if not rows:
        raise DataError(
            f"node-config min-class-images = {least}: no class has as many images; lower it, or "
            "leave this client out"
        )
    return rows


def has_rows(config: DataConfig, node: NodeConfig) -> bool:
    """Check whether this node's images are rows of a data set, rather than files in a folder."""
    if config.name == "digits":
        return False
    return has_saved_part(node) or (is_named(config) and not node.data_dir)


def has_training_split(config: DataConfig, node: NodeConfig) -> bool:
    """Check whether this node has training images: rows always do, a folder may lack train/."""
    if has_rows(config, node):
        return True
    home = _home(config, node)
    return (home / "train").is_dir() or _is_unsplit(config, home)


def folder_notes(config: DataConfig, nodes: Mapping[str, NodeConfig]) -> list[str]:
    """Return notes on clients whose images are files in a folder.

    The notes name clients without a folder test/, and groups in both training and test.

    Args:
        nodes: by client name.
    """
    nodes = {client: node for client, node in nodes.items() if _has_folder(config, node)}
    notes = []
    for client, node in nodes.items():
        home = _home(config, node)
        if not (home / "test").is_dir():
            images = "its images" if _is_unsplit(config, home) else "train/"
            notes.append(
                f"{client}: {sanitize(home, 1000)} has no folder test/; data.test-share = "
                f"{config.test_share:g} of {images} is used for testing"
            )
    return [*notes, *_groups_on_both_sides(config, nodes)]


def _has_folder(config: DataConfig, node: NodeConfig) -> bool:
    return config.name != "digits" and not has_rows(config, node)


def _groups_on_both_sides(config: DataConfig, nodes: Mapping[str, NodeConfig]) -> list[str]:
    """Describe the groups with images in both training and test."""
    train = {name: _group_folders(config, node, "train") for name, node in nodes.items()}
    test = {name: _group_folders(config, node, "test") for name, node in nodes.items()}
    # Overlaps within a client come first
    pairs = sorted(product(train, test), key=lambda pair: pair[0] != pair[1])
    overlaps: dict[str, str] = {}
    for trainer, tester in pairs:
        for group in sorted(train[trainer].keys() & test[tester].keys()):
            train_folder = sanitize(train[trainer][group], 400)
            test_folder = sanitize(test[tester][group], 400)
            overlaps.setdefault(
                group,
                f"  {sanitize(group, 120)}: training of {trainer} ({train_folder}), test of "
                f"{tester} "
                f"({test_folder})",
            )
    if not overlaps:
        return []
    lines = [f"groups (such as patients) with images in both training and test: {len(overlaps):,}"]
    lines += list(overlaps.values())[:MAX_NAMED_GROUPS]
    return (
        [*lines, f"  and {len(overlaps) - MAX_NAMED_GROUPS:,} more"]
        if len(overlaps) > MAX_NAMED_GROUPS
        else lines
    )


def _group_folders(config: DataConfig, node: NodeConfig, split: str) -> dict[str, Path]:
    """Return the folders within classes that have images of a split, such as patients', by name.

    Folders of the same name in several classes are one group, of which the first is returned.
    """
    home = _home(config, node)
    folders: dict[str, Path] = {}
    for file, _ in list_folder(config, node, split):
        root = _root_of(file, home)
        if group := _group_of(file, root):
            folders.setdefault(group, root.joinpath(*file.relative_to(root).parts[:2]))
    return folders


def _root_of(file: Path, home: Path) -> Path:
    """Return the folder of the classes that a file belongs to: train/, test/ or the client's."""
    roots = (home / "train", home / "test")
    return next((root for root in roots if file.is_relative_to(root)), home)


def _group_of(file: Path, root: Path) -> str:
    """Return the name of the folder in its class's folder that a file belongs to, or ""."""
    names = file.relative_to(root).parts
    return normalize_name(names[1]) if len(names) > 2 else ""


def list_folder(config: DataConfig, node: NodeConfig, split: str) -> list[tuple[Path, int]]:
    """Return (file, label) of all files in `<data-dir>/<split>/<class>/` and its subfolders.

    Without a folder test/, a share of train/ is for testing. Each subfolder of a class, such as a
    patient's, is then in one of the two splits.

    Raises:
        DataError: the folder does not exist, has classes that the run does not have, or has no
            images; or the run sets keys that do not apply to folders.
    """
    _check_folder_keys(config, node)
    home = _home(config, node)
    root = _split_folder(config, home, split)
    images = _list_classes(config, root)
    if not (home / "test").is_dir():
        _check_no_test(config, node, home)
        images = _cut_side(config, node, root, images, split)
    elif config.split_by:
        images = _regrouped_side(config, node, home, split)
    if not images:
        raise DataError(f"{sanitize(root, 1000)}: no images. This client has no data for {split}")
    return images


def _list_classes(config: DataConfig, root: Path) -> list[tuple[Path, int]]:
    names = class_names(config)
    folders = class_folders(root, names)
    images = []
    for label, name in enumerate(names):
        if (folder := folders.get(normalize_name(name))) is None:
            continue
        files = list(files_below(folder))
        if not files:
            raise DataError(
                f"{sanitize(folder, 1000)}: the class has no images. Remove the empty folder, or "
                "add images to it"
            )
        images += [(file, label) for file in files]
    return images


def _cut_side(
    config: DataConfig, node: NodeConfig, root: Path, images: list[tuple[Path, int]], split: str
) -> list[tuple[Path, int]]:
    """Return the files in `root` for testing or for training, cut like a data set's rows."""
    if not images:
        return []
    # By the sorted class names, so that the cut does not depend on their order in the run
    names = np.array(class_names(config))
    _, labels = np.unique(names[[label for _, label in images]], return_inverse=True)
    files = [file for file, _ in images]
    groups = _file_groups(config, node, files, [_group_of(file, root) for file in files])
    rows = split_rows(np.arange(len(images)), Rows(labels, groups=groups), config.test_share, split)
    if not len(rows):
        raise DataError(
            f"{sanitize(root, 1000)}: the classes have too few images or subfolders to cut a share "
            f"for {split}. Add images, or a folder test/ beside train/"
        )
    return [images[row] for row in sorted(rows)]


def _regrouped_side(
    config: DataConfig, node: NodeConfig, home: Path, split: str
) -> list[tuple[Path, int]]:
    """Return one side of train/ and test/, where groups with a training image are for training."""
    train = _list_classes(config, _split_folder(config, home, "train"))
    images = [*train, *_list_classes(config, home / "test")]
    files = [file for file, _ in images]
    folders = [_group_of(file, _root_of(file, home)) for file in files]
    trains = training_mask(_file_groups(config, node, files, folders), len(train))
    return [images[row] for row in np.flatnonzero(trains == (split == "train"))]


def _file_groups(
    config: DataConfig, node: NodeConfig, files: list[Path], names: list[str]
) -> np.ndarray:
    """Return the number of each file's group: its folder within the class, and near-duplicates.

    Args:
        names: of the folders within the class, or "".
    """
    folders = group_numbers(names)
    if not config.split_by:
        return folders

    def read(number: int) -> "Image.Image":
        # Imports torch, which takes seconds
        from osfl.data.pictures import open_image

        return open_image(files[number])

    stats = [file.stat() for file in files]
    traits = [
        f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape")
        for file, stat in zip(files, stats, strict=True)
    ]
    groups = near_duplicate_groups(content_key(traits), len(files), read, node.cache_dir)
    return merge_groups(groups, folders)


def _check_no_test(config: DataConfig, node: NodeConfig, home: Path) -> None:
    """Check that train/ may be cut because there is no folder test/.

    Raises:
        DataError: another folder may contain the test images, or this site demands a guarantee.
    """
    others = [path.name for path in list_visible(home) if path.is_dir() and path.name != "train"]
    if others and not _is_unsplit(config, home):
        raise DataError(
            f"{sanitize(home, 1000)}: has no folder test/, but {sanitize(others[0], 120)!r}. "
            "Rename that "
            "folder to test, or move it away to use data.test-share of train/"
        )
    # Replacing one image would move others between training and test
    if node.requires_guarantee:
        raise DataError(
            f"{sanitize(home, 1000)}: has no folder test/, and this site demands a guarantee, "
            "which a "
            "share of train/ would break; add a folder test/ with test images"
        )


def _check_folder_keys(config: DataConfig, node: NodeConfig) -> None:
    """Check that keys that only apply to data sets have their defaults.

    Raises:
        DataError: a key has another value.
    """
    if config.max_per_class:
        raise _only_for_rows("max-per-class", config.max_per_class, "set it to 0")
    if config.train_split != "train":
        raise _only_for_rows("train-split", config.train_split, "set it to 'train'")
    if config.test_split not in ("", "test"):
        raise _only_for_rows("test-split", config.test_split, "set it to ''")
    # Another site's images may be a saved data set, which has the column
    if config.group_column and not node.data_dir:
        hint = "the folders within a class are the groups: set it to ''"
        raise _only_for_rows("group-column", config.group_column, hint)


def _only_for_rows(key: str, value: object, hint: str) -> DataError:
    return DataError(
        f"data.{key} = {quote(value)}: has no effect on folders of images, which must be called "
        f"train and test; {hint}"
    )


def _home(config: DataConfig, node: NodeConfig) -> Path:
    """Return the folder with a node's train/ and test/.

    Raises:
        DataError: neither the node-config nor the run-config names it.
    """
    home = Path(node.data_dir).expanduser() if node.data_dir else simulated_folder(config, node)
    if home is None:
        raise DataError(
            "data.name = 'folder' requires node-config data-dir, a folder with train/<class>/* and "
            "test/<class>/*, or in a simulation data.root, a folder with all clients' folders"
        )
    return home


def _split_folder(config: DataConfig, home: Path, split: str) -> Path:
    """Return the folder with a split's classes: train/ if there is no test/, or `home` itself."""
    root = home / split
    if split == "test" and not root.is_dir():
        root = home / "train"
    if not root.is_dir() and _is_unsplit(config, home):
        return home
    if not root.is_dir():
        raise DataError(
            f"{sanitize(home, 1000)}: has no folder train/; move the classes' folders into train/, "
            "and test images into test/, or leave them in train/ for data.test-share"
        )
    return root


def _is_unsplit(config: DataConfig, home: Path) -> bool:
    """Check whether a client's folder has only the classes' folders, as PACS's domains have."""
    if not home.is_dir():
        return False
    names = {normalize_name(path.name) for path in list_visible(home) if path.is_dir()}
    classes = {normalize_name(name) for name in class_names(config)}
    return bool(names) and names <= classes


def list_visible(folder: Path) -> list[Path]:
    """Return a folder's content, sorted, without hidden files and those of operating systems."""
    return sorted(path for path in folder.iterdir() if not is_hidden(path.name))


def is_hidden(name: str) -> bool:
    """Check whether a file or folder is hidden, or was created by an operating system."""
    return name.startswith(".") or name.casefold() in SYSTEM_FILES


def class_folders(
    root: Path,
    names: tuple[str, ...],
    source: str = "data.classes",
    hint: str = "add it to data.classes, or remove the folder",
) -> dict[str, Path]:
    """Return the classes' folders by name, in Unicode's NFC.

    Args:
        source: what the names are, for the error.
        hint: for the error about a folder that is not similar to any name.

    Raises:
        DataError: a folder is not one of the names, or two folders are the same class.
    """
    classes = {normalize_name(name) for name in names}
    folders: dict[str, Path] = {}
    for folder in list_visible(root):
        if not folder.is_dir():
            continue
        name = normalize_name(folder.name)
        if name not in classes:
            raise DataError(
                f"{sanitize(root, 1000)}: {sanitize(folder.name, 120)!r} is not one of "
                f"{source} ({sanitize(', '.join(names), 500)})"
                f"{_why_unknown(folder.name, names, hint)}"
            )
        if name in folders:
            raise DataError(
                f"{sanitize(root, 1000)}: two folders are called {sanitize(name, 120)!r}, and only "
                "differ in the Unicode form of their accents; move the images into one of them"
            )
        folders[name] = folder
    return folders


def files_below(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the files of a class, including those in subfolders.

    Raises:
        DataError: the folders are nested too deeply, as by a link to a parent folder.
    """
    if depth > MAX_DEPTH:
        raise DataError(
            f"{sanitize(folder, 1000)}: more than {MAX_DEPTH} folders deep within a class; move "
            "the "
            "images up, or remove a link to a parent folder"
        )
    for path in list_visible(folder):
        if path.is_dir():
            yield from files_below(path, depth + 1)
        else:
            yield path


def _why_unknown(folder: str, names: tuple[str, ...], hint: str) -> str:
    """Return a hint for a folder that is not one of the classes."""
    if problem := name_problem(folder):
        return f"; it {problem}, so it cannot be the name of a class: rename the folder"
    if "," in folder:
        return "; it has a comma, which separates the names in data.classes: rename the folder"
    if folder != folder.strip():
        return f"; it starts or ends with a blank: rename the folder to {folder.strip()!r}"
    similar = [name for name in names if _normalized(name) == _normalized(folder)]
    if similar:
        return f"; rename the folder to {similar[0]!r}"
    return f"; {hint}"


def _normalized(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold().replace(" ", "_")


def simulated_folder(config: DataConfig, node: NodeConfig) -> Path | None:
    """Return a simulated client's folder, number `partition-id` of `data.root` alphabetically.

    Returns:
        None if the node has a `data-dir` of its own, or the data set does not consist of folders.

    Raises:
        DataError: `data.root` has too few folders.
    """
    if config.name != "folder" or node.data_dir or not config.root or node.partition_id < 0:
        return None
    check_root(config.root)
    root = Path(config.root).expanduser()
    folders = [path for path in list_visible(root) if path.is_dir()]
    if node.partition_id >= len(folders):
        raise DataError(
            f"data.root = {config.root!r} has {len(folders)} folders of clients; set num-clients "
            "to at most that number"
        )
    return folders[node.partition_id]


def count_parts(config: DataConfig, node: NodeConfig) -> int:
    """Return the number of parts of the digits.

    Raises:
        DataError: none of them is this node's.
    """
    if node.partition_id < 0:
        raise DataError(
            "data.name = 'digits' requires node-config partition-id, this client's number (0, 1, "
            "...)"
        )
    count = len(STYLES) if config.partition == "domain" else node.num_partitions or len(STYLES)
    if node.partition_id >= count:
        raise DataError(
            f"partition-id = {node.partition_id}: the data has {count} parts (0 to {count - 1}), "
            f"so this client has no data. Set num-clients to at most {count}, or data.partition to "
            "another value"
        )
    return count
