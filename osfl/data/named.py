"""Read data sets by name: from the Hugging Face hub, a local copy, or a saved part.

Labels are matched by the names that the data set stores. Images are not opened here.
"""

import os
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osfl.config import DataConfig, NodeConfig, split_names
from osfl.data.columns import (
    check_complete,
    check_distinct,
    check_image_column,
    class_indices,
    read_column,
    stored_names,
)
from osfl.data.offline import check_rows
from osfl.data.partition import DataError, Rows, node_rows
from osfl.data.shares import cap_per_class, group_numbers, held_out_mask, split_rows
from osfl.data.sides import content_key, merge_groups, near_duplicate_groups, training_mask
from osfl.util.text import folder_name, sanitize

if TYPE_CHECKING:
    # Takes seconds to import
    from datasets import Dataset, DatasetBuilder, DatasetDict, Features
    from PIL import Image

HUB = "hf:"


def is_named(config: DataConfig) -> bool:
    """Check whether a run uses a data set of the hub, or a copy of it."""
    return config.name.startswith(HUB)


def has_saved_part(node: NodeConfig) -> bool:
    """Check whether a node's folder was written by `Dataset.save_to_disk`.

    `flwr-datasets create` makes such a folder for every node of a deployment.
    """
    folder = Path(node.data_dir).expanduser()
    return bool(node.data_dir) and _is_saved(folder)


def stored_classes(config: DataConfig) -> tuple[str, ...]:
    """Return the names that the data set stores for its labels, in their order.

    Raises:
        DataError: the data set is unreadable, or stores no names.
    """
    if config.root:
        features = _first(_read(config.name, config.subset, config.root)).features
    else:
        features = _features_on_hub(config)
    names = stored_names(_feature(features, config.label_column, config.name))
    if not names:
        raise DataError(
            f"data.classes: {config.name} stores no names for the labels in its column "
            f"{config.label_column!r}; set data.classes to the names, in the order of the numbers"
        )
    classes = tuple(map(folder_name, names))
    place = f"data.label-column = {config.label_column!r}"
    if "" in classes:
        name = sanitize(repr(names[classes.index("")]), 80)
        raise DataError(
            f"{place}: {config.name} stores the name {name}, which has no letters or digits that "
            "are allowed in a class name; rename this class in the data set"
        )
    check_distinct(place, names)
    return classes


def resolve_classes(config: DataConfig) -> tuple[str, ...]:
    """Return the classes that `data.classes` stands for.

    "" stands for all stored names, and `0-89` for the first ninety. Other values are names.

    Raises:
        DataError: as `stored_classes`, or the range exceeds them.
    """
    first, dash, last = config.classes.partition("-")
    if not config.classes:
        return stored_classes(config)
    if not (dash and first.strip().isdigit() and last.strip().isdigit()):
        return split_names(config.classes)
    names = stored_classes(config)
    start = int(first)
    end = int(last)
    if not start <= end < len(names):
        raise DataError(
            f"data.classes = {config.classes!r}: {config.name} has the classes 0 to "
            f"{len(names) - 1}"
        )
    return names[start : end + 1]


