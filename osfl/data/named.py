"""Data sets by name: those of the Hugging Face hub, local copies of them, and saved parts.

Labels are mapped by the names that the data set itself stores. No image is opened here.
"""

import os
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from osfl.config import DataConfig, NodeConfig, split_names
from osfl.data.columns import (
    check_complete,
    check_distinct,
    check_pictures,
    class_indices,
    read_column,
    stored_names,
)
from osfl.data.offline import check_rows
from osfl.data.partition import DataError, Rows, node_rows
from osfl.data.shares import capped, group_numbers, is_test, side
from osfl.util.text import folder_name, sanitize

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, DatasetDict, Features  # seconds to import

HUB = "hf:"


def is_named(config: DataConfig) -> bool:
    """Whether a run's images are of a data set by name."""
    return config.name.startswith(HUB)


def has_saved_part(node: NodeConfig) -> bool:
    """Whether a node's folder is one that `Dataset.save_to_disk` wrote.

    That is what `flwr-datasets create` makes for every node of a deployment.
    """
    folder = Path(node.data_dir).expanduser()
    return bool(node.data_dir) and _is_saved(folder)


def stored_classes(config: DataConfig) -> tuple[str, ...]:
    """The names that the data set stores for its labels, in the order of the labels.

    Raises:
        DataError: it cannot be read, or stores none.
    """
    if config.root:
        features = _first(_read(config.name, config.subset, config.root)).features
    else:
        features = _features_on_hub(config)
    names = stored_names(_feature(features, config.label_column, config.name))
    if not names:
        raise DataError(
            f"data.classes: {config.name} stores no names for the labels in its column "
            f"{config.label_column!r}; name the classes, in the order of its numbers"
        )
    found = tuple(map(folder_name, names))
    place = f"data.label-column = {config.label_column!r}"
    if "" in found:
        raise DataError(
            f"{place}: {config.name} stores the name "
            f"{sanitize(repr(names[found.index('')]), 80)}, of "
            "which no letter is left as a class's name; rename this class in the data set"
        )
    check_distinct(place, names)
    return found


def chosen_classes(config: DataConfig) -> tuple[str, ...]:
    """`data.classes` with what stands for stored names replaced by them.

    Empty is all of them, `0-89` the first ninety; anything else stands for itself.

    Raises:
        DataError: as `stored_classes`, or a range beyond them.
    """
    first, dash, last = config.classes.partition("-")
    if not config.classes:
        return stored_classes(config)
    if not (dash and first.strip().isdigit() and last.strip().isdigit()):
        return split_names(config.classes)
    names = stored_classes(config)
    begin = int(first)
    end = int(last)
    if not begin <= end < len(names):
        raise DataError(
            f"data.classes = {config.classes!r}: {config.name} has the classes 0 to "
            f"{len(names) - 1}"
        )
    return names[begin : end + 1]


# A message needs its rows several times, and cutting takes longer than reading them
@lru_cache(maxsize=16)
def load_rows(config: DataConfig, node: NodeConfig, split: str, seed: int) -> "Dataset":
    """One node's rows, as a data set with the columns image and label, domain and group.

    Labels are indices into the run's classes. Images are not decoded. The columns domain and group
    are there where the data set has them; "" stands for none.

    Args:
        split: `train` or `test`.
        seed: of the partition and of the images that a cap leaves. A test share is the same with
            every seed.

    Raises:
        DataError: the data set or its columns are not as the configuration says, or this node has
            no rows.
    """
    held_out = _held_out(config, node)
    if held_out == config.train_split:
        raise DataError(
            f"data.train-split = {config.train_split!r}: is also the split of the test images; set "
            "data.train-split or data.test-split to another one"
        )
    is_held_out = split == "test" and bool(held_out)
    train = _labelled(config, node.data_dir, config.train_split, "train")
    if node.requires_guarantee and not node.classes:
        _check_label_kind(train, config)
    chosen = train.rows
    if not node.data_dir:
        _check_domains(config, train.rows)
    if held_out:
        test = _labelled(config, node.data_dir, held_out, "test").rows
        _check_sides(config, train.rows, test)
        if not node.data_dir:
            _check_domains(config, test)
        _check_any(config, node, test, "test", held_out)
        chosen = test if is_held_out else train.rows
    _check_any(config, node, train.rows, "train", config.train_split)
    labels = np.asarray(chosen["label"])
    groups = group_numbers(list(chosen["group"])) if config.group_column else None
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
        for_test = is_test(train.total, config.test_share)[train.places[rows]]
        rows = rows[for_test == (split == "test")]
    elif not held_out:
        rows = side(rows, Rows(labels, groups=groups), config.test_share, split)
    if split == "train" and config.max_per_class:
        rows = capped(rows, labels, config.max_per_class, seed)
    if not len(rows):
        raise DataError(_no_rows(config, node, split))
    return chosen.select(np.sort(rows))


