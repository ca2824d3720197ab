"""Mechanisms of differential privacy (Dwork et al., 2006), applied to what a client sends.

Their randomness comes from the operating system. The server knows a run's seed, so it could
subtract noise that was derived from it.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from scipy.special import ndtri

from client_app.privacy.bernoulli import RandomBelow, bernoulli_exp
from client_app.privacy.sum_noise import SumNoise
from osfl.config import RunConfig

# Returns n random bytes
RandomBytes = Callable[[int], bytes]
# Noisy numbers are multiples of their noise's deviation, rounded down to a power of two, over this
GRID = 2**14
# A tail below this many of 2^64 parts gets 64 more random bits
FINE_TAIL = 2**44


def private_mean(
    rows: torch.Tensor,
    center: torch.Tensor,
    limit: float,
    epsilon: float,
    delta: float,
    random_bytes: RandomBytes = secrets.token_bytes,
) -> torch.Tensor:
    """Return center + mean of the rows' clipped differences from it + Gaussian noise, in float32.

    It is (epsilon, delta)-differentially private for one row replaced; the number of rows is
    public. One row moves the mean by at most 2 limit / n in Euclidean norm, and the noise is the
    smallest that this sensitivity allows (Balle & Wang, arXiv 1805.06530, theorem 8).

    Args:
        rows: [n, ...], one per image; NaN and infinity count as the center.
        center: [...], public.
        limit: clipping bound of the differences' norm.
        epsilon, delta: above 0.
        random_bytes: the source of randomness.
    """
    mean = clipped_mean(rows, center, limit)
    sigma = noise_deviation(limit, len(rows), epsilon, delta)
    return add_noise(mean, sigma, random_bytes).float()


def add_noise(
    values: torch.Tensor, sigma: float, random_bytes: RandomBytes = secrets.token_bytes
) -> torch.Tensor:
    """Return values + N(0, sigma^2), in float64, as multiples of a small part of sigma.

    The last bits of a noisy floating-point number tell which exact values it can come from
    (Mironov, "On significance of the least significant bits for differential privacy", CCS 2012).
    Each multiple can come from any value, and has the probability of a Gaussian to 1e-9 of itself,
    up to ten deviations.
    """
    noise = sigma * standard_normal(values.shape, random_bytes).to(values.device)
    noisy = values.double() + noise
    if sigma == 0:
        return noisy
    step = 2.0 ** math.floor(math.log2(sigma)) / GRID
    return (noisy / step).round() * step


def clipped_mean(rows: torch.Tensor, center: torch.Tensor, limit: float) -> torch.Tensor:
    """Return center + mean of the rows' clipped differences from it, in float64, without noise."""
    mean = torch.zeros_like(center, dtype=torch.float64)
    # In parts, so that the float64 copies stay small
    for part in rows.split(64):
        mean += clip_rows(part.double() - center.double(), limit).sum(dim=0) / len(rows)
    return center.double() + mean


def noise_deviation(limit: float, count: int, epsilon: float, delta: float) -> float:
    """Return the standard deviation of the noise in each entry of `private_mean`."""
    # Takes seconds to import, and nothing else needs it
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta)) * 2 * limit / count


def private_mean_of_class(
    rows: torch.Tensor,
    prompts: torch.Tensor,
    label: int,
    config: RunConfig,
    shared: bool = False,
    sum_noise: SumNoise | None = None,
) -> torch.Tensor:
    """Return the noisy mean of one class's encodings [n, ...], centered at its prompt's encoding.

    Args:
        prompts: encodings of all classes of the run, [C, ...], the unit of `clip-norm`.
        shared: whether to return only the tokens' common difference from the prompt: [1, d], of
            encodings [n, L, d].
        sum_noise: gets the clipping bound; None: the mean gets its noise here. In a secure sum the
            noise is added to the whole numbers.
    """
    limit = config.clip_norm * mean_distance(prompts)
    center = prompts[label]
    if shared:
        rows, limit = mean_over_tokens(rows - center, limit)
        center = torch.zeros_like(rows[0])
    if sum_noise is not None and config.secure_sum:
        sum_noise.limit = limit
        return clipped_mean(rows, center, limit).float()
    return private_mean(rows, center, limit, config.epsilon, config.delta)


