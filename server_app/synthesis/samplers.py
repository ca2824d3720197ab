"""The denoising loop: DDIM (Song et al., arXiv 2010.02502) with eta = 0, or another solver.

Other solvers are approximations that need fewer steps. The rows of a batch are independent: each
may have its own condition, guidance and noise.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext

import torch

from osfl.models.diffusion import FEW_STEP_SOLVERS, Kit, ddim_step, new_solver, timesteps
from osfl.util.pixels import to_uint8
from server_app.synthesis.progress import step_done


class NotFiniteError(ValueError):
    """Sampling diverged.

    Attributes:
        rows: the rows of the batch whose z_0 or image is not finite.
    """

    def __init__(self, rows: list[int]):
        super().__init__(rows)
        self.rows = rows

    def __str__(self) -> str:
        return "sampling gave NaN or infinity; set a lower guidance"


class PrecisionError(ValueError):
    """A network overflows in a 16-bit number format, independently of the payloads."""


Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (z [B, ...], t []) -> e [B, ...]


def ddim_schedule(kit: Kit, steps: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return (t, a_t, a_prev) of every step from T down, spaced as the kit's scheduler says.

    A step ends at the noise level where the next one begins, and the last at the scheduler's final
    level. diffusers' DDIM subtracts a fixed gap from t instead, which leaves residual noise unless
    the timesteps are evenly spaced integers.
    """
    ts = timesteps(kit.scheduler, steps)
    a_t = [kit.alphas_cumprod[t] for t in ts]
    return list(zip(ts, a_t, [*a_t[1:], _final_alpha(kit)], strict=True))


def _final_alpha(kit: Kit) -> torch.Tensor:
    """Return 1, or a_0 if the kit's scheduler has `set_alpha_to_one = false`."""
    final_alpha: torch.Tensor = kit.scheduler.final_alpha_cumprod.to(kit.device)
    return final_alpha


def ddim(kit: Kit, z: torch.Tensor, steps: int, predict: Predict, skipped: int = 0) -> torch.Tensor:
    """Denoise z_T to z_0 by DDIM.

    Args:
        z: z_T, [B, c, h, w].
        steps: number of timesteps.
        predict: returns the guided noise prediction.
        skipped: number of first timesteps to leave out; z is then the latent of the next one.

    Returns:
        z_0, [B, c, h, w].
    """
    schedule = ddim_schedule(kit, steps)[skipped:]
    for number, (t, a_t, a_prev) in enumerate(schedule, start=skipped + 1):
        with kit.without_lora() if number <= kit.sampling.base_steps else nullcontext():
            e = predict(z, torch.tensor(t, device=kit.device))
        # DDIM, eq. 12 with sigma_t = 0
        z = ddim_step(z, e, a_t, a_prev)
        step_done(number, steps)
    return z


def denoise(kit: Kit, z: torch.Tensor, steps: int, predict: Predict) -> torch.Tensor:
    """Denoise z_T to z_0 by the kit's solver. Arguments and result as `ddim`.

    DPM-Solver++ (Lu et al., arXiv 2211.01095), UniPC (Zhao et al., arXiv 2302.04867), LCM (Luo et
    al., arXiv 2310.04378) and TCD (Zheng et al., arXiv 2402.19159) are diffusers'. The first
    `base_steps` run without the distilled LoRA.
    """
    if kit.sampling.solver == "ddim":
        return ddim(kit, z, steps, predict)
    solver = new_solver(kit.sampling.solver, kit.scheduler)
    solver.set_timesteps(steps, device=kit.device)
    is_stochastic = kit.sampling.solver in FEW_STEP_SOLVERS
    options = {"generator": _own_generators(z)} if is_stochastic else {}
    for number, t in enumerate(solver.timesteps, start=1):
        with kit.without_lora() if number <= kit.sampling.base_steps else nullcontext():
            e = predict(z, t)
        z = solver.step(e, t, z, **options).prev_sample
        step_done(number, len(solver.timesteps))
    return z


def _own_generators(z: torch.Tensor) -> list[torch.Generator]:
    """Return one generator per row, seeded by its z_T, so that its noise ignores its batch."""
    generators = []
    for row in z.cpu():
        digest = hashlib.sha256(row.contiguous().numpy().tobytes()).digest()
        seed = int.from_bytes(digest[:8], "big") % 2**63
        generators.append(torch.Generator().manual_seed(seed))
    return generators


def first_timestep(kit: Kit, steps: int) -> int:
    """Return the timestep at which denoising begins."""
    if kit.sampling.solver == "ddim":
        return ddim_schedule(kit, steps)[0][0]
    solver = new_solver(kit.sampling.solver, kit.scheduler)
    solver.set_timesteps(steps)
    return int(solver.timesteps[0])


def z_sampling(
    kit: Kit, z: torch.Tensor, steps: int, strong: Predict, weak: Predict, threshold: int
) -> torch.Tensor:
    """Denoise z_T to z_0 with a zigzag at timesteps above a threshold.

    Espresso, phase 2; Z-Sampling (Bai et al., arXiv 2412.10891).

    Args:
        z: z_T, [B, c, h, w].
        steps: number of timesteps.
        strong: returns the noise prediction with guidance gamma_1.
        weak: returns the noise prediction with guidance gamma_2 < gamma_1.
        threshold: T_z.

    Returns:
        z_0, [B, c, h, w].
    """
    for number, (t, a_t, a_prev) in enumerate(ddim_schedule(kit, steps), start=1):
        timestep = torch.tensor(t, device=kit.device)
        if t > threshold:
            # 1. Zig: denoise one step with strong guidance
            z_prev = ddim_step(z, strong(z, timestep), a_t, a_prev)
            # 2. Zag: invert it with weak guidance at the same timestep. The inverse of a DDIM step
            # is the step with a_t and a_prev exchanged
            z = ddim_step(z_prev, weak(z_prev, timestep), a_prev, a_t)
        # 3. Denoise one step with strong guidance
        z = ddim_step(z, strong(z, timestep), a_t, a_prev)
        step_done(number, steps)
    return z


@torch.no_grad()
def to_images(kit: Kit, z: torch.Tensor) -> torch.Tensor:
    """Decode z_0 to images, uint8 [B, 3, H, W] on the CPU.

    Raises:
        NotFiniteError: z_0 or its image is not finite in some rows.
    """
    images = kit.decode(z).float()
    finite = torch.isfinite(z).flatten(1).all(dim=1) & torch.isfinite(images).flatten(1).all(dim=1)
    if not finite.all():
        raise NotFiniteError((~finite).nonzero().flatten().tolist())
    return to_uint8(images).cpu()
