"""Domains that the server adds by name (`public-domains`): what no client has, the kit may know.

Every class is drawn in each of them from the prompt of prompts-domain, beside the clients' images.
The global model then learns domains that are none of the clients': for those who will use it, and
whose images no client has. None of the papers does this.
"""

from collections.abc import Mapping
from functools import cache
from typing import cast

import torch

from osfl.methods import server_half
from osfl.payload.kinds import Domain
from osfl.util.prompts import in_words
from osfl.util.text import safe_name
from server_app.context import ServerJob
from server_app.synthesis.plan import ImageJob, plan_images
from server_app.synthesis.workers import MakeSampler, Sample


def owner_of(name: str) -> str:
    """Whose images a domain's are; no client's name has a point."""
    return f"public.{safe_name(in_words(name))}"


def plan(job: ServerJob) -> list[ImageJob]:
    """R images of every class in every public domain."""
    every = dict.fromkeys(map(owner_of, job.config.domains_by_name), range(len(job.classes)))
    per_class = job.config.synthesis.images_per_class
    return plan_images(job.config.method, job.config.seed, every, per_class)


def ingredients(job: ServerJob) -> dict[str, str]:
    """What shapes each domain's images, in the place of a client's payload."""
    settings = job.config.prompts_domain
    found = {}
    for name in job.config.domains_by_name:
        found[owner_of(name)] = f"{name} by {settings.prompt} at {settings.guidance}"
    return found


def with_public(job: ServerJob, make_sampler: MakeSampler) -> MakeSampler:
    """The same sampler, which draws the public domains' images too."""
    domains: Mapping[str, Domain] = {
        owner_of(name): Domain(job.classes, name) for name in job.config.domains_by_name
    }
    if not domains:
        return make_sampler

    def make(device: torch.device) -> Sample:
        @cache
        def sampler(public: bool) -> Sample:
            # Late, for it loads the kit
            if public:
                return cast(Sample, server_half("prompts-domain").sampler(job, device, domains))
            return make_sampler(device)

        # A unit's images are of one owner
        return lambda jobs: sampler(jobs[0].client in domains)(jobs)

    return make
