"""Prompts only (SD_Gen): no upload; classifier-free guidance on each class's prompt. What the kit knows without the clients.

The papers' baseline (FedDEO, table 1; FedLMG, table 1). Differences: none known; the papers do not say more.

Payload: nothing.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.models.diffusion import Kit
from osfl.payloads import Payload
from server_app.job import GlobalModel, ServerJob
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.images import render
from server_app.synthesis.plan import ImageJob, initial_noise, plan_images
from server_app.synthesis.samplers import denoise, to_images
from server_app.synthesis.workers import Sample
from server_app.training import train_global


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """R images a class and client from prompts; one global model, FT."""
    held = dict.fromkeys(job.clients, range(len(job.classes)))
    plan = plan_images("prompts-only", job.config.seed, held, job.config.synthesis.images_per_class)
    images = render(
        job,
        plan,
        lambda device: _sampler(job, device),
        {"guidance": job.config.prompts_only.guidance},
    )
    return {"FT": train_global(job, "FT", images.pixels, images.labels)}


def _sampler(job: ServerJob, device: torch.device) -> Sample:
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.synthesis.prompts(job.classes))
    guidance, steps = job.config.prompts_only.guidance, job.config.synthesis.steps
    return lambda jobs: sample(kit, jobs, prompts[[image.label for image in jobs]], guidance, steps)


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    c: torch.Tensor,
    guidance: float,
    steps: int,
    c0: torch.Tensor | None = None,
) -> torch.Tensor:
    """Classifier-free guidance on one condition an image: e = e0 + g (e_c - e0).

    Args:
        c: the condition of every image, [B, L, d].
        c0: what it is guided away from, [1, L, d]; None: the empty prompt's encoding.

    Returns:
        uint8 [B, 3, H, W].
    """
    nothing = kit.text([""]) if c0 is None else c0
    z = initial_noise(jobs, kit.latent_shape, kit.device)
    return to_images(
        kit,
        denoise(kit, z, steps, lambda z, t: compose(kit, z, t, nothing, [Condition(c, guidance)])),
    )
