"""prompts-domain: class prompts that also name the client's domain, as if the server were told it.

Espresso's prompts-only baseline (CVPR 2026): "a {domain} of a {class}". A reference: OSFL's other methods keep the domain from the server.

Differences: none known; the wording is `prompts-domain.prompt`.
"""

from collections.abc import Mapping
from typing import cast

import torch

from osfl.payloads import Domain, Payload
from osfl.prompts import fill
from server_app.job import GlobalModel, ServerJob
from server_app.methods.prompts_only import sample
from server_app.synthesis.engine import load_engine
from server_app.synthesis.images import render
from server_app.synthesis.plan import plan_images
from server_app.synthesis.workers import Sample
from server_app.training import train_global


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """R images for every class of every client from prompts that name both; one global model, FT."""
    domains = {
        client: payload.name for client, payload in cast(Mapping[str, Domain], payloads).items()
    }
    settings = job.config.prompts_domain
    plan = plan_images(
        "prompts-domain", job.config.seed, job.held(payloads), job.config.synthesis.images_per_class
    )
    sampling = {"guidance": settings.guidance, "prompt": settings.prompt}
    images = render(job, plan, lambda device: _sampler(job, device, domains), sampling)
    return {"FT": train_global(job, "FT", images.pixels, images.labels)}


def _sampler(job: ServerJob, device: torch.device, domains: Mapping[str, str]) -> Sample:
    kit, settings = load_engine(job.kit, device, job.config.synthesis), job.config.prompts_domain

    def prompt(client: str, label: int) -> str:
        return fill(settings.prompt, {"domain": domains[client], "class": job.classes[label]})

    return lambda jobs: sample(
        kit,
        jobs,
        kit.text([prompt(image.client, image.label) for image in jobs]),
        settings.guidance,
        job.config.synthesis.steps,
    )
