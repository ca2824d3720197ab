"""The analytic Gaussian mechanism, from its definition."""

import math

from scipy import optimize, stats


def least_sigma(epsilon: float, delta: float) -> float:
    """Balle & Wang, theorem 8, for a sensitivity of 1; by plain bisection."""

    def exceeds(sigma: float) -> float:
        near = stats.norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        far = stats.norm.cdf(-1 / (2 * sigma) - epsilon * sigma)
        return float(near - math.exp(epsilon) * far - delta)

    return float(optimize.bisect(exceeds, 0.05, 100))
