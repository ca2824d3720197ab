"""Train the UNet on the latents of public images under captions; the text encoder stays frozen."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import nn

from osfl.kit_training import untrained
from osfl.kit_training.diffusion_model import noise_prediction_loss
from osfl.kit_training.photographs.corpus import PublicCorpus
from osfl.kit_training.photographs.recipe import PhotographRecipe
from osfl.kit_training.stages import CHECKPOINT_SECONDS, Stage, run_stage
from osfl.models.encoders import TextEncoder
from osfl.util.files import read_record, write_record
from osfl.util.pixels import to_float
from osfl.util.seeds import generator_of, seed_of

STAGE = "unet"
# Images between two checkpoints of the encoding, and images per pass of the autoencoder
CHUNK = 1024
BATCH = 128


def load_latents(
    work: Path, corpus: PublicCorpus, vae: Any, device: torch.device, bar: Progress
) -> torch.Tensor:
    """Return the latents of every image and of its mirror image, [N, 2, c, h, w] float16.

    They are scaled as the UNet takes them, and encoded once; an interrupted encoding continues.
    """
    file = work / "latents.npy"
    count_file = work / "latents.json"
    total = len(corpus.pixels)
    encoded = read_record(count_file)["encoded"] if count_file.is_file() else 0
    task = bar.add_task("latents", total=total, completed=encoded)
    half = deepcopy(vae).to(device, torch.bfloat16, memory_format=torch.channels_last)
    while encoded < total:
        rows = torch.arange(encoded, min(encoded + CHUNK, total))
        latents = _encode(corpus.images(rows).to(device), half).numpy()
        if not encoded:
            shape = (total, *latents.shape[1:])
            np.lib.format.open_memmap(file, "w+", np.float16, shape).flush()
        stored = np.load(file, mmap_mode="r+", allow_pickle=False)
        stored[rows.numpy()] = latents
        stored.flush()
        encoded += len(rows)
        write_record(count_file, {"encoded": encoded})
        bar.update(task, completed=encoded)
    return torch.from_numpy(np.load(file, allow_pickle=False))


@torch.no_grad()
def _encode(pixels: torch.Tensor, vae: Any) -> torch.Tensor:
    """Return the latents [B, 2, c, h, w] of images [B, 3, S, S] uint8 and their mirror images."""
    images = to_float(pixels)
    views = torch.stack([images, images.flip(3)], dim=1).flatten(0, 1)
    inputs = views.to(torch.bfloat16, memory_format=torch.channels_last)
    parts = [vae.encode(part).latents for part in inputs.split(BATCH)]
    latents = torch.cat(parts).float() * vae.config.scaling_factor
    latents_by_image: torch.Tensor = latents.half().unflatten(0, (-1, 2)).contiguous().cpu()
    return latents_by_image


def train_unet(
    work: Path,
    recipe: PhotographRecipe,
    corpus: PublicCorpus,
    text: TextEncoder,
    vae: Any,
    device: torch.device,
    bar: Progress,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train the UNet; return it in eval mode, with the stage's log.

    The learning rate is constant after its warm-up, so that a longer training can continue a
    shorter one. Averaged weights (EMA) replace its decay.
    """
    latents = load_latents(work, corpus, vae, device, bar)
    settings = recipe.unet
    torch.manual_seed(seed_of(recipe.seed, STAGE))
    unet = untrained.new_photograph_unet(recipe, vae)
    if device.type == "cpu":
        untrained.unfuse_attention(unet)
    hidden = text.states(corpus.captions)
    alphas_cumprod = untrained.new_scheduler().alphas_cumprod.to(device)

    def loss(generator: torch.Generator) -> torch.Tensor:
        # The corpus stays on the CPU
        host = generator_of(generator.initial_seed(), "rows")
        rows = corpus.draw(settings.batch, host)
        captions = corpus.draw_captions(rows, host)
        is_mirrored = torch.randint(2, (len(rows),), generator=host)
        is_dropped = torch.rand(len(rows), generator=host) < settings.caption_dropout
        # Index 0 is the empty caption
        condition = hidden[captions.masked_fill(is_dropped, 0).to(device)]
        x0 = latents[rows, is_mirrored].float().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            return noise_prediction_loss(unet, x0, condition, None, alphas_cumprod, generator)

    stage = Stage(
        STAGE,
        nn.ModuleDict({"unet": unet}),
        settings.steps,
        settings.lr,
        loss,
        settings.ema_decay,
        decay=False,
        interval=200,
        patience=CHECKPOINT_SECONDS,
    )
    log = run_stage(stage, work, recipe.seed, device, bar)
    return unet, log
