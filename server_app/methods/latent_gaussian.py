"""latent-gaussian's server half: latents from each class's Gaussian, decoded.

Ours, near FedKT-CSD (arXiv 2607.07565), of which we know the abstract alone. From the counts n and
the sums S and Q of a client's class,

    mu = S / n,    sigma^2 = Q / n - mu^2,    z_0 ~ N(mu, diag(sigma^2))

and D(z_0) is an image. With `latent-gaussian.strength` = s above 0 it is first edited by SDEdit
(Meng et al., arXiv 2108.01073, algorithm 1): z_t = sqrt(a_t) z_0 + sqrt(1 - a_t) eps at the first
of the last s T of T sampling timesteps, from which DDIM denoises under the class prompt.

Differences from the paper: not known beyond its abstract. A class's images have its own client's
Gaussian, which carries the client's domain.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import RunConfig
from osfl.methods.latent_gaussian import LatentGaussianConfig
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, forward_noise
from osfl.payload.kinds import LatentStatistics
from osfl.util.seeds import generator_of
from server_app.context import ServerJob, rows_by_class
from server_app.costs import NoisyMean, guided_branches
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import ddim, ddim_schedule, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, LatentStatistics]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(
    job: ServerJob, device: torch.device, payloads: Mapping[str, LatentStatistics]
) -> Sample:
    """Return a function that samples images from their clients' Gaussians of their classes."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    gaussians = rows_by_class(job, payloads, class_gaussians)
    settings = job.config.latent_gaussian
    steps = job.config.synthesis.steps

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        z = draw_latents(jobs, gaussians).to(kit.device)
        c = prompts[[image.label for image in jobs]]
        return edit(kit, jobs, z, c, settings, steps)

    return draw


def class_gaussians(payload: LatentStatistics) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return mean and deviation [c, h, w] of each class's latents."""
    counts = payload.counts.double().view(-1, 1, 1, 1)
    means = payload.sums.double() / counts
    variances = payload.squares.double() / counts - means.square()
    # Rounding may leave a variance below 0
    deviations = variances.clamp_min(0).sqrt()
    return list(zip(means.float(), deviations.float(), strict=True))


def draw_latents(
    jobs: Sequence[ImageJob],
    gaussians: Mapping[tuple[str, int], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Draw z_0 [B, c, h, w] of every image from its client's Gaussian of its class."""
    sources = [gaussians[image.client, image.label] for image in jobs]
    means, deviations = (torch.stack(part) for part in zip(*sources, strict=True))
    channels, height, width = means.shape[1:]
    noise = initial_noise(jobs, (channels, height, width), torch.device("cpu"))
    return means + deviations * noise


@torch.no_grad()
def edit(
    kit: Kit,
    jobs: Sequence[ImageJob],
    z: torch.Tensor,
    c: Conditioning,
    settings: LatentGaussianConfig,
    steps: int,
) -> torch.Tensor:
    """Decode latents z_0 [B, c, h, w], after SDEdit's steps if there are any.

    Args:
        c: the condition of every image, B rows.
        steps: T, of which the last ones are edits.

    Returns:
        uint8 [B, 3, H, W].
    """
    edits = edit_steps(settings, steps)
    if not edits:
        return to_images(kit, z)
    a_t = ddim_schedule(kit, steps)[-edits][1]
    noises = [
        torch.randn(kit.latent_shape, generator=generator_of(image.noise_seed, "sdedit"))
        for image in jobs
    ]
    # SDEdit, algorithm 1: x = alpha(t_0) x + sigma(t_0) z
    z_t = forward_noise(z, torch.stack(noises).to(z), a_t.expand(len(z)))
    c0 = kit.text([""])

    def predict(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return compose(kit, z, t, c0, [Condition(c, settings.guidance)])

    return to_images(kit, ddim(kit, z_t, steps, predict, skipped=steps - edits))


def edit_steps(settings: LatentGaussianConfig, steps: int) -> int:
    """Return the number of denoising steps, of T."""
    return round(settings.strength * steps)


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the UNet rows per image."""
    settings = config.latent_gaussian
    edits = edit_steps(settings, config.synthesis.steps)
    return edits * guided_branches(settings.guidance)


def noisy_mean(sizes: Mapping[str, int]) -> NoisyMean:
    """Return a class's means and mean squares, whose common guarantee doubles the variance."""
    return NoisyMean(2 * sizes["c"] * sizes["h"] * sizes["w"])
