"""Seeds as functions of what is drawn, so that neither time nor order changes the numbers."""

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed for a list of names and non-negative integers.

    It is the same in every process.
    """
    entropy: list[int] = []
    for position, part in enumerate(parts):
        entropy += [part] if isinstance(part, int) else part.encode()
        if isinstance(part, str) and position < len(parts) - 1:
            # Not a byte, so that it separates ("ab", "c") from ("a", "bc")
            entropy.append(256)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def generator_of(*parts: int | str) -> torch.Generator:
    """Return a CPU generator seeded by `seed_of`, whose numbers do not depend on the device."""
    return torch.Generator().manual_seed(seed_of(*parts))
