"""FedBiP's server half: images interpolated between two latents, prompted with learned concepts.

FedBiP (Chen et al., arXiv 2410.04810, CVPR 2025): the posteriors of two of a client's images are
interpolated, and a latent is drawn, diffused to the first timestep and denoised with the prompt
"a S style of a V", with noise on S.

Differences from the paper:

1. Ours: the interpolation weight is drawn uniformly from [0, 1]. Means and standard deviations are
   interpolated, because the mean of two draws would have a smaller deviation.
2. Theirs: noise N(0, 0.1^2) on S. Ours: `fedbip.domain-noise`, drawn anew for every image.
3. Theirs (code) and ours: the condition is the prompt without padding (see 1 in the client half),
   and the empty prompt of the guidance has the same length, as in diffusers' pipeline. The other
   methods' conditions are padded to 77 tokens.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import FedBiPConfig
from osfl.models.concepts import encode_concept_prompt
from osfl.models.diffusion import Kit, forward_noise
from osfl.payload.kinds import Concepts
from osfl.util.seeds import generator_of
from server_app.context import ServerJob
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, first_timestep, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Concepts]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Concepts]) -> Sample:
    """Return a function that samples images from their clients' concepts and latents."""
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
    """Interpolate, noise and denoise latents.

    Args:
        classes: the run's class names.

    Returns:
        uint8 [B, 3, H, W].
    """
    names = [classes[image.label] for image in jobs]
    domains = []
    concepts = []
    latents = []
    for image, name in zip(jobs, names, strict=True):
        payload = payloads[image.client]
        generator = generator_of(image.noise_seed, "fedbip")
        noise = torch.randn(payload.domain.shape, generator=generator)
        domains.append(payload.domain + settings.domain_noise * noise)
        concepts.append(payload.vectors[payload.classes.index(name)])
        latents.append(draw_latent(payload, image.label, generator))
    s = torch.stack(domains).to(kit.device)
    v = torch.stack(concepts).to(kit.device)
    c = encode_concept_prompt(kit.text).filled(s, v)
    a_first = kit.alphas_cumprod[first_timestep(kit, steps)]
    z0 = torch.stack(latents).to(kit.device)
    eps = initial_noise(jobs, kit.latent_shape, kit.device)
    z = forward_noise(z0, eps, a_first.expand(len(z0)))
    nothing = kit.text([""])
    c0 = nothing.with_states(nothing.states[:, : c.states.shape[1]])

    def predict(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return compose(kit, z, t, c0, [Condition(c, settings.guidance)])

    return to_images(kit, denoise(kit, z, steps, predict))


def draw_latent(payload: Concepts, label: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a latent [c, h, w] from the interpolated posteriors of two of a class's images.

    A class with one image uses it twice.
    """
    rows = (payload.labels == label).nonzero().flatten()
    i, j = rows[torch.randperm(len(rows), generator=generator)].repeat(2)[:2]
    weight = torch.rand((), generator=generator)
    mean = weight * payload.means[i] + (1 - weight) * payload.means[j]
    deviation = weight * payload.deviations[i] + (1 - weight) * payload.deviations[j]
    return mean + deviation * torch.randn(mean.shape, generator=generator)
