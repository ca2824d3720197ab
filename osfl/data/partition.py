"""Partition a data set into clients: by domain (feature skew), by label, or at random."""

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from osfl.config import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner  # seconds to import


class DataError(ValueError):
    """Unusable images; the message names the file, folder or key, and the fix."""


def partitioner_of(config: DataConfig, count: int, seed: int, even: bool) -> "Partitioner":
    """Return the partitioner for a data set with a column `label`.

    Args:
        count: number of parts.
        seed: of a random partition.
        even: return one for equal random parts, regardless of `data.partition`, for test images.
    """
    from flwr_datasets import partitioner

    if even or config.partition == "iid":
        return partitioner.IidPartitioner(num_partitions=count)
    if config.partition == "label":
        return partitioner.ShardPartitioner(
            count, "label", num_shards_per_partition=config.shards_per_client, seed=seed
        )
    return partitioner.DirichletPartitioner(
        count, "label", config.alpha, min_partition_size=1, seed=seed
    )


@dataclass(frozen=True)
class Rows:
    """The columns of a data set that partitions depend on.

    Attributes:
        labels: [N].
        domains: one per row, for the partitions `domain` and `dirichlet-domain`.
        domain_names: all domains, in the clients' order, including those without rows.
        groups: [N] numbers; rows of the same group stay together.
    """

    labels: np.ndarray
    domains: Sequence[str] | None = None
    domain_names: Sequence[str] = ()
    groups: np.ndarray | None = None