# Each message needs its rows several times, and cutting is slower than reading
@lru_cache(maxsize=16)
def load_rows(config: DataConfig, node: NodeConfig, split: str, seed: int) -> "Dataset":
    """Return one node's rows, with the columns image and label, and domain and group if present.

    Labels are indices into the run's classes. Images are not decoded. A domain or group of ""
    stands for none.

    Args:
        split: `train` or `test`.
        seed: of the partition and of the cap's random choice. A test share does not depend on it.

    Raises:
        DataError: the data set or its columns do not match the configuration, or this node has no
            rows.
    """
    held_out = _held_out(config, node)
    _check_splits_differ(config, held_out)
    is_held_out = split == "test" and bool(held_out)
    train = _labelled(config, node.data_dir, config.train_split, "train")
    if node.requires_guarantee and not node.classes:
        _check_label_kind(train, config)
    if not node.data_dir:
        _check_domains(config, train.rows)
    if held_out:
        _check_test_rows(config, node, held_out, train.rows)
    _check_any(config, node, train.rows, "train", config.train_split)
    sides = _sides(config, node.data_dir, node.cache_dir, held_out)
    chosen, groups = sides.test if is_held_out else sides.train
    labels = np.asarray(chosen["label"])
    if node.data_dir:
        rows = np.arange(len(chosen))
    else:
        _check_whole(config, held_out)
        domains = list(chosen["domain"]) if _by_domain(config) else None
        table = Rows(labels, domains, domain_names(config), groups)
        part, parts = node.partition_id, node.num_partitions
        rows = node_rows(config, table, part, parts, seed, even=is_held_out)
    if not held_out and node.requires_guarantee:
        _check_no_groups(config)
        for_test = held_out_mask(train.total, config.test_share)[train.places[rows]]
        rows = rows[for_test == (split == "test")]
    elif not held_out and config.split_by:
        rows = np.intersect1d(rows, _side_of_all(config, chosen, groups, split))
    elif not held_out:
        rows = split_rows(rows, Rows(labels, groups=groups), config.test_share, split)
    if split == "train" and config.max_per_class:
        rows = cap_per_class(rows, labels, config.max_per_class, seed)
    if not len(rows):
        raise DataError(_no_rows(config, node, split))
    return chosen.select(np.sort(rows))


def _check_splits_differ(config: DataConfig, held_out: str) -> None:
    if held_out == config.train_split:
        raise DataError(
            f"data.train-split = {config.train_split!r}: must differ from the split of the test "
            "images; set data.train-split or data.test-split to another split"
        )


def _check_test_rows(config: DataConfig, node: NodeConfig, held_out: str, train: "Dataset") -> None:
    """Check the split of test images against the training images."""
    test = _labelled(config, node.data_dir, held_out, "test").rows
    _check_sides(config, train, test)
    if not node.data_dir:
        _check_domains(config, test)
    _check_any(config, node, test, "test", held_out)


@dataclass(frozen=True)
class Sides:
    """The rows of training and of test, each with the number of every row's group, or None.

    Without a split of test images, all rows are in `train`.
    """

    train: tuple["Dataset", np.ndarray | None]
    test: tuple["Dataset", np.ndarray | None]


# Every split and part of a simulation needs them
@lru_cache(maxsize=4)
def _sides(config: DataConfig, folder: str, cache_dir: str, held_out: str) -> Sides:
    """Return the two sides; with `data.split-by`, test rows that look like a training row train."""
    from datasets import concatenate_datasets

    train = _labelled(config, folder, config.train_split, "train").rows
    test = train.select([])
    if held_out:
        test = _labelled(config, folder, held_out, "test").rows
    if not config.split_by:
        return Sides((train, _column_groups(config, train)), (test, _column_groups(config, test)))
    pool = concatenate_datasets([train, test]) if held_out else train
    groups = _near_duplicates(pool, cache_dir)
    columns = _column_groups(config, pool)
    if columns is not None:
        groups = merge_groups(groups, columns)
    trains = training_mask(groups, len(train))
    sides = [(pool.select(np.flatnonzero(mask)), groups[mask]) for mask in (trains, ~trains)]
    return Sides(sides[0], sides[1])


def _column_groups(config: DataConfig, rows: "Dataset") -> np.ndarray | None:
    return group_numbers(list(rows["group"])) if config.group_column else None


def _near_duplicates(rows: "Dataset", cache_dir: str) -> np.ndarray:
    images = rows.select_columns(["image"])
    mode = getattr(images.features["image"], "mode", None)

    def read(number: int) -> "Image.Image":
        # Imports torch, which takes seconds
        from osfl.data.pictures import open_stored_image

        return open_stored_image(images[number]["image"], mode)

    key = content_key([stored_bytes(row["image"]) for row in images])
    return near_duplicate_groups(key, len(images), read, cache_dir)


def _side_of_all(
    config: DataConfig, rows: "Dataset", groups: np.ndarray | None, split: str
) -> np.ndarray:
    """Return the training or test rows of all clients, cut by share in every domain and class.

    A group may have images of two domains, hence of two clients, whose own cuts might differ.
    """
    labels = np.asarray(rows["label"])
    if "domain" in rows.column_names:
        domains = np.unique(list(rows["domain"]), return_inverse=True)[1]
        labels = labels + domains * (labels.max() + 1)
    every = np.arange(len(rows))
    return split_rows(every, Rows(labels, groups=groups), config.test_share, split)


