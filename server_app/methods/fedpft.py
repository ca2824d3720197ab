"""FedPFT: a linear head trained on features that are drawn from the clients' Gaussian mixtures.

Beitollahi et al. (arXiv 2402.01862), section 4: of every client and class, as many features as
there were images; on all of them together, cross-entropy.

Differences from the paper:

1. Theirs: steps of AdamW. Ours: scikit-learn's logistic regression, to the minimum, on features
   with mean 0 and deviation 1, and an L2 penalty of 1 / `fedpft.inverse-penalty`.
2. Theirs: as many features as images. Ours: at most `fedpft.samples` a client and class, which then
   count for as many as the images. A client that states far more images than the others counts for
   fewer (`max-weight-ratio`).
3. A class that no client holds is never chosen.
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
from server_app.defenses.image_counts import class_weights
from server_app.heads import NEVER, store_with_head


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """The clients' frozen network with the head that features from their mixtures train."""
    mixtures = cast(Mapping[str, FeatureMixtures], payloads)
    settings = job.config.fedpft
    watch = Stopwatch()
    job.status.phase("training the head")
    features, labels, shares = drawn_features(
        mixtures,
        job.held(payloads),
        settings.samples,
        job.config.seed,
        class_weights(payloads, job.config.max_weight_ratio),
    )
    weight, bias = trained_head(features, labels, shares, len(job.classes), settings)
    images = sum(int(payload.counts.sum()) for payload in mixtures.values())
    return store_with_head(job, "FedPFT", weight, bias, images, watch)


def drawn_features(
    mixtures: Mapping[str, FeatureMixtures],
    held: Mapping[str, list[int]],
    limit: int,
    seed: int,
    weights: Mapping[str, Sequence[float]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features [N, D], their labels [N], and how many images each stands for [N].

    Args:
        held: the labels of each client's rows.
        limit: the most that are drawn of a client's class.
        seed: of the draws, which are each client's and class's own.
        weights: the factor of the images of each client's classes; None: 1 for all.
    """
    features = []
    labels = []
    shares = []
    for client in sorted(mixtures):
        payload = mixtures[client]
        for row, label in enumerate(held[client]):
            generator = generator_of(seed, "fedpft", client, payload.classes[row])
            count = int(payload.counts[row])
            weight = weights[client][row] if weights else 1.0
            drawn = min(count, limit)
            component = torch.multinomial(
                payload.weights[row], drawn, replacement=True, generator=generator
            )
            # FedPFT, section 4.2: f ~ sum_k pi_k N(mu_k, Sigma_k)
            mean = payload.means[row, component]
            deviation = payload.variances[row, component].sqrt()
            noise = torch.randn(mean.shape, generator=generator)
            features.append(mean + deviation * noise)
            labels.append(torch.full((drawn,), label))
            shares.append(torch.full((drawn,), weight * count / drawn))
    return torch.cat(features), torch.cat(labels), torch.cat(shares)


def trained_head(
    features: torch.Tensor,
    labels: torch.Tensor,
    shares: torch.Tensor,
    classes: int,
    settings: FedPFTConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [C, D] and bias [C] of a linear head for features as they are, float32.

    It minimises sum_i share_i (-log softmax(W z_i + b)_y_i) + |W|^2 / (2 inverse-penalty), with z
    the standardised features.

    Args:
        features: [N, D].
        labels: [N].
        shares: how much each counts, [N].
    """
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    bias = torch.full((classes,), float(NEVER), dtype=torch.float64)
    present = labels.unique()
    bias[present] = 0
    if len(present) > 1:
        scaler = StandardScaler().fit(features.double().numpy(), sample_weight=shares.numpy())
        z = scaler.transform(features.double().numpy())
        regression = LogisticRegression(C=settings.inverse_penalty, max_iter=settings.iterations)
        regression.fit(z, labels.numpy(), sample_weight=shares.double().numpy())
        coefficients = np.atleast_2d(regression.coef_) / scaler.scale_
        intercepts = regression.intercept_ - coefficients @ scaler.mean_
        # Of two classes it has the second's row alone: the first's is 0
        rows = present[-len(coefficients) :]
        weight[rows] = torch.from_numpy(coefficients)
        bias[rows] = torch.from_numpy(intercepts)
    return weight.float(), bias.float()
