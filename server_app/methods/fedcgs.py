"""FedCGS's server half: a closed-form linear head on a frozen network, without diffusion.

FedCGS (Guan et al., AAAI 2025, arXiv 2503.06962): the features of each class are modeled as a
Gaussian with a shared covariance. The clients' sums give means and covariance exactly, whatever
their skew.

    mu_j = A_j / N_j,    Sigma = (B - N mu mu^T) / (N - 1)
    w_j = Sigma^-1 mu_j, b_j = log(N_j / N) - mu_j^T Sigma^-1 mu_j / 2

The same sums give two other heads (`fedcgs.head`). "within" is the LDA of GH-OFL (Turazza et al.,
ICLR 2026, arXiv 2602.01186), with the covariance within the C classes that have images:

    Sigma = (B - sum_j A_j A_j^T / N_j) / (N - C)

"ridge" is AFL (He et al., CVPR 2025, arXiv 2405.16240), the least-squares regression of one-hot
labels on features, which has no bias:

    w_j = B^-1 A_j

Differences from the papers:

1. Theirs: the inverse of Sigma. Ours: the inverse of (1 - gamma) Sigma + gamma tr(Sigma) / D I with
   gamma = `fedcgs.shrinkage`, because Sigma is singular with fewer images than features. 0 is
   FedCGS's. AFL adds a multiple of I to each client's B and takes it away afterwards. Ours shrinks
   the sum of all B like Sigma.
2. Theirs: a class without images has the prior log 0. Ours: such a class is never predicted.
3. Theirs: each client then personalizes a model with the global statistics. Ours: no
   personalization.
4. Theirs: clients are summed as they are. Ours: the weight of a client that states far more images
   than the others is capped (`max-weight-ratio`, server_app/defenses/image_counts.py).
5. GH-OFL sends second moments of each class, for its QDA. Its FisherMix and Proto-Hyper heads,
   which are trained on drawn features, are not here; `fedpft` trains on drawn features, too.
6. With a lossy `payload-codec` the clients' scatter within classes comes as a factor, and B is
   computed from it (see 5 in the client half).
7. With `fedcgs.projection` the head W is solved for projected features P f, and W P is the head for
   f.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from osfl.config import ConfigError
from osfl.methods.fedcgs import FedCGSConfig
from osfl.models.classifiers import meta_classifier, remove_head
from osfl.models.projection import random_projection
from osfl.payload.kinds import FeatureStatistics, Payload
from osfl.payload.wire import PayloadError
from osfl.util.costs import Stopwatch
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.image_counts import class_weights
from server_app.heads import NEVER_PREDICTED, store_with_head

# By this share of the moments' trace, rounding to 32 bits may lower an eigenvalue of the scatter
ROUNDING = 1e-4


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """Return the clients' frozen network with the head from their statistics."""
    statistics = cast(Mapping[str, FeatureStatistics], payloads)
    watch = Stopwatch()
    job.status.phase("solving for the head")
    weights = class_weights(payloads, job.config.max_weight_ratio)
    settings = job.config.fedcgs
    weight, bias = closed_form_head(
        statistics, job.held(payloads), len(job.classes), settings, weights
    )
    if settings.projection:
        model = meta_classifier(
            job.config.classifier.architecture, 2, job.config.classifier.small_stem
        )
        projection = random_projection(remove_head(model)[1], settings.projection, job.config.seed)
        weight = (weight.double() @ projection).float()
    images = sum(int(payload.counts.sum()) for payload in statistics.values())
    return store_with_head(job, "FedCGS", weight, bias, images, watch)


