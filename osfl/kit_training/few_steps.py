"""Stage 7: LoRA weights with which the kit's UNet draws in few steps (LCM-LoRA, Luo et al., arXiv
2311.05556), by latent consistency distillation (Luo et al., arXiv 2310.04378).

Differences from the paper:

1. Theirs: guidance drawn anew in each step. Ours: one scale (`Recipe.lora_guidance`), which the
   weights then have within them: they are sampled with guidance 1.
2. Theirs: weights for Stable Diffusion of rank 64. Ours: of a UNet with 3 million weights, 32.
"""

from pathlib import Path

import torch
from rich.progress import Progress
from torch import nn

from osfl.kit_training import Recipe
from osfl.kit_training.stages import Corpus, Stage, run_stage
from osfl.methods import LORA
from osfl.models import diffusion
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of

# Of the loss, as their training has it
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
) -> dict[str, dict]:
    """Distil the kit's UNet, guided, into LoRA weights beside it: `lora/`."""
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
    nothing = teacher.text([""])
    caption_of = torch.tensor([number[c] for c in corpus.captions], device=device)
    # A caption guides; where there is none, nothing does
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
            nothing,
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
    condition: torch.Tensor,
    nothing: torch.Tensor,
    guidance: float,
    noise: torch.Tensor,
    step: torch.Tensor,
    schedule: int,
) -> torch.Tensor:
    """How far what the student sees at t is from what it sees one step of the guided teacher
    lower (LCM, eq. 17 and algorithm 1, with their code's Huber distance).

    Args:
        x0: clean latents [B, c, h, w].
        condition: [B, L, d].
        nothing: the empty prompt's encoding [1, L, d].
        guidance: w, in diffusers' convention: 1 is the condition's prediction alone.
        noise: as x0.
        step: of the teacher's schedule, 0 .. schedule - 1, [B].
        schedule: how many steps it has.
    """
    gap = len(teacher.alphas_cumprod) // schedule
    # diffusers' LCMScheduler counts its steps from the end of each gap.
    t = (step + 1) * gap - 1
    t_lower = (t - gap).clamp(min=0)
    a_t = teacher.alphas_cumprod[t].view(-1, 1, 1, 1)
    a_lower = teacher.alphas_cumprod[t_lower].view(-1, 1, 1, 1)
    z = diffusion.forward_noise(x0, noise, a_t.flatten())
    seen = consistency(student, z, t, condition)
    with torch.no_grad():
        given = teacher.eps(z, t, condition)
        free = teacher.eps(z, t, nothing.expand(len(z), -1, -1))
        e = free + guidance * (given - free)
        lower = diffusion.ddim_step(z, e, a_t, a_lower)
        wanted = consistency(student, lower, t_lower, condition)
    return ((seen - wanted).square() + HUBER**2).sqrt().mean() - HUBER


def consistency(
    kit: diffusion.Kit, z: torch.Tensor, t: torch.Tensor, condition: torch.Tensor
) -> torch.Tensor:
    """f(z, t) = c_skip(t) z + c_out(t) x0hat(z, t): the clean latent at once, and z itself at t = 0
    (LCM, eq. 9; the coefficients are those of diffusers' LCMScheduler).

    Args:
        z: [B, c, h, w].
        t: [B].
        condition: [B, L, d].
    """
    scheduler = diffusion.new_solver("lcm", kit.scheduler)
    c_skip, c_out = (
        part.view(-1, 1, 1, 1) for part in scheduler.get_scalings_for_boundary_condition_discrete(t)
    )
    a_t = kit.alphas_cumprod[t].view(-1, 1, 1, 1)
    return c_skip * z + c_out * diffusion.x0hat(z, kit.eps(z, t, condition), a_t)
