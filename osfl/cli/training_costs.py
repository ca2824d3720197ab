"""Estimates of what global models cost: training, by some steps on this machine, and files."""

import time
from dataclasses import replace
from functools import partial

import torch

from osfl.config import ClassifierConfig, RunConfig, split_names
from osfl.data.parts import class_names
from osfl.models.classifiers import build_classifier, meta_classifier
from osfl.models.training import fit, split_batches
from osfl.util.costs import Cost, FlopMeter, time_growing_batches
from osfl.util.devices import pick_device

# The first batch to time; others are twice as large as the one before
FIRST_BATCH = 8
# Seconds after which no larger batch is timed
MEASURE_SECONDS = 5.0


def training_cost(config: RunConfig, images: int) -> Cost | None:
    """Estimate the costs of training a run's global models on its images.

    Teachers, label filters and contributions are left out.

    Args:
        images: the number of synthetic images.

    Returns:
        None if there are too few images to train on.
    """
    settings = config.global_model
    if images < 2:
        return None
    classes = len(class_names(config.data))
    model = build_classifier(settings.architecture, classes, settings.small_stem)
    time_batch = partial(_time_steps, model, config)
    largest = min(settings.batch_size, images)
    per_image = time_growing_batches(time_batch, FIRST_BATCH, largest, MEASURE_SECONDS)
    batches = split_batches(images, settings, config.seed)
    passes = trained_models(config) * sum(map(len, batches))
    return Cost(passes * per_image.flops, passes * per_image.seconds)


def trained_models(config: RunConfig) -> int:
    """Return the number of global models that a run trains on its images."""
    return len(split_names(getattr(config.method_settings, "strategies", "ft")))


def model_bytes(config: RunConfig) -> int:
    """Return the bytes of the global models' weights."""
    settings = config.global_model
    classes = len(class_names(config.data))
    model = meta_classifier(settings.architecture, classes, settings.small_stem)
    tensors = model.state_dict().values()
    size: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return trained_models(config) * size


def _time_steps(model: torch.nn.Module, config: RunConfig, rows: int) -> Cost:
    """Return the costs per image of training steps with `rows` images; the first is not timed."""
    # With a learning rate of 0 nothing diverges
    settings: ClassifierConfig = replace(config.global_model, steps=3, batch_size=rows, lr=0.0)
    side = config.data.image_size
    pixels = torch.randint(256, (rows, 3, side, side), dtype=torch.uint8)
    labels = torch.arange(rows) % len(class_names(config.data))
    ends: list[float] = []
    meter = FlopMeter()
    fit(
        model,
        pixels,
        labels,
        settings,
        config.seed,
        pick_device(config.device),
        meter=meter,
        progress=lambda done, total: ends.append(time.perf_counter()),
    )
    # Counting FLOPs slows the first step down
    seconds = (ends[-1] - ends[1]) / (settings.steps - 1)
    return Cost(meter.total / settings.steps / rows, seconds / rows)
