"""Data sets by name: those of the Hugging Face hub, local copies of them, and saved parts.

Labels are mapped by the names that the data set itself stores. No image is opened here.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from osfl.config import DataConfig, NodeConfig, split_names
from osfl.data.offline import check_rows
from osfl.data.partition import DataError, node_rows
from osfl.words import identifier, plain

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features  # seconds to import

HUB = "hf:"
# Of every site's test share, whatever the run's seed
SHARE_SEED = [*b"test share"]


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
    names = getattr(_feature(features, config.label_column, config.name), "names", None)
    if not names:
        raise DataError(
            f"data.classes: {config.name} stores no names for the labels in its column "
            f"{config.label_column!r}; name the classes, in the order of its numbers"
        )
    return tuple(map(identifier, names))


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
    """One node's rows, as a data set with the columns image and label.

    Labels are indices into the run's classes. Images are decoded when a row is read.

    Args:
        split: `train` or `test`.
        seed: of the partition and of the images that a cap leaves. A test share is the same with
            every seed.

    Raises:
        DataError: the data set or its columns are not as the configuration says, or this node has
            no rows.
    """
    if node.data_dir:
        source = node.data_dir
        splits = _saved(Path(node.data_dir).expanduser())
    else:
        source = config.name
        splits = _read(config.name, config.subset, config.root)
    saved_test = "test" if node.data_dir and "test" in splits else ""
    held_out = config.test_split or saved_test
    if held_out == config.train_split:
        raise DataError(
            f"data.train-split = {config.train_split!r}: is also the split of the test images; set "
            "data.train-split or data.test-split to another one"
        )
    is_held_out = split == "test" and bool(held_out)
    if is_held_out:
        chosen = _split(splits, held_out, "test", source)
    else:
        chosen = _split(splits, config.train_split, "train", source)
    check_rows(chosen, config, _home(config, node), source)
    if node.demands_guarantee and not node.classes:
        _check_label_kind(chosen, config, source)
    chosen = _labelled(chosen, config, source)
    labels = np.asarray(chosen["label"])
    if node.data_dir:
        rows = np.arange(len(chosen))
    else:
        domains = _domains(chosen, config, source)
        part, parts = node.partition_id, node.num_partitions
        rows = node_rows(config, labels, domains, part, parts, seed, even=is_held_out)
    if not held_out:
        rows = _share(rows, labels, config.test_share, split)
    if split == "train" and config.max_per_class:
        rows = _capped(rows, labels, config.max_per_class, seed)
    if not len(rows):
        raise DataError(f"{source}: no images. This client has no data for {split}")
    wanted = {config.image_column: "image", "label": "label"}
    if config.domain_column in chosen.column_names:
        wanted[config.domain_column] = "domain"
    held = chosen.select(np.sort(rows)).select_columns(list(wanted))
    return held.rename_columns({old: new for old, new in wanted.items() if old != new})


def _home(config: DataConfig, node: NodeConfig) -> Path | None:
    folder = node.data_dir or config.root
    return Path(folder).expanduser() if folder else None


def domain_of(rows: "Dataset") -> str:
    """The domain's name, where all of a node's rows are of one; else ""."""
    if "domain" not in rows.column_names:
        return ""
    names = set(_domain_names(rows.select_columns(["domain"]), "domain"))
    return names.pop() if len(names) == 1 else ""


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
    from datasets import load_dataset

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
    try:
        return load_dataset(
            str(Path(root).expanduser()) if root else repository,
            subset or None,
            revision=None if root else revision,
        )
    # Whatever the hub's client, the network or a file of the data set raises
    except Exception as error:
        raise DataError(_unread(name, root, error)) from error


def _features_on_hub(config: DataConfig) -> "Features":
    """What the data set's card says of its columns: a few kB, where it says it."""
    from datasets import load_dataset_builder

    repository, revision = repository_of(config.name)
    try:
        builder = load_dataset_builder(repository, config.subset or None, revision=revision)
    except Exception as error:
        raise DataError(_unread(config.name, "", error)) from error
    if builder.info.features:
        return builder.info.features
    return _first(_read(config.name, config.subset, "")).features


