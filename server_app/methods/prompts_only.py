"""Prompts only (SD_Gen): no upload; classifier-free guidance on each class's prompt.

What the kit knows without the clients.

The papers' baseline (FedDEO, table 1; FedLMG, table 1). Differences: none known; the papers do not
say more.

Payload: nothing.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.models.diffusion import Kit
from osfl.payload.kinds import Payload
from server_app.context import ServerJob
from server_app.pipeline import Models, synthesise_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise, plan_images
from server_app.synthesis.samplers import denoise, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> Models:
    """R images a class and client from prompts; one global model, FT."""
    return synthesise_and_train(job, payloads, sampler, plan=plan)


def plan(job: ServerJob, payloads: Mapping[str, Payload]) -> list[ImageJob]:
    """R images of all classes for every client, for nobody says which it holds."""
    held = dict.fromkeys(job.clients, range(len(job.classes)))
    per_class = job.config.synthesis.images_per_class
    return plan_images(job.config.method, job.config.seed, held, per_class)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Payload]) -> Sample:
    """Each image by its class's prompt."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    guidance = job.config.prompts_only.guidance
    steps = job.config.synthesis.steps
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
