"""Client half of latent-gaussian: moments of each class's latents; nothing is trained.

Ours, near FedKT-CSD (arXiv 2607.07565), of which we know the abstract alone. A client encodes its
images by the kit's autoencoder, and sends each class's image count n, and the sums of the latents z
and of z^2 over its images. It needs the autoencoder alone. The sums of clients add up.

Differences from the paper: not known beyond its abstract. Choices of ours:

1. The latent of an image is the mean of its posterior E(x).
2. With `epsilon`: FedPFT's noisy Gaussian per class, of latents clipped to `clip-norm` times the
   square root of their size, and the sums that follow from it.

What it reveals: the mean latent of each class decodes to a blurred image. For a class with one
image, the sum is that image's latent.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.methods.fedpft import private_gaussian
from osfl.config import RunConfig
from osfl.kit.kits import kit_image_size
from osfl.models.diffusion import load_kit_autoencoder
from osfl.payload.kinds import LatentStatistics
from osfl.payload.wire import MAX_MAGNITUDE

# Of a latent: its square and as large a variance stay below the limit of a mean
LARGEST_MEAN = (0.4 * MAX_MAGNITUDE) ** 0.5


def make_payload(job: ClientJob) -> LatentStatistics:
    """Return counts, sums and sums of squares of the latents of each class.

    Raises:
        KitError: the kit is missing or corrupt.
    """
    images = job.load(kit_image_size(job.kit))
    autoencoder = load_kit_autoencoder(job.kit, job.device)
    latents = posteriors(autoencoder, images, job)[0].double().cpu()
    class_labels = images.held()
    moments = [class_moments(latents[images.labels == label], job.config) for label in class_labels]
    sums, squares = (torch.stack(part).float() for part in zip(*moments, strict=True))
    counts = torch.bincount(images.labels, minlength=len(job.classes))[class_labels]
    names = tuple(job.classes[label] for label in class_labels)
    return LatentStatistics(names, counts, sums, squares)


def class_moments(latents: torch.Tensor, config: RunConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of a class's latents [n, c, h, w] and of their squares, each [c, h, w]."""
    if not config.epsilon:
        return latents.sum(dim=0), latents.square().sum(dim=0)
    private = private_gaussian(latents.flatten(1), config, "diag", components=1)
    mean, variance = (part[0].double().view(latents.shape[1:]) for part in private[1:])
    # Noise must not push them beyond what a server accepts of a mean; this reveals nothing more
    mean = mean.clamp(-LARGEST_MEAN, LARGEST_MEAN)
    variance = variance.clamp(max=LARGEST_MEAN**2)
    count = len(latents)
    return count * mean, count * (variance + mean.square())
