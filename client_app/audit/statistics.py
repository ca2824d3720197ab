"""What the guesses of an audit show."""

import math

import numpy as np
import torch
from scipy import stats

from client_app.audit.game import Scores

LOW = 0.001  # false positives at which true ones are counted
SURE = 0.99  # of the measured epsilons of an audit, together
RESAMPLES = 500


def right_guesses(scores: Scores, generator: torch.Generator) -> torch.Tensor:
    """Whether the member of each pair has the higher score, [P] bool; of equal ones a coin says."""
    coin = torch.rand(len(scores.members), generator=generator) < 0.5
    equal = scores.members == scores.others
    return torch.where(equal, coin, scores.members > scores.others)


def interval(count: int, total: int) -> tuple[float, float]:
    """95 % of a share (Clopper & Pearson)."""
    found = stats.binomtest(count, total).proportion_ci(0.95)
    return float(found.low), float(found.high)


def auc(scores: Scores) -> tuple[float, float, float]:
    """Return the area under the ROC curve and its 95 % interval, by resampled pairs.

    The interval is for these images and payloads. Pairs of one payload share its noise, and with
    more pairs the interval says nothing more of another payload.
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
    """How often a member scores above another one, equal ones count half: by the sum of ranks."""
    ranks = stats.rankdata(np.concatenate([members, others], axis=axis), axis=axis)
    count = members.shape[axis]
    own = ranks.take(range(count), axis=axis).sum(axis=axis)
    return (own - count * (count + 1) / 2) / (count * others.shape[axis])


def true_positives(scores: Scores, false_positives: float = LOW) -> tuple[int, int] | None:
    """How many members score above all but so large a share of the others, of how many; None: there
    are too few to say.
    """
    allowed = int(len(scores.others) * false_positives)
    if allowed == 0:
        return None
    # The first of the others that must not be taken for a member
    threshold = scores.others.sort(descending=True).values[allowed]
    return int((scores.members > threshold).sum()), len(scores.members)


def measured_epsilon(
    scores: Scores, delta: float, generator: torch.Generator, looks: int = 1
) -> float:
    """The least epsilon that the guesses are compatible with, at 99 %; 0 where they show nothing.

    All pairs are guessed, and the fifth with the largest differences of scores; each is asked for
    at 99.5 %, and the higher one counts.

    Args:
        looks: how many figures are looked at, of all of which 99 % shall hold together.
    """
    right = right_guesses(scores, generator)
    surest = (scores.members - scores.others).abs().argsort(descending=True, stable=True)
    fifth = right[surest[: max(1, len(right) // 5)]]
    sure = 1 - (1 - SURE) / 2 / looks
    return max(least_epsilon(int(g.sum()), len(g), len(right), delta, sure) for g in (right, fifth))


def least_epsilon(right: int, guesses: int, coins: int, delta: float, sure: float) -> float:
    """The largest epsilon that so many right guesses exclude.

    Steinke, Nasr & Jagielski, theorem 5.2 and appendix D.

    Args:
        right: of the guesses.
        guesses: how many of the coins were guessed.
        coins: that were thrown.
        sure: with which confidence.
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
    """At most how likely so many right guesses are under (epsilon, delta)-differential privacy."""
    chance = 1 / (1 + math.exp(-epsilon))
    # P(Binomial(r, e^eps / (e^eps + 1)) >= v)
    beta = float(stats.binom.sf(right - 1, guesses, chance))
    if delta == 0:
        return beta
    # The largest of P(v > Binomial >= v - i) / i
    below = stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance).cumsum()
    alpha = float((below / np.arange(1, right + 1)).max(initial=0))
    return min(1.0, beta + 2 * coins * delta * alpha)
