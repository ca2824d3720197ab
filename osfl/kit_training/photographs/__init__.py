"""Train a kit on public photographs: `osfl kit train configs/kits/photographs.toml`.

1. `corpus`: read the sources of the recipe, and drop images that look like a client's.
2. `encoders`: text and image encoder together, contrastively (`contrast`); then, if the recipe
   says so, `image_encoder`: the image encoder alone.
3. `latents`: every image and its mirror image, by a published tiny autoencoder (TAESD).
4. `unet`: noise prediction under the captions, with the frozen text encoder (`denoiser`).

Each stage resumes from its checkpoint. With a checkpoint of the UNet, `export` writes the kit
without further training.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from osfl.config import ConfigError
from osfl.kit_training import untrained
from osfl.kit_training.photographs.card import (
    check_photograph_kit,
    require_torchmetrics,
    write_card,
)
from osfl.kit_training.photographs.contrast import Encoders, train_encoders
from osfl.kit_training.photographs.corpus import load_public_corpus
from osfl.kit_training.photographs.denoiser import STAGE as UNET
from osfl.kit_training.photographs.denoiser import train_unet
from osfl.kit_training.photographs.recipe import PhotographRecipe
from osfl.kit_training.stages import claim_checkpoints
from osfl.methods import CLIP
from osfl.models import diffusion
from osfl.models.encoders import TextEncoder


def train_photograph_kit(
    out: Path,
    work: Path,
    recipe: PhotographRecipe,
    device: str,
    progress: Progress,
    export: bool = False,
) -> dict[str, Any]:
    """Train a kit and write it to `out`.

    Args:
        work: folder of the corpus, the latents and the checkpoints.
        export: whether to write the kit from the present checkpoints, without further training.

    Returns:
        The log written to the kit's `training.json`.

    Raises:
        ConfigError: `work` holds checkpoints of another recipe, `export` finds none, or
            torchmetrics is not installed.
        KitError: the autoencoder cannot be loaded.
    """
    require_torchmetrics()
    claim_checkpoints(work, recipe.identity())
    if export:
        recipe = _without_training(work, recipe)
    place = torch.device(device)
    vae = diffusion.load_autoencoder(recipe.path(recipe.autoencoder))
    corpus = load_public_corpus(work, recipe, progress)
    encoders, stages = train_encoders(work, recipe, corpus, place, progress)
    text = encoders.text
    unet, stages[UNET] = train_unet(work, recipe, corpus, text, vae, place, progress)
    log: dict[str, Any] = {
        "recipe": asdict(recipe),
        "device": device,
        "torch": torch.__version__,
        "sources": corpus.counts,
        "stages": stages,
        "parameters": {UNET: sum(weight.numel() for weight in unet.parameters())},
    }
    _write_kit(out, encoders, unet, vae)
    log["checks"] = check_photograph_kit(out, encoders, corpus, recipe, progress)
    write_card(out, log)
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    return log


def _without_training(work: Path, recipe: PhotographRecipe) -> PhotographRecipe:
    """Return the recipe with no steps of training left.

    Raises:
        ConfigError: there is no checkpoint of the UNet.
    """
    if not (work / f"{UNET}.pt").is_file():
        raise ConfigError(f"--export: {work} has no checkpoint of the UNet yet; train first")
    finished = replace(recipe.image_encoder, more_steps=0)
    return replace(recipe, image_encoder=finished, unet=replace(recipe.unet, steps=0))


def _write_kit(out: Path, encoders: Encoders, unet: torch.nn.Module, vae: torch.nn.Module) -> None:
    """Write the Stable Diffusion folder, the image encoder and the whole CLIP, in 16 bits."""
    clip = encoders.clip.cpu().half()
    text = TextEncoder(clip.text_model, encoders.tokenizer)
    pipeline = untrained.pipeline(vae.cpu().half(), unet.cpu().half(), text)
    pipeline.save_pretrained(out)
    encoders.image.model.half().save_pretrained(out / "image_encoder")
    encoders.processor.save_pretrained(out / "feature_extractor")
    clip.save_pretrained(out / CLIP)
    encoders.tokenizer.save_pretrained(out / CLIP)
    encoders.processor.save_pretrained(out / CLIP)
