"""mixed's server half: images from different kinds of payload, and one global model of them all.

Each method's own server half plans its clients' images and samples them, so that they equal those
of a pure run with the same seed, clients and counts. All methods share one frozen kit. One model is
trained on all images. Where a method has teachers (FedLMG, FedCADO), they label their own clients'
images softly. With `mixed.teacher` a foundation model labels all images softly: a head on frozen
features, from statistics that clients send in the same messages, or a CLIP with the classes' names.

The rule for counts is one for all: R images per client and class, or with `class-balance` equally
many of every class, shared by all clients that hold it.

Differences from the paper: none; it is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from osfl.config import ConfigError, RunConfig, all_parts, loads_clip
from osfl.methods import METHODS, server_module
from osfl.models.training import Distillation
from osfl.payload.kinds import Payload, Sent, by_method
from server_app import costs
from server_app.context import ServerJob
from server_app.defenses.label_filter import apply_label_filter
from server_app.distillation import head_distillation
from server_app.methods.zero_shot import load_classifier
from server_app.pipeline import Models, Recipe, recipe_of, train_on
from server_app.synthesis.images import SyntheticSet, finish_work, plan_work
from server_app.synthesis.plan import ImageJob, balanced_counts
from server_app.synthesis.workers import Sample
from server_app.training import train_global

# The name of the global model that is trained on images
NAME = "Mixed"


def run(job: ServerJob, payloads: Mapping[str, Sent]) -> Models:
    """Sample the images of every kind of payload, and train one global model on all of them.

    A head on frozen features, from payloads beside those that make images, is a further model.
    """
    recipes = recipes_of(job, payloads)
    if job.config.public_domain_names:
        recipes.append(Recipe(job, {}, _no_sampler, plan=_no_images))
    works = [
        plan_work(recipe.job, *recipe.inputs(has_public_domains=not recipe.payloads))
        for recipe in recipes
    ]
    images = finish_work(job, works)
    return train_on(job, payloads, images, partial(_train, recipes=recipes))


def recipes_of(job: ServerJob, payloads: Mapping[str, Sent]) -> list[Recipe[Any]]:
    """Return the recipe of each method whose payloads make images, in the run's order.

    Raises:
        ConfigError: a method has none.
    """
    counts = _balanced_counts(job, payloads)
    return [
        _recipe(half, sent, counts)
        for half, sent in _half_jobs(job, payloads)
        if METHODS[half.config.method].samples
    ]


def _half_jobs(
    job: ServerJob, payloads: Mapping[str, Sent]
) -> list[tuple[ServerJob, dict[str, Payload]]]:
    """Return the job of each method's server half and its clients' payloads, in the run's order."""
    sent = by_method(payloads, job.kinds)
    return [
        (replace(job, config=config, clients=tuple(sent[method])), sent[method])
        for method, config in all_parts(job.config).items()
        if method in sent
    ]


def _balanced_counts(
    job: ServerJob, payloads: Mapping[str, Sent]
) -> dict[tuple[str, int], int] | None:
    """Return image counts that are balanced over all clients; None without `class-balance`."""
    if not job.config.class_balance:
        return None
    return balanced_counts(job.held(payloads), job.config.synthesis.images_per_class)


def _recipe(
    job: ServerJob,
    payloads: Mapping[str, Payload],
    counts: Mapping[tuple[str, int], int] | None,
) -> Recipe[Any]:
    """Return the recipe with which a method's server half would make images and models.

    Args:
        counts: as `Mixing`.

    Raises:
        ConfigError: it has none.
    """
    recipe = recipe_of(job, payloads, counts)
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"mixed.methods: method {job.config.method!r} must call "
            "server_app.pipeline.synthesize_and_train to be mixed; remove it from the list"
        )
    return recipe


def _no_images(job: ServerJob, payloads: Mapping[str, Any]) -> list[ImageJob]:
    return []


def _no_sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Any]) -> Sample:
    raise AssertionError("images of public domains have a sampler of their own")


def _train(
    job: ServerJob,
    payloads: Mapping[str, Sent],
    images: SyntheticSet,
    *,
    recipes: Sequence[Recipe[Any]],
) -> Models:
    """Train the global model on all images, each with the soft targets of its own method.

    Args:
        payloads: those of all clients that the defense has not dropped.
    """
    images, filter_teacher = apply_label_filter(job, images)
    heads = _heads(job, payloads)
    terms = [_own_targets(recipe, payloads, images) for recipe in recipes]
    terms.append(_head_targets(job, heads, images))
    distillations = tuple(term for term in terms if term is not None)
    model = train_global(
        job, NAME, images.pixels, images.labels, filter_teacher, 1.0, distillations
    )
    models = {NAME: model}
    for of_method in heads.values():
        models.update(of_method)
    return models


def _heads(job: ServerJob, payloads: Mapping[str, Sent]) -> dict[str, Models]:
    """Return the models of the methods whose payloads make no images, by method."""
    return {
        half.config.method: server_module(half.config.method).run(half, sent)
        for half, sent in _half_jobs(job, payloads)
        if not METHODS[half.config.method].samples
    }


def _head_targets(
    job: ServerJob, heads: Mapping[str, Models], images: SyntheticSet
) -> Distillation | None:
    """Return the soft targets of the run's teacher for all images; None without a teacher."""
    settings = job.config.method_settings
    scale = (settings.teacher_temperature, settings.teacher_weight)
    if loads_clip(job.config):
        clip, _ = load_classifier(job)
        return head_distillation(clip, images.pixels, job.device, *scale)
    if not settings.teacher:
        return None
    if settings.teacher not in heads:
        job.status.add_warning(
            f"mixed.teacher = {settings.teacher!r}: no client sent its payload; the model was "
            "trained without a teacher"
        )
        return None
    (head,) = heads[settings.teacher].values()
    return head_distillation(head.model, images.pixels, job.device, *scale)


def _own_targets(
    recipe: Recipe[Any], payloads: Mapping[str, Sent], images: SyntheticSet
) -> Distillation | None:
    """Return a method's soft targets for the images of its own clients; zeros for the others.

    Args:
        payloads: those of all clients that a defense has not dropped.
    """
    parts = {client: part for client, part in recipe.payloads.items() if client in payloads}
    rows = [row for row, client in enumerate(images.clients) if client in parts]
    result = recipe.targets(recipe.job, parts, images.select(rows)) if rows else None
    if result is None:
        return None
    targets, weight = result
    teacher = torch.zeros(len(images.labels), targets.shape[1])
    teacher[rows] = targets
    return Distillation(teacher, weight)


def branches(config: RunConfig) -> int:
    """Return the largest number of rows per image of a guided UNet pass of all kinds."""
    return max(costs.branches(part) for part in _sampling_parts(config))


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the UNet rows per image of the kind that takes most."""
    return max(costs.rows_per_image(part, timesteps) for part in _sampling_parts(config))


def _sampling_parts(config: RunConfig) -> list[RunConfig]:
    """Return the settings of all methods that make images."""
    return [part for method, part in all_parts(config).items() if METHODS[method].samples]
