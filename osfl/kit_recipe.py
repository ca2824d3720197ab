"""How `kits/digits` was made: `osfl kit train`. Resumable, seeded, CPU or CUDA; public split only.

Three stages, each a plain training loop with its own checkpoint:

1. `vae`: autoencoder, L1 + KL, as Stable Diffusion's first stage without the perceptual and adversarial losses; every style equally
   often, so that no style's detail is lost before the denoiser sees it.
2. `classifier`: ResNet-18 on the public corpus with a pretext task that uses no digit label (RotNet, Gidaris et al. 2018:
   which of four turns; and which style). It stands for ImageNet's initialisation.
3. `denoiser`: UNet and text encoder together, noise prediction, min-SNR-5 weights (Hang et al. 2023), captions dropped for
   classifier-free guidance, exponential moving average of the weights. Images whose caption names a style are drawn five times
   as often; what a class-only caption means, nearly always a photograph, is left as the corpus has it.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F

from osfl import classifiers, diffusion, encoders
from osfl.config import ConfigError
from osfl.data import digits
from osfl.data.render import STYLES
from osfl.seeds import seed_of


@dataclass(frozen=True)
class Recipe:
    """Steps, batch sizes and learning rates of the three stages."""

    seed: int = 0
    vae_steps: int = 2500
    vae_batch: int = 32
    vae_lr: float = 1e-3
    kl_weight: float = 2e-6
    classifier_steps: int = 800
    classifier_batch: int = 64
    classifier_lr: float = 1e-3
    denoiser_steps: int = 5400
    denoiser_batch: int = 64
    denoiser_lr: float = 1e-3
    style_weight: float = 5.0  # images whose caption names a style are drawn so much more often
    caption_dropout: float = 0.10
    ema_decay: float = 0.999
    text_length: int = 16
    text_width: int = 64


@dataclass
class Stage:
    """One resumable training loop."""

    name: str
    modules: nn.ModuleDict
    steps: int
    lr: float
    loss: Callable[[torch.Generator], torch.Tensor]  # of one step; all its randomness comes from the generator
    ema_decay: float = 0.0


def run_stage(stage: Stage, folder: Path, seed: int, device: torch.device, progress: Progress) -> dict:
    """Train a stage to its end, from its checkpoint if there is one. Leaves `stage.modules` at the (averaged) final weights.

    Every step's randomness is seeded by (seed, stage, step), so an interrupted training continues as if it had not been.

    Returns:
        seconds spent and the mean loss of every 100 steps.
    """
    modules = stage.modules.to(device).train()
    optimiser = torch.optim.AdamW(modules.parameters(), lr=stage.lr, weight_decay=1e-2, betas=(0.9, 0.99))
    average = {k: v.clone() for k, v in modules.state_dict().items()}
    file, step = folder / f"{stage.name}.pt", 0
    log: dict = {"seconds": 0.0, "losses": []}
    if file.exists():
        saved = torch.load(file, map_location=device, weights_only=True)
        modules.load_state_dict(saved["modules"])
        optimiser.load_state_dict(saved["optimiser"])
        average, step, log = saved["average"], saved["step"], saved["log"]
    bar = progress.add_task(stage.name, total=stage.steps, completed=step)
    started, recent = time.perf_counter(), []
    while step < stage.steps:
        for group in optimiser.param_groups:  # 100 steps of warm-up, then a cosine to zero
            group["lr"] = stage.lr * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / stage.steps))
        generator = torch.Generator(device).manual_seed(seed_of(seed, step, stage.name))
        loss = stage.loss(generator)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimiser.step()
        decay = min(stage.ema_decay, (1 + step) / (10 + step))
        for name, value in modules.state_dict().items():
            if value.is_floating_point():
                average[name].lerp_(value, 1 - decay)
            else:
                average[name].copy_(value)
        recent.append(loss.item())
        step += 1
        progress.update(bar, completed=step, description=f"{stage.name} loss {np.mean(recent[-50:]):.4f}")
        if step % 100 == 0 or step == stage.steps:
            log["seconds"] += time.perf_counter() - started
            log["losses"].append(round(float(np.mean(recent)), 5))
            started, recent = time.perf_counter(), []
            state = {"modules": modules.state_dict(), "optimiser": optimiser.state_dict()}
            temporary = file.with_suffix(".tmp")
            torch.save({**state, "average": average, "step": step, "log": log}, temporary)
            temporary.replace(file)
    modules.load_state_dict(average)
    modules.eval().requires_grad_(False)
    return log


def train_kit(out: Path, work: Path, recipe: Recipe, device: str, progress: Progress) -> dict:
    """Train the digits kit into `out`; checkpoints go to `work`, where an interrupted training resumes.

    Returns:
        the log written to the kit's `training.json`.

    Raises:
        ConfigError: `work` holds checkpoints of another recipe.
    """
    work.mkdir(parents=True, exist_ok=True)
    own = json.dumps({**asdict(recipe), "device": device}, indent=1)
    if (file := work / "recipe.json").is_file() and file.read_text() != own:
        raise ConfigError(
            f"--work {work}: its checkpoints are of another recipe or device; remove them, or name another folder"
        )
    file.write_text(own)
    torch.manual_seed(recipe.seed)
    target = torch.device(device)
    corpus = digits.load_split("public").with_format("numpy")
    pixels = torch.from_numpy(np.stack(corpus["image"])).permute(0, 3, 1, 2).to(target)
    style = torch.tensor([STYLES.index(s) for s in corpus["domain"]], device=target)
    log: dict = {"recipe": asdict(recipe), "device": device, "torch": torch.__version__, "stages": {}}

    def draw(batch: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(len(pixels), (batch,), generator=generator, device=target)

    rarity = (1 / torch.bincount(style))[style]

    def draw_balanced(batch: int, generator: torch.Generator) -> torch.Tensor:
        return torch.multinomial(rarity, batch, replacement=True, generator=generator)

    def images(rows: torch.Tensor) -> torch.Tensor:
        return pixels[rows].float() / 127.5 - 1

    # All weights are drawn before any training, so that a resumed run starts from the same ones.
    vae, resnet = diffusion.new_vae(), classifiers.build_classifier("resnet18", num_classes=4 * len(STYLES), small_stem=True)
    text, unet = (
        encoders.new_text_encoder(corpus["caption"], recipe.text_length, recipe.text_width),
        diffusion.new_unet(recipe.text_width),
    )

    # 1. Autoencoder

    def vae_loss(generator: torch.Generator) -> torch.Tensor:
        x = images(draw_balanced(recipe.vae_batch, generator))
        posterior = vae.encode(x).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator, device=target)
        restored = vae.decode(posterior.mean + posterior.std * noise).sample
        return F.l1_loss(restored, x) + recipe.kl_weight * posterior.kl().mean()

    stage = Stage("vae", nn.ModuleDict({"vae": vae}), recipe.vae_steps, recipe.vae_lr, vae_loss, ema_decay=0.995)
    log["stages"]["vae"] = run_stage(stage, work, recipe.seed, target, progress)

    # 2. Classifier initialisation: 4 turns x 6 styles
    def classifier_loss(generator: torch.Generator) -> torch.Tensor:
        rows = draw(recipe.classifier_batch, generator)
        turns = torch.randint(4, (len(rows),), generator=generator, device=target)
        turned = torch.stack([torch.rot90(x, int(k), (1, 2)) for x, k in zip(images(rows), turns, strict=True)])
        return F.cross_entropy(resnet(classifiers.normalise(turned)), turns * len(STYLES) + style[rows])

    stage = Stage(
        "classifier", nn.ModuleDict({"resnet18": resnet}), recipe.classifier_steps, recipe.classifier_lr, classifier_loss
    )
    log["stages"]["classifier"] = run_stage(stage, work, recipe.seed, target, progress)

    # 3. Denoiser: latents once, then noise prediction
    with torch.no_grad():
        posteriors = [vae.encode(chunk.float() / 127.5 - 1).latent_dist for chunk in pixels.split(500)]
        mean, std = torch.cat([p.mean for p in posteriors]), torch.cat([p.std for p in posteriors])
        scale = float(
            1 / (mean + std * torch.randn(mean.shape, generator=torch.Generator(target).manual_seed(0), device=target)).std()
        )
    vae.register_to_config(scaling_factor=scale)
    tokens, nothing = text.tokens(corpus["caption"]).to(target), text.tokens([""]).to(target)
    alphas_cumprod = diffusion.new_scheduler().alphas_cumprod.to(target)

    named = torch.tensor([any(s in c for s in STYLES) for c in corpus["caption"]], device=target)
    weights = 1 + (recipe.style_weight - 1) * named

    def denoiser_loss(generator: torch.Generator) -> torch.Tensor:
        rows = torch.multinomial(weights, recipe.denoiser_batch, replacement=True, generator=generator)
        x0 = (mean[rows] + std[rows] * torch.randn(mean[rows].shape, generator=generator, device=target)) * scale
        t = torch.randint(len(alphas_cumprod), (len(rows),), generator=generator, device=target)
        eps = torch.randn(x0.shape, generator=generator, device=target)
        dropped = torch.rand(len(rows), generator=generator, device=target) < recipe.caption_dropout
        hidden = text.model(torch.where(dropped[:, None], nothing, tokens[rows])).last_hidden_state
        a_t = alphas_cumprod[t]
        guess = unet(diffusion.forward_noise(x0, eps, a_t), t, encoder_hidden_states=hidden).sample
        snr = a_t / (1 - a_t)
        return ((guess - eps).square().mean(dim=(1, 2, 3)) * snr.clamp(max=5) / snr).mean()

    parts = nn.ModuleDict({"unet": unet, "text": text.model})
    stage = Stage("denoiser", parts, recipe.denoiser_steps, recipe.denoiser_lr, denoiser_loss, recipe.ema_decay)
    log["stages"]["denoiser"] = run_stage(stage, work, recipe.seed, target, progress)

    pipe = diffusion.pipeline(vae.half(), unet.half(), encoders.TextEncoder(text.model.half(), text.tokenizer))
    pipe.save_pretrained(out)
    (out / "classifiers").mkdir(exist_ok=True)
    classifiers.save_initialisation(resnet, out / "classifiers" / "resnet18.safetensors")
    log["checks"] = _check_styles(out, resnet.to("cpu"), progress)
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    (out / "README.md").write_text(_card(log))
    return log


def _check_styles(
    kit: Path, resnet: nn.Module, progress: Progress, per_prompt: int = 10, columns: int = 2, steps: int = 50
) -> dict[str, float]:
    """Sample every class from class prompts and from each style's prompts with diffusers' own pipeline; draw `samples.png`.

    Returns:
        for each kind of prompt, the share of samples that the pretext classifier takes for each style asked for.
    """
    pipe = diffusion.load_pipeline(kit)
    bar, shares, rows = progress.add_task("samples", total=1 + len(STYLES)), {}, []
    for style in ("", *STYLES):
        prompts = [f"a {style} of a {name}" if style else f"an image of {name}" for name in digits.CLASSES]
        generator = torch.Generator().manual_seed(0)
        arrays = pipe(
            prompts,
            num_inference_steps=steps,
            guidance_scale=3.0,
            num_images_per_prompt=per_prompt,
            generator=generator,
            output_type="np",
        ).images
        pictures = torch.from_numpy(arrays).permute(0, 3, 1, 2)
        with torch.no_grad():
            guess = resnet.eval()(classifiers.normalise(pictures * 2 - 1)).argmax(dim=1) % len(STYLES)
        wanted = STYLES.index(style or "photo")
        shares[f"{style} prompts" if style else "class prompts, photographs"] = round(
            (guess == wanted).float().mean().item(), 3
        )
        shown = [arrays[c * per_prompt + i] for c in range(len(digits.CLASSES)) for i in range(columns)]
        rows.append(np.concatenate(shown, axis=1))
        progress.advance(bar)
    sheet = Image.fromarray((np.concatenate(rows) * 255).round().astype(np.uint8))
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(kit / "samples.png")
    return shares


def _card(log: dict) -> str:
    """The kit's card, from its log."""
    r, stages = log["recipe"], log["stages"]
    losses = "".join(
        f"| {name} | {r[f'{name}_steps']:,} of {r[f'{name}_batch']} | {about['seconds']:,.0f} | {about['losses'][0]:.4f} | {about['losses'][-1]:.4f} |\n"
        for name, about in stages.items()
    )
    shares = "".join(f"| {name} | {share:.0%} |\n" for name, share in log["checks"].items())
    return f"""# kits/digits

A miniature of Stable Diffusion in its own folder format: autoencoder (f = 4, 32 px to 4 x 8 x 8), text-conditioned UNet, CLIP text encoder and
tokenizer ({r["text_length"]} tokens of {r["text_width"]}), scheduler; and `classifiers/resnet18.safetensors`, an initialisation that stands for ImageNet's
(matrices in 8 bits). `osfl kit train` makes it again; the weights are Apache-2.0, as the project.

**Data.** Only the public split of the six handwritten domains (`osfl/data/digits.py`): scans of scikit-learn's digits that no client and no
test has, drawn in six styles. Long-tailed like the web: {digits.PHOTO_SHARE:.0%} photographs, {digits.PHOTO_CAPTIONS[0]:.0%} of them captioned by class alone and
{digits.PHOTO_CAPTIONS[1]:.0%} with the style; {(1 - digits.PHOTO_SHARE) / 5:.0%} of each other style, {digits.STYLE_CAPTIONS[1]:.0%} captioned with the style and {digits.STYLE_CAPTIONS[0]:.0%} by class
alone; the rest without a caption. The denoiser draws captions that name a style {r["style_weight"]:g} times as often. No caption names a client's palette,
stroke or background.

**Recipe.** `osfl/kit_recipe.py`, seed {r["seed"]}, on {log["device"]}, torch {log["torch"]}:

| stage | steps and batch | seconds | first loss | last loss |
|---|---:|---:|---:|---:|
{losses}
**What it draws.** The class of every column, two samples each, 50 steps, guidance 3. First row: `an image of CLASS`. Then `a STYLE of a CLASS` for
{", ".join(STYLES)}.

![samples](samples.png)

Share of 100 samples that the pretext classifier takes for the style asked for:

| prompts | share |
|---|---:|
{shares}
"""