def _held_out(config: DataConfig, node: NodeConfig) -> str:
    """Return the split of the test images; "" for a share of the training images."""
    if config.test_split or not node.data_dir:
        return config.test_split
    return "test" if "test" in _saved(Path(node.data_dir).expanduser()) else ""


def _no_rows(config: DataConfig, node: NodeConfig, split: str) -> str:
    """Return the error message for a node without rows."""
    source = node.data_dir or config.name
    problem = f"{source}: no images. This client has no data for {split}"
    if node.data_dir:
        hint = "Save more images in this part"
    else:
        problem += f" (partition-id {node.partition_id} of {node.num_partitions})"
        hint = "Lower num-clients"
    if config.group_column:
        problem += "; data.group-column keeps each group in one split"
    if not _held_out(config, node):
        hint += ", or set data.test-split to the split of the test images"
    return f"{problem}. {hint}"


def domain_of(rows: "Dataset") -> str:
    """Return the domain that all of a node's rows belong to, or ""."""
    if "domain" not in rows.column_names:
        return ""
    names = set(rows["domain"])
    return names.pop() if len(names) == 1 else ""


def domain_names(config: DataConfig) -> tuple[str, ...]:
    """Return the domains of a data set's training images in the clients' order.

    Returns:
        () if the data set is not partitioned by domain.
    """
    if not _by_domain(config):
        return ()
    return tuple(sorted(set(_labelled(config, "", config.train_split, "train").rows["domain"])))


def count_left_out(config: DataConfig, node: NodeConfig) -> dict[str, int]:
    """Count the rows that are left out of a node's data set, by reason.

    Raises:
        DataError: as `load_rows`.
    """
    counts = Counter(_labelled(config, node.data_dir, config.train_split, "train").left_out)
    if held_out := _held_out(config, node):
        counts.update(_labelled(config, node.data_dir, held_out, "test").left_out)
    return {reason: count for reason, count in counts.items() if count}


def stored_images(config: DataConfig, node: NodeConfig, split: str) -> "Dataset":
    """Return all stored images of a split, before decoding, partitioning and capping.

    Args:
        split: `train` or `test`.

    Raises:
        DataError: as `load_rows`.
    """
    held_out = _held_out(config, node)
    name = held_out if split == "test" and held_out else config.train_split
    source = node.data_dir or config.name
    stored = _stored_rows(config, node.data_dir, name, split)
    rows = _pictures(stored, config.image_column, source)
    if held_out:
        return rows
    for_test = held_out_mask(len(rows), config.test_share)
    return rows.select(np.flatnonzero(for_test == (split == "test")))


def stored_bytes(image: Any) -> bytes:
    """Return an image's bytes, which are in the row or in a file."""
    content = image.get("bytes") if isinstance(image, dict) else image
    if content is None:
        content = Path(image["path"]).read_bytes()
    return content if isinstance(content, bytes) else repr(content).encode()


# ---- Reading ----


def check_root(root: str) -> None:
    """Check that `data.root` exists, if it is set.

    Raises:
        DataError: it does not.
    """
    if root and not Path(root).expanduser().is_dir():
        raise DataError(f"data.root = {root!r}: no such folder")


@lru_cache(maxsize=4)
def _read(name: str, subset: str, root: str) -> "DatasetDict":
    """Read all splits of a data set, from the local copy in `root` or from the hub."""
    from datasets import load_dataset, load_dataset_builder

    if root:
        check_root(root)
        folder = Path(root).expanduser()
        if _is_saved(folder):
            return _saved(folder)
    repository, revision = repository_of(name)
    if not root and Path(repository).exists():
        raise DataError(
            f"data.name = {name!r}: the hub's data set is hidden by a local folder of this name. "
            "Set data.root to the folder's absolute path, or rename it"
        )
    place = str(Path(root).expanduser()) if root else repository
    version = None if root else revision
    try:
        _check_origins(load_dataset_builder(place, subset or None, revision=version), name, root)
        return load_dataset(place, subset or None, revision=version)
    except DataError:
        raise
    # The hub's client, the network and the data set's files raise many kinds of errors
    except Exception as error:
        raise _unread(name, root, error) from error


