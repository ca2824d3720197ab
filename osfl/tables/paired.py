"""Compare two rows of a table, paired by seed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean difference between two rows' accuracies, in percentage points.

    Attributes:
        mean: over the common seeds.
        low, high: confidence interval of the mean by Student's t; NaN with one seed.
        seeds: number of common seeds.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def is_significant(self) -> bool:
        """True if the confidence interval excludes 0."""
        return self.low > 0 or self.high < 0


def paired_difference(row: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """Return the mean of the differences per seed, with its 95 % confidence interval.

    Args:
        row: average accuracy by seed.
        reference: the other row's.

    Raises:
        ValueError: the rows have no seed in common.
    """
    seeds = sorted(row.keys() & reference.keys())
    if not seeds:
        raise ValueError("the rows have no seed in common")
    differences = np.array([row[seed] - reference[seed] for seed in seeds])
    mean = float(differences.mean())
    if len(differences) == 1:
        return Difference(mean, float("nan"), float("nan"), 1)
    t_value = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)
    half_width = t_value * stats.sem(differences)
    return Difference(mean, float(mean - half_width), float(mean + half_width), len(differences))
