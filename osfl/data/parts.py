"""Which images are a node's own: a part of an embedded data set, or a folder.

Imports no torch: joining takes no second.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
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
from osfl.data.partition import DataError, Rows, check_count, cut
from osfl.data.render import CLASSES, STYLES
from osfl.data.shares import group_numbers, side
from osfl.util.text import name_problem, quote, sanitize

# Of all clients together; `osfl.data.digits`, which takes seconds to import, draws them
_DIGITS_OF_A_CLASS = 10 * len(STYLES)
# Folders within a class's folder, such as patients' and their visits'
DEEPEST = 8
# What Windows, archives of macOS, Linux and network storage leave beside a user's files
OF_SYSTEMS = frozenset(
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
SHOWN = 10  # of the groups in training and in test
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
                f"{sanitize(folder, 1000)}: a client is called as its folder, and its name must "
                "be 1 "
                "to 64 letters of a to z, digits, '-' or '_', and not 'average'; rename the folder"
            )
        return folder.name
    if node.partition_id < 0:
        return ""
    # A name after the rows' domain would tell of single rows, without noise
    if has_rows(config, node) and config.partition == "domain" and not node.requires_guarantee:
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
    """Check that every client of a simulation has images and a name; return notes on its data.

    Raises:
        DataError: one has not.
    """
    check_root(config.root)
    nodes = {}
    for part in range(clients):
        node = NodeConfig(partition_id=part, num_partitions=clients)
        check_images(config, node, seed)
        nodes[client_name(config, node, seed)] = node
    if config.name == "digits" and config.partition == "dirichlet":
        digits = np.repeat(range(len(CLASSES)), _DIGITS_OF_A_CLASS)
        cut(config, digits, clients, seed)
    return [*left_out_words(config, NodeConfig()), *folder_notes(config, nodes)]


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


def folder_notes(config: DataConfig, nodes: Mapping[str, NodeConfig]) -> list[str]:
    """Return what a user should know of the clients whose images are files of a folder.

    These are test images that are cut from train/, and groups in training and in test.

    Args:
        nodes: by the client's name.
    """
    nodes = {client: node for client, node in nodes.items() if _has_folder(config, node)}
    notes = []
    for client, node in nodes.items():
        home = _home(config, node)
        if not (home / "test").is_dir():
            notes.append(
                f"{client}: {sanitize(home, 1000)} has no folder test/; data.test-share = "
                f"{config.test_share:g} of train/ is for the test"
            )
    return [*notes, *_groups_on_both_sides(config, nodes)]


def _has_folder(config: DataConfig, node: NodeConfig) -> bool:
    return config.name != "digits" and not has_rows(config, node)


def _groups_on_both_sides(config: DataConfig, nodes: Mapping[str, NodeConfig]) -> list[str]:
    """Name the groups that have images in training and in test, with their clients and folders."""
    train = {name: _group_folders(config, node, "train") for name, node in nodes.items()}
    test = {name: _group_folders(config, node, "test") for name, node in nodes.items()}
    # A client that tests on its own training images comes first
    pairs = sorted(product(train, test), key=lambda pair: pair[0] != pair[1])
    found: dict[str, str] = {}
    for one, other in pairs:
        for group in sorted(train[one].keys() & test[other].keys()):
            found.setdefault(
                group,
                f"  {sanitize(group, 120)}: training of {one} "
                f"({sanitize(train[one][group], 400)}), "
                f"test of {other} ({sanitize(test[other][group], 400)})",
            )
    if not found:
        return []
    lines = [f"{len(found):,} groups, patients say, have images in training and in test"]
    lines += list(found.values())[:SHOWN]
    return [*lines, f"  and {len(found) - SHOWN:,} more"] if len(found) > SHOWN else lines


def _group_folders(config: DataConfig, node: NodeConfig, split: str) -> dict[str, Path]:
    """The folders within classes that hold images of a split, such as patients', by their names.

    One name in several classes is one group, here with its first folder.
    """
    root = _split_folder(_home(config, node), split)
    folders: dict[str, Path] = {}
    for file, _ in list_folder(config, node, split):
        if group := _group_of(file, root):
            folders.setdefault(group, root.joinpath(*file.relative_to(root).parts[:2]))
    return folders


def _group_of(file: Path, root: Path) -> str:
    """The name of the folder within a class's folder that a file is in; "" where there is none."""
    places = file.relative_to(root).parts
    return composed(places[1]) if len(places) > 2 else ""


def list_folder(config: DataConfig, node: NodeConfig, split: str) -> list[tuple[Path, int]]:
    """(file, label) of everything in `<data-dir>/<split>/<class>/`, and in folders below.

    Without a folder test/, a share of train/ is for the test, and each folder within a class, such
    as a patient's, is on one side.

    Raises:
        DataError: there is no such folder, it has other classes than the run, or no images; or the
            run asks for what folders do not have.
    """
    _check_folder_keys(config, node)
    home = _home(config, node)
    root = _split_folder(home, split)
    listed = _list_classes(config, root)
    if not (home / "test").is_dir():
        _check_no_test(node, home)
        listed = _cut_side(config, root, listed, split)
    if not listed:
        place = sanitize(root, 1000)
        raise DataError(f"{place}: no images. This client has no data for {split}")
    return listed


