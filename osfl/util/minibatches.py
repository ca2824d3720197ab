"""The order in which a training sees its images."""

import torch


def minibatches(
    rows: torch.Tensor,
    epochs: int,
    steps: int,
    size: int,
    generator: torch.Generator,
    least: int = 1,
) -> list[torch.Tensor]:
    """Passes over `rows`, each in a new order, in batches: `epochs` passes, or `steps` batches.

    Args:
        rows: at least `least` of them.
        steps: 0: as many as the passes have.
        least: a pass leaves a last batch of fewer rows out.
    """
    rest = len(rows) % size
    of_a_pass = len(rows) // size + (rest >= least and rest > 0)
    if steps:
        epochs = -(-steps // of_a_pass)
    batches = [
        batch
        for _ in range(epochs)
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(size)[:of_a_pass]
    ]
    return batches[:steps] if steps else batches
