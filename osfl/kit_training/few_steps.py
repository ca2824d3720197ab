"""Train stage 7: a LoRA for few-step sampling with the kit's UNet (LCM-LoRA).

LCM-LoRA: Luo et al., arXiv 2311.05556. Latent consistency distillation: Luo et al., arXiv
2310.04378. Differences from the papers:

1. Theirs: the guidance scale is drawn in each step. Ours: one scale (`Recipe.lora_guidance`) is
   distilled into the weights, which are then sampled with guidance 1.
2. Theirs: rank 64 for Stable Diffusion. Ours: rank 32 for a UNet with 3 million weights.
"""

from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from osfl.kit_training.recipe import Recipe
from osfl.kit_training.stages import Corpus, Stage, run_stage
from osfl.methods import LORA
from osfl.models import diffusion
from osfl.models.conditioning import Conditioning
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of

# Constant c of the pseudo-Huber loss, as in the authors' training
HUBER = 0.001
# Every convolution and projection of the UNet
TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "proj_in",
    "proj_out",
    "ff.net.0.proj",
    "ff.net.2",
    "conv1",
    "conv2",
    "conv_shortcut",
    "downsamplers.0.conv",
    "upsamplers.0.conv",
    "time_emb_proj",
)


def train_lora(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Distill the kit's guided UNet into a LoRA, and write it to `lora/`."""
    from peft import LoraConfig

    device = corpus.pixels.device
    teacher = diffusion.load_kit(out, device)
    student = diffusion.load_kit(out, device)
    torch.manual_seed(seed_of(recipe.seed, LORA))
    rank = recipe.lora_rank
    student.unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)))
    posteriors = [teacher.encode(to_float(chunk)) for chunk in corpus.pixels.split(500)]
    mean, logvar = (torch.cat(part) for part in zip(*posteriors, strict=True))
    captions = sorted(set(corpus.captions))
    number = {caption: index for index, caption in enumerate(captions)}
    hidden = teacher.text(captions)
    empty = teacher.text([""])
    caption_of = torch.tensor([number[c] for c in corpus.captions], device=device)
    # Only an image with a caption has a condition to guide by
    captioned = torch.tensor([bool(c) for c in corpus.captions], device=device)

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.lora_batch, generator, among=captioned)
        noise = torch.randn(2, *mean[rows].shape, generator=generator, device=device)
        x0 = mean[rows] + (0.5 * logvar[rows]).exp() * noise[0]
        step = torch.randint(recipe.lora_schedule, (len(rows),), generator=generator, device=device)
        return consistency_loss(
            student,
            teacher,
            x0,
            hidden[caption_of[rows]],
            empty,
            recipe.lora_guidance,
            noise[1],
            step,
            recipe.lora_schedule,
        )

    stage = Stage(
        LORA,
        nn.ModuleDict({"unet": student.unet}),
        recipe.lora_steps,
        recipe.lora_lr,
        loss,
        ema_decay=0.99,
    )
    log = run_stage(stage, work, recipe.seed, device, progress)
    diffusion.save_lora(student.unet, out / LORA)
    return {LORA: log}


def consistency_loss(
    student: diffusion.Kit,
    teacher: diffusion.Kit,
    x0: torch.Tensor,
    condition: Conditioning,
    unconditional: Conditioning,
    guidance: float,
    noise: torch.Tensor,
    step: torch.Tensor,
    schedule: int,
) -> torch.Tensor:
    """Return the latent consistency distillation loss (LCM, eq. 17 and algorithm 1).

    It is the distance between the student's consistency function at t and at the next lower step
    of the guided teacher, with the pseudo-Huber distance of the authors' code.

    Args:
        x0: clean latents [B, c, h, w].
        condition: of B rows.
        unconditional: the empty prompt's, one row.
        guidance: w in diffusers' convention, where 1 is the conditional prediction alone.
        noise: as x0.
        step: of the teacher's schedule, 0 .. schedule - 1, [B].
        schedule: the teacher's number of steps.
    """
    gap = len(teacher.alphas_cumprod) // schedule
    # diffusers' LCMScheduler places a step at the end of each gap
    t = (step + 1) * gap - 1
    t_lower = (t - gap).clamp(min=0)
    a_t = teacher.alphas_cumprod[t].view(-1, 1, 1, 1)
    a_lower = teacher.alphas_cumprod[t_lower].view(-1, 1, 1, 1)
    z = diffusion.forward_noise(x0, noise, a_t.flatten())
    prediction = consistency(student, z, t, condition)
    with torch.no_grad():
        e_cond = teacher.eps(z, t, condition)
        e_uncond = teacher.eps(z, t, unconditional.expand(len(z)))
        e = e_uncond + guidance * (e_cond - e_uncond)
        z_lower = diffusion.ddim_step(z, e, a_t, a_lower)
        target = consistency(student, z_lower, t_lower, condition)
    return ((prediction - target).square() + HUBER**2).sqrt().mean() - HUBER


def consistency(
    kit: diffusion.Kit, z: torch.Tensor, t: torch.Tensor, condition: Conditioning
) -> torch.Tensor:
    """Return the clean latent in one step: f(z, t) = c_skip(t) z + c_out(t) x0hat(z, t).

    LCM, eq. 9, with the coefficients of diffusers' LCMScheduler. f(z, 0) is z itself.

    Args:
        z: [B, c, h, w].
        t: [B].
        condition: of B rows.
    """
    scheduler = diffusion.new_solver("lcm", kit.scheduler)
    c_skip, c_out = (
        part.view(-1, 1, 1, 1) for part in scheduler.get_scalings_for_boundary_condition_discrete(t)
    )
    a_t = kit.alphas_cumprod[t].view(-1, 1, 1, 1)
    x0: torch.Tensor = c_skip * z + c_out * diffusion.x0hat(z, kit.eps(z, t, condition), a_t)
    return x0
