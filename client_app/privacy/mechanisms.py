"""Mechanisms of differential privacy (Dwork et al., 2006): what a client does to what it sends.

Their chance comes from the operating system. A run's seed is known to the server, which could take
out noise that came from it.
"""

import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from scipy.special import ndtri

from osfl.config import RunConfig

# Whole numbers in [0, n), each as likely
Below = Callable[[int], int]
# So many random bytes
Bytes = Callable[[int], bytes]


def private_mean(
    rows: torch.Tensor,
    centre: torch.Tensor,
    limit: float,
    epsilon: float,
    delta: float,
    chance: Bytes = secrets.token_bytes,
) -> torch.Tensor:
    """centre + mean of the rows' clipped differences from it + Gaussian noise, float32.

    It is (epsilon, delta)-differentially private for one row replaced; how many rows there are is
    taken to be known. One row moves the mean by at most 2 limit / n, in Euclidean norm, and the
    noise is the least that this needs (Balle & Wang, arXiv 1805.06530, theorem 8). It is drawn in
    64 bits, which is not exactly a Gaussian (Mironov, 2012); permute-and-flip has no such gap.

    Args:
        rows: [n, ...], of one image each; NaN and infinity count as the centre.
        centre: [...], known to all.
        limit: norm to which differences are cut.
        epsilon, delta: above 0.
        chance: where chance comes from.
    """
    mean = torch.zeros_like(centre, dtype=torch.float64)
    # Part by part, so that the copies in 64 bits stay small
    for part in rows.split(64):
        mean += clipped(part.double() - centre.double(), limit).sum(dim=0) / len(rows)
    sigma = deviation_of_mean(limit, len(rows), epsilon, delta)
    return (centre.double() + mean + sigma * standard_normal(mean.shape, chance)).float()


def deviation_of_mean(limit: float, count: int, epsilon: float, delta: float) -> float:
    """Of the noise in each number of `private_mean`."""
    # Seconds to import, and nothing else needs it
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta)) * 2 * limit / count


def private_mean_of_class(
    rows: torch.Tensor,
    prompts: torch.Tensor,
    label: int,
    config: RunConfig,
    alike: bool = False,
) -> torch.Tensor:
    """Of encodings of one class's images [n, ...], as the run asks for it, around its prompt's.

    Args:
        prompts: of all classes of the run, [C, ...], by which `clip-norm` is measured.
        alike: whether what their tokens have in common is taken, and as a difference from the
            prompt: [1, d], of encodings [n, L, d].
    """
    limit = config.clip_norm * spread(prompts)
    centre = prompts[label]
    if alike:
        rows, limit = common_to_tokens(rows - centre, limit)
        centre = torch.zeros_like(rows[0])
    return private_mean(rows, centre, limit, config.epsilon, config.delta)


def common_to_tokens(vectors: torch.Tensor, limit: float) -> tuple[torch.Tensor, float]:
    """What the tokens of each vector [n, L, d] have in common, [n, 1, d], and its limit.

    Where each of L tokens gets it, it is as long as the limit again.
    """
    return vectors.mean(dim=1, keepdim=True), limit / vectors.shape[1] ** 0.5


def clipped(rows: torch.Tensor, limit: float) -> torch.Tensor:
    """Rows [n, ...] of which the norm of each is at most `limit`; NaN and infinity become 0."""
    finite = rows.flatten(1).isfinite().all(dim=1)
    known = torch.where(finite.view(-1, *[1] * (rows.ndim - 1)), rows, 0)
    norms = known.flatten(1).norm(dim=1).clamp_min(1e-300)
    return known * (limit / norms).clamp(max=1).view(-1, *[1] * (rows.ndim - 1))


def standard_normal(shape: torch.Size, chance: Bytes = secrets.token_bytes) -> torch.Tensor:
    """Independent draws in 64 bits, by the inverse of the distribution function."""
    count = shape.numel()
    whole = np.frombuffer(chance(8 * count), dtype=np.uint64) >> np.uint64(12)
    # The middles of 2^52 equal parts of (0, 1), none of which is rounded
    uniform = (whole.astype(np.float64) + 0.5) / 2**52
    return torch.from_numpy(ndtri(uniform)).view(shape)


def spread(encodings: torch.Tensor) -> float:
    """The mean distance of encodings [C, ...] from their mean: a public unit for what is clipped.

    The norm of the encoding, where there is a single one.
    """
    rows = encodings.double().flatten(1)
    around = rows - rows.mean(dim=0) if len(rows) > 1 else rows
    return float(around.norm(dim=1).mean())


@cache
def noise_multiplier(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """The deviation of DP-SGD's noise, in units of what an image's gradient is cut to.

    The least, to a thousandth, with which `steps` sums of images that are each taken with the
    probability `rate` are (epsilon, delta)-differentially private for one image replaced.
    """
    # Seconds to import, and nothing else needs it
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def training(multiplier: float) -> dp_accounting.DpEvent:
        noised = dp_accounting.GaussianDpEvent(multiplier)
        step = dp_accounting.PoissonSampledDpEvent(rate, noised)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    found: float = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(replaced), training, epsilon, delta, tol=1e-3
    )
    return found


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