def _unread(name: str, root: str, error: Exception) -> str:
    place = f"data.root = {root!r}" if root else f"data.name = {name!r}"
    return (
        f"{place}: cannot be read ({type(error).__name__}: {plain(error)}). "
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
        raise DataError(f"{folder}: cannot be read ({plain(error)})") from error
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


# ---- Labels and domains ----


def _labelled(rows: "Dataset", config: DataConfig, source: str) -> "Dataset":
    """The rows of the run's classes, whose column label holds indices into them."""
    from datasets import Value

    _feature(rows.features, config.image_column, source)
    feature = _feature(rows.features, config.label_column, source)
    stored = rows.with_format("numpy")[config.label_column][:]
    labels = _indices(stored, getattr(feature, "names", None), split_names(config.classes), source)
    kept = np.flatnonzero(labels >= 0)
    others = [column for column in rows.column_names if column != config.label_column]
    chosen = rows.select_columns(others)
    if len(kept) < len(labels):
        chosen = chosen.select(kept)
    if "label" in chosen.column_names:
        chosen = chosen.remove_columns("label")
    return chosen.add_column("label", labels[kept], feature=Value("int64"))


def _indices(
    stored: Iterable, stored_names: Sequence[str] | None, names: tuple[str, ...], source: str
) -> np.ndarray:
    """Each stored label as the index of its class, [N] int64; -1: none of the run's."""
    places = {name: place for place, name in enumerate(names)}
    values = np.asarray(stored)
    # Numbers without names are the classes in their order; texts name their class.
    if stored_names is None and np.issubdtype(values.dtype, np.integer):
        return np.where((values >= 0) & (values < len(names)), values, -1).astype(np.int64)
    if stored_names is None:
        texts, values = np.unique(values, return_inverse=True)
        stored_names = [str(text) for text in texts]
    table = np.array([places.get(identifier(name), -1) for name in stored_names])
    if missing := sorted(set(range(len(names))) - set(table.tolist())):
        raise DataError(
            f"data.classes: {source} has no class {names[missing[0]]!r}; it has "
            f"{plain(', '.join(map(identifier, stored_names)), 500)}"
        )
    return np.where(values >= 0, table[values], -1).astype(np.int64)


def _check_label_kind(rows: "Dataset", config: DataConfig, source: str) -> None:
    """Check that `data.classes` cannot ask which values a column of texts has.

    Raises:
        DataError: there is no such column, or it has texts without declared names.
    """
    feature = _feature(rows.features, config.label_column, source)
    numbered = "int" in str(getattr(feature, "dtype", ""))
    if not (getattr(feature, "names", None) or numbered):
        raise DataError(
            f"data.label-column = {config.label_column!r}: its labels are texts, of which a run's "
            "data.classes could ask one by one; set classes in this site's node-config"
        )


def _domains(rows: "Dataset", config: DataConfig, source: str) -> list[str] | None:
    if config.partition not in ("domain", "dirichlet-domain"):
        return None
    if config.domain_column not in rows.column_names:
        raise DataError(
            f"data.partition = {config.partition!r} needs data.domain-column, the column that says "
            f"which domain an image is of; {source} has {', '.join(rows.column_names)}"
        )
    return _domain_names(rows, config.domain_column)


def _domain_names(rows: "Dataset", column: str) -> list[str]:
    values = rows.with_format("numpy")[column][:]
    names = getattr(rows.features[column], "names", None)
    return [identifier(names[value] if names else str(value)) for value in values]


# ---- Shares ----


def _share(rows: np.ndarray, labels: np.ndarray, share: float, split: str) -> np.ndarray:
    """A node's test rows, `share` of every class (at least one of two), or the others.

    They depend on nothing that a run chooses but the share: with another seed, or with the classes
    in another order, training images would become test images.
    """
    taken = []
    for _, members in _by_class(rows, labels):
        order = np.random.default_rng(SHARE_SEED).permutation(members)
        count = round(share * len(members))
        if len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        taken.append(order[:count] if split == "test" else order[count:])
    return np.concatenate(taken) if taken else rows


def _capped(rows: np.ndarray, labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """At most so many rows of every class."""
    taken = []
    for label, members in _by_class(rows, labels):
        order = np.random.default_rng([seed, label, *b"cap"]).permutation(members)
        taken.append(order[:most])
    return np.concatenate(taken) if taken else rows


def _by_class(rows: np.ndarray, labels: np.ndarray) -> list[tuple[int, np.ndarray]]:
    held = labels[rows]
    return [(int(label), rows[held == label]) for label in np.unique(held)]
