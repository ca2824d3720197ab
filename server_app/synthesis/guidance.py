"""Guidance terms, which turn noise predictions or classifiers into a guided noise prediction.

All functions take batches whose rows may belong to different classes and clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from osfl.models.classifiers import normalize
from osfl.models.conditioning import Conditioning, concatenate
from osfl.models.diffusion import Kit


@dataclass(frozen=True)
class Condition:
    """A condition of the guidance, with its scale.

    Attributes:
        c: the conditions of B rows.
        scale: guidance scale.
    """

    c: Conditioning
    scale: float


def compose(
    kit: Kit, z: torch.Tensor, t: torch.Tensor, c0: Conditioning, conditions: Sequence[Condition]
) -> torch.Tensor:
    """Compose conditions: e = e0 + sum_i g_i (e_i - e0).

    This is compositional guidance (Liu et al., arXiv 2206.01714; FedDEO, eq. 5). With one condition
    it is classifier-free guidance (Ho & Salimans, arXiv 2207.12598) in diffusers' convention: scale
    1 gives the condition's own prediction. All branches go through the UNet in one batch. Outside
    the kit's guidance interval (Kynkaanniemi et al., arXiv 2404.07724), an approximation that is
    off by default, the conditions' predictions are averaged by their scales, without e0.

    Args:
        z: [B, c, h, w].
        t: timestep, [].
        c0: condition of the empty prompt or a negative prompt, one row.
        conditions: the conditions i with their scales g_i.

    Returns:
        The guided noise prediction, [B, c, h, w].
    """
    # If all scales are 0, e0 is the prediction at every step
    has_scale = any(condition.scale for condition in conditions)
    # e0 + 1 (e1 - e0) = e1
    is_plain_condition = [condition.scale for condition in conditions] == [1.0]
    if is_plain_condition or (has_scale and not _is_guided(kit, t)):
        return _weighted_mean(kit, z, t, conditions)
    branches = concatenate([c0.expand(len(z)), *(condition.c for condition in conditions)])
    num_branches = 1 + len(conditions)
    predictions = kit.eps(z.repeat(num_branches, 1, 1, 1), t, branches)
    e0, *conditional = predictions.chunk(num_branches)
    e = e0
    for e_i, condition in zip(conditional, conditions, strict=True):
        # FedDEO, eq. 5: e = e0 + sum_i g_i (e_i - e0)
        e = e + condition.scale * (e_i - e0)
    return e


def _is_guided(kit: Kit, t: torch.Tensor) -> bool:
    low = kit.sampling.guided_from
    high = kit.sampling.guided_to
    # Without an interval t is not read, because that synchronizes with the GPU
    return (low, high) == (0, 1000) or low <= int(t) <= high


def _weighted_mean(
    kit: Kit, z: torch.Tensor, t: torch.Tensor, conditions: Sequence[Condition]
) -> torch.Tensor:
    """Return the mean of the conditions' predictions, weighted by their scales."""
    branches = concatenate([condition.c for condition in conditions])
    predictions = kit.eps(z.repeat(len(conditions), 1, 1, 1), t, branches)
    conditional = predictions.chunk(len(conditions))
    total = sum(condition.scale for condition in conditions)
    return sum(
        (
            condition.scale / total * e_i
            for condition, e_i in zip(conditions, conditional, strict=True)
        ),
        start=torch.zeros_like(z),
    )


@dataclass(frozen=True)
class Teacher:
    """A client's frozen classifier F_k and its BatchNorm layers."""

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
    """Return L = w CE(F_k(x), y) + lambda L_BN of each image, [B].

    FedLMG, eq. 7 and 9; FedCADO, eq. 4. `L_BN = sum_l ||mu_l - mu_kl||_2 + ||var_l - var_kl||_2`
    over the inputs of every BatchNorm layer l.

    Args:
        teacher: F_k, whose running statistics are mu_kl and var_kl.
        images: x, [B, 3, H, W] in about [-1, 1].
        labels: y, [B].
        classifier_weight: w.
        bn_weight: lambda; 0 skips L_BN.
        size: side in pixels at which the classifier was trained; None: H.
        bn_statistics: `image`: mu_l and var_l are over each image's positions, so that an image
            does not depend on its batch. `unit`: they are over all B images, which must then be a
            whole work unit.
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
        logits = teacher.model(normalize(images, teacher.model))
    finally:
        for hook in hooks:
            hook.remove()
    # FedLMG, eq. 9: L = w CE(F_k(x), y) + lambda L_BN
    loss = classifier_weight * F.cross_entropy(logits, labels, reduction="none")
    if bn_weight > 0:
        for norm, x in zip(teacher.norms, inputs, strict=True):
            mean_k = cast(torch.Tensor, norm.running_mean)
            var_k = cast(torch.Tensor, norm.running_var)
            dims = (2, 3) if bn_statistics == "image" else (0, 2, 3)
            mu = x.mean(dim=dims).view(-1, x.shape[1])
            var = x.var(dim=dims, unbiased=False).view(-1, x.shape[1])
            # FedLMG, eq. 7: L_BN = sum_l ||mu_l - mu_kl||_2 + ||var_l - var_kl||_2
            loss = loss + bn_weight * (_norm(mu - mean_k) + _norm(var - var_k))
    return loss


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Return ||x||_2 of each row. The floor keeps the gradient finite at x = 0."""
    return x.square().sum(dim=1).clamp_min(1e-12).sqrt()


def guide(
    z: torch.Tensor, e: torch.Tensor, a_t: torch.Tensor, loss: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return e + scale sqrt(1 - a_t) grad_z L.

    This is classifier guidance (Dhariwal & Nichol, arXiv 2105.05233, algorithm 2, with
    log p = -L). FedLMG and FedCADO print a minus, which would increase the loss L.

    Args:
        z: the leaf tensor that `loss` was computed from.
        e: the noise prediction, detached here.
        a_t: cumulative alpha of the timestep.
        loss: L of each image, [B]. Rows are independent (except for statistics over a unit), so the
            gradient of the sum is each row's own.
        scale: s.
    """
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    # FedLMG, eq. 10, with the opposite sign: e + s sqrt(1 - a_t) grad_z L
    return e.detach() + scale * (1 - a_t).sqrt() * gradient
