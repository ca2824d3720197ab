"""DP-SGD (Abadi et al., arXiv 1607.00133, algorithm 1): differentially private classifier training.

Each step samples every image with the same probability, clips each image's gradient, and adds
Gaussian noise to their sum. Sampling and noise use the operating system's randomness.

Differences from the paper:

1. Theirs: the moments accountant, for one image added or removed. Ours: dp-accounting's privacy
   loss distributions (Koskela et al., arXiv 1906.03049), for one image replaced.
2. BatchNorm mixes the images of a batch, and its statistics are computed from all images. Theirs
   has no BatchNorm. Ours freezes it at the initial weights, which are public: it only shifts and
   scales.
"""

import math
import secrets
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from client_app.context import Progress
from client_app.privacy.mechanisms import RandomBytes, add_noise, noise_multiplier
from osfl.config import ClassifierConfig, RunConfig
from osfl.models.classifiers import ClassifierError, normalize
from osfl.models.training import (
    Augmentation,
    new_augmentation,
    new_average,
    new_schedule,
    trainable_parameters,
)
from osfl.util.costs import FlopMeter
from osfl.util.pixels import Pixels, to_float

# Images whose gradients are held in memory in parallel
PARALLEL_IMAGES = 8
# Maps images' rows to their gradients [B, ...], one tensor per trained parameter
GradientsOf = Callable[[torch.Tensor], list[torch.Tensor]]


def fit_private(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    config: RunConfig,
    device: torch.device,
    meter: FlopMeter,
    progress: Progress,
    random_bytes: RandomBytes = secrets.token_bytes,
) -> nn.Module:
    """Train a classifier in place with an (epsilon, delta)-DP guarantee, on cross-entropy.

    The guarantee covers the replacement of one image and its label; the number of images is public.
    Takes as many steps as `osfl.models.training.fit`, of as many images on average, always in
    float32.

    Args:
        pixels: [N, 3, S, S] uint8.
        labels: [N] int64.
        config: `classifier`, `epsilon`, `delta` and `clip-gradient`.
        random_bytes: the source of randomness.

    Raises:
        ClassifierError: the weights are not finite.
    """
    settings = config.classifier
    count = len(labels)
    rate = min(1.0, settings.batch_size / count)
    steps = settings.steps or settings.epochs * math.ceil(count / settings.batch_size)
    # Calibrating the noise may take half a minute
    progress(0, steps, "training step")
    limit = config.clip_gradient
    sigma = limit * noise_multiplier(rate, steps, config.epsilon, config.delta)
    model = model.to(device).eval()
    parameters = trainable_parameters(model, settings.trained)
    augment = new_augmentation(settings.augmentation, pixels[torch.tensor([0])].shape[-1])
    gradients_of = partial(
        _gradients_of, model, pixels, labels, settings.label_smoothing, augment, random_bytes
    )
    # The average cost of all steps: the true cost would reveal how many images each has sampled
    meter.total += round(rate * count * steps * _flops_per_image(gradients_of))

    def set_gradients() -> None:
        rows = poisson_sample(count, rate, random_bytes)
        sums = _summed_gradients(gradients_of, rows, parameters, limit)
        _set_noisy_gradients(parameters, sums, sigma, rate * count, random_bytes)

    _take_steps(model, parameters, settings, steps, set_gradients, progress)
    _check_finite(model, settings.lr)
    return model.requires_grad_(True).eval()


def _take_steps(
    model: nn.Module,
    parameters: list[nn.Parameter],
    settings: ClassifierConfig,
    steps: int,
    set_gradients: Callable[[], None],
    progress: Progress,
) -> None:
    """Take the steps of SGD, with the schedule and the weight averaging of `fit`."""
    optimizer = torch.optim.SGD(
        parameters, settings.lr, settings.momentum, weight_decay=settings.weight_decay
    )
    scheduler = new_schedule(optimizer, settings, steps)
    average = new_average(model, settings)
    for step in range(1, steps + 1):
        set_gradients()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
        progress(step, steps, "training step")
    if average is not None:
        model.load_state_dict(average.module.state_dict())


