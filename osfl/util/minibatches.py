"""The order in which a training uses its images."""

import torch


def minibatches(
    rows: torch.Tensor,
    epochs: int,
    steps: int,
    size: int,
    generator: torch.Generator,
    least: int = 1,
) -> list[torch.Tensor]:
    """Shuffle `rows` anew for every epoch, and split them into minibatches.

    Args:
        rows: row numbers [n], n >= `least`.
        epochs: the number of passes over the rows.
        steps: the number of minibatches, in place of `epochs`; 0 to use `epochs`.
        size: rows in a minibatch.
        generator: of the shuffles, one per epoch.
        least: a smaller last minibatch of an epoch is dropped.
    """
    remainder = len(rows) % size
    per_epoch = len(rows) // size + (remainder >= least and remainder > 0)
    if steps:
        epochs = -(-steps // per_epoch)
    batches = [
        batch
        for _ in range(epochs)
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(size)[:per_epoch]
    ]
    return batches[:steps] if steps else batches
