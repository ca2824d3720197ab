"""Server pipeline of the methods that sample images, from payloads to global models.

Plan -> synthesize -> drop suspicious clients -> train -> estimate contributions.

A method supplies its sampler and, if they differ from the defaults here, its plan and training.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from osfl.payload.kinds import Payload
from server_app import public_domains
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.contribution import report_contributions
from server_app.defenses.label_consistency import drop_flagged
from server_app.defenses.label_filter import cross_fitted_predictions, drop_noisy_labels
from server_app.synthesis.images import SyntheticSet, synthesize
from server_app.synthesis.plan import ImageJob, balanced_counts, plan_counts, plan_images
from server_app.synthesis.workers import MakeSampler, Sample
from server_app.training import train_global

P = TypeVar("P", bound=Payload)
Models = dict[str, GlobalModel]  # by training strategy


def plan_held_classes(job: ServerJob, payloads: Mapping[str, Any]) -> list[ImageJob]:
    """Plan R images per client and held class; with `class-balance`, equally many per class."""
    per_class = job.config.synthesis.images_per_class
    labels_of = job.held(payloads)
    if job.config.class_balance:
        counts = balanced_counts(labels_of, per_class)
        return plan_counts(job.config.method, job.config.seed, counts)
    return plan_images(job.config.method, job.config.seed, labels_of, per_class)


def train_global_model(job: ServerJob, payloads: Mapping[str, Any], images: SyntheticSet) -> Models:
    """Train one global model (FT) on the images.

    With `label-check`, a cross-fitted classifier filters noisy labels or is the teacher.
    """
    teacher = None
    if job.config.label_check != "none":
        opinions = cross_fitted_predictions(job, images)
        if job.config.label_check == "filter":
            images = drop_noisy_labels(job, images, opinions)
        else:
            teacher = opinions
    return {"FT": train_global(job, "FT", images.pixels, images.labels, teacher, 1.0)}


def _in_float32(job: ServerJob) -> ServerJob:
    """Return the same job with networks in float32."""
    synthesis = replace(job.config.synthesis, dtype="float32")
    return replace(job, config=replace(job.config, synthesis=synthesis))


def synthesize_and_train(
    job: ServerJob,
    payloads: Mapping[str, P],
    sampler: Callable[[ServerJob, torch.device, Mapping[str, P]], Sample],
    *,
    plan: Callable[[ServerJob, Mapping[str, P]], list[ImageJob]] = plan_held_classes,
    train: Callable[[ServerJob, Mapping[str, P], SyntheticSet], Models] = train_global_model,
    divisible: bool = True,
) -> Models:
    """Plan the images, synthesize the missing ones, and train on all of them.

    The images of `public-domains` are added. With `robust = "exclude"`, the images of clients
    flagged by the label-consistency defense are dropped.

    Args:
        payloads: by client; empty for a method whose clients send nothing.
        sampler: loads the kit on a device and returns a function that samples a batch, whose rows
            may belong to different clients and classes. Every worker calls it once.
        plan: returns the images to sample.
        train: returns the global models trained on the images.
        divisible: whether a work unit may be sampled in batches.

    Raises:
        PayloadError: a client's payload makes sampling or training diverge.
        NotFiniteError: sampling diverges without a client's payload.
        PrecisionError: the kit's networks overflow in the number format of `synthesis.dtype`.
    """

    def sampler_factory(in_float32: bool) -> MakeSampler:
        def make_sampler(device: torch.device) -> Sample:
            return sampler(_in_float32(job) if in_float32 else job, device, payloads)

        return public_domains.add_public_domains(job, make_sampler)

    jobs = plan(job, payloads) + public_domains.plan(job)
    public_ingredients = public_domains.ingredients(job)
    images = synthesize(
        job, jobs, sampler_factory(False), divisible, public_ingredients, sampler_factory(True)
    )
    trusted, images = drop_flagged(job, payloads, images)
    models = train(job, trusted, images)
    report_contributions(job, trusted, images)
    return models
