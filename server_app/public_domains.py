"""Domains that the server adds by name (`public-domains`).

The base diffusion model may know domains that no client has. In each public domain, images of every
class are sampled from the prompt of prompts-domain and added to the clients' images. The global
model then also learns domains of its later users. None of the papers does this.
"""

from collections.abc import Mapping
from functools import cache
from typing import cast

import torch

from osfl.methods import server_module
from osfl.payload.kinds import Domain
from osfl.util.prompts import to_words
from osfl.util.text import safe_name
from server_app.context import ServerJob
from server_app.synthesis.plan import ImageJob, plan_images
from server_app.synthesis.workers import MakeSampler, Sample


def owner_id(name: str) -> str:
    """Return the owner id of a public domain.

    It contains a dot, which client ids do not, so it cannot collide with one.
    """
    return f"public.{safe_name(to_words(name))}"


def plan(job: ServerJob) -> list[ImageJob]:
    """Plan R images of every class in every public domain."""
    labels_of = dict.fromkeys(
        map(owner_id, job.config.public_domain_names), range(len(job.classes))
    )
    per_class = job.config.synthesis.images_per_class
    return plan_images(job.config.method, job.config.seed, labels_of, per_class)


def ingredients(job: ServerJob) -> dict[str, str]:
    """Return a text per domain that identifies its images, as a digest does for a client's payload.

    It enters the names of the domain's work units.
    """
    settings = job.config.prompts_domain
    return {
        owner_id(name): f"{name} by {settings.prompt} at {settings.guidance}"
        for name in job.config.public_domain_names
    }


def add_public_domains(job: ServerJob, make_sampler: MakeSampler) -> MakeSampler:
    """Extend a sampler factory so that its samplers also sample the public domains' images."""
    domains: Mapping[str, Domain] = {
        owner_id(name): Domain(job.classes, name) for name in job.config.public_domain_names
    }
    if not domains:
        return make_sampler

    def make(device: torch.device) -> Sample:
        @cache
        def sampler(public: bool) -> Sample:
            # Called only when needed, because it loads the kit
            if public:
                return cast(Sample, server_module("prompts-domain").sampler(job, device, domains))
            return make_sampler(device)

        # All images of a work unit have the same owner
        return lambda jobs: sampler(jobs[0].client in domains)(jobs)

    return make