def _check_origins(builder: "DatasetBuilder", name: str, root: str) -> None:
    """Check that a data set's card only names files of the data set.

    Raises:
        DataError: it names files of this machine, or of another data set.
    """
    files = [str(file) for split in (builder.config.data_files or {}).values() for file in split]
    prefixes = [f"hf://datasets/{repository_of(name)[0]}@"]
    if root:
        home = Path(root).expanduser()
        prefixes = [f"{home.absolute()}{os.sep}", f"{home.resolve()}{os.sep}"]
    if not all(file.startswith(tuple(prefixes)) and ".." not in file.split("/") for file in files):
        raise _no_files(name, root)


def _no_files(name: str, root: str) -> DataError:
    """Return the error for missing files and for files outside the data set."""
    place = f"data.root = {root!r}" if root else f"data.name = {name!r}"
    return DataError(
        f"{place}: its card names data files that are missing or outside the data set. They must "
        "be in its repository or folder"
    )


def _features_on_hub(config: DataConfig) -> "Features":
    """Return the columns' types, from the data set's card if it has them, which is a few kB."""
    from datasets import load_dataset_builder

    repository, revision = repository_of(config.name)
    try:
        builder = load_dataset_builder(repository, config.subset or None, revision=revision)
    except Exception as error:
        raise _unread(config.name, "", error) from error
    _check_origins(builder, config.name, "")
    if builder.info.features:
        return builder.info.features
    return _first(_read(config.name, config.subset, "")).features


def _unread(name: str, root: str, error: Exception) -> DataError:
    if type(error).__name__ == "DataFilesNotFoundError":
        return _no_files(name, root)
    place = f"data.root = {root!r}" if root else f"data.name = {name!r}"
    return DataError(
        f"{place}: cannot be read ({type(error).__name__}: {sanitize(error)}). Set data.name to "
        "hf:OWNER/NAME@REVISION, and data.subset if the data set has several; without a network, "
        "set data.root to the folder of a copy"
    )


def repository_of(name: str) -> tuple[str, str | None]:
    """Split `hf:owner/name@revision` into (owner/name, revision)."""
    repository, _, revision = name.removeprefix(HUB).partition("@")
    return repository, revision or None


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(folder: Path) -> "DatasetDict":
    """Read the splits that `save_to_disk` wrote; a data set without splits becomes train."""
    from datasets import Dataset, DatasetDict, load_from_disk

    if not _is_saved(folder):
        raise DataError(
            f"node-config data-dir = {str(folder)!r}: must be a data set written by save_to_disk, "
            "such as a part made by `flwr-datasets create`"
        )
    try:
        saved = load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: cannot be read ({sanitize(error)})") from error
    return DatasetDict(train=saved) if isinstance(saved, Dataset) else saved


def _first(splits: "DatasetDict") -> "Dataset":
    return next(iter(splits.values()))


def _split(splits: "DatasetDict", name: str, key: str, source: str) -> "Dataset":
    if name not in splits:
        raise DataError(f"data.{key}-split = {name!r}: {source} has the splits {', '.join(splits)}")
    return splits[name]


def _feature(features: "Features", column: str, source: str) -> object:
    if column not in features:
        raise DataError(
            f"{source} has no column {column!r}, only {', '.join(features)}; set "
            "data.label-column, data.image-column and data.domain-column"
        )
    return features[column]


# ---- Labels, domains and groups ----


@dataclass(frozen=True)
class LabeledRows:
    """The rows of a split that have a class of the run.

    Attributes:
        rows: with the columns image and label, and domain and group if present.
        left_out: number of other rows, by reason.
        has_names: whether the data set stores names of its labels.
        has_texts: whether the labels are strings.
        places: [len(rows)], indices of the rows among all rows of the split.
        total: number of all rows of the split.
    """

    rows: "Dataset"
    left_out: dict[str, int]
    has_names: bool
    has_texts: bool
    places: np.ndarray
    total: int