def _list_classes(config: DataConfig, root: Path) -> list[tuple[Path, int]]:
    names = class_names(config)
    folders = _class_folders(root, names)
    listed = []
    for label, name in enumerate(names):
        if (folder := folders.get(composed(name))) is None:
            continue
        files = list(_files_below(folder))
        if not files:
            raise DataError(
                f"{sanitize(folder, 1000)}: the class has no images. Remove the empty folder, or "
                "add images to it"
            )
        listed += [(file, label) for file in files]
    return listed


def _cut_side(
    config: DataConfig, root: Path, listed: list[tuple[Path, int]], split: str
) -> list[tuple[Path, int]]:
    """The files of train/ that are for the test, or for training, as a data set's rows are cut."""
    if not listed:
        return []
    # By the classes' names, whose order is not the run's to choose
    names = np.array(class_names(config))
    _, labels = np.unique(names[[label for _, label in listed]], return_inverse=True)
    groups = group_numbers([_group_of(file, root) for file, _ in listed])
    rows = side(np.arange(len(listed)), Rows(labels, groups=groups), config.test_share, split)
    if not len(rows):
        raise DataError(
            f"{sanitize(root, 1000)}: too few images or folders within the classes to cut a share "
            f"for {split} from. Add images, or a folder test/ beside train/"
        )
    return [listed[row] for row in sorted(rows)]


def _check_no_test(node: NodeConfig, home: Path) -> None:
    """Check that train/ may be cut, for want of a folder test/.

    Raises:
        DataError: another folder may be meant, or this site demands a guarantee.
    """
    others = [path.name for path in visible(home) if path.is_dir() and path.name != "train"]
    if others:
        raise DataError(
            f"{sanitize(home, 1000)}: there is no folder test/ in it, but "
            f"{sanitize(others[0], 120)!r}; "
            "rename that folder to test, or move it away to have data.test-share cut from train/"
        )
    # One image replaced would move others between training and test
    if node.requires_guarantee:
        raise DataError(
            f"{sanitize(home, 1000)}: there is no folder test/ in it, and this site demands a "
            "guarantee, which a share of train/ would break; add a folder test/ with test images"
        )


def _check_folder_keys(config: DataConfig, node: NodeConfig) -> None:
    """Check that no key asks for what is done with data sets alone.

    Raises:
        DataError: one does.
    """
    if config.max_per_class:
        raise _only_for_rows("max-per-class", config.max_per_class, "set it to 0")
    if config.train_split != "train":
        raise _only_for_rows("train-split", config.train_split, "set it to 'train'")
    if config.test_split not in ("", "test"):
        raise _only_for_rows("test-split", config.test_split, "set it to ''")
    # Another site's images may be a saved data set, which has the column
    if config.group_column and not node.data_dir:
        fix = "the folders within a class are the groups: set it to ''"
        raise _only_for_rows("group-column", config.group_column, fix)


def _only_for_rows(key: str, value: object, fix: str) -> DataError:
    return DataError(
        f"data.{key} = {quote(value)}: has no effect on folders of images, which are called "
        f"train and test; {fix}"
    )


def _home(config: DataConfig, node: NodeConfig) -> Path:
    """The folder with a node's train/ and test/.

    Raises:
        DataError: nothing names it.
    """
    home = Path(node.data_dir).expanduser() if node.data_dir else simulated_folder(config, node)
    if home is None:
        raise DataError(
            "data.name = 'folder' needs node-config data-dir: the folder with train/<class>/* and "
            "test/<class>/*; in a simulation, data.root: the folder with all clients' folders"
        )
    return home


def _split_folder(home: Path, split: str) -> Path:
    """Where images of a split lie, by class; those of the test may be among those of train/."""
    root = home / split
    if split == "test" and not root.is_dir():
        root = home / "train"
    if not root.is_dir():
        raise DataError(
            f"{sanitize(home, 1000)}: there is no folder train/ in it; move the classes' folders "
            "into train/, and test images into test/ or leave them there for data.test-share"
        )
    return root


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, but for hidden files and those that systems leave there."""
    return sorted(path for path in folder.iterdir() if not is_passed_over(path.name))


def is_passed_over(name: str) -> bool:
    """Check whether a file or folder is hidden, or left by an operating system."""
    return name.startswith(".") or name.casefold() in OF_SYSTEMS


def _class_folders(root: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """The folders of the classes, by their names as these are compared.

    Raises:
        DataError: a folder that is none of the run's classes, or two that are one.
    """
    known = {composed(name) for name in names}
    folders: dict[str, Path] = {}
    for folder in visible(root):
        if not folder.is_dir():
            continue
        name = composed(folder.name)
        if name not in known:
            raise DataError(
                f"{sanitize(root, 1000)}: {sanitize(folder.name, 120)!r} is not one of "
                "data.classes "
                f"({sanitize(', '.join(names), 500)}){_why_unknown(folder.name, names)}"
            )
        if name in folders:
            raise DataError(
                f"{sanitize(root, 1000)}: two folders are called {sanitize(name, 120)!r}, and "
                "differ in "
                "the Unicode of their accents alone; move the images into one of them"
            )
        folders[name] = folder
    return folders


def _files_below(folder: Path, depth: int = 0) -> Iterator[Path]:
    """The files of a class, those in folders within it too.

    Raises:
        DataError: the folders are too deep, as those of a link to a folder above are.
    """
    if depth > DEEPEST:
        raise DataError(
            f"{sanitize(folder, 1000)}: more than {DEEPEST} folders deep within a class; move the "
            "images up, or remove a link to a folder above"
        )
    for path in visible(folder):
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
    folders = [path for path in visible(root) if path.is_dir()]
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
