"""Client half of FedLD: a Gaussian mixture of the noisy latents of all images of the client.

FedLD ("Local Distribution-Conditioned Image Synthesis for One-Shot Federated Learning", OpenReview
KPjHoZdEJe, submitted to ICLR 2026). The client encodes its images, adds the noise of the first
sampling timestep, and fits one Gaussian mixture to the result. Nothing is trained. We have the
abstract and a summary of the reviews, not the paper; "not known" below means that neither says it.

Differences from the paper:

1. Theirs: a mixture fitted to noisy latents. Ours: fitted to the clean ones and diffused forward in
   closed form, as if by infinitely many draws of noise, because a fit to a few draws fits their
   noise (see 4 in Espresso's client half). `fedld.mixture-fit = "sampled"` follows their wording,
   with `fedld.noise-draws` draws of each image.
2. Theirs: the number of components and their covariances are not known. Ours: 4, and diagonal, as
   Espresso's; a client with fewer latents than components has fewer, padded with weight 0.
3. Theirs: the noise's timestep is not known. Ours: that of the server's first DDIM step, so that
   the mixture is what the server starts from.
4. Theirs: whether a latent is the mean of E(x) or a draw from it is not known. Ours: one draw.

Payload for Stable Diffusion 1.5 at 512 px: M x (1 + 2 x 16,384) = 131,076 numbers with M = 4, for
any number of classes.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.learning.mixtures import diffuse_mixture, padded_mixture
from osfl.models.diffusion import forward_noise, load_kit, timesteps
from osfl.payload.kinds import LatentMixture
from osfl.util.seeds import generator_of, seed_of


def make_payload(job: ClientJob) -> LatentMixture:
    """Fit one mixture to the latents of all images.

    Raises:
        KitError: the kit is missing or corrupt.
    """
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    mean, logvar = (part.float().cpu() for part in posteriors(kit, images, job))
    a_first = kit.alphas_cumprod[timesteps(kit.scheduler, job.config.synthesis.steps)[0]].cpu()
    weights, means, variances = _fit(mean, logvar, a_first, job)
    names = tuple(job.classes[label] for label in images.held())
    return LatentMixture(names, weights, means, variances)


def _fit(
    mean: torch.Tensor, logvar: torch.Tensor, a_t: torch.Tensor, job: ClientJob
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit the mixture of the noisy latents z_t, as the run configures it.

    Args:
        mean, logvar: posteriors of the images' latents, [N, c, h, w].
        a_t: alphas_cumprod at the first sampling timestep, [].

    Returns:
        weights [M], means and variances [M, c, h, w].
    """
    settings = job.config.fedld
    stream = ("fedld mixture", job.client)
    generator = generator_of(job.config.seed, *stream)
    seed = seed_of(job.config.seed, *stream)
    x0 = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator)
    if settings.mixture_fit == "closed":
        return diffuse_mixture(padded_mixture(x0, settings.components, seed), a_t)
    x0 = x0.repeat(settings.noise_draws, 1, 1, 1)
    noise = torch.randn(x0.shape, generator=generator)
    return padded_mixture(forward_noise(x0, noise, a_t.expand(len(x0))), settings.components, seed)
