"""Two rows of a table against each other, paired by seed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """What one row has above another, in points.

    Attributes:
        mean: over the seeds that both have.
        low, high: the interval of the mean by Student's t; nan with one seed.
        seeds: how many both have.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(row: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """The mean of the differences seed by seed, with its 95 % interval.

    Args:
        row: its average accuracy by seed.
        reference: the other row's.

    Raises:
        ValueError: they have no seed in common.
    """
    both = sorted(row.keys() & reference.keys())
    if not both:
        raise ValueError("the rows have no seed in common")
    apart = np.array([row[seed] - reference[seed] for seed in both])
    mean = float(apart.mean())
    if len(apart) == 1:
        return Difference(mean, float("nan"), float("nan"), 1)
    # Student: the mean's standard error, t(n - 1) times
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(apart) - 1) * stats.sem(apart)
    return Difference(mean, float(mean - half), float(mean + half), len(apart))
