"""DP-SGD (Abadi et al., arXiv 1607.00133, algorithm 1): a classifier's training with a guarantee.

Each step takes every image with the same probability, cuts each one's gradient, and adds Gaussian
noise to their sum. Which images, and the noise, come from the operating system.

Differences from the paper:

1. Theirs: the moments accountant, for one image added or removed. Ours: dp-accounting's privacy
   loss distributions (Koskela et al., arXiv 1906.03049), for one image replaced.
2. BatchNorm mixes the images of a batch, and its statistics are of them all. Theirs has none of it.
   Ours leaves it as it is in the initial weights, which are public: it moves and scales.
"""

import math
import secrets
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from client_app.context import Progress
from client_app.privacy.mechanisms import Bytes, noise_multiplier, standard_normal
from osfl.config import RunConfig
from osfl.models.classifiers import ClassifierError, normalise
from osfl.models.training import (
    Augmentation,
    new_augmentation,
    new_average,
    new_schedule,
    trained_part,
)
from osfl.util.costs import FlopMeter
from osfl.util.pixels import Pixels, to_float

AT_ONCE = 8  # images whose gradients are held side by side


def fit_private(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    config: RunConfig,
    device: torch.device,
    meter: FlopMeter,
    progress: Progress,
    chance: Bytes = secrets.token_bytes,
) -> nn.Module:
    """Train in place on cross-entropy, (epsilon, delta)-differentially private for one image, and
    its label, replaced; how many images there are is taken to be known.

    As many steps as `osfl.models.training.fit` takes, of as many images on average; always in
    float32.

    Args:
        pixels: [N, 3, S, S] uint8.
        labels: [N] int64.
        config: `classifier`, `epsilon`, `delta` and `clip-gradient`.
        chance: where chance comes from.

    Raises:
        ClassifierError: the weights are not finite.
    """
    settings = config.classifier
    count = len(labels)
    rate = min(1.0, settings.batch_size / count)
    steps = settings.steps or settings.epochs * math.ceil(count / settings.batch_size)
    # To find the least noise may take half a minute
    progress(0, steps, "training step")
    limit = config.clip_gradient
    sigma = limit * noise_multiplier(rate, steps, config.epsilon, config.delta)
    model = model.to(device)
    learned = trained_part(model, settings.trained)
    model.eval()
    optimiser = torch.optim.SGD(
        learned, settings.lr, settings.momentum, weight_decay=settings.weight_decay
    )
    scheduler = new_schedule(optimiser, settings, steps)
    average = new_average(model, settings)
    augment = new_augmentation(settings.augmentation, pixels[torch.tensor([0])].shape[-1])

    def gradients_of(rows: torch.Tensor) -> list[torch.Tensor]:
        taken = pixels[rows]
        if augment is not None:
            taken = torch.stack([by_itself(augment, image, chance) for image in taken])
        images = normalise(to_float(taken.to(device)), model)
        return gradients(model, images, labels[rows].to(device), settings.label_smoothing)

    # What all steps cost on average: the true cost would tell how many images each has taken
    of_one = FlopMeter()
    of_one.run("image", partial(gradients_of, torch.tensor([0])))
    meter.total += round(rate * count * steps * of_one.total)
    for done in range(1, steps + 1):
        total = [torch.zeros_like(p) for p in learned]
        rows = sampled(count, rate, chance)
        for part in rows.split(AT_ONCE) if len(rows) else ():
            # Algorithm 1: g <- g / max(1, |g| / C)
            cut = clipped_sum(gradients_of(part), limit)
            total = [one + more for one, more in zip(total, cut, strict=True)]
        for p, gradient in zip(learned, total, strict=True):
            noise = sigma * standard_normal(p.shape, chance)
            # Algorithm 1: g <- (sum of g_i + N(0, sigma^2 C^2 I)) / L, L images on average
            p.grad = (gradient + noise.to(p)) / (rate * count)
        optimiser.step()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
        progress(done, steps, "training step")
    model.requires_grad_(True)
    if average is not None:
        model.load_state_dict(average.module.state_dict())
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise ClassifierError(
            f"training diverged; lower classifier.lr = {settings.lr:g}, which also multiplies the "
            "noise"
        )
    return model.eval()


def by_itself(augment: Augmentation, image: torch.Tensor, chance: Bytes) -> torch.Tensor:
    """An image augmented by chance that no other image shares.

    Of one stream for all, an image that is taken would shift what those after it get.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(chance(8)) >> 1)
        return augment(image)


def sampled(count: int, rate: float, chance: Bytes = secrets.token_bytes) -> torch.Tensor:
    """Rows of 0 to `count` - 1, each with the probability `rate` (Poisson sampling)."""
    whole = np.frombuffer(chance(8 * count), dtype=np.uint64) >> np.uint64(11)
    # Even steps in [0, 1), so that a rate of 1 takes all
    return torch.from_numpy(whole.astype(np.float64) / 2**53 < rate).nonzero().flatten()


def gradients(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> list[torch.Tensor]:
    """Of the loss of every image [B, ...] by itself, for each parameter that is trained."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(
        parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor
    ) -> torch.Tensor:
        logits = functional_call(model, parameters, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0), label_smoothing=smoothing)

    return list(vmap(grad(loss), in_dims=(None, 0, 0))(trained, images, labels).values())


def clipped_sum(of_each: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """The sum over images, each cut so that its norm over all tensors is at most `limit`.

    One whose norm is NaN or infinite gives nothing.

    Args:
        of_each: tensors [B, ...].
    """
    flat = [g.flatten(1) for g in of_each]
    # In 64 bits: in 32 the norm of millions of numbers comes out too small
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in flat]
    norm = torch.stack(norms).norm(dim=0)
    factor = torch.where(norm.isfinite(), (limit / norm.clamp_min(1e-300)).clamp(max=1), 0)
    found = []
    for g in of_each:
        known = torch.where(norm.isfinite().view(-1, *[1] * (g.ndim - 1)), g, 0)
        found.append(torch.einsum("b...,b->...", known, factor.to(g.dtype)))
    return found
