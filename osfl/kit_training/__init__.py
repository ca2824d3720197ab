"""Train the shipped kits: `osfl kit train`.

The training is seeded and resumable, runs on CPU or CUDA, and uses the public split only. Each
stage is a plain training loop with its own checkpoint:

1. `vae`: an autoencoder with L1 + KL loss, like Stable Diffusion's first stage without the
   perceptual and adversarial losses. Every style is drawn equally often, so that no style's detail
   is lost before the denoiser sees it.
2. `denoiser`: UNet and text encoder together, noise prediction with min-SNR-5 weights (Hang et al.
   2023), caption dropout for classifier-free guidance, and an exponential moving average of the
   weights. Images whose caption names a style are drawn five times as often. The meaning of a
   class-only caption, nearly always a photograph, stays as in the corpus.
3. `image_encoder`: a small CLIP vision tower with SLIP's two losses (Mu et al. 2021): an image's
   caption among all captions, encoded by the kit's own text encoder, and an image's other view
   among the batch's views.
4. `captioner`: a small BLIP with the captioning loss, every style equally often.
5. `unclip`: the denoiser's UNet, trained further with the noisy image embedding as an additional
   condition (Ramesh et al. 2022, in Stable unCLIP's form), with dropout of embeddings and captions
   for guidance.
6. `tiny_decoder`: a tiny autoencoder (TAESD) with L1 loss to the output of the kit's decoder, for
   the latents of images and for the x0hat that the denoiser predicts from noisy ones.
7. `lora`: a distilled LoRA (LCM-LoRA, `osfl.kit_training.few_steps`), every style equally often.
8. `classifier-<architecture>`: initial weights in place of ImageNet's, from a pretext task without
   digit labels: which of four rotations (RotNet, Gidaris et al. 2018), and which style.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from osfl.kit_training.recipe import Recipe


def train_kit(
    out: Path,
    work: Path,
    recipe: Recipe,
    device: str,
    progress: Progress,
    base: Path | None = None,
) -> dict[str, Any]:
    """Train the kit into `out`, and its unCLIP variant into `<out>-unclip`.

    An interrupted training resumes from `work`.

    Args:
        base: a finished kit to copy, with its unCLIP variant; only the stages that its
            `training.json` lacks are trained.

    Returns:
        The log written to the kit's `training.json`.

    Raises:
        ConfigError: `work` holds checkpoints of another recipe.
    """
    from osfl.kit_training import card, diffusion_model, parts
    from osfl.kit_training.stages import claim_checkpoints, load_corpus

    claim_checkpoints(work, {**asdict(recipe), "device": device})
    corpus = load_corpus(torch.device(device))
    unclip = out.with_name(f"{out.name}-unclip")
    if base:
        stages = _copy_kit(base, out, unclip)
    else:
        stages = diffusion_model.train(out, work, recipe, corpus, progress)
    arguments = {"work": work, "recipe": recipe, "corpus": corpus, "progress": progress}
    for stage, train in _trainers(unclip).items():
        if stage not in stages:
            stages |= train(out, **arguments)
    trained = frozenset(name.removeprefix("classifier-") for name in stages)
    stages |= parts.train_classifiers(out, work, recipe, corpus, progress, trained)
    log = {
        "recipe": asdict(recipe),
        "device": device,
        "torch": torch.__version__,
        "stages": stages,
        "checks": card.check_kit(out, unclip, progress),
    }
    card.write_cards(out, unclip, log)
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    return log


def _trainers(unclip: Path) -> dict[str, Callable[..., dict[str, dict[str, Any]]]]:
    """Return the functions that train the stages after the diffusion model, in their order."""
    from osfl.kit_training import few_steps, parts

    return {
        "image_encoder": parts.train_image_encoder,
        "captioner": parts.train_captioner,
        "unclip": partial(parts.train_unclip, unclip=unclip),
        "tiny_decoder": parts.train_tiny_decoder,
        "lora": few_steps.train_lora,
    }


def _copy_kit(base: Path, out: Path, unclip: Path) -> dict[str, dict[str, Any]]:
    """Copy a finished kit and its unCLIP variant; return the log of its stages."""
    stages: dict[str, dict[str, Any]] = json.loads((base / "training.json").read_text())["stages"]
    if base.resolve() != out.resolve():
        shutil.copytree(base, out, dirs_exist_ok=True)
        if "unclip" in stages:
            shutil.copytree(base.with_name(f"{base.name}-unclip"), unclip, dirs_exist_ok=True)
    return stages
