"""Choose test images by share, for sites without a test split; and caps per class."""

from collections.abc import Sequence

import numpy as np

from osfl.data.partition import Rows, most_frequent, split_by_group

# Seed of every site's test share, independent of the run's seed
SHARE_SEED = [*b"test share"]


def split_rows(rows: np.ndarray, table: Rows, share: float, split: str) -> np.ndarray:
    """Return a node's test rows, which are `share` of every class, or its training rows.

    Args:
        rows: the node's rows, as indices into the table.
        table: of all nodes.
        share: of rows, or of whole groups if the table has groups.
        split: `train` or `test`.
    """
    if table.groups is None:
        return _share(rows, table.labels, share, split)
    return _grouped_share(rows, table, share, split)


def group_numbers(names: Sequence[str]) -> np.ndarray:
    """Return each image's group as a number; an image without a group has a number of its own."""
    texts = np.array(names, dtype=object)
    distinct, numbers = np.unique(texts.astype(str), return_inverse=True)
    return np.where(texts == "", len(distinct) + np.arange(len(texts)), numbers)


def _share(rows: np.ndarray, labels: np.ndarray, share: float, split: str) -> np.ndarray:
    """Return a node's test rows, `share` of every class (at least one of two), or the others.

    Of a run's settings they only depend on the share. Otherwise, training images of one run would
    be test images of a run with another seed or another order of classes.
    """
    chosen = []
    for _, members in _by_class(rows, labels):
        order = np.random.default_rng(SHARE_SEED).permutation(members)
        count = round(share * len(members))
        if len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        chosen.append(order[:count] if split == "test" else order[count:])
    return np.concatenate(chosen) if chosen else rows


def held_out_mask(total: int, share: float) -> np.ndarray:
    """Return which of all stored rows are test rows, regardless of labels, as [total] bool.

    A guarantee holds for replacing one image, possibly by one of another class. A cut by class
    would then also move other images between training and test.
    """
    count = min(max(round(share * total), 1), total - 1)
    is_test = np.zeros(total, dtype=bool)
    is_test[np.random.default_rng(SHARE_SEED).permutation(total)[:count]] = True
    return is_test


def _grouped_share(rows: np.ndarray, table: Rows, share: float, split: str) -> np.ndarray:
    """Return whole groups like `_share`; a group's class is its most frequent label.

    Of two or more groups, at least one is for testing and one for training.
    """
    assert table.groups is not None
    units = split_by_group(rows, table.groups)
    labels = np.array([most_frequent(table.labels[unit]) for unit in units])
    chosen: list[np.ndarray] = []
    for _, members in _by_class(np.arange(len(units)), labels):
        order = np.random.default_rng(SHARE_SEED).permutation(members)
        sizes = [len(units[number]) for number in order]
        test = _choose_by_size(sizes, share * sum(sizes))
        numbers = order[test] if split == "test" else np.delete(order, test)
        chosen += [units[number] for number in numbers]
    return np.concatenate(chosen) if chosen else rows[:0]


def _choose_by_size(sizes: Sequence[int], target: float) -> list[int]:
    """Choose indices greedily, in order, so that their sizes add up to about `target`.

    Chooses at least one index of two or more, and never all.
    """
    chosen: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if total + size / 2 <= target and len(chosen) < len(sizes) - 1:
            chosen.append(index)
            total += size
    if not chosen and len(sizes) > 1:
        chosen = [int(np.argmin(sizes))]
    return chosen


def cap_per_class(rows: np.ndarray, labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Choose at most `most` rows of every class at random."""
    chosen = []
    for label, members in _by_class(rows, labels):
        order = np.random.default_rng([seed, label, *b"cap"]).permutation(members)
        chosen.append(order[:most])
    return np.concatenate(chosen) if chosen else rows


def _by_class(rows: np.ndarray, labels: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Group rows by label, as (label, rows)."""
    row_labels = labels[rows]
    return [(int(label), rows[row_labels == label]) for label in np.unique(row_labels)]
