"""Which of a site's images are for its test, where no split or folder says so; and caps."""

from collections.abc import Sequence

import numpy as np

from osfl.data.partition import Rows, grouped, most_frequent

# Of every site's test share, whatever the run's seed
SHARE_SEED = [*b"test share"]


def side(rows: np.ndarray, table: Rows, share: float, split: str) -> np.ndarray:
    """Return a node's rows for the test, `share` of every class, or those for training.

    Args:
        rows: of this node, as indices into the table.
        share: of single rows; of whole groups where the table has groups.
        split: `train` or `test`.
    """
    if table.groups is None:
        return _share(rows, table.labels, share, split)
    return _grouped_share(rows, table, share, split)


def group_numbers(names: Sequence[str]) -> np.ndarray:
    """Return each image's group as a number; an image without a group has a number of its own."""
    texts = np.array(names, dtype=object)
    known, numbers = np.unique(texts.astype(str), return_inverse=True)
    return np.where(texts == "", len(known) + np.arange(len(texts)), numbers)


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


def is_test(total: int, share: float) -> np.ndarray:
    """Which of all stored rows are for the test, [total], whatever their labels.

    The guarantee is for one image replaced, also by one of another class. A cut by class would then
    move other images between training and test, too.
    """
    count = min(max(round(share * total), 1), total - 1)
    is_test = np.zeros(total, dtype=bool)
    is_test[np.random.default_rng(SHARE_SEED).permutation(total)[:count]] = True
    return is_test


def _grouped_share(rows: np.ndarray, table: Rows, share: float, split: str) -> np.ndarray:
    """As `_share`, of whole groups: those of each class, by the label that most of a group have.

    At least one group of two is for the test, and at least one for training.
    """
    assert table.groups is not None
    units = grouped(rows, table.groups)
    labels = np.array([most_frequent(table.labels[unit]) for unit in units])
    taken = []
    for _, members in _by_class(np.arange(len(units)), labels):
        order = np.random.default_rng(SHARE_SEED).permutation(members)
        wanted = share * sum(len(units[number]) for number in order)
        test = _nearest([len(units[number]) for number in order], wanted)
        chosen = order[test] if split == "test" else np.delete(order, test)
        taken += [units[number] for number in chosen]
    return np.concatenate(taken) if taken else rows[:0]


def _nearest(sizes: Sequence[int], wanted: float) -> list[int]:
    """The places of sizes, taken in their order, whose sum is near what is wanted.

    At least one place of two, and never all.
    """
    taken: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if total + size / 2 <= wanted and len(taken) < len(sizes) - 1:
            taken.append(place)
            total += size
    if not taken and len(sizes) > 1:
        taken = [int(np.argmin(sizes))]
    return taken


def capped(rows: np.ndarray, labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """At most so many rows of every class."""
    taken = []
    for label, members in _by_class(rows, labels):
        order = np.random.default_rng([seed, label, *b"cap"]).permutation(members)
        taken.append(order[:most])
    return np.concatenate(taken) if taken else rows


def _by_class(rows: np.ndarray, labels: np.ndarray) -> list[tuple[int, np.ndarray]]:
    held = labels[rows]
    return [(int(label), rows[held == label]) for label in np.unique(held)]
