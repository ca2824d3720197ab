"""FedPFT's server half: a linear head trained on features sampled from Gaussian mixtures.

FedPFT (Beitollahi et al., arXiv 2402.01862), section 4: for every client and class, as many
features are sampled as there were images. The head is trained on all of them by cross-entropy.

Differences from the paper:

1. Theirs: steps of AdamW. Ours: scikit-learn's logistic regression on standardized features, with
   an L2 penalty of 1 / `fedpft.inverse-penalty`, until convergence.
2. Theirs: as many features as images. Ours: at most `fedpft.samples` per client and class, weighted
   by the number of images. The weight of a client that states far more images than the others is
   capped (`max-weight-ratio`).
3. Ours: a class that no client holds is never predicted.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from osfl.config import FedPFTConfig
from osfl.payload.kinds import FeatureMixtures, Payload
from osfl.util.costs import Stopwatch
from osfl.util.seeds import generator_of
from server_app.context import GlobalModel, ServerJob
from server_app.costs import NoisyMean
from server_app.defenses.image_counts import class_weights
from server_app.heads import NEVER_PREDICTED, store_with_head


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """Return the clients' frozen network with a head trained on features from their mixtures."""
    mixtures = cast(Mapping[str, FeatureMixtures], payloads)
    settings = job.config.fedpft
    watch = Stopwatch()
    job.status.phase("training the head")
    features, labels, shares = sample_features(
        mixtures,
        job.held(payloads),
        settings.samples,
        job.config.seed,
        class_weights(payloads, job.config.max_weight_ratio),
    )
    weight, bias = train_head(features, labels, shares, len(job.classes), settings)
    images = sum(int(payload.counts.sum()) for payload in mixtures.values())
    return store_with_head(job, "FedPFT", weight, bias, images, watch)


def sample_features(
    mixtures: Mapping[str, FeatureMixtures],
    labels_of: Mapping[str, list[int]],
    limit: int,
    seed: int,
    weights: Mapping[str, Sequence[float]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample features [N, D] with labels [N] and the number of images that each stands for [N].

    Args:
        labels_of: the label of each of a client's rows.
        limit: upper bound of the features per client and class.
        seed: of the run; each client and class has its own random stream.
        weights: factors of the images of each client's classes; None: 1 for all.
    """
    features = []
    labels = []
    shares = []
    for client in sorted(mixtures):
        payload = mixtures[client]
        for row, label in enumerate(labels_of[client]):
            generator = generator_of(seed, "fedpft", client, payload.classes[row])
            count = int(payload.counts[row])
            weight = weights[client][row] if weights else 1.0
            num_samples = min(count, limit)
            component = torch.multinomial(
                payload.weights[row], num_samples, replacement=True, generator=generator
            )
            # FedPFT, section 4.2: f ~ sum_k pi_k N(mu_k, Sigma_k)
            mean = payload.means[row, component]
            deviation = payload.variances[row, component].sqrt()
            noise = torch.randn(mean.shape, generator=generator)
            features.append(mean + deviation * noise)
            labels.append(torch.full((num_samples,), label))
            shares.append(torch.full((num_samples,), weight * count / num_samples))
    return torch.cat(features), torch.cat(labels), torch.cat(shares)


def train_head(
    features: torch.Tensor,
    labels: torch.Tensor,
    shares: torch.Tensor,
    classes: int,
    settings: FedPFTConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train a linear head: weight [C, D] and bias [C] for unstandardized features, float32.

    It minimizes sum_i share_i (-log softmax(W z_i + b)_y_i) + |W|^2 / (2 inverse-penalty), where z
    are the standardized features.

    Args:
        features: [N, D].
        labels: y, [N].
        shares: sample weights, [N].
        classes: C.
    """
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    bias = torch.full((classes,), float(NEVER_PREDICTED), dtype=torch.float64)
    present = labels.unique()
    bias[present] = 0
    if len(present) > 1:
        scaler = StandardScaler().fit(features.double().numpy(), sample_weight=shares.numpy())
        z = scaler.transform(features.double().numpy())
        regression = LogisticRegression(C=settings.inverse_penalty, max_iter=settings.iterations)
        regression.fit(z, labels.numpy(), sample_weight=shares.double().numpy())
        coefficients = np.atleast_2d(regression.coef_) / scaler.scale_
        intercepts = regression.intercept_ - coefficients @ scaler.mean_
        # With two classes, scikit-learn returns the second one's row only; the first one's is 0
        rows = present[-len(coefficients) :]
        weight[rows] = torch.from_numpy(coefficients)
        bias[rows] = torch.from_numpy(intercepts)
    return weight.float(), bias.float()


def noisy_mean(sizes: Mapping[str, int]) -> NoisyMean:
    """Return a class's means and mean squares, whose common guarantee doubles the variance."""
    return NoisyMean(2 * sizes["f"])