@lru_cache(maxsize=4)
def _labelled(config: DataConfig, folder: str, split: str, key: str) -> LabeledRows:
    """Return the rows of a split that have a class of the run.

    Args:
        folder: a node's saved part; "" for the run's data set.
        split: name of the split in the data set.
        key: `train` or `test`, for messages that name the split's key.

    Raises:
        DataError: the split or a column does not exist, or a column has values of another type.
    """
    from datasets import Value

    source = folder or config.name
    stored = _stored_rows(config, folder, split, key)
    rows = _pictures(stored, config.image_column, source)
    _feature(stored.features, config.label_column, source)
    column = read_column(stored, config.label_column, "data.label-column")
    labels = class_indices(column, split_names(config.classes), source)
    rows = rows.add_column("label", labels, feature=Value("int64"))
    is_valid = labels >= 0
    no_class = int((~is_valid & ~column.is_missing).sum())
    counts = {"no label": int(column.is_missing.sum()), "a label outside data.classes": no_class}
    if (domains := _domains(stored, config, folder)) is not None:
        rows = rows.add_column("domain", domains, feature=Value("string"))
        if _by_domain(config) and not folder:
            has_domain = np.array(domains, dtype=object) != ""
            counts["no domain"] = int((is_valid & ~has_domain).sum())
            is_valid = is_valid & has_domain
        if config.domains and not folder:
            _check_listed(config, domains, key)
            is_listed = np.isin(domains, split_names(config.domains))
            counts["a domain outside data.domains"] = int((is_valid & ~is_listed).sum())
            is_valid = is_valid & is_listed
    if config.group_column:
        rows = rows.add_column("group", _groups(stored, config), feature=Value("string"))
    places = np.flatnonzero(is_valid)
    valid_rows = rows if is_valid.all() else rows.select(places)
    has_texts = not column.is_number and column.names is None
    return LabeledRows(valid_rows, counts, column.names is not None, has_texts, places, len(rows))


def _stored_rows(config: DataConfig, folder: str, split: str, key: str) -> "Dataset":
    """Return all rows of a split, after checking that they only refer to the data set's files."""
    source = folder or config.name
    if folder:
        splits = _saved(Path(folder).expanduser())
    else:
        splits = _read(config.name, config.subset, config.root)
    stored = _split(splits, split, key, source).with_format(None)
    home = folder or config.root
    check_rows(stored, config, Path(home).expanduser() if home else None, source)
    return stored


def _pictures(stored: "Dataset", column: str, source: str) -> "Dataset":
    """Return the column of images only, named image and without decoding."""
    from datasets import Image

    feature = _feature(stored.features, column, source)
    check_image_column(feature, column, source)
    rows = stored.select_columns([column])
    if column != "image":
        rows = rows.rename_column(column, "image")
    if isinstance(feature, Image):
        rows = rows.cast_column("image", Image(mode=feature.mode, decode=False))
    return rows


def _check_label_kind(labelled: LabeledRows, config: DataConfig) -> None:
    """Check that a server cannot probe a column's values through `data.classes`.

    Raises:
        DataError: the labels are strings without stored names.
    """
    if labelled.has_texts:
        raise DataError(
            f"data.label-column = {config.label_column!r}: the labels are strings, which a server "
            "could probe one by one through data.classes; set classes in this site's node-config"
        )


def _by_domain(config: DataConfig) -> bool:
    return config.partition in ("domain", "dirichlet-domain")


def _domains(stored: "Dataset", config: DataConfig, folder: str) -> list[str] | None:
    """Return each row's domain, or "", or None if there is no column of domains."""
    is_cut = (_by_domain(config) or bool(config.domains)) and not folder
    if config.domain_column not in stored.column_names:
        if is_cut:
            key, value = (
                ("partition", config.partition)
                if _by_domain(config)
                else ("domains", config.domains)
            )
            raise DataError(
                f"data.{key} = {value!r} requires data.domain-column, the column of "
                f"the images' domains; the columns of {config.name} are "
                f"{', '.join(stored.column_names)}"
            )
        return None
    try:
        column = read_column(stored, config.domain_column, "data.domain-column")
        if is_cut:
            # Two domains of the same name would become one client
            check_distinct(column.location, column.words())
        return column.texts()
    except DataError:
        # The column only happens to have this name, and no partition depends on it
        if is_cut:
            raise
        return None


