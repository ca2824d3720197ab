"""Random events of exact probability, for mechanisms of differential privacy.

Canonne, Kamath & Steinke, arXiv 2004.00010, algorithm 1: no logarithm or exponential is rounded.
"""

from collections.abc import Callable
from fractions import Fraction

# Draws a uniform integer in [0, n)
RandomBelow = Callable[[int], int]


def bernoulli_exp(gamma: Fraction, below: RandomBelow) -> bool:
    """Return True with the probability exp(-gamma), gamma >= 0."""
    while gamma > 1:
        if not _bernoulli_exp_to_1(Fraction(1), below):
            return False
        gamma -= 1
    return _bernoulli_exp_to_1(gamma, below)


def _bernoulli_exp_to_1(gamma: Fraction, below: RandomBelow) -> bool:
    """Return True with the probability exp(-gamma), gamma in [0, 1]."""
    # Trial k succeeds with probability gamma / k. The first k to fail is odd with exp(-gamma)
    k = 1
    while _bernoulli(gamma / k, below):
        k += 1
    return k % 2 == 1


def _bernoulli(probability: Fraction, below: RandomBelow) -> bool:
    """Return True with the given probability in [0, 1]."""
    return below(probability.denominator) < probability.numerator
