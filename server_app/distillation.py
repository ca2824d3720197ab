"""Distillation into the global model: from clients' classifiers, or from a head on their features.

The former is FedLMG's, section 3.4; the latter is ours.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from osfl.config import FedLMGConfig, split_names
from osfl.models.classifiers import compute_logits
from osfl.models.training import Distillation
from osfl.payload.kinds import Classifier
from osfl.util.pixels import Pixels
from server_app.context import GlobalModel, ServerJob
from server_app.synthesis.guidance import Teacher
from server_app.synthesis.images import SyntheticSet
from server_app.training import mean_teacher, specific_teacher, train_global

TeachersOf = Callable[[ServerJob, Mapping[str, Classifier]], dict[str, Teacher]]


def train_strategies(
    job: ServerJob,
    payloads: Mapping[str, Classifier],
    images: SyntheticSet,
    *,
    settings: FedLMGConfig,
    teachers_of: TeachersOf,
) -> dict[str, GlobalModel]:
    """Train a global model per strategy.

    FT has no teacher, MD the mean of all classifiers, and SD the classifier of the image's client.

    Args:
        teachers_of: returns the clients' classifiers, frozen.
    """
    networks = {client: teacher.model for client, teacher in teachers_of(job, payloads).items()}
    models = {}
    for strategy in split_names(settings.strategies):
        target = _target(job, payloads, images, networks, (strategy, settings.teacher_mean))
        name = strategy.upper()
        models[name] = train_global(
            job, name, images.pixels, images.labels, target, settings.distillation_weight
        )
    return models


def strategy_targets(
    job: ServerJob,
    payloads: Mapping[str, Classifier],
    images: SyntheticSet,
    *,
    settings: FedLMGConfig,
    teachers_of: TeachersOf,
) -> tuple[torch.Tensor, float] | None:
    """Return the soft targets of the last strategy with a teacher, [N, C], and their loss's weight.

    Returns:
        None if no strategy has a teacher.
    """
    taught = [name for name in split_names(settings.strategies) if name != "ft"]
    if not taught:
        return None
    networks = {client: teacher.model for client, teacher in teachers_of(job, payloads).items()}
    target = _target(job, payloads, images, networks, (taught[-1], settings.teacher_mean))
    return None if target is None else (target, settings.distillation_weight)


def _target(
    job: ServerJob,
    payloads: Mapping[str, Classifier],
    images: SyntheticSet,
    networks: Mapping[str, nn.Module],
    strategy: tuple[str, str],
) -> torch.Tensor | None:
    """Return a strategy's soft targets of the images, [N, C] probabilities; None for ft.

    Args:
        networks: each client's classifier.
        strategy: its name, and the settings' `teacher_mean`.
    """
    name, mean = strategy
    if name == "md":
        is_uniform = mean == "plain"
        labels_of = job.held(payloads)
        return mean_teacher(networks, labels_of, images.pixels, job.device, plain=is_uniform)
    if name == "sd":
        return specific_teacher(networks, images.clients, images.pixels, job.device)
    return None


def head_distillation(
    head: nn.Module, pixels: Pixels, device: torch.device, temperature: float, weight: float
) -> Distillation:
    """Return the loss term in which a frozen network with a head is the teacher of all images.

    Args:
        head: returns logits [N, C].
        pixels: [N, 3, S, S] uint8, at the classifiers' size.
        temperature: T.
        weight: of the term.
    """
    # Hinton et al., section 2: p_T = softmax(logits / T)
    teacher = F.softmax(compute_logits(head, pixels, device) / temperature, dim=1)
    return Distillation(teacher, weight, temperature)
