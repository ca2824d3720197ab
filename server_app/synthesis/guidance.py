"""Guidance terms.

Functions that turn noise predictions, or classifiers, into a guided noise prediction.

All take batches whose rows may belong to different classes and clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from osfl.models.classifiers import normalise
from osfl.models.diffusion import Kit


@dataclass(frozen=True)
class Condition:
    """One branch of the guidance."""

    c: torch.Tensor  # [B, L, d]
    scale: float
    image: torch.Tensor | None = None  # [B, 2e], for an unCLIP UNet


def compose(
    kit: Kit, z: torch.Tensor, t: torch.Tensor, c0: torch.Tensor, conditions: Sequence[Condition]
) -> torch.Tensor:
    """e = e0 + sum_i g_i (e_i - e0): compositional guidance (Liu et al., arXiv 2206.01714.

    FedDEO, eq. 5).

    With one condition this is classifier-free guidance (Ho & Salimans, arXiv 2207.12598) in
    diffusers' convention: with the scale 1 it is the condition's own prediction. All branches go
    through the UNet in one batch. Outside of the kit's guidance interval (Kynkaanniemi et al.,
    arXiv 2404.07724), an approximation that is off by default, the conditions' predictions are
    averaged by their scales, without the branch of c0.

    Args:
        z: [B, c, h, w].
        t: timestep, [].
        c0: the empty prompt's encoding, or a negative prompt's, [1, L, d]; with images, its image
            condition is zero, as in Stable unCLIP.
    """
    # Else e0 is the prediction at every step
    weighted = any(condition.scale for condition in conditions)
    # e0 + 1 (e1 - e0) is e1
    alone = [condition.scale for condition in conditions] == [1.0]
    if alone or (weighted and not _is_guided(kit, t)):
        return _unguided(kit, z, t, conditions)
    branches = torch.cat([c0.expand(len(z), -1, -1), *(condition.c for condition in conditions)])
    images = [condition.image for condition in conditions if condition.image is not None]
    image = torch.cat([torch.zeros_like(images[0]), *images]) if images else None
    e0, *others = kit.eps(z.repeat(1 + len(conditions), 1, 1, 1), t, branches, image).chunk(
        1 + len(conditions)
    )
    e = e0
    for e_i, condition in zip(others, conditions, strict=True):
        e = e + condition.scale * (e_i - e0)
    return e


def _is_guided(kit: Kit, t: torch.Tensor) -> bool:
    low = kit.sampling.guided_from
    high = kit.sampling.guided_to
    return (low, high) == (0, 1000) or low <= int(
        t
    ) <= high  # reading t waits for a GPU, so not for nothing


def _unguided(
    kit: Kit, z: torch.Tensor, t: torch.Tensor, conditions: Sequence[Condition]
) -> torch.Tensor:
    images = [condition.image for condition in conditions if condition.image is not None]
    branches = torch.cat([condition.c for condition in conditions])
    image = torch.cat(images) if images else None
    parts = kit.eps(z.repeat(len(conditions), 1, 1, 1), t, branches, image).chunk(len(conditions))
    total = sum(condition.scale for condition in conditions)
    return sum(
        (condition.scale / total * e_i for condition, e_i in zip(conditions, parts, strict=True)),
        start=torch.zeros_like(z),
    )


@dataclass(frozen=True)
class Teacher:
    """A client's classifier F_k and its BatchNorm layers, frozen."""

    model: nn.Module
    norms: tuple[nn.BatchNorm2d, ...]


def as_teacher(model: nn.Module) -> Teacher:
    """Freeze a classifier for guidance."""
    model.eval().requires_grad_(False)
    return Teacher(model, tuple(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)))


def classifier_loss(
    teacher: Teacher,
    images: torch.Tensor,
    labels: torch.Tensor,
    classifier_weight: float,
    bn_weight: float,
    size: int | None = None,
    bn_statistics: str = "image",
) -> torch.Tensor:
    """L = w CE(F_k(x), y) + lambda L_BN for each image (FedLMG, eq. 7 and 9.

    FedCADO, eq. 4), shape [B].

    `L_BN = sum_l ||mu_l - mu_kl||_2 + ||var_l - var_kl||_2` over the inputs of every BatchNorm
    layer.

    Args:
        images: [B, 3, H, W] in about [-1, 1].
        labels: [B].
        size: pixels on a side that the classifier was trained at; None: H.
        bn_statistics: what mu_l and var_l are taken over: `image`, each image's own positions, so
            that an image does not depend on its batch; `unit`, all B images, which must then be a
            whole unit of the plan.
    """
    images = images.clamp(-1, 1)
    if size is not None and images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    inputs: list[torch.Tensor] = []
    hooks = [
        norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for norm in teacher.norms
    ]
    try:
        logits = teacher.model(normalise(images, teacher.model))
    finally:
        for hook in hooks:
            hook.remove()
    loss = classifier_weight * F.cross_entropy(logits, labels, reduction="none")
    if bn_weight > 0:
        for norm, x in zip(teacher.norms, inputs, strict=True):
            mean_k = cast(torch.Tensor, norm.running_mean)
            var_k = cast(torch.Tensor, norm.running_var)
            over = (2, 3) if bn_statistics == "image" else (0, 2, 3)
            mu = x.mean(dim=over).view(-1, x.shape[1])
            var = x.var(dim=over, unbiased=False).view(-1, x.shape[1])
            loss = loss + bn_weight * (_norm(mu - mean_k) + _norm(var - var_k))
    return loss


def _norm(x: torch.Tensor) -> torch.Tensor:
    """||x||_2 of each row; the floor keeps the gradient finite at x = 0."""
    return x.square().sum(dim=1).clamp_min(1e-12).sqrt()


def guide(
    z: torch.Tensor, e: torch.Tensor, a_t: torch.Tensor, loss: torch.Tensor, scale: float
) -> torch.Tensor:
    """e + scale sqrt(1 - a_t) grad_z L.

    Classifier guidance (Dhariwal & Nichol, arXiv 2105.05233, alg. 2, with log p = -L).

    The papers print a minus; with L a loss, that would increase it.

    Args:
        z: the leaf that `loss` was computed from.
        e: the noise prediction, detached here.
        loss: L of each image, [B]; rows are independent (but for statistics over a unit), so the
            gradient of their sum is each row's own.
    """
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    return e.detach() + scale * (1 - a_t).sqrt() * gradient
