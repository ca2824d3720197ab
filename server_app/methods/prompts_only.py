"""prompts-only (SD_Gen): classifier-free guidance on each class's prompt, without payloads.

This baseline of the papers (FedDEO, table 1; FedLMG, table 1) shows what the base diffusion model
knows without the clients.

Differences from the papers: none known; they give no details.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Payload
from server_app.context import ServerJob
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise, plan_images
from server_app.synthesis.samplers import denoise, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> Models:
    """Sample R images per client and class from prompts, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler, plan=plan)


def plan(job: ServerJob, payloads: Mapping[str, Payload]) -> list[ImageJob]:
    """Plan R images of all classes per client, because the server does not know the held ones."""
    labels_of = dict.fromkeys(job.clients, range(len(job.classes)))
    per_class = job.config.synthesis.images_per_class
    return plan_images(job.config.method, job.config.seed, labels_of, per_class)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Payload]) -> Sample:
    """Return a function that samples images from their class's prompts."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    guidance = job.config.prompts_only.guidance
    steps = job.config.synthesis.steps
    return lambda jobs: sample(kit, jobs, prompts[[image.label for image in jobs]], guidance, steps)


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    c: Conditioning,
    guidance: float,
    steps: int,
    c0: Conditioning | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample with classifier-free guidance on one condition per image.

    Args:
        c: the condition of every image, B rows.
        guidance: g.
        c0: the negative condition, one row; None: the empty prompt's.
        z: z_T, [B, c, h, w]; None: standard normal noise.

    Returns:
        uint8 [B, 3, H, W].
    """
    negative = kit.text([""]) if c0 is None else c0
    conditions = [Condition(c, guidance)]
    if z is None:
        z = initial_noise(jobs, kit.latent_shape, kit.device)

    def predict(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        # Classifier-free guidance: e = e0 + g (e_c - e0)
        return compose(kit, z, t, negative, conditions)

    return to_images(kit, denoise(kit, z, steps, predict))
