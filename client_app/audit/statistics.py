"""Statistics of an audit's guesses."""

import math

import numpy as np
import torch
from scipy import stats

from client_app.audit.game import Scores

# False-positive rate at which the true-positive rate is measured
FALSE_POSITIVE_RATE = 0.001
# Joint confidence of an audit's measured epsilons
CONFIDENCE = 0.99
RESAMPLES = 500


def correct_guesses(scores: Scores, generator: torch.Generator) -> torch.Tensor:
    """Return whether each pair's member has the higher score, [P] bool; ties are random."""
    tie_break = torch.rand(len(scores.members), generator=generator) < 0.5
    is_tie = scores.members == scores.others
    return torch.where(is_tie, tie_break, scores.members > scores.others)


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % Clopper-Pearson interval of a share."""
    bounds = stats.binomtest(count, total).proportion_ci(0.95)
    return float(bounds.low), float(bounds.high)


def auc(scores: Scores) -> tuple[float, float, float]:
    """Return the area under the ROC curve and its 95 % interval, by bootstrap over pairs.

    The interval covers these images and this payload only. Pairs of one payload share its noise, so
    even many pairs say nothing about another payload.
    """
    members, others = scores.members.numpy(), scores.others.numpy()
    area = float(area_under_curve(members, others))
    if len(members) == 1:
        return area, 0.0, 1.0
    if len(np.unique(np.concatenate([members, others]))) == 1:
        return area, area, area
    resampled = stats.bootstrap(
        (members, others),
        area_under_curve,
        n_resamples=RESAMPLES,
        batch=50,
        paired=True,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = resampled.confidence_interval
    return area, float(low), float(high)


def area_under_curve(members: np.ndarray, others: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return how often a member scores above a non-member, by rank sums; ties count half."""
    ranks = stats.rankdata(np.concatenate([members, others], axis=axis), axis=axis)
    count = members.shape[axis]
    member_ranks = ranks.take(range(count), axis=axis).sum(axis=axis)
    areas: np.ndarray = (member_ranks - count * (count + 1) / 2) / (count * others.shape[axis])
    return areas


def true_positives(
    scores: Scores, false_positives: float = FALSE_POSITIVE_RATE
) -> tuple[int, int] | None:
    """Return the number of true positives at a false-positive rate, and of all members.

    Return None if there are too few non-members for that rate.
    """
    allowed = int(len(scores.others) * false_positives)
    if allowed == 0:
        return None
    # The highest-scoring non-member that must stay a true negative
    threshold = scores.others.sort(descending=True).values[allowed]
    return int((scores.members > threshold).sum()), len(scores.members)


def empirical_epsilon(
    scores: Scores, delta: float, generator: torch.Generator, looks: int = 1
) -> float:
    """Return the lower bound of epsilon that the guesses imply at 99 % confidence, 0 if none.

    Guesses all pairs, and the fifth of them with the largest score differences. Each bound holds at
    99.5 %, and the higher one counts.

    Args:
        looks: number of figures for which the 99 % shall hold jointly.
    """
    right = correct_guesses(scores, generator)
    surest = (scores.members - scores.others).abs().argsort(descending=True, stable=True)
    fifth = right[surest[: max(1, len(right) // 5)]]
    sure = 1 - (1 - CONFIDENCE) / 2 / looks
    return max(
        epsilon_lower_bound(int(g.sum()), len(g), len(right), delta, sure) for g in (right, fifth)
    )


def epsilon_lower_bound(right: int, guesses: int, coins: int, delta: float, sure: float) -> float:
    """Return the largest epsilon that `right` correct guesses exclude.

    Steinke, Nasr & Jagielski, theorem 5.2 and appendix D.

    Args:
        right: number of correct guesses.
        guesses: number of guesses, of the canary bits.
        coins: number of canary bits.
        sure: confidence.
    """
    low = 0.0
    if p_value(right, guesses, coins, low, delta) > 1 - sure:
        return low
    high = 1.0
    while p_value(right, guesses, coins, high, delta) < 1 - sure:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        if p_value(right, guesses, coins, middle, delta) < 1 - sure:
            low = middle
        else:
            high = middle
    return low


def p_value(right: int, guesses: int, coins: int, epsilon: float, delta: float) -> float:
    """Bound the probability of `right` correct guesses under (epsilon, delta)-DP from above."""
    accuracy = 1 / (1 + math.exp(-epsilon))
    # P(Binomial(r, e^eps / (e^eps + 1)) >= v)
    beta = float(stats.binom.sf(right - 1, guesses, accuracy))
    if delta == 0:
        return beta
    # The largest of P(v > Binomial >= v - i) / i
    cumulative = stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy).cumsum()
    alpha = float((cumulative / np.arange(1, right + 1)).max(initial=0))
    return min(1.0, beta + 2 * coins * delta * alpha)
