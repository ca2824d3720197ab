"""How the shipped kits were made: `osfl kit train`.

Resumable, seeded, CPU or CUDA; public split only.

Each stage is a plain training loop with its own checkpoint:

1. `vae`: autoencoder, L1 + KL, as Stable Diffusion's first stage without the perceptual and
   adversarial losses; every style equally often, so that no style's detail is lost before the
   denoiser sees it.
2. `denoiser`: UNet and text encoder together, noise prediction, min-SNR-5 weights (Hang et al.
   2023), captions dropped for classifier-free guidance, exponential moving average of the weights.
   Images whose caption names a style are drawn five times as often; what a class-only caption
   means, nearly always a photograph, is left as the corpus has it.
3. `image_encoder`: a small CLIP vision tower by SLIP's two losses (Mu et al. 2021): an image's
   caption among all captions, encoded by the kit's own text encoder, and an image's other view
   among the batch's.
4. `captioner`: a small BLIP, captioning loss, every style equally often.
5. `unclip`: the denoiser's UNet, trained on with the noised image embedding as one more condition
   (Ramesh et al. 2022, in Stable unCLIP's form), embeddings and captions dropped for guidance.
6. `small_decoder`: TAESD's architecture, L1 to what the autoencoder's own decoder makes, of images'
   latents and of those that a denoiser would predict from noised ones.
7. `lora`: LCM-LoRA's weights (`osfl.kit_training.few_steps`), every style equally often.
8. `classifier-<architecture>`: initialisations that stand for ImageNet's, on a pretext task that
   uses no digit label (RotNet, Gidaris
   et al. 2018: which of four turns; and which style).
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import Progress

from osfl.config import ConfigError


@dataclass(frozen=True)
class Recipe:
    """Steps, batch sizes and learning rates of the stages."""

    seed: int = 0
    vae_steps: int = 2500
    vae_batch: int = 32
    vae_lr: float = 1e-3
    kl_weight: float = 2e-6
    denoiser_steps: int = 5400
    denoiser_batch: int = 64
    denoiser_lr: float = 1e-3
    style_weight: float = 5.0  # images whose caption names a style are drawn so much more often
    caption_dropout: float = 0.10
    ema_decay: float = 0.999
    text_length: int = 16
    text_width: int = 64
    classifiers: tuple[str, ...] = (
        "resnet18",
        "resnet50",
        "vgg16",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "shufflenet_v2_x1_0",
    )
    classifier_steps: int = 800
    classifier_batch: int = 64
    classifier_lr: float = 1e-3
    image_encoder_steps: int = 1500
    image_encoder_batch: int = 96
    image_encoder_lr: float = 1e-3
    image_encoder_width: int = 96
    embedding: int = 64
    captioner_steps: int = 4000
    captioner_batch: int = 64
    captioner_lr: float = 1e-3
    captioner_width: int = 96
    unclip_steps: int = 2500
    unclip_batch: int = 64
    unclip_lr: float = 5e-4
    unclip_caption_dropout: float = 0.5
    unclip_image_dropout: float = 0.1
    small_decoder_steps: int = 1500
    small_decoder_batch: int = 64
    small_decoder_lr: float = 2e-3
    small_decoder_width: int = 24
    lora_steps: int = 2400
    lora_batch: int = 64
    lora_lr: float = 1e-3
    lora_rank: int = 32
    lora_guidance: float = 2.0  # the methods' usual one, which the weights take in
    lora_schedule: int = 50  # steps of the guided model that is distilled


def train_kit(
    out: Path,
    work: Path,
    recipe: Recipe,
    device: str,
    progress: Progress,
    base: Path | None = None,
) -> dict:
    """Train the kit into `out`, and its unCLIP sister into `<out>-unclip`.

    An interrupted training resumes from `work`.

    Args:
        base: a finished kit, taken over with its sister; the stages that its `training.json` lacks
            are trained.

    Returns:
        the log written to the kit's `training.json`.

    Raises:
        ConfigError: `work` holds checkpoints of another recipe.
    """
    from osfl.kit_training import card, diffusion_model, few_steps, parts
    from osfl.kit_training.stages import load_corpus

    work.mkdir(parents=True, exist_ok=True)
    description = json.dumps({**asdict(recipe), "device": device}, indent=1)
    if (file := work / "recipe.json").is_file() and file.read_text() != description:
        raise ConfigError(
            f"--work {work}: its checkpoints are of another recipe or device; remove them, or name "
            "another folder"
        )
    file.write_text(description)
    target = torch.device(device)
    corpus = load_corpus(target)
    log: dict = {
        "recipe": asdict(recipe),
        "device": device,
        "torch": torch.__version__,
        "stages": {},
    }
    unclip = out.with_name(f"{out.name}-unclip")
    if base:
        log["stages"] = json.loads((base / "training.json").read_text())["stages"]
        if base.resolve() != out.resolve():
            shutil.copytree(base, out, dirs_exist_ok=True)
            if "unclip" in log["stages"]:
                shutil.copytree(base.with_name(f"{base.name}-unclip"), unclip, dirs_exist_ok=True)
    else:
        log["stages"] |= diffusion_model.train(out, work, recipe, corpus, progress)
    if "image_encoder" not in log["stages"]:
        log["stages"] |= parts.train_image_encoder(out, work, recipe, corpus, progress)
    if "captioner" not in log["stages"]:
        log["stages"] |= parts.train_captioner(out, work, recipe, corpus, progress)
    if "unclip" not in log["stages"]:
        log["stages"] |= parts.train_unclip(out, unclip, work, recipe, corpus, progress)
    if "small_decoder" not in log["stages"]:
        log["stages"] |= parts.train_small_decoder(out, work, recipe, corpus, progress)
    if "lora" not in log["stages"]:
        log["stages"] |= few_steps.train_lora(out, work, recipe, corpus, progress)
    kept = frozenset(name.removeprefix("classifier-") for name in log["stages"])
    log["stages"] |= parts.train_classifiers(out, work, recipe, corpus, progress, kept)
    log["checks"] = card.check_kit(out, unclip, progress)
    card.write_cards(out, unclip, log)
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    return log
