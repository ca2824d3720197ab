"""prompts-domain: class prompts that also name the client's domain, as if the server were told it.

Espresso's prompts-only baseline (CVPR 2026): "a {domain} of a {class}". A reference: OSFL's other
methods keep the domain from the server.

Differences: none known; the wording is `prompts-domain.prompt`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from osfl.config import PromptsDomainConfig, VotesConfig
from osfl.payload.kinds import Domain
from osfl.util.prompts import fill
from server_app.context import ServerJob
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, synthesise_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Domain]) -> Models:
    """R images for every class of every client from prompts that name both.

    One global model, FT.
    """
    return synthesise_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Domain]) -> Sample:
    """Each image by a prompt that names its class and its client's domain."""
    word = job.config.data.word
    settings = job.config.prompts_domain
    return by_name(job, device, settings, lambda image: word(payloads[image.client].name))


def by_name(
    job: ServerJob,
    device: torch.device,
    settings: PromptsDomainConfig | VotesConfig,
    domain_of: Callable[[ImageJob], str],
) -> Sample:
    """Each image by a prompt that names its class and a domain."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    steps = job.config.synthesis.steps
    word = job.config.data.word

    def prompt(image: ImageJob) -> str:
        names = {"domain": domain_of(image), "class": word(job.classes[image.label])}
        return fill(settings.prompt, names)

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        c = kit.text([prompt(image) for image in jobs])
        return sample(kit, jobs, c, settings.guidance, steps)

    return draw
