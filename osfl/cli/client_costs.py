"""Estimates of what a client computes for a method, in FLOPs, from settings and shapes alone."""

from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from osfl.cli.run_clients import Client
from osfl.config import ClassifierConfig, ConditionTraining, RunConfig
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.methods import METHODS
from osfl.models.classifiers import meta_classifier
from osfl.models.diffusion import unet_flops

# FLOPs of a pass with gradients, in forward passes: of the weights, and through frozen weights
TRAINING = 3
THROUGH_FROZEN = 2


def client_flops(client: Client) -> float | None:
    """Return the estimated FLOPs of a client's work over all rounds; None if they are unknown.

    The VAE, which encodes each image once, captioners and encoders are left out.

    Raises:
        FileNotFoundError, KitError: the kit is missing or corrupt.
    """
    config = client.config
    method = METHODS[config.method]
    images = len(client.labels)
    if method.rounds:
        passes = images * config.rounds.local_epochs * config.rounds.count
        return TRAINING * passes * _classifier_flops(config)
    if method.client is None:
        return 0.0
    if method.sends_classifier:
        passes = _trained_images(config.classifier, images, 1)
        return TRAINING * passes * _classifier_flops(config)
    if method.features:
        return images * _classifier_flops(config)
    return _denoising_flops(client)


def _denoising_flops(client: Client) -> float | None:
    settings: Any = client.config.method_settings
    images = len(client.labels)
    if hasattr(settings, "draws"):
        rows = images * settings.draws * len(settings.words)
        return float(rows * unet_flops(find_kit(client.config.sampling_kit)))
    if not all(hasattr(settings, name) for name in ("epochs", "batch_size")):
        # Prompts and mixtures need no UNet; captioners and encoders are not estimated
        return None if METHODS[client.config.method].client_parts else 0.0
    # A condition for each class, or for each cluster of it; else one for all images
    groups = 1
    if isinstance(settings, ConditionTraining):
        groups = len(client.held) * getattr(settings, "clusters", 1)
    rows = _trained_images(settings, images, groups)
    return float(THROUGH_FROZEN * rows * unet_flops(find_kit(client.config.sampling_kit)))


def _trained_images(settings: Any, images: int, groups: int) -> int:
    """Return the number of images in all training steps together.

    Args:
        groups: the number of trainings, among which the images are divided.
    """
    steps = getattr(settings, "steps", 0)
    if steps:
        return int(groups * steps * min(settings.batch_size, max(1, images // groups)))
    return int(images * settings.epochs)


def _classifier_flops(config: RunConfig) -> float:
    settings = config.classifier
    return _forward_flops(settings, len(class_names(config.data)), config.data.image_size)


@lru_cache(maxsize=8)
def _forward_flops(settings: ClassifierConfig, classes: int, side: int) -> float:
    """Return the FLOPs of a classifier's forward pass for one image."""
    model = meta_classifier(settings.architecture, classes, settings.small_stem).eval()
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, side, side))
    return float(counter.get_total_flops())