def node_rows(
    config: DataConfig, table: Rows, part: int, parts: int, seed: int, even: bool = False
) -> np.ndarray:
    """Return the indices of one part's rows, ascending.

    Args:
        part: number of the part, from 0.
        parts: number of parts, from the simulation or the node-config.
        even: use equal random parts for test images of a partition by labels.

    Raises:
        DataError: the part does not exist, or the rows cannot be cut into that many.
    """
    if part < 0:
        raise DataError(
            f"data.name = {config.name!r} requires node-config partition-id, this client's number "
            "(0, 1, ...), or data-dir, a folder with its part"
        )
    rows = np.arange(len(table.labels))
    if table.domains is not None:
        names = table.domain_names
        is_by_domain = config.partition == "domain"
        parts = 1 if is_by_domain else _parts_per_domain(parts, len(names))
        _check_part(config, part, parts * len(names))
        rows = np.flatnonzero(np.asarray(table.domains) == names[part // parts])
        if parts == 1:
            return rows
        part %= parts
    _check_part(config, part, parts)
    if table.groups is None:
        return np.sort(rows[cut_parts(config, table.labels[rows], parts, seed, even)[part]])
    units = split_by_group(rows, table.groups)
    labels = np.array([most_frequent(table.labels[unit]) for unit in units])
    chosen = cut_parts(config, labels, parts, seed, even)[part]
    return np.sort(np.concatenate([units[number] for number in chosen]))


def _parts_per_domain(parts: int, domains: int) -> int:
    parts_per_domain, remainder = divmod(parts, domains)
    if remainder or not parts_per_domain:
        raise DataError(
            f"data.partition = 'dirichlet-domain': {parts} clients cannot share {domains} domains "
            f"evenly; set num-clients to a multiple of {domains}"
        )
    return parts_per_domain


def _check_part(config: DataConfig, part: int, parts: int) -> None:
    if part >= parts:
        raise DataError(
            f"partition-id = {part}: {config.name} is cut into {parts} parts (0 to {parts - 1}), "
            f"so this client has no data. Set num-clients to at most {parts}, or data.partition to "
            "another value"
        )


# Each message needs its part several times, and a simulation needs every part
_CUTS: OrderedDict[tuple[Any, ...], list[np.ndarray]] = OrderedDict()


def cut_parts(
    config: DataConfig, labels: np.ndarray, parts: int, seed: int, even: bool = False
) -> list[np.ndarray]:
    """Return the row indices of all parts, from a cache.

    Args:
        labels: of the rows.
        parts: number of parts.
        even: as in `partitioner_of`.

    Raises:
        DataError: the rows cannot be cut into that many parts.
    """
    key = (config, labels.tobytes(), parts, seed, even)
    if key not in _CUTS:
        _CUTS[key] = _cut_all(config, labels, parts, seed, even)
        while len(_CUTS) > 8:
            _CUTS.popitem(last=False)
    return _CUTS[key]


def _cut_all(
    config: DataConfig, labels: np.ndarray, parts: int, seed: int, even: bool
) -> list[np.ndarray]:
    """Return the row indices of all parts, cut by flwr-datasets.

    Args:
        even: as in `partitioner_of`.

    Raises:
        DataError: the rows cannot be cut into that many parts.
    """
    from datasets import Dataset

    check_count(config, len(labels), parts, even)
    table = Dataset.from_dict({"row": np.arange(len(labels)), "label": labels})
    # The data set may be sorted by class or domain
    shuffled = table.shuffle(seed=seed)
    try:
        partitioner = _partitioned(config, shuffled, parts, seed, even)
        return [np.asarray(partitioner.load_partition(part)["row"]) for part in range(parts)]
    # The partitioner's own message does not name the run's keys
    except Exception as error:
        most = _most_parts(config, shuffled, parts, seed)
        scope = " per domain" if config.partition == "dirichlet-domain" else ""
        raise DataError(
            f"data.partition = {config.partition!r} with data.alpha = {config.alpha:g}: "
            f"{len(labels)} {_units(config)} cut into {parts} parts leave a client without any. "
            f"Set num-clients to at most {most}{scope}, or raise data.alpha"
        ) from error


def _partitioned(
    config: DataConfig, rows: "Dataset", parts: int, seed: int, even: bool
) -> "Partitioner":
    """Return a partitioner that has cut the rows."""
    partitioner = partitioner_of(config, parts, seed, even)
    partitioner.dataset = rows
    with warnings.catch_warnings():
        # It warns of each retry with other random shares
        warnings.simplefilter("ignore")
        partitioner.load_partition(0)
    return partitioner


def _units(config: DataConfig) -> str:
    return "groups of images" if config.group_column else "images"


def check_count(config: DataConfig, count: int, parts: int, even: bool = False) -> None:
    """Check that there are enough images for all parts.

    Args:
        count: number of images or groups.
        parts: number of parts.
        even: as in `partitioner_of`.

    Raises:
        DataError: there are too few; the message names the largest values that work.
    """
    if count < parts:
        units = f"test {_units(config)}" if even else _units(config)
        raise DataError(
            f"{count} {units} cannot be cut into {parts} parts; set num-clients to at most {count}"
        )
    shards = config.shards_per_client
    if even or config.partition != "label" or parts * shards <= count:
        return
    raise DataError(
        f"data.partition = 'label' with num-clients = {parts} and data.shards-per-client = "
        f"{shards}: {count} {_units(config)} cannot be cut into {parts * shards} shards. Set "
        f"data.shards-per-client to at most {count // parts}, or num-clients to at most "
        f"{max(1, count // shards)}"
    )


def _most_parts(config: DataConfig, rows: "Dataset", parts: int, seed: int) -> int:
    """Return a number of parts into which the rows can be cut, by bisection; 1 always works."""
    works = 1
    fails = parts
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            _partitioned(config, rows, middle, seed, even=False)
        except Exception:
            fails = middle
        else:
            works = middle
    return works


# ---- Groups ----


def split_by_group(rows: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """Split rows by group, in the order of the groups' numbers.

    Args:
        rows: indices into the table.
        groups: of all rows of the table.
    """
    order = rows[np.argsort(groups[rows], kind="stable")]
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    return np.split(order, ends)


def most_frequent(labels: np.ndarray) -> int:
    """Return the most frequent label, and of several the smallest."""
    return int(np.bincount(labels).argmax())
