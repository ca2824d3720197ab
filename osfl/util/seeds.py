"""Randomness is an argument.

Seeds that depend on what is drawn, never on when or where it is drawn.
"""

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed of a list of names and non-negative numbers; the same in every process."""
    entropy: list[int] = []
    for position, part in enumerate(parts):
        entropy += [part] if isinstance(part, int) else part.encode()
        if isinstance(part, str) and position < len(parts) - 1:
            entropy.append(256)  # no byte: keeps ("ab", "c") apart from ("a", "bc")
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def generator_of(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by `seed_of`: the same numbers whatever device they go to."""
    return torch.Generator().manual_seed(seed_of(*parts))
