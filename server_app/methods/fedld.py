"""FedLD's server half: images that start from their client's Gaussian mixture.

FedLD ("Local Distribution-Conditioned Image Synthesis for One-Shot Federated Learning", OpenReview
KPjHoZdEJe, submitted to ICLR 2026): the server draws the initial noise of an image from its
client's mixture, which carries the client's style and backgrounds, and denoises it under the class
prompt.

Differences from the paper:

1. Theirs: the guidance scale is not known (see the client half for our sources). Ours: classifier-
   free guidance with `fedld.guidance`, as in prompts-only.
2. Theirs: how many images of which class a client gets is not known. Ours: R of every class that
   the client holds, as for the other methods.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.payload.kinds import LatentMixture
from osfl.util.seeds import generator_of
from server_app.context import ServerJob
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob, from_mixture, initial_noise
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, LatentMixture]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, LatentMixture]) -> Sample:
    """Return a function that samples images from their clients' mixtures and class prompts."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    guidance = job.config.fedld.guidance
    steps = job.config.synthesis.steps

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        c = prompts[[image.label for image in jobs]]
        noise = initial_noise(jobs, kit.latent_shape, torch.device("cpu"))
        z = start_latents(jobs, payloads, noise).to(kit.device)
        return sample(kit, jobs, c, guidance, steps, z=z)

    return draw


def start_latents(
    jobs: Sequence[ImageJob], payloads: Mapping[str, LatentMixture], noise: torch.Tensor
) -> torch.Tensor:
    """Draw z_T [B, c, h, w] of every image from its client's mixture.

    An image's component depends on its own seed, not on its batch.

    Args:
        noise: standard normal, [B, c, h, w].
    """
    starts = []
    for image, eps in zip(jobs, noise, strict=True):
        payload = payloads[image.client]
        generator = generator_of(image.noise_seed, "fedld")
        mixture = payload.weights, payload.means, payload.variances
        starts.append(from_mixture(*mixture, eps, generator))
    return torch.stack(starts)
