"""FedDEO's server half: images from each client's descriptions.

FedDEO (Yang et al., arXiv 2407.19953), section 3.3: every step composes three branches: the empty
prompt, the class's prompt, and the client's description of the class.

Differences from the paper:

1. Theirs: guidance 3 on the prompt and 3 on the description. Ours: both scales are configured
   (`feddeo.guidance-text`, `feddeo.guidance-description`), and a branch of scale 0 is not computed.
   pyproject.toml has the defaults for the digits.
2. Theirs, eq. 5: the plain sum of the prompt's and the description's predictions. Ours: each
   relative to the empty prompt's, with a scale, as composition is usually written and as their code
   does.
3. Theirs: one image at a time. Ours: batches, whose rows may be of any class and client.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import RunConfig
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Descriptions
from server_app.context import ServerJob, rows_by_class
from server_app.costs import NoisyMean, guided_branches
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Descriptions]) -> Models:
    """Sample R images per description, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Descriptions]) -> Sample:
    """Return a function that samples images from class prompts and their clients' descriptions."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    descriptions = rows_by_class(
        job, payloads, lambda payload: payload.vectors.to(kit.device, kit.dtype)
    )
    if job.config.feddeo.tokens == "all":
        # d_y = tau(prompt of y) + u_y
        descriptions = {
            (client, label): prompts.states[label] + vector
            for (client, label), vector in descriptions.items()
        }
    scales = (job.config.feddeo.guidance_text, job.config.feddeo.guidance_description)
    steps = job.config.synthesis.steps
    return lambda jobs: sample(kit, jobs, prompts, descriptions, scales, steps)


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: Conditioning,
    descriptions: Mapping[tuple[str, int], torch.Tensor],
    scales: tuple[float, float],
    steps: int,
) -> torch.Tensor:
    """Sample with compositional guidance on the class's prompt and the client's description.

    Args:
        prompts: conditions of every class's prompt.
        descriptions: descriptions d_y [L, d] by (client, label), which replace the prompt's states.
        scales: (g_text, g_desc).

    Returns:
        uint8 [B, 3, H, W].
    """
    c0 = kit.text([""])
    text = prompts[[job.label for job in jobs]]
    states = torch.stack([descriptions[job.client, job.label] for job in jobs])
    conditions = [
        Condition(c, scale)
        for c, scale in zip((text, text.with_states(states)), scales, strict=True)
        if scale != 0
    ]
    z = initial_noise(jobs, kit.latent_shape, kit.device)
    # FedDEO, eq. 5: e = e0 + g_text (e_text - e0) + g_desc (e_desc - e0)
    return to_images(kit, denoise(kit, z, steps, lambda z, t: compose(kit, z, t, c0, conditions)))


def branches(config: RunConfig) -> int:
    """Return the rows per image of a guided UNet pass, in which a scale of 0 has no part."""
    scales = (config.feddeo.guidance_text, config.feddeo.guidance_description)
    return guided_branches(*filter(None, scales))


def noisy_mean(sizes: Mapping[str, int]) -> NoisyMean:
    """Return a description, the mean over the images of its class."""
    return NoisyMean(sizes["p"] * sizes["d"])
