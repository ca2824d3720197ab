"""Denoising errors of images under prompts: a diffusion model as a classifier.

Li et al., "Your Diffusion Model is Secretly a Zero-Shot Classifier" (arXiv 2303.16203), eq. 6: an
image is most likely under the prompt under which it is denoised best.

Differences from the paper:

1. Theirs: many draws of noise and timestep. Ours: three timesteps, with one noise each for all
   images and prompts.
"""

import torch
from torch.nn import functional as F

from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, forward_noise
from osfl.util.pixels import to_float

# Timesteps as shares of the schedule. At lower ones the image is nearly intact; at higher ones
# almost nothing of it is left
TIMES = (0.3, 0.5, 0.7)
BATCH = 32


def encode_images(kit: Kit, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images [N, 3, S, S] uint8 of any size S as the kit's latents [N, c, h, w]."""
    size = (kit.image_size, kit.image_size)
    floats = to_float(pixels)
    if pixels.shape[-2:] != size:
        floats = F.interpolate(floats, size, mode="bilinear", antialias=True)
    # One by one: the VAE needs more memory per image than the UNet, and there are few images
    return torch.cat([kit.encode(image)[0].float() for image in floats.split(1)])


def denoising_errors(
    kit: Kit, latents: torch.Tensor, prompts: Conditioning, rng: torch.Generator
) -> torch.Tensor:
    """Return the denoising error of every image under every prompt, [N, M] on the CPU.

    The noise of a timestep is the same for all images and prompts.

    Args:
        latents: [N, c, h, w].
        prompts: conditions of M rows.
        rng: the random generator of the noise.
    """
    errors = torch.zeros(len(latents), len(prompts))
    pairs = torch.cartesian_prod(torch.arange(len(latents)), torch.arange(len(prompts)))
    for time in TIMES:
        t = int(time * len(kit.alphas_cumprod))
        eps = torch.randn(latents.shape[1:], generator=rng).to(kit.device)
        for batch in pairs.split(BATCH):
            image, prompt = batch.unbind(1)
            # Diffusion classifier, eq. 6: the mean over draws of ||eps - e(z_t, t, c)||^2
            errors[image, prompt] += _errors(kit, latents[image], t, prompts[prompt], eps)
    return errors / len(TIMES)


def _errors(
    kit: Kit, latents: torch.Tensor, t: int, c: Conditioning, eps: torch.Tensor
) -> torch.Tensor:
    """Return ||eps - e(z_t, t, c)||^2 as a mean over elements, [B].

    A batch that does not fit into GPU memory is halved.
    """
    noise = eps.expand(len(latents), *eps.shape)
    timesteps = torch.full((len(latents),), t, device=kit.device)
    try:
        z_t = forward_noise(latents, noise, kit.alphas_cumprod[timesteps])
        return (noise - kit.eps(z_t, timesteps, c)).square().flatten(1).mean(dim=1).cpu().float()
    except torch.OutOfMemoryError:
        if len(latents) == 1:
            raise
    torch.cuda.empty_cache()
    halves = torch.arange(len(latents)).chunk(2)
    return torch.cat([_errors(kit, latents[rows], t, c[rows], eps) for rows in halves])
