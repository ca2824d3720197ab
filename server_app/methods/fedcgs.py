"""FedCGS: a linear head in closed form on a frozen network; no diffusion, no training.

Guan et al. (AAAI 2025, arXiv 2503.06962): features of all classes are taken as Gaussians of one
covariance, whose means and covariance the clients' sums give exactly, whatever their skew.

    mu_j = A_j / N_j,    Sigma = (B - N mu mu^T) / (N - 1)
    w_j = Sigma^-1 mu_j, b_j = log(N_j / N) - mu_j^T Sigma^-1 mu_j / 2

Differences from the paper:

1. Theirs: the inverse of Sigma. Ours: of (1 - gamma) Sigma + gamma tr(Sigma) / D I, with gamma =
   `fedcgs.shrinkage`, for with fewer images than features Sigma has no inverse. 0 is theirs.
2. Theirs has a class without images at log 0. Ours: such a class is never chosen.
3. Theirs goes on to train a model of each client's own with the global statistics. Not ours.
4. Theirs adds clients as they are. A client that states far more images than the others counts here
   for fewer of them (`max-weight-ratio`, server_app/defenses/image_counts.py).
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from osfl.payload.kinds import FeatureStatistics, Payload
from osfl.payload.wire import PayloadError
from osfl.util.costs import Stopwatch
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.image_counts import class_weights
from server_app.heads import NEVER, store_with_head

# Of the moments' trace: by how much rounding to 32 bits may lower an eigenvalue of their scatter.
ROUNDING = 1e-4


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """The clients' frozen network with the head that their statistics give."""
    statistics = cast(Mapping[str, FeatureStatistics], payloads)
    watch = Stopwatch()
    job.status.phase("solving for the head")
    weights = class_weights(payloads, job.config.max_weight_ratio)
    weight, bias = closed_form_head(
        statistics, job.held(payloads), len(job.classes), job.config.fedcgs.shrinkage, weights
    )
    images = sum(int(payload.counts.sum()) for payload in statistics.values())
    return store_with_head(job, "FedCGS", weight, bias, images, watch)


def closed_form_head(
    statistics: Mapping[str, FeatureStatistics],
    held: Mapping[str, list[int]],
    classes: int,
    shrinkage: float,
    weights: Mapping[str, Sequence[float]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [C, D] and bias [C] of the head, float32.

    Args:
        held: the labels of each client's rows.
        shrinkage: gamma, 0 to 1.
        weights: the factor of the images of each client's classes; None: 1 for all.
    """
    width = next(iter(statistics.values())).sums.shape[1]
    counts = torch.zeros(classes, dtype=torch.float64)
    sums = torch.zeros(classes, width, dtype=torch.float64)
    moments = torch.zeros(width, width, dtype=torch.float64)
    # By name, for sums of floats depend on their order
    for client in sorted(statistics):
        labels = torch.tensor(held[client])
        own = weighted(statistics[client], weights[client] if weights else ())
        counts.index_add_(0, labels, own[0])
        sums.index_add_(0, labels, own[1])
        moments += own[2]
    n = counts.sum()
    mu = sums.sum(dim=0) / n
    # FedCGS: Sigma = (B - N mu mu^T) / (N - 1)
    sigma = (moments - n * torch.outer(mu, mu)) / (n - 1)
    sigma = (sigma + sigma.T) / 2
    floor = sigma.trace() / width
    shrunk = (1 - shrinkage) * sigma + shrinkage * floor * torch.eye(width, dtype=torch.float64)
    present = counts > 0
    means = sums[present] / counts[present, None]
    # FedCGS: w_j = Sigma^-1 mu_j, b_j = log pi_j - mu_j^T Sigma^-1 mu_j / 2
    solved = torch.linalg.lstsq(shrunk, means.T).solution.T
    weight = torch.zeros(classes, width, dtype=torch.float64)
    weight[present] = solved
    bias = torch.full((classes,), NEVER, dtype=torch.float64)
    bias[present] = (counts[present] / n).log() - (means * solved).sum(dim=1) / 2
    return weight.float(), bias.float()


def weighted(
    payload: FeatureStatistics, weights: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, sums and moments of as many images as the weights leave, in 64 bits.

    They have the same class means and the same covariance within the classes.

    Args:
        weights: the factor of each class's images, 0 to 1; none: 1 for all.
    """
    counts = payload.counts.double()
    sums = payload.sums.double()
    moments = payload.moments.double()
    if min(weights, default=1.0) == 1.0:
        return counts, sums, moments
    means = sums / counts[:, None]
    within = moments - sums.T @ means
    left = torch.tensor(weights, dtype=torch.float64) * counts
    sums = left[:, None] * means
    return left, sums, left.sum() / counts.sum() * within + sums.T @ means


def check_statistics(payload: FeatureStatistics, client: str) -> None:
    """Check that one client's counts, sums and moments can be those of any images at all.

    By the Cauchy-Schwarz inequality n_j sum f f^T - A_j A_j^T is positive semidefinite for the n_j
    features f of a class j, so B - sum_j A_j A_j^T / n_j is, too: the scatter within the classes.

    Raises:
        PayloadError: they cannot: the features would have a negative variance in some direction.
    """
    moments = payload.moments.double()
    scale = moments.diagonal().abs().max().clamp_min(1e-12)
    if (moments - moments.T).abs().max() > ROUNDING * scale:
        raise PayloadError(client, "moments", "are not symmetric")
    sums = payload.sums.double()
    between = sums.T @ (sums / payload.counts.double()[:, None])
    scatter = (moments + moments.T) / 2 - between
    slack = ROUNDING * moments.trace().abs() * torch.eye(len(moments), dtype=torch.float64)
    if torch.linalg.cholesky_ex(scatter + slack).info != 0:
        raise PayloadError(
            client,
            "moments",
            "are of no features: with these counts and sums some variance within the classes would "
            "be negative",
        )
