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

from osfl.config import EspressoConfig
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Mixtures
from osfl.util.seeds import generator_of
from server_app.context import ServerJob, rows_by_class
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, to_images, z_sampling
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Mixtures]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Mixtures]) -> Sample:
    """Return a function that samples images from the conditions and mixtures of their classes."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    steps = job.config.synthesis.steps
    row_of = rows_by_class(job, payloads, lambda payload: range(len(payload.classes)))

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        sources = [(payloads[image.client], row_of[image.client, image.label]) for image in jobs]
        return sample(kit, jobs, sources, job.config.espresso, steps)

    return draw


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    sources: Sequence[tuple[Mixtures, int]],
    settings: EspressoConfig,
    steps: int,
) -> torch.Tensor:
    """Sample images by semantics-preserving sampling (Espresso, phase 2).

    Args:
        sources: for every image its client's payload, and its class's row there.

    Returns:
        uint8 [B, 3, H, W].
    """
    c0 = kit.text([""])
    z = initial_noise(jobs, kit.latent_shape, torch.device("cpu"))
    conditions = []
    starts = []
    for image, (payload, row), noise in zip(jobs, sources, z, strict=True):
        generator = generator_of(image.noise_seed, "espresso")
        j = int(torch.multinomial(payload.weights[row], 1, generator=generator))
        conditions.append(payload.conditions[row, j])
        starts.append(from_mixture(payload, row, noise, generator) if settings.gmm else noise)
    c = torch.stack(conditions).to(kit.device, kit.dtype)
    z = torch.stack(starts).to(kit.device)

    def strong(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:  # gamma_1
        return compose(kit, z, t, c0, [Condition(c, settings.guidance)])

    def weak(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:  # gamma_2
        if settings.inversion_guidance == 0:
            return kit.eps(z, t, c0.expand(len(z), -1, -1))
        return compose(kit, z, t, c0, [Condition(c, settings.inversion_guidance)])

    if settings.z_sampling:
        return to_images(kit, z_sampling(kit, z, steps, strong, weak, settings.z_threshold))
    return to_images(kit, denoise(kit, z, steps, strong))


def from_mixture(
    payload: Mixtures, row: int, noise: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw z_T [c, h, w] from a class's Gaussian mixture.

    Args:
        payload: has the mixture.
        row: the class's row in the payload.
        noise: standard normal, [c, h, w].
        generator: of the component m.
    """
    assert payload.component_weights is not None
    assert payload.component_means is not None
    assert payload.component_variances is not None
    m = int(torch.multinomial(payload.component_weights[row], 1, generator=generator))
    # z_T = mean_m + sqrt(variance_m) * noise
    return payload.component_means[row, m] + payload.component_variances[row, m].sqrt() * noise