def closed_form_head(
    statistics: Mapping[str, FeatureStatistics],
    labels_of: Mapping[str, list[int]],
    classes: int,
    settings: FedCGSConfig,
    weights: Mapping[str, Sequence[float]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve for the head: weight [C, D] and bias [C], float32.

    Args:
        statistics: N_j, A_j and B of each client.
        labels_of: the label of each of a client's rows.
        classes: C.
        settings: head, and gamma (`shrinkage`).
        weights: factors of the images of each client's classes; None: 1 for all.
    """
    width = next(iter(statistics.values())).sums.shape[1]
    counts = torch.zeros(classes, dtype=torch.float64)
    sums = torch.zeros(classes, width, dtype=torch.float64)
    moments = torch.zeros(width, width, dtype=torch.float64)
    # Sorted, because floating-point sums depend on their order
    for client in sorted(statistics):
        labels = torch.tensor(labels_of[client])
        client_counts, client_sums, client_moments = weight_statistics(
            statistics[client], weights[client] if weights else ()
        )
        counts.index_add_(0, labels, client_counts)
        sums.index_add_(0, labels, client_sums)
        moments += client_moments
    has_images = counts > 0
    held_weight, held_bias = _HEADS[settings.head](
        counts[has_images], sums[has_images], moments, settings.shrinkage
    )
    weight = torch.zeros(classes, width, dtype=torch.float64)
    weight[has_images] = held_weight
    bias = torch.full((classes,), NEVER_PREDICTED, dtype=torch.float64)
    bias[has_images] = held_bias
    return weight.float(), bias.float()


def _total_head(
    counts: torch.Tensor, sums: torch.Tensor, moments: torch.Tensor, shrinkage: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the discriminant analysis with the covariance of all features."""
    n = counts.sum()
    mu = sums.sum(dim=0) / n
    # FedCGS: Sigma = (B - N mu mu^T) / (N - 1)
    sigma = (moments - n * torch.outer(mu, mu)) / (n - 1)
    return _discriminant(counts, sums, _shrunk(sigma, shrinkage))


def _within_head(
    counts: torch.Tensor, sums: torch.Tensor, moments: torch.Tensor, shrinkage: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the discriminant analysis with the covariance within classes.

    Raises:
        ConfigError: no class has two images.
    """
    if counts.sum() <= len(counts):
        raise ConfigError(
            "fedcgs.head = 'within': must be total or ridge where every class has a single image, "
            "because such classes have no covariance"
        )
    # GH-OFL: Sigma = (B - sum_j A_j A_j^T / N_j) / (N - C)
    scatter = moments - sums.T @ (sums / counts[:, None])
    freedom = counts.sum() - len(counts)
    return _discriminant(counts, sums, _shrunk(scatter / freedom, shrinkage))


def _ridge_head(
    counts: torch.Tensor, sums: torch.Tensor, moments: torch.Tensor, shrinkage: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the regression of one-hot labels on features."""
    # AFL: w_j = B^-1 A_j, without a bias
    weight = torch.linalg.lstsq(_shrunk(moments, shrinkage), sums.T).solution.T
    return weight, torch.zeros_like(counts)


_HEADS = {"total": _total_head, "within": _within_head, "ridge": _ridge_head}


def _discriminant(
    counts: torch.Tensor, sums: torch.Tensor, sigma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head of Gaussians with a shared covariance: weight [C, D] and bias [C]."""
    # FedCGS: mu_j = A_j / N_j
    means = sums / counts[:, None]
    # FedCGS: w_j = Sigma^-1 mu_j, b_j = log(N_j / N) - mu_j^T Sigma^-1 mu_j / 2
    w = torch.linalg.lstsq(sigma, means.T).solution.T
    return w, (counts / counts.sum()).log() - (means * w).sum(dim=1) / 2


def _shrunk(matrix: torch.Tensor, shrinkage: float) -> torch.Tensor:
    """Return (1 - gamma) M + gamma tr(M) / D I of a symmetric matrix."""
    width = len(matrix)
    scale = matrix.trace() / width
    identity = torch.eye(width, dtype=matrix.dtype)
    return (1 - shrinkage) * (matrix + matrix.T) / 2 + shrinkage * scale * identity


def weight_statistics(
    payload: FeatureStatistics, weights: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return counts, sums and moments, float64, with each class's number of images weighted.

    The class means and the covariance within classes stay the same.

    Args:
        payload: one client's statistics.
        weights: the factor of each class's images, 0 to 1; empty: 1 for all.
    """
    counts = payload.counts.double()
    sums = payload.sums.double()
    moments = payload.moments.double()
    if min(weights, default=1.0) == 1.0:
        return counts, sums, moments
    means = sums / counts[:, None]
    within = moments - sums.T @ means
    weighted_counts = torch.tensor(weights, dtype=torch.float64) * counts
    sums = weighted_counts[:, None] * means
    moments = weighted_counts.sum() / counts.sum() * within + sums.T @ means
    return weighted_counts, sums, moments


def check_statistics(payload: FeatureStatistics, client: str) -> None:
    """Check that some images can have a client's counts, sums and moments.

    By the Cauchy-Schwarz inequality, n_j sum f f^T - A_j A_j^T is positive semidefinite for the n_j
    features f of a class j. So is the scatter within the classes, B - sum_j A_j A_j^T / n_j.

    Raises:
        PayloadError: some direction would have a negative variance.
    """
    moments = payload.moments.double()
    sums = payload.sums.double()
    between = sums.T @ (sums / payload.counts.double()[:, None])
    scatter = moments - between
    slack = ROUNDING * moments.trace().abs() * torch.eye(len(moments), dtype=torch.float64)
    if torch.linalg.cholesky_ex(scatter + slack).info != 0:
        raise PayloadError(
            client,
            "triangle" if payload.factor is None else "factor",
            "cannot come from features: with these counts and sums some variance within classes "
            "would be negative",
        )
