"""Train stages 1 and 2: the autoencoder, then the UNet and the text encoder together."""

import re
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F

from osfl.data.render import STYLES
from osfl.kit_training import untrained
from osfl.kit_training.recipe import Recipe
from osfl.kit_training.stages import Corpus, Stage, run_stage
from osfl.models import diffusion, encoders
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of


def train(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Train both stages and write the Stable Diffusion folder, in half precision.

    Returns:
        The log of each stage.
    """
    device = corpus.pixels.device
    torch.manual_seed(seed_of(recipe.seed, "diffusion model"))
    vae = untrained.new_vae()
    unet = untrained.new_unet(recipe.text_width)
    text = untrained.new_text_encoder(corpus.captions, recipe.text_length, recipe.text_width)

    def vae_loss(generator: torch.Generator) -> torch.Tensor:
        x = corpus.images(corpus.draw_balanced(recipe.vae_batch, generator))
        posterior = vae.encode(x).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator, device=device)
        restored = vae.decode(posterior.mean + posterior.std * noise).sample
        loss: torch.Tensor = F.l1_loss(restored, x) + recipe.kl_weight * posterior.kl().mean()
        return loss

    stage = Stage(
        "vae",
        nn.ModuleDict({"vae": vae}),
        recipe.vae_steps,
        recipe.vae_lr,
        vae_loss,
        ema_decay=0.995,
    )
    log = {"vae": run_stage(stage, work, recipe.seed, device, progress)}

    with torch.no_grad():
        posteriors = [vae.encode(to_float(chunk)).latent_dist for chunk in corpus.pixels.split(500)]
        mean = torch.cat([p.mean for p in posteriors])
        std = torch.cat([p.std for p in posteriors])
        noise = torch.randn(
            mean.shape, generator=torch.Generator(device).manual_seed(0), device=device
        )
        scale = float(1 / (mean + std * noise).std())
    vae.register_to_config(scaling_factor=scale)
    tokens = text.tokens(corpus.captions).to(device)
    empty_tokens = text.tokens([""]).to(device)
    alphas_cumprod = untrained.new_scheduler().alphas_cumprod.to(device)
    names = re.compile("|".join(map(re.escape, STYLES)))
    has_style = torch.tensor([bool(names.search(c)) for c in corpus.captions], device=device)
    weights = 1 + (recipe.style_weight - 1) * has_style

    def denoiser_loss(generator: torch.Generator) -> torch.Tensor:
        rows = torch.multinomial(
            weights, recipe.denoiser_batch, replacement=True, generator=generator
        )
        x0 = (
            mean[rows]
            + std[rows] * torch.randn(mean[rows].shape, generator=generator, device=device)
        ) * scale
        dropped = torch.rand(len(rows), generator=generator, device=device) < recipe.caption_dropout
        batch = torch.where(dropped[:, None], empty_tokens, tokens[rows])
        hidden = text.model(batch).last_hidden_state
        return noise_prediction_loss(unet, x0, hidden, None, alphas_cumprod, generator)

    both = nn.ModuleDict({"unet": unet, "text": text.model})
    stage = Stage(
        "denoiser", both, recipe.denoiser_steps, recipe.denoiser_lr, denoiser_loss, recipe.ema_decay
    )
    log["denoiser"] = run_stage(stage, work, recipe.seed, device, progress)
    untrained.pipeline(
        vae.half(), unet.half(), encoders.TextEncoder(text.model.half(), text.tokenizer)
    ).save_pretrained(out)
    return log


def noise_prediction_loss(
    unet: nn.Module,
    x0: torch.Tensor,
    hidden: torch.Tensor,
    image: torch.Tensor | None,
    alphas_cumprod: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the mean squared error of the noise prediction at uniformly drawn timesteps.

    Each image's error is weighted by min(SNR, 5) / SNR.

    Args:
        x0: scaled latents [B, c, h, w].
        hidden: text condition [B, L, d].
        image: image condition [B, 2e], or None.
    """
    t = torch.randint(len(alphas_cumprod), (len(x0),), generator=generator, device=x0.device)
    eps = torch.randn(x0.shape, generator=generator, device=x0.device)
    a_t = alphas_cumprod[t]
    prediction = unet(
        diffusion.forward_noise(x0, eps, a_t), t, encoder_hidden_states=hidden, class_labels=image
    ).sample
    snr = a_t / (1 - a_t)
    errors = (prediction - eps).square().mean(dim=(1, 2, 3))
    loss: torch.Tensor = (errors * snr.clamp(max=5) / snr).mean()
    return loss