def _check_listed(config: DataConfig, domains: list[str], key: str) -> None:
    """Check that the training images have every domain of `data.domains`.

    Raises:
        DataError: a domain has no images.
    """
    if key == "train" and (missing := sorted(set(split_names(config.domains)) - set(domains))):
        raise DataError(
            f"data.domains: {config.name} has no domain {sanitize(missing[0], 80)!r}; its domains "
            f"are {sanitize(', '.join(sorted(set(domains))), 500)}"
        )


def _groups(stored: "Dataset", config: DataConfig) -> list[str]:
    """Return each row's group, or ""."""
    if config.group_column not in stored.column_names:
        raise DataError(
            f"data.group-column = {config.group_column!r}: there is no such column; set it to the "
            'column of the groups, such as patients, or to "" to partition by image'
        )
    return read_column(stored, config.group_column, "data.group-column").texts()


def _check_any(config: DataConfig, node: NodeConfig, rows: "Dataset", key: str, split: str) -> None:
    """Check that a split has rows of the run's classes, unlike test splits with hidden labels.

    Raises:
        DataError: it has none.
    """
    if len(rows):
        return
    source = node.data_dir or config.name
    domain = " and a domain" if _by_domain(config) else ""
    share = ', or to "" for a share of the training images' if key == "test" else ""
    raise DataError(
        f"data.{key}-split = {split!r}: no row of {source} has a label in data.classes{domain} "
        f"(-1 and null stand for none). Set data.{key}-split to another split{share}, or "
        f"data.label-column = {config.label_column!r}{_domain_key(config)} to another column"
    )


def _domain_key(config: DataConfig) -> str:
    return f" or data.domain-column = {config.domain_column!r}" if _by_domain(config) else ""


def _check_whole(config: DataConfig, held_out: str) -> None:
    """Check that a whole data set has images of all classes, unless it stores their names.

    Raises:
        DataError: a class has no images.
    """
    parts = [_labelled(config, "", config.train_split, "train")]
    if held_out:
        parts.append(_labelled(config, "", held_out, "test"))
    if not parts[0].has_names:
        labels = np.concatenate([np.asarray(part.rows["label"]) for part in parts])
        classes = split_names(config.classes)
        has_texts = parts[0].has_texts
        check_complete(labels, classes, config.label_column, config.name, has_texts)


def _check_sides(config: DataConfig, train: "Dataset", test: "Dataset") -> None:
    """Check that no group has images in both the training and the test split.

    Raises:
        DataError: some groups have.
    """
    if not config.group_column:
        return
    if overlap := (set(train["group"]) & set(test["group"])) - {""}:
        raise DataError(
            f"data.group-column = {config.group_column!r}: {len(overlap)} groups have images in "
            'both the training and the test split. Set data.test-split to "", and save the data '
            "set without a test split, to choose test images by group"
        )


def _check_no_groups(config: DataConfig) -> None:
    """Check that the size of a group cannot move images between training and test.

    Raises:
        DataError: the run sets a column of groups.
    """
    if config.group_column:
        raise DataError(
            f"data.group-column = {config.group_column!r}: this site demands a guarantee, but the "
            "group of one image would move others into the test; save the data with a test split"
        )


def _check_domains(config: DataConfig, rows: "Dataset") -> None:
    """Check that no group has images in two domains, which belong to two clients.

    Raises:
        DataError: a group has.
    """
    if not (config.group_column and _by_domain(config)):
        return
    domains: dict[str, str] = {}
    for group, domain in zip(rows["group"], rows["domain"], strict=True):
        first = domains.setdefault(group, domain)
        if group and first != domain:
            raise DataError(
                f"data.group-column = {config.group_column!r}: group {sanitize(group, 80)!r} has "
                f"images in the domains {sanitize(first, 80)!r} and {sanitize(domain, 80)!r}, "
                "which "
                f"data.partition = {config.partition!r} assigns to two clients. Set data.partition "
                "to dirichlet, label or iid, or give the group another name in each domain"
            )
