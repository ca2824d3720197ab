"""Server pipeline of the methods that sample images, from payloads to global models.

Plan -> synthesize -> filter images by the defense -> train -> estimate contributions.

A method supplies its sampler and, if they differ from the defaults here, its plan and training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from osfl.methods import server_module
from osfl.payload.kinds import Sent
from osfl.run_folder.status import DROPPED
from server_app import public_domains
from server_app.context import GlobalModel, Mixing, ServerJob
from server_app.defenses.contribution import report_contributions
from server_app.defenses.filters import drop_clients_without_images, filter_images
from server_app.defenses.label_filter import apply_label_filter
from server_app.synthesis.images import SyntheticSet, synthesize
from server_app.synthesis.plan import ImageJob, balanced_counts, plan_counts, plan_images
from server_app.synthesis.workers import MakeSampler, Sample
from server_app.training import train_global

P = TypeVar("P", bound=Sent)
Models = dict[str, GlobalModel]  # by training strategy
SoftTargets = tuple[torch.Tensor, float]  # [N, C] probabilities, and the weight of their loss
Targets = Callable[[ServerJob, Mapping[str, P], SyntheticSet], SoftTargets | None]


def plan_held_classes(job: ServerJob, payloads: Mapping[str, Any]) -> list[ImageJob]:
    """Plan R images per client and held class; with `class-balance`, equally many per class."""
    per_class = job.config.synthesis.images_per_class
    labels_of = job.held(payloads)
    if job.mixing is not None and job.mixing.counts is not None:
        counts = {pair: n for pair, n in job.mixing.counts.items() if pair[0] in labels_of}
        return plan_counts(job.config.method, job.config.seed, counts)
    if job.config.class_balance:
        counts = balanced_counts(labels_of, per_class)
        return plan_counts(job.config.method, job.config.seed, counts)
    return plan_images(job.config.method, job.config.seed, labels_of, per_class)


def train_global_model(job: ServerJob, payloads: Mapping[str, Any], images: SyntheticSet) -> Models:
    """Train one global model (FT) on the images.

    With `label-filter`, a cross-fitted classifier filters noisy labels or is the teacher.
    """
    images, teacher = apply_label_filter(job, images)
    return {"FT": train_global(job, "FT", images.pixels, images.labels, teacher, 1.0)}


def _in_float32(job: ServerJob) -> ServerJob:
    """Return the same job with networks in float32."""
    synthesis = replace(job.config.synthesis, dtype="float32")
    return replace(job, config=replace(job.config, synthesis=synthesis))


def no_targets(job: ServerJob, payloads: Mapping[str, Any], images: SyntheticSet) -> None:
    """Return None: the clients' payloads contain no teacher."""


@dataclass(frozen=True)
class Recipe(Generic[P]):
    """All that makes images and models from the payloads of a method's clients.

    Attributes:
        payloads: by client; empty for a method whose clients send nothing.
        sampler: loads the kit on a device and returns a function that samples a batch, whose rows
            may belong to different clients and classes. Every worker calls it once.
        plan: returns the images to sample.
        train: returns the global models trained on the images.
        divisible: whether a work unit may be sampled in batches.
        targets: returns the soft targets of the images, of a mixed run's clients with a teacher.
    """

    job: ServerJob
    payloads: Mapping[str, P]
    sampler: Callable[[ServerJob, torch.device, Mapping[str, P]], Sample]
    plan: Callable[[ServerJob, Mapping[str, P]], list[ImageJob]] = plan_held_classes
    train: Callable[[ServerJob, Mapping[str, P], SyntheticSet], Models] = train_global_model
    divisible: bool = True
    targets: Targets[P] = no_targets

    def inputs(
        self, has_public_domains: bool = True
    ) -> tuple[list[ImageJob], MakeSampler, bool, dict[str, str], MakeSampler]:
        """Return the arguments of `synthesize` and `plan_work` after the job.

        Args:
            has_public_domains: whether the images of `public-domains` are among the plan's.
        """
        job = self.job
        public = public_domains.plan(job) if has_public_domains else []
        jobs = self.plan(job, self.payloads) + public
        ingredients = public_domains.ingredients(job)
        in_float32 = self._make_sampler(in_float32=True)
        return jobs, self._make_sampler(False), self.divisible, ingredients, in_float32

    def _make_sampler(self, in_float32: bool) -> MakeSampler:
        def make_sampler(device: torch.device) -> Sample:
            job = _in_float32(self.job) if in_float32 else self.job
            return self.sampler(job, device, self.payloads)

        return public_domains.add_public_domains(self.job, make_sampler)


def synthesize_and_train(
    job: ServerJob,
    payloads: Mapping[str, P],
    sampler: Callable[[ServerJob, torch.device, Mapping[str, P]], Sample],
    *,
    plan: Callable[[ServerJob, Mapping[str, P]], list[ImageJob]] = plan_held_classes,
    train: Callable[[ServerJob, Mapping[str, P], SyntheticSet], Models] = train_global_model,
    divisible: bool = True,
    targets: Targets[P] = no_targets,
) -> Models:
    """Plan the images, synthesize the missing ones, and train on all of them.

    The images of `public-domains` are added. The run's defense (`defense`) may drop images, and
    then the payloads of clients that have none left. In a mixed run the images of all methods are
    made first, by `server_app.methods.mixed`, which gets the recipe and trains.

    Args:
        payloads, sampler, plan, train, divisible, targets: as `Recipe`.

    Raises:
        PayloadError: a client's payload makes sampling or training diverge.
        NotFiniteError: sampling diverges without a client's payload.
        PrecisionError: the kit's networks overflow in the number format of `synthesis.dtype`.
    """
    recipe = Recipe(job, payloads, sampler, plan, train, divisible, targets)
    if job.mixing is not None:
        job.mixing.recipe = recipe
        return {}
    images = synthesize(job, *recipe.inputs())
    return train_on(job, payloads, images, recipe.train)


def recipe_of(
    job: ServerJob,
    payloads: Mapping[str, Any],
    counts: Mapping[tuple[str, int], int] | None = None,
) -> Any:
    """Return the recipe with which a method's server half would make images and models.

    It is None for a half of an installed package that does not call `synthesize_and_train`.

    Args:
        counts: as `Mixing`.
    """
    mixing = Mixing(counts)
    server_module(job.config.method).run(replace(job, mixing=mixing), payloads)
    return mixing.recipe


def train_on(
    job: ServerJob,
    payloads: Mapping[str, P],
    images: SyntheticSet,
    train: Callable[[ServerJob, Mapping[str, P], SyntheticSet], Models],
) -> Models:
    """Train on the images that the run's defense keeps, and report the clients' contributions."""
    trusted_images = filter_images(job, images)
    trusted = drop_clients_without_images(payloads, images, trusted_images)
    for client in payloads.keys() - trusted.keys():
        job.status.stamp(client, DROPPED)
    models = train(job, trusted, trusted_images)
    report_contributions(job, trusted, trusted_images)
    return models
