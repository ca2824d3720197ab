"""FedPFT: Gaussian mixtures of a frozen network's features; nothing is trained.

Beitollahi et al., "Parametric Feature Transfer: One-shot Federated Learning with Foundation Models"
(arXiv 2402.01862). Of features f(x) before the last layer, a client fits a mixture to those of each
class by EM, and sends it with the number of its images.

Differences from the paper:

1. Theirs: CLIP's or an ImageNet network's features. Ours: `classifier.architecture` at
   `classifier.init`, any classifier of torchvision, timm or the hub that ends with a linear layer.
2. Theirs: also full covariances. Ours: spherical ones and diagonal ones.
3. Theirs: numbers of 16 bits. Ours: of 32.
4. Their code leaves out a class with no more images than components. Ours has fewer components, in
   as many places, of which those left over have weight 0.
5. Theirs has a variant with differential privacy, of one Gaussian a class. Ours with `epsilon`: one
   whose mean and mean squares are noised together, of features cut to `clip-norm` times the root of
   their number.

What it gives away: the mean features of each class, or of groups in it, which its owner could
search a public collection with, and how many images there are. With as many components as images,
each image's features.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.features import width_and_features
from client_app.learning.mixtures import padded_mixture
from client_app.privacy.mechanisms import clipped, deviation_of_mean, private_mean
from osfl.config import RunConfig
from osfl.payload.kinds import FeatureMixtures
from osfl.util.seeds import seed_of


def make_payload(job: ClientJob) -> FeatureMixtures:
    """A mixture of the features of each class's images.

    Raises:
        ClassifierError: no such architecture or initialisation, or one without a linear layer at
            its end.
    """
    settings = job.config.fedpft
    images = job.load(job.config.data.image_size)
    width, batches = width_and_features(job, images)
    features = torch.cat([batch for _, batch in batches])
    # scikit-learn adds a millionth to each variance, whatever the network's numbers are like
    scale = torch.ones(()) if job.config.epsilon else features.std().clamp_min(1e-30)
    held = images.held()
    names = tuple(job.classes[label] for label in held)
    mixtures = []
    for label, name in zip(held, names, strict=True):
        if job.config.epsilon:
            mixtures.append(private_gaussian(features[images.labels == label], job.config))
            continue
        seed = seed_of(job.config.seed, "fedpft mixture", job.client, name)
        rows = features[images.labels == label] / scale
        # FedPFT, section 4.1: EM for the class-conditional features
        mixtures.append(padded_mixture(rows, settings.components, seed, settings.covariance))
    weights, means, variances = (torch.stack(part) for part in zip(*mixtures, strict=True))
    counts = torch.bincount(images.labels, minlength=len(job.classes))
    shape = (len(held), settings.components, 1 if settings.covariance == "spherical" else width)
    spreads = (variances * scale.square()).view(shape)
    return FeatureMixtures(names, counts[held], weights, means * scale, spreads)


def private_gaussian(
    features: torch.Tensor, config: RunConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One Gaussian of a class's features [N, D], as the run asks for it.

    Returns:
        weights [K], of which one is 1; means [K, D]; variances [K, 1] or [K, D].
    """
    settings = config.fedpft
    width = features.shape[1]
    limit = config.clip_norm * width**0.5
    kept = clipped(features, limit)
    squares = kept.square()
    if settings.covariance == "spherical":
        squares = squares.sum(dim=1, keepdim=True)
    # |x| <= C and |x^2| <= |x|^2 <= C^2, so that both together have the norm C sqrt(2) at most
    both = torch.cat([kept, squares / limit], dim=1)
    whole = limit * 2**0.5
    noised = private_mean(both, torch.zeros_like(both[0]), whole, config.epsilon, config.delta)
    mean = noised[:width]
    # The square of a noised number is larger by the noise's variance, on average
    sigma = deviation_of_mean(whole, len(features), config.epsilon, config.delta)
    of_mean = mean.square() - sigma**2
    numbers = 1
    if settings.covariance == "spherical":
        of_mean = of_mean.sum()
        numbers = width
    # E x^2 - (E x)^2, which noise may take below 0, and above what cut features can have
    variance = ((limit * noised[width:] - of_mean) / numbers).clamp(0, limit**2 / numbers)
    weights = torch.zeros(settings.components)
    weights[0] = 1
    means = torch.zeros(settings.components, width)
    means[0] = mean
    variances = torch.zeros(settings.components, len(variance))
    variances[0] = variance
    return weights, means, variances
