"""How a data set is cut into clients: by domain (feature skew), by label, or at random."""

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from osfl.config import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner  # seconds to import


class DataError(ValueError):
    """Images that cannot be used; the message names the file, folder or key, and the fix."""


def partitioner_of(config: DataConfig, count: int, seed: int, even: bool) -> "Partitioner":
    """What cuts the rows of a data set with a column label.

    Args:
        count: of parts.
        even: at random into equal parts, whatever `data.partition` says: test images.
    """
    from flwr_datasets import partitioner as cut

    if even or config.partition == "iid":
        return cut.IidPartitioner(num_partitions=count)
    if config.partition == "label":
        return cut.ShardPartitioner(
            count, "label", num_shards_per_partition=config.shards_per_client, seed=seed
        )
    return cut.DirichletPartitioner(count, "label", config.alpha, min_partition_size=1, seed=seed)


@dataclass(frozen=True)
class Rows:
    """What is known of a data set's rows before they are cut.

    Attributes:
        labels: [N].
        domains: one a row, for the partitions `domain` and `dirichlet-domain`.
        domain_names: all domains, in the clients' order; the rows may lack some.
        groups: [N] numbers; rows of one group stay together.
    """

    labels: np.ndarray
    domains: Sequence[str] | None = None
    domain_names: Sequence[str] = ()
    groups: np.ndarray | None = None


def node_rows(
    config: DataConfig, table: Rows, part: int, parts: int, seed: int, even: bool = False
) -> np.ndarray:
    """The rows of one part, as indices, ascending.

    Args:
        part: which of them, from 0.
        parts: how many the simulation or the node-config says there are.
        even: test images of a partition by labels are at random.

    Raises:
        DataError: there is no such part, or the rows cannot be cut into that many.
    """
    if part < 0:
        raise DataError(
            f"data.name = {config.name!r} needs node-config partition-id (0, 1, ...): which client "
            "this node is; or data-dir, a folder with its part"
        )
    rows = np.arange(len(table.labels))
    if table.domains is not None:
        names = table.domain_names
        each = 1 if config.partition == "domain" else _parts_each(parts, len(names))
        _check_part(config, part, each * len(names))
        rows = np.flatnonzero(np.asarray(table.domains) == names[part // each])
        if each == 1:
            return rows
        part %= each
        parts = each
    _check_part(config, part, parts)
    if table.groups is None:
        return np.sort(rows[cut(config, table.labels[rows], parts, seed, even)[part]])
    units = grouped(rows, table.groups)
    labels = np.array([most_frequent(table.labels[unit]) for unit in units])
    chosen = cut(config, labels, parts, seed, even)[part]
    return np.sort(np.concatenate([units[number] for number in chosen]))


def _parts_each(parts: int, domains: int) -> int:
    each, rest = divmod(parts, domains)
    if rest or not each:
        raise DataError(
            f"data.partition = 'dirichlet-domain': {parts} clients cannot share {domains} domains "
            f"evenly; set num-clients to a multiple of {domains}"
        )
    return each


def _check_part(config: DataConfig, part: int, parts: int) -> None:
    if part >= parts:
        raise DataError(
            f"partition-id = {part}: {config.name} is cut into {parts} parts (0 to {parts - 1}), "
            "so "
            f"this client has no data. Use at most {parts} clients, or another data.partition"
        )


# A message needs its part several times, and a simulation needs every part
_CUTS: OrderedDict[tuple, list[np.ndarray]] = OrderedDict()


def cut(
    config: DataConfig, labels: np.ndarray, parts: int, seed: int, even: bool = False
) -> list[np.ndarray]:
    """The indices of all parts of some labelled rows.

    Raises:
        DataError: they cannot be cut into that many.
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
    """The indices of all parts of some labelled rows, cut by flwr-datasets.

    Args:
        even: as of `partitioner_of`.

    Raises:
        DataError: they cannot be cut into that many; the keys, and the largest value that works.
    """
    from datasets import Dataset

    check_count(config, len(labels), parts, even)
    table = Dataset.from_dict({"row": np.arange(len(labels)), "label": labels})
    # A data set may lie class by class or domain by domain.
    shuffled = table.shuffle(seed=seed)
    try:
        partitioner = _begun(config, shuffled, parts, seed, even)
        return [np.asarray(partitioner.load_partition(part)["row"]) for part in range(parts)]
    # The partitioner's words are for who calls it, and name none of the run's keys
    except Exception as error:
        most = _most_parts(config, shuffled, parts, seed)
        each = " for each domain" if config.partition == "dirichlet-domain" else ""
        raise DataError(
            f"data.partition = {config.partition!r} with data.alpha = {config.alpha:g}: "
            f"{len(labels)} {_units(config)} cut into {parts} parts leave a client without any. "
            f"Set num-clients to at most {most}{each}, or raise data.alpha"
        ) from error


def _begun(config: DataConfig, rows: "Dataset", parts: int, seed: int, even: bool) -> "Partitioner":
    """A partitioner that has cut the rows."""
    partitioner = partitioner_of(config, parts, seed, even)
    partitioner.dataset = rows
    with warnings.catch_warnings():
        # One for each try with other random shares; what comes of the tries is told
        warnings.simplefilter("ignore")
        partitioner.load_partition(0)
    return partitioner


def _units(config: DataConfig) -> str:
    return "groups of images" if config.group_column else "images"


def check_count(config: DataConfig, count: int, parts: int, even: bool = False) -> None:
    """Check that there are enough images for all parts.

    Raises:
        DataError: there are not; the keys, and the largest values that work.
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
    """A number of parts into which the rows can be cut, found by bisection; 1 always works."""
    works = 1
    fails = parts
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            _begun(config, rows, middle, seed, even=False)
        except Exception:
            fails = middle
        else:
            works = middle
    return works


# ---- Groups ----


def grouped(rows: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """The rows of each group, in the order of the groups' numbers.

    Args:
        groups: of all rows, those beyond `rows` too.
    """
    order = rows[np.argsort(groups[rows], kind="stable")]
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    return np.split(order, ends)


def most_frequent(labels: np.ndarray) -> int:
    """The label that most of some images have; of several, the lowest."""
    return int(np.bincount(labels).argmax())
