"""Mechanisms of differential privacy (Dwork et al., 2006): what a client does to what it sends.

Their chance comes from the operating system. A run's seed is known to the server, which could take
out noise that came from it.
"""

import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction

# Whole numbers in [0, n), each as likely
Below = Callable[[int], int]


def permute_and_flip(
    counts: Sequence[int], epsilon: float, below: Below = secrets.randbelow
) -> int:
    """The index of a large count (McKenna & Sheldon, arXiv 2010.12603, algorithm 1).

    Candidates come in a random order. r is taken with the probability exp(epsilon (q_r - q*) / 2),
    else the next one is asked; q* is the largest count, which is always taken.

    One image that is replaced changes each count by one at most, so the choice is
    epsilon-differentially private. Where it only adds to a count, or only takes from one, the
    choice is epsilon / 2-private. The probabilities are exact: no logarithm is rounded (Canonne,
    Kamath & Steinke, arXiv 2004.00010, algorithm 1).

    Args:
        counts: of every candidate.
        epsilon: above 0.
        below: where chance comes from.
    """
    largest = max(counts)
    waiting = list(range(len(counts)))
    while True:
        candidate = waiting.pop(below(len(waiting)))
        if happens_exp(Fraction(epsilon) * (largest - counts[candidate]) / 2, below):
            return candidate


def happens_exp(gamma: Fraction, below: Below) -> bool:
    """True with the probability exp(-gamma), gamma >= 0."""
    while gamma > 1:
        if not _happens_exp_below_1(Fraction(1), below):
            return False
        gamma -= 1
    return _happens_exp_below_1(gamma, below)


def _happens_exp_below_1(gamma: Fraction, below: Below) -> bool:
    """True with the probability exp(-gamma), gamma in [0, 1]."""
    # The k-th trial succeeds with gamma / k: the first failure is an odd one with exp(-gamma)
    k = 1
    while _happens(gamma / k, below):
        k += 1
    return k % 2 == 1


def _happens(probability: Fraction, below: Below) -> bool:
    """True with a probability in [0, 1]."""
    return below(probability.denominator) < probability.numerator
