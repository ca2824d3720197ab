"""Noise that the clients of a secure sum add together, once for the federation.

Each client adds discrete Gaussian noise to its integers before it masks them. In the sum of t
clients the noises add up to that of the guarantee. t is the size of the smallest sum that any
server can open (`Roster.smallest_sum`), so that larger sums have more noise than they need. Noise
in integers avoids the attack on the rounding of floating-point noise (Mironov, 2012).

A sum of integers with the sensitivity D in Euclidean norm, to which t clients add independent
discrete Gaussians N_Z(0, s^2)^d, is e^2/2-concentrated differentially private (Kairouz, Liu &
Steinke, "The Distributed Discrete Gaussian Mechanism", ICML 2021, theorem 1), with

    e = min(sqrt(D^2 / (t s^2) + tau d / 2), D / (sqrt(t) s) + tau sqrt(d))
    tau = 10 sum_{k=1}^{t-1} exp(-2 pi^2 s^2 k / (k + 1))

`MIN_DEVIATION` makes tau less than 1e-1000 for any t below 1e6, so e = D / (sqrt(t) s). The bound
on the Renyi divergences is then that of a Gaussian with the deviation sqrt(t) s, which
`sum_multiplier` converts to epsilon and delta.
"""

import math
import secrets
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np

from client_app.privacy.bernoulli import RandomBelow, bernoulli_exp
from osfl.config import ConfigError, RunConfig
from osfl.payload.masking import Numbers
from osfl.payload.summands import NOISY_TENSORS, RANGE, Layout
from osfl.util.files import read_record, write_record

_RECORD = "sum-noise.json"
# Smallest deviation s of a client's noise, in integers
MIN_DEVIATION = 20
# Relative rounding error of the payload's mean, which is in float32
FLOAT32_ERROR = 2.0**-24


@dataclass
class SumNoise:
    """The clipping bound of an image's contribution to a client's means; 0 before it is known."""

    limit: float = 0.0

    def store(self, folder: Path) -> None:
        """Keep the bound beside the payload."""
        write_record(folder / _RECORD, {"limit": self.limit})

    @classmethod
    def load(cls, folder: Path) -> "SumNoise | None":
        """Return the bound of the payload in a folder; None if its noise is not added here.

        Raises:
            CorruptFileError: the record is corrupt.
        """
        file = folder / _RECORD
        return cls(**read_record(file)) if file.exists() else None

    def draw(self, layout: Layout, config: RunConfig, contributors: int) -> Numbers:
        """Draw a client's share of the noise, for all its integers; 0 where none is needed.

        Args:
            contributors: t, the number of clients whose noises together make the guarantee.

        Raises:
            ConfigError: the integers are too coarse for the noise, or the noise exceeds them.
        """
        noise = np.zeros(layout.size, dtype=np.uint32)
        for name in NOISY_TENSORS:
            if name in layout.shapes:
                deviation = self.deviation(layout, name, config, contributors)
                place = layout.place(name)
                noise[place] = discrete_gaussians(deviation, place.stop - place.start)
        return noise

    def deviation(self, layout: Layout, name: str, config: RunConfig, contributors: int) -> int:
        """Return the standard deviation s of a client's noise, in integers.

        It depends on settings alone, because the noises of all clients must be alike.

        Raises:
            ConfigError: it is below `MIN_DEVIATION`, or the sum's is beyond its range.
        """
        step = layout.step(name)
        shape = layout.shapes[name]
        # An image contributes to the mean of one class, or of the domain
        width = math.prod(shape if name == "domain" else shape[1:])
        # Twice the rounding of a number: to a whole number, and of the mean in float32, whose
        # product with the images is at most the limit
        rounding = 1 + 2 * layout.limit(name) * FLOAT32_ERROR / step
        # D of theorem 1: replacing an image moves the sum by at most twice the clipping bound
        sensitivity = 2 * self.limit / step + rounding * math.sqrt(width)
        total = sum_multiplier(config.epsilon, config.delta) * sensitivity
        deviation = math.ceil(total / math.sqrt(contributors))
        if deviation < MIN_DEVIATION:
            raise ConfigError(
                f"secure-sum-images = {config.secure_sum_images}: the numbers of the sum are too "
                "coarse for its noise; lower it, or secure-sum-bound"
            )
        # Six deviations of the sum must fit beside the numbers
        if 6 * deviation * math.sqrt(layout.members) > RANGE // 2:
            raise ConfigError(
                f"secure-sum-images = {config.secure_sum_images}: the noise of epsilon = "
                f"{config.epsilon:g} exceeds the sum's range; raise it, or secure-sum-bound"
            )
        return deviation


@cache
def sum_multiplier(epsilon: float, delta: float) -> float:
    """Return the deviation of the sum's noise in units of its sensitivity.

    It is the smallest one, to a thousandth, for which the Renyi divergences of a Gaussian imply
    (epsilon, delta)-differential privacy.
    """
    # Takes seconds to import, and nothing else needs it
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    multiplier: float = dp_accounting.calibrate_dp_mechanism(
        RdpAccountant, dp_accounting.GaussianDpEvent, epsilon, delta, tol=1e-3
    )
    return multiplier


def discrete_gaussians(
    deviation: int, count: int, below: RandomBelow = secrets.randbelow
) -> Numbers:
    """Draw independent discrete Gaussians N_Z(0, s^2) modulo 2^32."""
    draws = [discrete_gaussian(deviation, below) for _ in range(count)]
    return np.array(draws, dtype=np.int64).astype(np.uint32)


def discrete_gaussian(deviation: int, below: RandomBelow = secrets.randbelow) -> int:
    """Draw from N_Z(0, s^2): the probability of x is proportional to exp(-x^2 / 2 s^2).

    Canonne, Kamath & Steinke, arXiv 2004.00010, algorithm 3; exact.

    Args:
        deviation: s, a whole number.
        below: the source of randomness.
    """
    scale = deviation + 1
    variance = deviation**2
    while True:
        draw = _discrete_laplace(scale, below)
        # Algorithm 3: accept y with probability exp(-(|y| - s^2 / scale)^2 / 2 s^2)
        distance = abs(draw) * scale - variance
        if bernoulli_exp(Fraction(distance**2, 2 * variance * scale**2), below):
            return draw


def _discrete_laplace(scale: int, below: RandomBelow) -> int:
    """Draw x with a probability proportional to exp(-|x| / scale) (algorithm 2)."""
    while True:
        remainder = below(scale)
        if not bernoulli_exp(Fraction(remainder, scale), below):
            continue
        quotient = 0
        while bernoulli_exp(Fraction(1), below):
            quotient += 1
        magnitude = remainder + scale * quotient
        is_negative = below(2) == 1
        # Otherwise 0, with either sign, would be drawn twice as often
        if not (is_negative and magnitude == 0):
            return -magnitude if is_negative else magnitude
