"""Initial weights of the iterative baselines' models."""

import torch

from osfl.config import ClassifierConfig
from osfl.kit.kits import find_kit
from osfl.models.classifiers import new_classifier
from server_app.context import ServerJob


def initial_state(job: ServerJob, settings: ClassifierConfig) -> dict[str, torch.Tensor]:
    """Return the initial weights of one of the run's models."""
    kit = find_kit(job.config.kit) if settings.init == "kit" else ""
    return new_classifier(settings, len(job.classes), kit, job.config.seed).state_dict()