def _held_out(config: DataConfig, node: NodeConfig) -> str:
    """The split of the test images; "": a share of the training images."""
    if config.test_split or not node.data_dir:
        return config.test_split
    return "test" if "test" in _saved(Path(node.data_dir).expanduser()) else ""


def _no_rows(config: DataConfig, node: NodeConfig, split: str) -> str:
    source = node.data_dir or config.name
    begin = f"{source}: no images. This client has no data for {split}"
    if node.data_dir:
        cure = "Save more images in this part"
    else:
        begin += f" (partition-id {node.partition_id} of {node.num_partitions})"
        cure = "Lower num-clients"
    if config.group_column:
        begin += "; data.group-column keeps each group on one side"
    if not _held_out(config, node):
        cure += ", or set data.test-split to a split of the test images"
    return f"{begin}. {cure}"


def domain_of(rows: "Dataset") -> str:
    """The domain's name, where all of a node's rows are of one; else ""."""
    if "domain" not in rows.column_names:
        return ""
    names = set(rows["domain"])
    return names.pop() if len(names) == 1 else ""


def domain_names(config: DataConfig) -> tuple[str, ...]:
    """The domains of a whole data set's training images, in the clients' order.

    () where it is not cut by domain.
    """
    if not _by_domain(config):
        return ()
    return tuple(sorted(set(_labelled(config, "", config.train_split, "train").rows["domain"])))


def left_out(config: DataConfig, node: NodeConfig) -> dict[str, int]:
    """How many rows of a node's source are left out, by what they lack.

    Raises:
        DataError: as `load_rows`.
    """
    counts = Counter(_labelled(config, node.data_dir, config.train_split, "train").left_out)
    if held_out := _held_out(config, node):
        counts.update(_labelled(config, node.data_dir, held_out, "test").left_out)
    return {reason: count for reason, count in counts.items() if count}


def side_of(config: DataConfig, node: NodeConfig, split: str) -> "Dataset":
    """All stored images of a side, not decoded: of every class, uncut and uncapped.

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
    for_test = is_test(len(rows), config.test_share)
    return rows.select(np.flatnonzero(for_test == (split == "test")))


# ---- Reading ----


def check_root(root: str) -> None:
    """Whether the folder of all clients' images is there, where a run names one.

    Raises:
        DataError: it is not.
    """
    if root and not Path(root).expanduser().is_dir():
        raise DataError(f"data.root = {root!r}: no such folder")


@lru_cache(maxsize=4)
def _read(name: str, subset: str, root: str) -> "DatasetDict":
    """All splits of a data set: of the local copy in `root`, or of the hub."""
    from datasets import load_dataset, load_dataset_builder

    if root:
        check_root(root)
        folder = Path(root).expanduser()
        if _is_saved(folder):
            return _saved(folder)
    repository, revision = repository_of(name)
    if not root and Path(repository).exists():
        raise DataError(
            f"data.name = {name!r}: a folder here has this name, and the data set of the hub is "
            "not read in its place. Set data.root to the folder's absolute path, or rename it"
        )
    place = str(Path(root).expanduser()) if root else repository
    version = None if root else revision
    try:
        _check_origins(load_dataset_builder(place, subset or None, revision=version), name, root)
        return load_dataset(place, subset or None, revision=version)
    except DataError:
        raise
    # Whatever the hub's client, the network or a file of the data set raises
    except Exception as error:
        raise _unread(name, root, error) from error


def _check_origins(builder: "DatasetBuilder", name: str, root: str) -> None:
    """Refuse a data set whose card names files of this machine, or of another data set.

    Raises:
        DataError: it does.
    """
    files = [str(file) for named in (builder.config.data_files or {}).values() for file in named]
    own = [f"hf://datasets/{repository_of(name)[0]}@"]
    if root:
        home = Path(root).expanduser()
        own = [f"{home.absolute()}{os.sep}", f"{home.resolve()}{os.sep}"]
    if not all(file.startswith(tuple(own)) and ".." not in file.split("/") for file in files):
        raise _no_files(name, root)


def _no_files(name: str, root: str) -> DataError:
    """The same words where files are another's and where there are none."""
    place = f"data.root = {root!r}" if root else f"data.name = {name!r}"
    return DataError(
        f"{place}: its card names data files that are not there, or not the data set's own. They "
        "must lie in its repository or folder"
    )


