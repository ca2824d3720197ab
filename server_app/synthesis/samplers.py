"""The denoise loop.

DDIM (Song et al., arXiv 2010.02502) with eta = 0, or, approximately, a multistep solver in fewer
steps.

Rows of a batch are independent: each may have its own condition, guidance and noise.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext

import torch

from osfl.models.diffusion import FEW_STEP_SOLVERS, Kit, ddim_step, new_solver, timesteps
from osfl.util.pixels import to_uint8
from server_app.synthesis.progress import step_done


class NotFiniteError(ValueError):
    """Sampling was led astray.

    Attributes:
        rows: of the batch, whose z_0 is not finite.
    """

    def __init__(self, rows: list[int]):
        super().__init__(rows)
        self.rows = rows

    def __str__(self) -> str:
        return "sampling gave NaN or infinity; lower the guidance"


class PrecisionError(ValueError):
    """A network overflows in a number format of 16 bits, whatever the clients sent."""


Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (z [B, ...], t []) -> e [B, ...]


def ddim_schedule(kit: Kit, steps: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return (t, a_t, a_prev) of every step, from T down, spaced as the kit's scheduler says.

    A step ends at the noise level where the next one begins, the last at the scheduler's final one.
    diffusers' DDIM subtracts a fixed gap from t, which leaves noise behind unless the timesteps are
    evenly spaced whole numbers.
    """
    taken = timesteps(kit.scheduler, steps)
    a_t = [kit.alphas_cumprod[t] for t in taken]
    return list(zip(taken, a_t, [*a_t[1:], _final_alpha(kit)], strict=True))


def _final_alpha(kit: Kit) -> torch.Tensor:
    """Return 1, or a_0 where the kit says `set_alpha_to_one = false`."""
    return kit.scheduler.final_alpha_cumprod.to(kit.device)


def ddim(kit: Kit, z: torch.Tensor, steps: int, predict: Predict) -> torch.Tensor:
    """Denoise z_T to z_0.

    Args:
        z: z_T, [B, c, h, w].
        steps: number of timesteps.
        predict: the guided noise prediction.

    Returns:
        z_0 [B, c, h, w].
    """
    for number, (t, a_t, a_prev) in enumerate(ddim_schedule(kit, steps), start=1):
        with kit.without_lora() if number <= kit.sampling.base_steps else nullcontext():
            e = predict(z, torch.tensor(t, device=kit.device))
        z = ddim_step(z, e, a_t, a_prev)
        step_done(number, steps)
    return z


def denoise(kit: Kit, z: torch.Tensor, steps: int, predict: Predict) -> torch.Tensor:
    """Denoise z_T to z_0 by the kit's solver; arguments and result as `ddim`.

    DPM-Solver++ (Lu et al., arXiv 2211.01095), UniPC (Zhao et al., arXiv 2302.04867), LCM (Luo et
    al., arXiv 2310.04378) and TCD (Zheng et al., arXiv 2402.19159) by diffusers. The first
    `base_steps` are without the few-step weights.
    """
    if kit.sampling.solver == "ddim":
        return ddim(kit, z, steps, predict)
    solver = new_solver(kit.sampling.solver, kit.scheduler)
    solver.set_timesteps(steps, device=kit.device)
    noisy = kit.sampling.solver in FEW_STEP_SOLVERS
    own = {"generator": _own_generators(z)} if noisy else {}
    for number, t in enumerate(solver.timesteps, start=1):
        with kit.without_lora() if number <= kit.sampling.base_steps else nullcontext():
            e = predict(z, t)
        z = solver.step(e, t, z, **own).prev_sample
        step_done(number, len(solver.timesteps))
    return z


def _own_generators(z: torch.Tensor) -> list[torch.Generator]:
    """A generator for each row's further noise, of its z_T: the same whatever batch it is in."""
    generators = []
    for row in z.cpu():
        digest = hashlib.sha256(row.contiguous().numpy().tobytes()).digest()
        seed = int.from_bytes(digest[:8], "big") % 2**63
        generators.append(torch.Generator().manual_seed(seed))
    return generators


def first_timestep(kit: Kit, steps: int) -> int:
    """Where denoising begins."""
    if kit.sampling.solver == "ddim":
        return ddim_schedule(kit, steps)[0][0]
    solver = new_solver(kit.sampling.solver, kit.scheduler)
    solver.set_timesteps(steps)
    return int(solver.timesteps[0])


def z_sampling(
    kit: Kit, z: torch.Tensor, steps: int, strong: Predict, weak: Predict, threshold: int
) -> torch.Tensor:
    """Denoise z_T to z_0 with a zig-zag at timesteps above the threshold (Espresso, Z-Sampling.

    Bai et al., arXiv 2412.10891).

    Args:
        strong: the noise prediction with guidance gamma_1.
        weak: with gamma_2 < gamma_1.
        threshold: T_z.
    """
    for number, (t, a_t, a_prev) in enumerate(ddim_schedule(kit, steps), start=1):
        at = torch.tensor(t, device=kit.device)
        if t > threshold:
            # 1. zig: a strong step down
            lower = ddim_step(z, strong(z, at), a_t, a_prev)
            # 2. zag: back up with a weak prediction at the same timestep; a DDIM step is its own
            # inverse with a_t and a_prev exchanged
            z = ddim_step(lower, weak(lower, at), a_prev, a_t)
        # 3. the step that stays
        z = ddim_step(z, strong(z, at), a_t, a_prev)
        step_done(number, steps)
    return z


@torch.no_grad()
def to_images(kit: Kit, z: torch.Tensor) -> torch.Tensor:
    """D(z_0) as uint8 [B, 3, H, W].

    Raises:
        NotFiniteError: in some rows z_0 or its image is not finite.
    """
    images = kit.decode(z).float()
    finite = torch.isfinite(z).flatten(1).all(dim=1) & torch.isfinite(images).flatten(1).all(dim=1)
    if not finite.all():
        raise NotFiniteError((~finite).nonzero().flatten().tolist())
    return to_uint8(images).cpu()
