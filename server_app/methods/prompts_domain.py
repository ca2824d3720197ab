"""prompts-domain: class prompts that also name the client's domain.

This is Espresso's prompts-only baseline (CVPR 2026): "a {domain} of a {class}". It is a reference,
because the papers' methods do not name the domain to the server.

Differences from the paper: none known. `prompts-domain.prompt` has the wording.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from osfl.config import PromptsDomainConfig, VotesConfig
from osfl.payload.kinds import Domain
from osfl.util.prompts import fill_prompt
from server_app.context import ServerJob
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Domain]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Domain]) -> Sample:
    """Return a function that samples images from prompts with class and client's domain."""
    word = job.config.data.prompt_name
    settings = job.config.prompts_domain
    return sampler_by_name(job, device, settings, lambda image: word(payloads[image.client].name))


def sampler_by_name(
    job: ServerJob,
    device: torch.device,
    settings: PromptsDomainConfig | VotesConfig,
    domain_of: Callable[[ImageJob], str],
) -> Sample:
    """Return a function that samples images from prompts with class and domain.

    Args:
        device: to load the kit on.
        settings: has the prompt and the guidance scale.
        domain_of: returns the domain's name for an image.
    """
    kit = load_engine(job.kit, device, job.config.synthesis)
    steps = job.config.synthesis.steps
    word = job.config.data.prompt_name

    def prompt(image: ImageJob) -> str:
        names = {"domain": domain_of(image), "class": word(job.classes[image.label])}
        return fill_prompt(settings.prompt, names)

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        c = kit.text([prompt(image) for image in jobs])
        return sample(kit, jobs, c, settings.guidance, steps)

    return draw
