"""Client half of FedPFT: Gaussian mixtures of a frozen network's features; nothing is trained.

Beitollahi et al., "Parametric Feature Transfer: One-shot Federated Learning with Foundation Models"
(arXiv 2402.01862). A client fits a mixture to each class's penultimate-layer features f(x) by EM,
and sends it with the class's image count.

Differences from the paper:

1. Theirs: CLIP's or an ImageNet network's features. Ours: `classifier.architecture` at
   `classifier.init`, any classifier of torchvision, timm or the hub that ends with a linear layer.
2. Theirs: also full covariances. Ours: spherical and diagonal ones.
3. Theirs: 16-bit numbers. Ours: 32-bit.
4. Their code skips a class with no more images than components. Ours uses fewer components and pads
   the tensors with components of weight 0.
5. Theirs has a variant with differential privacy, with one Gaussian per class. Ours with `epsilon`:
   one Gaussian with noise on its mean and mean squares, of features clipped to `clip-norm` times
   the square root of their width.

What it reveals: image count and mean features of each class, or of groups in it, with which a
receiver could search a public collection. With as many components as images, each image's features.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.features import width_and_features
from client_app.learning.mixtures import padded_mixture
from client_app.privacy.mechanisms import clip_rows, noise_deviation, private_mean
from osfl.config import RunConfig
from osfl.payload.kinds import FeatureMixtures
from osfl.util.seeds import seed_of


def make_payload(job: ClientJob) -> FeatureMixtures:
    """Fit a mixture to the features of each class's images.

    Raises:
        ClassifierError: the architecture or initialization is unknown, or the classifier does not
            end in a linear layer.
    """
    settings = job.config.fedpft
    images = job.load(job.config.data.image_size)
    width, batches = width_and_features(job, images)
    features = torch.cat([batch for _, batch in batches])
    # scikit-learn adds 1e-6 to each variance, whatever the scale of the features
    scale = torch.ones(()) if job.config.epsilon else features.std().clamp_min(1e-30)
    class_labels = images.held()
    names = tuple(job.classes[label] for label in class_labels)
    mixtures = []
    for label, name in zip(class_labels, names, strict=True):
        if job.config.epsilon:
            rows = features[images.labels == label]
            mixtures.append(
                private_gaussian(rows, job.config, settings.covariance, settings.components)
            )
            continue
        seed = seed_of(job.config.seed, "fedpft mixture", job.client, name)
        rows = features[images.labels == label] / scale
        # FedPFT, section 4.1: EM for the class-conditional features
        mixtures.append(padded_mixture(rows, settings.components, seed, settings.covariance))
    weights, means, variances = (torch.stack(part) for part in zip(*mixtures, strict=True))
    counts = torch.bincount(images.labels, minlength=len(job.classes))
    shape = (
        len(class_labels),
        settings.components,
        1 if settings.covariance == "spherical" else width,
    )
    spreads = (variances * scale.square()).view(shape)
    return FeatureMixtures(names, counts[class_labels], weights, means * scale, spreads)


def private_gaussian(
    features: torch.Tensor, config: RunConfig, covariance: str, components: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit one (epsilon, delta)-DP Gaussian to a class's features [N, D].

    Args:
        config: its epsilon, delta and clipping bound.
        covariance: `spherical` or `diag`, as `fedpft.covariance`.
        components: K.

    Returns:
        weights [K], of which one is 1; means [K, D]; variances [K, 1] or [K, D].
    """
    width = features.shape[1]
    limit = config.clip_norm * width**0.5
    limited = clip_rows(features, limit)
    squares = limited.square()
    if covariance == "spherical":
        squares = squares.sum(dim=1, keepdim=True)
    # |x| <= C and |x^2| <= |x|^2 <= C^2, so that (x, x^2 / C) has a norm of at most C sqrt(2)
    joint = torch.cat([limited, squares / limit], dim=1)
    joint_limit = limit * 2**0.5
    noisy = private_mean(
        joint, torch.zeros_like(joint[0]), joint_limit, config.epsilon, config.delta
    )
    mean = noisy[:width]
    # In expectation, squaring a noisy number adds the noise's variance
    sigma = noise_deviation(joint_limit, len(features), config.epsilon, config.delta)
    squared_mean = mean.square() - sigma**2
    entries = 1
    if covariance == "spherical":
        squared_mean = squared_mean.sum()
        entries = width
    # E x^2 - (E x)^2. Noise may push it below 0 or above the maximum for clipped features
    variance = ((limit * noisy[width:] - squared_mean) / entries).clamp(0, limit**2 / entries)
    weights = torch.zeros(components)
    weights[0] = 1
    means = torch.zeros(components, width)
    means[0] = mean
    variances = torch.zeros(components, len(variance))
    variances[0] = variance
    return weights, means, variances
