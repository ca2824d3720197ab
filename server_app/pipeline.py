"""The server's half of a method that samples, from payloads to global models.

Plan -> render -> look for liars -> train -> ask what each client gave.

A method gives what is its own. That is its sampler; where they differ, also its plan and its
training.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from osfl.payload.kinds import Payload
from server_app import public_domains
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.contribution import report_influences
from server_app.defenses.label_consistency import without_doubted
from server_app.defenses.label_filter import second_opinions, without_doubtful
from server_app.synthesis.images import SyntheticSet, render
from server_app.synthesis.plan import ImageJob, balanced_counts, plan_counts, plan_images
from server_app.synthesis.workers import MakeSampler, Sample
from server_app.training import train_global

P = TypeVar("P", bound=Payload)
Models = dict[str, GlobalModel]  # by the names of the strategies


def plan_held(job: ServerJob, payloads: Mapping[str, Any]) -> list[ImageJob]:
    """R images for every client and every class that it holds; or as many of each class in all."""
    per_class = job.config.synthesis.images_per_class
    held = job.held(payloads)
    if job.config.class_balance:
        counts = balanced_counts(held, per_class)
        return plan_counts(job.config.method, job.config.seed, counts)
    return plan_images(job.config.method, job.config.seed, held, per_class)


def train_one(job: ServerJob, payloads: Mapping[str, Any], images: SyntheticSet) -> Models:
    """One global model on all images, FT; or on those whose class a second opinion sees."""
    teacher = None
    if job.config.label_check != "none":
        opinions = second_opinions(job, images)
        if job.config.label_check == "filter":
            images = without_doubtful(job, images, opinions)
        else:
            teacher = opinions
    return {"FT": train_global(job, "FT", images.pixels, images.labels, teacher, 1.0)}


def _in_float32(job: ServerJob) -> ServerJob:
    """The same job, drawn by networks in float32."""
    synthesis = replace(job.config.synthesis, dtype="float32")
    return replace(job, config=replace(job.config, synthesis=synthesis))


def synthesise_and_train(
    job: ServerJob,
    payloads: Mapping[str, P],
    sampler: Callable[[ServerJob, torch.device, Mapping[str, P]], Sample],
    *,
    plan: Callable[[ServerJob, Mapping[str, P]], list[ImageJob]] = plan_held,
    train: Callable[[ServerJob, Mapping[str, P], SyntheticSet], Models] = train_one,
    divisible: bool = True,
) -> Models:
    """Plan the images, render those that are not there yet, and train on all of them.

    Public domains' images, where the run asks for them, are among them; those of clients whose
    classes the kit does not see are not, where it says `robust = "exclude"`.

    Args:
        payloads: by client; empty for a method whose clients send nothing.
        sampler: loads the kit on a device; what it gives back draws a batch, whose rows may belong
            to different clients and classes. Every worker calls it once.
        plan: which images to draw.
        train: the global models of the images.
        divisible: whether a unit of images may be sampled in batches.

    Raises:
        PayloadError: a client's payload leads the sampling or the training astray.
        NotFiniteError: the sampling is led astray, and by no payload.
        PrecisionError: the kit's networks overflow in the number format of `synthesis.dtype`.
    """

    def drawing(in_float32: bool) -> MakeSampler:
        def make_sampler(device: torch.device) -> Sample:
            return sampler(_in_float32(job) if in_float32 else job, device, payloads)

        return public_domains.with_public(job, make_sampler)

    planned = plan(job, payloads) + public_domains.plan(job)
    others = public_domains.ingredients(job)
    images = render(job, planned, drawing(False), divisible, others, drawing(True))
    believed, images = without_doubted(job, payloads, images)
    models = train(job, believed, images)
    report_influences(job, believed, images)
    return models
