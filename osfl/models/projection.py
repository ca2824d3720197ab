"""A public random projection of features to fewer dimensions."""

import math

import torch

from osfl.util.seeds import generator_of


def random_projection(width: int, size: int, seed: int) -> torch.Tensor:
    """Return a projection of random signs, [size, width] in float64.

    Every entry is +1 or -1 over sqrt(size), which keeps squared lengths and distances on average
    (Achlioptas 2003, "Database-friendly random projections", theorem 1.1). The projection is the
    same on all machines. It is public and hides nothing.

    Args:
        width: of the features.
        size: of the projected features.
        seed: the run's.
    """
    signs = torch.randint(2, (size, width), generator=generator_of(seed, "feature projection"))
    return (2 * signs - 1).double() / math.sqrt(size)
