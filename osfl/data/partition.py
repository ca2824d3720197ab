"""How a data set is cut into clients: by domain (feature skew), by label, or at random."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from osfl.config import DataConfig

if TYPE_CHECKING:
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


def node_rows(
    config: DataConfig,
    labels: np.ndarray,
    domains: Sequence[str] | None,
    part: int,
    parts: int,
    seed: int,
    even: bool = False,
) -> np.ndarray:
    """The rows of one part, as indices, ascending.

    Args:
        labels: of all rows, [N].
        domains: of all rows, for the partitions `domain` and `dirichlet-domain`.
        part: which of them, from 0.
        parts: how many the simulation or the node-config says there are.
        even: test images of a partition by labels are at random.

    Raises:
        DataError: there is no such part, or fewer rows than parts.
    """
    if part < 0:
        raise DataError(
            f"data.name = {config.name!r} needs node-config partition-id (0, 1, ...): which client "
            "this node is; or data-dir, a folder with its part"
        )
    rows = np.arange(len(labels))
    if domains is not None:
        names = sorted(set(domains))
        each = 1 if config.partition == "domain" else _parts_each(parts, len(names))
        _check_part(config, part, each * len(names))
        rows = np.flatnonzero(np.asarray(domains) == names[part // each])
        if each == 1:
            return rows
        part %= each
        parts = each
    _check_part(config, part, parts)
    return _cut(partitioner_of(config, parts, seed, even), rows, labels, part, parts, seed)


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


def _cut(
    partitioner: "Partitioner",
    rows: np.ndarray,
    labels: np.ndarray,
    part: int,
    parts: int,
    seed: int,
) -> np.ndarray:
    from datasets import Dataset

    if len(rows) < parts:
        raise DataError(f"{len(rows)} images cannot be cut into {parts} parts")
    table = Dataset.from_dict({"row": rows, "label": labels[rows]})
    # A data set may lie class by class or domain by domain.
    partitioner.dataset = table.shuffle(seed=seed)
    return np.sort(np.asarray(partitioner.load_partition(part)["row"]))