def _check_finite(model: nn.Module, lr: float) -> None:
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise ClassifierError(
            f"training diverged; lower classifier.lr = {lr:g}, which also multiplies the noise"
        )


def _flops_per_image(gradients_of: GradientsOf) -> int:
    meter = FlopMeter()
    meter.run("image", partial(gradients_of, torch.tensor([0])))
    return meter.total


def _set_noisy_gradients(
    parameters: list[nn.Parameter],
    sums: list[torch.Tensor],
    sigma: float,
    batch_size: float,
    random_bytes: RandomBytes,
) -> None:
    for p, gradient in zip(parameters, sums, strict=True):
        # Algorithm 1: g <- (sum of g_i + N(0, sigma^2 C^2 I)) / L, L images on average
        p.grad = (add_noise(gradient, sigma, random_bytes) / batch_size).to(p)


def _gradients_of(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    smoothing: float,
    augment: Augmentation | None,
    random_bytes: RandomBytes,
    rows: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients [B, ...] of some rows' images, augmented one by one."""
    device = next(model.parameters()).device
    batch = pixels[rows]
    if augment is not None:
        batch = torch.stack([augment_separately(augment, image, random_bytes) for image in batch])
    images = normalize(to_float(batch.to(device)), model)
    return per_image_gradients(model, images, labels[rows].to(device), smoothing)


def _summed_gradients(
    gradients_of: GradientsOf,
    rows: torch.Tensor,
    parameters: list[nn.Parameter],
    limit: float,
) -> list[torch.Tensor]:
    """Return the sum over rows of clipped gradients, zeros if there are no rows."""
    sums = [torch.zeros_like(p) for p in parameters]
    for part in rows.split(PARALLEL_IMAGES) if len(rows) else ():
        # Algorithm 1: g <- g / max(1, |g| / C)
        clipped = clipped_sum(gradients_of(part), limit)
        sums = [a + b for a, b in zip(sums, clipped, strict=True)]
    return sums


def augment_separately(
    augment: Augmentation, image: torch.Tensor, random_bytes: RandomBytes
) -> torch.Tensor:
    """Augment an image with its own random seed.

    With one stream for all images, sampling an image would shift the augmentations of those after
    it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(random_bytes(8)) >> 1)
        return augment(image)


def poisson_sample(
    count: int, rate: float, random_bytes: RandomBytes = secrets.token_bytes
) -> torch.Tensor:
    """Sample rows of 0 to `count` - 1, each with probability `rate` (Poisson sampling)."""
    integers = np.frombuffer(random_bytes(8 * count), dtype=np.uint64) >> np.uint64(11)
    # Uniform on a grid in [0, 1), so that a rate of 1 samples all rows
    return torch.from_numpy(integers.astype(np.float64) / 2**53 < rate).nonzero().flatten()


def per_image_gradients(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> list[torch.Tensor]:
    """Return each trained parameter's gradient of every image's own loss: tensors [B, ...]."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(
        parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor
    ) -> torch.Tensor:
        logits = functional_call(model, parameters, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0), label_smoothing=smoothing)

    return list(vmap(grad(loss), in_dims=(None, 0, 0))(trained, images, labels).values())


def clipped_sum(per_image: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """Sum per-image gradients, each clipped to a norm of at most `limit` over all tensors.

    An image whose norm is NaN or infinite contributes nothing.

    Args:
        per_image: tensors [B, ...].
    """
    flat = [g.flatten(1) for g in per_image]
    # In float32 the norm of millions of numbers would come out too small
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in flat]
    norm = torch.stack(norms).norm(dim=0)
    factor = torch.where(norm.isfinite(), (limit / norm.clamp_min(1e-300)).clamp(max=1), 0)
    sums = []
    for g in per_image:
        finite = torch.where(norm.isfinite().view(-1, *[1] * (g.ndim - 1)), g, 0)
        sums.append(torch.einsum("b...,b->...", finite, factor.to(g.dtype)))
    return sums
