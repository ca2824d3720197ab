"""Espresso's server half: a cluster's condition (C), noise from a mixture (G), zigzag sampling (Z).

Espresso ("Guiding Diffusion Models with Fine-Grained Conditions and Semantics-Preserving Sampling",
CVPR 2026; its code is not public), phase 2. Its ablation: C (`espresso.gmm = false`,
`espresso.z-sampling = false`), C+G, C+Z, C+G+Z.

Differences from the paper:

1. Theirs: "a randomly selected condition". Ours: drawn with the clusters' shares of the class's
   images as probabilities.
2. Theirs: the inversion is at the next lower timestep, as Z-Sampling's authors write, or at the
   same one; the summary leaves it open. Ours: the same timestep t, at which the inverse of a DDIM
   step is exact if the prediction is.
3. Theirs: gamma_2 is not given. Ours: 0, so that step 2 needs the unconditional branch only (5 UNet
   passes per zigzag).
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import EspressoConfig, RunConfig
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Mixtures
from osfl.util.seeds import generator_of
from server_app.context import ServerJob, rows_by_class
from server_app.costs import guided_branches
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, from_mixture, initial_noise
from server_app.synthesis.samplers import denoise, to_images, z_sampling
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Mixtures]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Mixtures]) -> Sample:
    """Return a function that samples images from the conditions and mixtures of their classes."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    steps = job.config.synthesis.steps
    row_of = rows_by_class(job, payloads, lambda payload: range(len(payload.classes)))

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        sources = [(payloads[image.client], row_of[image.client, image.label]) for image in jobs]
        return sample(kit, jobs, prompts, sources, job.config.espresso, steps)

    return draw


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: Conditioning,
    sources: Sequence[tuple[Mixtures, int]],
    settings: EspressoConfig,
    steps: int,
) -> torch.Tensor:
    """Sample images by semantics-preserving sampling (Espresso, phase 2).

    Args:
        prompts: conditions of every class's prompt, whose states the payloads' conditions replace.
        sources: for every image its client's payload, and its class's row there.

    Returns:
        uint8 [B, 3, H, W].
    """
    c0 = kit.text([""])
    z = initial_noise(jobs, kit.latent_shape, torch.device("cpu"))
    states = []
    starts = []
    for image, (payload, row), noise in zip(jobs, sources, z, strict=True):
        generator = generator_of(image.noise_seed, "espresso")
        j = int(torch.multinomial(payload.weights[row], 1, generator=generator))
        states.append(payload.conditions[row, j])
        starts.append(start_latent(payload, row, noise, generator) if settings.gmm else noise)
    text = prompts[[image.label for image in jobs]]
    c = text.with_states(torch.stack(states).to(kit.device, kit.dtype))
    z = torch.stack(starts).to(kit.device)

    def strong(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:  # gamma_1
        return compose(kit, z, t, c0, [Condition(c, settings.guidance)])

    def weak(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:  # gamma_2
        if settings.inversion_guidance == 0:
            return kit.eps(z, t, c0.expand(len(z)))
        return compose(kit, z, t, c0, [Condition(c, settings.inversion_guidance)])

    if settings.z_sampling:
        return to_images(kit, z_sampling(kit, z, steps, strong, weak, settings.z_threshold))
    return to_images(kit, denoise(kit, z, steps, strong))


def start_latent(
    payload: Mixtures, row: int, noise: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw z_T [c, h, w] from the mixture of a class, which has a row of the payload."""
    assert payload.component_weights is not None
    assert payload.component_means is not None
    assert payload.component_variances is not None
    return from_mixture(
        payload.component_weights[row],
        payload.component_means[row],
        payload.component_variances[row],
        noise,
        generator,
    )


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the UNet rows per image; a zigzag is one more step, and an inversion."""
    settings = config.espresso
    strong = guided_branches(settings.guidance)
    # A scale of 0 needs the unconditional row alone
    weak = guided_branches(settings.inversion_guidance) if settings.inversion_guidance else 1
    rows = config.synthesis.steps * strong
    if settings.z_sampling:
        zigzags = sum(t > settings.z_threshold for t in timesteps)
        rows += zigzags * (strong + weak)
    return rows
