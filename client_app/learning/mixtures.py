"""Gaussian mixtures of a class, by scikit-learn's EM."""

import torch
from sklearn.mixture import GaussianMixture


def fit_mixture(
    rows: torch.Tensor, components: int, seed: int, covariance: str = "diag"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Gaussian mixture of rows [N, ...], at least `components` of them.

    Args:
        covariance: diag, a variance for each number of a row; or spherical, one for all.

    Returns:
        weights [M], means [M, ...], variances [M, ...] or, spherical, [M].
    """
    shape = rows.shape[1:]
    mixture = GaussianMixture(components, covariance_type=covariance, random_state=seed % 2**32)
    mixture.fit(rows.flatten(1).double().numpy())
    weights, means, variances = (
        torch.from_numpy(v).float()
        for v in (mixture.weights_, mixture.means_, mixture.covariances_)
    )
    if covariance == "diag":
        variances = variances.view(components, *shape)
    return weights, means.view(components, *shape), variances


def padded_mixture(
    rows: torch.Tensor, components: int, seed: int, covariance: str = "diag"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `fit_mixture`, of any number of rows: components beyond them have weight 0."""
    count = min(components, len(rows))
    # scikit-learn wants two rows; the same one twice is the same mixture
    enough = rows if len(rows) > 1 else torch.cat([rows, rows])
    weights, means, variances = fit_mixture(enough, count, seed, covariance)
    unused = components - count
    return (
        torch.cat([weights, torch.zeros(unused)]),
        torch.cat([means, torch.zeros(unused, *means.shape[1:])]),
        torch.cat([variances, torch.zeros(unused, *variances.shape[1:])]),
    )
