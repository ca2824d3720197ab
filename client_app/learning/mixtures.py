"""Gaussian mixtures of vectors, by scikit-learn's EM."""

import torch
from sklearn.mixture import GaussianMixture

# Weights [M], means and variances [M, ...]
Mixture = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fit_mixture(
    rows: torch.Tensor, components: int, seed: int, covariance: str = "diag"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit a Gaussian mixture to rows [N, ...], where N is at least `components`.

    Args:
        covariance: "diag", a variance per entry of a row; or "spherical", one per component.

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
    """Fit a mixture as `fit_mixture` does, to any number of rows.

    Components beyond the number of rows have weight 0.
    """
    count = min(components, len(rows))
    # scikit-learn requires two rows; one row twice gives the same mixture
    samples = rows if len(rows) > 1 else torch.cat([rows, rows])
    weights, means, variances = fit_mixture(samples, count, seed, covariance)
    unused = components - count
    return (
        torch.cat([weights, torch.zeros(unused)]),
        torch.cat([means, torch.zeros(unused, *means.shape[1:])]),
        torch.cat([variances, torch.zeros(unused, *variances.shape[1:])]),
    )


def diffuse_mixture(mixture: Mixture, a_t: torch.Tensor) -> Mixture:
    """Diffuse a mixture of clean latents forward in closed form.

    A component N(mu, s^2) of z_0 is N(sqrt(a_t) mu, a_t s^2 + 1 - a_t) of z_t (DDPM, eq. 4).

    Args:
        mixture: weights [M], means and variances [M, ...].
        a_t: alphas_cumprod at the timestep, [].
    """
    weights, means, variances = mixture
    return weights, a_t.sqrt() * means, a_t * variances + 1 - a_t