def mean_over_tokens(vectors: torch.Tensor, limit: float) -> tuple[torch.Tensor, float]:
    """Return each vector's mean over its tokens, [n, L, d] to [n, 1, d], and its clipping bound.

    Repeated for each of L tokens, a mean at that bound has the norm `limit` again.
    """
    return vectors.mean(dim=1, keepdim=True), limit / vectors.shape[1] ** 0.5


def clip_rows(rows: torch.Tensor, limit: float) -> torch.Tensor:
    """Clip rows [n, ...] to a norm of at most `limit` each; rows with NaN or infinity become 0."""
    finite = rows.flatten(1).isfinite().all(dim=1)
    values = torch.where(finite.view(-1, *[1] * (rows.ndim - 1)), rows, 0)
    norms = values.flatten(1).norm(dim=1).clamp_min(1e-300)
    clipped: torch.Tensor = values * (limit / norms).clamp(max=1).view(-1, *[1] * (rows.ndim - 1))
    return clipped


def standard_normal(
    shape: torch.Size, random_bytes: RandomBytes = secrets.token_bytes
) -> torch.Tensor:
    """Draw independent standard normals in float64, by the inverse distribution function.

    A number has a random sign, and a random tail of the distribution beyond it: one of 2^63 parts
    of (0, 1/2), or of 2^127 far out, where the parts would be too coarse. None is beyond 13.2.
    """
    integers = np.frombuffer(random_bytes(8 * shape.numel()), dtype=np.uint64)
    signs = np.where(integers & np.uint64(1), 1.0, -1.0)
    parts = integers >> np.uint64(1)
    tails = parts.astype(np.float64) + 0.5
    far = np.flatnonzero(parts < FINE_TAIL)
    fractions = np.frombuffer(random_bytes(8 * len(far)), dtype=np.uint64)
    tails[far] = parts[far].astype(np.float64) + (fractions.astype(np.float64) + 0.5) / 2**64
    return torch.from_numpy(signs * -ndtri(tails / 2**64)).view(shape)


def mean_distance(encodings: torch.Tensor) -> float:
    """Return the mean distance of encodings [C, ...] from their mean, a public unit of clipping.

    With a single encoding, return its norm.
    """
    rows = encodings.double().flatten(1)
    centered = rows - rows.mean(dim=0) if len(rows) > 1 else rows
    return float(centered.norm(dim=1).mean())


@cache
def noise_multiplier(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Return the deviation of DP-SGD's noise in units of the gradient clipping bound.

    It is the smallest, to a thousandth, with which `steps` sums of images, each sampled with the
    probability `rate`, are (epsilon, delta)-differentially private for one image replaced.
    """
    # Takes seconds to import, and nothing else needs it
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def training(multiplier: float) -> dp_accounting.DpEvent:
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        step = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    calibrated: float = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(relation), training, epsilon, delta, tol=1e-3
    )
    return calibrated


def permute_and_flip(
    counts: Sequence[int], epsilon: float, below: RandomBelow = secrets.randbelow
) -> int:
    """Return the index of a large count by a noisy argmax (permute-and-flip).

    McKenna & Sheldon, arXiv 2010.12603, algorithm 1. Candidates come in a random order. Candidate r
    is accepted with the probability exp(epsilon (q_r - q*) / 2), else the next one is tried; q* is
    the largest count, which is always accepted.

    Replacing one image changes each count by at most one, so the choice is epsilon-differentially
    private. Where a replacement only increments one count, or only decrements one, the choice is
    epsilon / 2-private. The probabilities are exact: no logarithm is rounded (Canonne, Kamath &
    Steinke, arXiv 2004.00010, algorithm 1).

    Args:
        counts: of every candidate.
        epsilon: above 0.
        below: the source of randomness.
    """
    largest = max(counts)
    candidates = list(range(len(counts)))
    while True:
        candidate = candidates.pop(below(len(candidates)))
        if bernoulli_exp(Fraction(epsilon) * (largest - counts[candidate]) / 2, below):
            return candidate
