"""FedBiP's server half: images between two of a client's latents, under its learned words.

FedBiP (Chen et al., arXiv 2410.04810, CVPR 2025): two images' posteriors are interpolated, a latent
is drawn, diffused forward to the first timestep and denoised under "a S style of a V", with noise
on S.

Differences from the paper:

1. The interpolation's share: ours is drawn uniformly from [0, 1], and mixes means and standard
   deviations alike; the mean of two draws would deviate less.
2. Theirs: noise N(0, 0.1^2) on S. Ours: `fedbip.domain-noise`, a new draw for every image.
3. Theirs (code) and ours: the condition is the prompt without padding (client half, 1), and is
   guided away from the empty prompt at the same length, as diffusers' pipeline makes it for such a
   condition; the other methods' is padded to 77.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import FedBiPConfig
from osfl.models.concepts import concept_prompt
from osfl.models.diffusion import Kit, forward_noise
from osfl.payload.kinds import Concepts
from osfl.util.seeds import generator_of
from server_app.context import ServerJob
from server_app.pipeline import Models, synthesise_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, first_timestep, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Concepts]) -> Models:
    """R images for every class of every client; one global model, FT."""
    return synthesise_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Concepts]) -> Sample:
    """Each image by its client's words and latents."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    settings = job.config.fedbip
    steps = job.config.synthesis.steps
    return lambda jobs: sample(kit, jobs, job.classes, payloads, settings, steps)


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    classes: Sequence[str],
    payloads: Mapping[str, Concepts],
    settings: FedBiPConfig,
    steps: int,
) -> torch.Tensor:
    """Interpolate, noise, denoise. Returns uint8 [B, 3, H, W]."""
    names = [classes[image.label] for image in jobs]
    domains = []
    words = []
    latents = []
    for image, name in zip(jobs, names, strict=True):
        payload = payloads[image.client]
        generator = generator_of(image.noise_seed, "fedbip")
        domains.append(
            payload.domain
            + settings.domain_noise * torch.randn(payload.domain.shape, generator=generator)
        )
        words.append(payload.vectors[payload.classes.index(name)])
        latents.append(interpolated(payload, image.label, generator))
    s = torch.stack(domains).to(kit.device)
    v = torch.stack(words).to(kit.device)
    c = concept_prompt(kit.text).filled(s, v)
    a_first = kit.alphas_cumprod[first_timestep(kit, steps)]
    z0 = torch.stack(latents).to(kit.device)
    z = forward_noise(
        z0, initial_noise(jobs, kit.latent_shape, kit.device), a_first.expand(len(z0))
    )
    c0 = kit.text([""])[:, : c.shape[1]]
    return to_images(
        kit,
        denoise(
            kit, z, steps, lambda z, t: compose(kit, z, t, c0, [Condition(c, settings.guidance)])
        ),
    )


def interpolated(payload: Concepts, label: int, generator: torch.Generator) -> torch.Tensor:
    """A latent [c, h, w] drawn between two images' posteriors of a class.

    Of the one image, where there is one.
    """
    rows = (payload.labels == label).nonzero().flatten()
    one, other = rows[torch.randperm(len(rows), generator=generator)].repeat(2)[:2]
    share = torch.rand((), generator=generator)
    mean = share * payload.means[one] + (1 - share) * payload.means[other]
    deviation = share * payload.deviations[one] + (1 - share) * payload.deviations[other]
    return mean + deviation * torch.randn(mean.shape, generator=generator)