def _features_on_hub(config: DataConfig) -> "Features":
    """What the data set's card says of its columns: a few kB, where it says it."""
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
        f"{place}: cannot be read ({type(error).__name__}: {sanitize(error)}). "
        "It is hf:OWNER/NAME@REVISION, with data.subset where the data set has several; without "
        "a network, give data.root, the folder of a copy of it"
    )


def repository_of(name: str) -> tuple[str, str | None]:
    """(owner/name, revision) of `hf:owner/name@revision`."""
    repository, _, revision = name.removeprefix(HUB).partition("@")
    return repository, revision or None


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(folder: Path) -> "DatasetDict":
    """What `save_to_disk` wrote: a data set, whose rows are all called train, or one of splits."""
    from datasets import Dataset, DatasetDict, load_from_disk

    if not _is_saved(folder):
        raise DataError(
            f"node-config data-dir = {str(folder)!r}: no data set that save_to_disk wrote, such as "
            "a part that `flwr-datasets create` makes"
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
class Labelled:
    """The rows of a split that have a class of the run.

    Attributes:
        rows: with the columns image and label, and domain and group where there are such columns.
        left_out: how many rows are not among them, by what they lack.
        has_names: whether the data set stores the names of its labels.
        has_texts: whether its labels are texts.
        places: [len(rows)], each row's place among all that the split stores.
        total: how many rows the split stores.
    """

    rows: "Dataset"
    left_out: dict[str, int]
    has_names: bool
    has_texts: bool
    places: np.ndarray
    total: int


@lru_cache(maxsize=4)
def _labelled(config: DataConfig, folder: str, split: str, key: str) -> Labelled:
    """The labelled rows of one split.

    Args:
        folder: of a node's saved part; "": the run's data set.
        key: `train` or `test`, whose key names the split.

    Raises:
        DataError: there is no such split or column, or a column holds something else.
    """
    from datasets import Value

    source = folder or config.name
    stored = _stored_rows(config, folder, split, key)
    rows = _pictures(stored, config.image_column, source)
    _feature(stored.features, config.label_column, source)
    column = read_column(stored, config.label_column, "data.label-column")
    labels = class_indices(column, split_names(config.classes), source)
    rows = rows.add_column("label", labels, feature=Value("int64"))
    is_kept = labels >= 0
    no_class = int((~is_kept & ~column.is_missing).sum())
    counts = {"no label": int(column.is_missing.sum()), "a label outside data.classes": no_class}
    if (domains := _domains(stored, config, folder)) is not None:
        rows = rows.add_column("domain", domains, feature=Value("string"))
        if _by_domain(config) and not folder:
            has_domain = np.array(domains, dtype=object) != ""
            counts["no domain"] = int((is_kept & ~has_domain).sum())
            is_kept = is_kept & has_domain
    if config.group_column:
        rows = rows.add_column("group", _groups(stored, config), feature=Value("string"))
    kept = rows if is_kept.all() else rows.select(np.flatnonzero(is_kept))
    has_texts = not column.is_number and column.names is None
    places = np.flatnonzero(is_kept)
    return Labelled(kept, counts, column.names is not None, has_texts, places, len(rows))


def _stored_rows(config: DataConfig, folder: str, split: str, key: str) -> "Dataset":
    """All rows of one split, of which reading opens nothing but the data set's own."""
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
    """The column of the images alone, called image and not decoded."""
    from datasets import Image

    feature = _feature(stored.features, column, source)
    check_pictures(feature, column, source)
    rows = stored.select_columns([column])
    if column != "image":
        rows = rows.rename_column(column, "image")
    if isinstance(feature, Image):
        rows = rows.cast_column("image", Image(mode=feature.mode, decode=False))
    return rows


def _check_label_kind(labelled: Labelled, config: DataConfig) -> None:
    """Check that `data.classes` cannot ask which values a column of texts has.

    Raises:
        DataError: it has texts without declared names.
    """
    if labelled.has_texts:
        raise DataError(
            f"data.label-column = {config.label_column!r}: its labels are texts, of which a run's "
            "data.classes could ask one by one; set classes in this site's node-config"
        )


def _by_domain(config: DataConfig) -> bool:
    return config.partition in ("domain", "dirichlet-domain")


def _domains(stored: "Dataset", config: DataConfig, folder: str) -> list[str] | None:
    """Each row's domain, "" where it has none; None: there is no column of domains."""
    is_cut = _by_domain(config) and not folder
    if config.domain_column not in stored.column_names:
        if is_cut:
            raise DataError(
                f"data.partition = {config.partition!r} needs data.domain-column, the column that "
                f"says which domain an image is of; {config.name} has "
                f"{', '.join(stored.column_names)}"
            )
        return None
    try:
        column = read_column(stored, config.domain_column, "data.domain-column")
        if is_cut:
            # Two domains of one name would be one client
            check_distinct(column.place, column.words())
        return column.texts()
    except DataError:
        # A column that happens to have this name, and nothing is cut by it
        if is_cut:
            raise
        return None


def _groups(stored: "Dataset", config: DataConfig) -> list[str]:
    """Each row's group, "" where it is in none."""
    if config.group_column not in stored.column_names:
        raise DataError(
            f"data.group-column = {config.group_column!r}: there is no such column; set it to the "
            'column of the patients, or to "" to cut by image'
        )
    return read_column(stored, config.group_column, "data.group-column").texts()


def _check_any(config: DataConfig, node: NodeConfig, rows: "Dataset", key: str, split: str) -> None:
    """Check that a split has rows of the run's classes, such as no test split of hidden labels has.

    Raises:
        DataError: it has none.
    """
    if len(rows):
        return
    source = node.data_dir or config.name
    domain = " and a domain" if _by_domain(config) else ""
    share = ', or to "" for a share of the training images' if key == "test" else ""
    raise DataError(
        f"data.{key}-split = {split!r}: no row of {source} has a label of the run{domain} (-1 and "
        f"null mean none). Set data.{key}-split to another split{share}; or set data.label-column "
        f"= {config.label_column!r}{_domain_key(config)} to another column"
    )


def _domain_key(config: DataConfig) -> str:
    return f" or data.domain-column = {config.domain_column!r}" if _by_domain(config) else ""


def _check_whole(config: DataConfig, held_out: str) -> None:
    """Check that a whole data set has images of all classes, unless it stores their names.

    Raises:
        DataError: it lacks a class.
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
    """Check that no group has images among both the training and the test images.

    Raises:
        DataError: some have.
    """
    if not config.group_column:
        return
    if both := (set(train["group"]) & set(test["group"])) - {""}:
        raise DataError(
            f"data.group-column = {config.group_column!r}: {len(both)} groups have images in the "
            "split of the test images and in that of the training images. Leave data.test-split "
            "empty, and save the data set without a test split, to cut the test by group"
        )


def _check_no_groups(config: DataConfig) -> None:
    """Check that no group's size moves images between training and test.

    Raises:
        DataError: the run names groups.
    """
    if config.group_column:
        raise DataError(
            f"data.group-column = {config.group_column!r}: this site demands a guarantee, and one "
            "image's group would move others into the test; save the data with a test split"
        )


def _check_domains(config: DataConfig, rows: "Dataset") -> None:
    """Check that no group has images in two domains, which are two clients.

    Raises:
        DataError: one has.
    """
    if not (config.group_column and _by_domain(config)):
        return
    domains: dict[str, str] = {}
    for group, domain in zip(rows["group"], rows["domain"], strict=True):
        other = domains.setdefault(group, domain)
        if group and other != domain:
            raise DataError(
                f"data.group-column = {config.group_column!r}: group {sanitize(group, 80)!r} has "
                f"images in the domains {sanitize(other, 80)!r} and {sanitize(domain, 80)!r}, "
                "which "
                f"data.partition = {config.partition!r} gives to two clients. Set data.partition "
                "to dirichlet, label or iid, or give the group another name in each domain"
            )
