"""Latent consistency distillation: its loss with a kit that is known in closed form.

The teacher's latents are x0 ~ N(mu(c), s^2 I) (tests/helpers/analytic.py). The student is the
same kit with predictions that are 0.8 of the teacher's, so that no two of the loss's terms agree
by chance.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from osfl.kit_training.few_steps import consistency, consistency_loss
from osfl.models.diffusion import Kit
from tests.helpers.analytic import CHANNELS, SIDE, Denoiser, alphas_cumprod, analytic_kit, eps, mu

TIMID = 0.8
GUIDANCE = 2.5


class TimidDenoiser(Denoiser):
    """Predicts a share of the noise, which can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(TIMID, dtype=torch.float64))

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=self.share * super().forward(*given, **named).sample)


def timid_kit() -> Kit:
    return replace(analytic_kit(), unet=TimidDenoiser())  # type: ignore[arg-type]


def latents(seed: int, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)


def seen(z: np.ndarray, t: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """f(z, t) of the student: LCM's eq. 9 with diffusers' coefficients, 0.25 for sigma squared."""
    a = alphas_cumprod()[t][:, None, None, None]
    clean = (z - np.sqrt(1 - a) * TIMID * eps(z, a, mean)) / np.sqrt(a)
    scaled = 10.0 * t[:, None, None, None]
    return (0.25 * z + scaled * np.sqrt(scaled**2 + 0.25) * clean) / (scaled**2 + 0.25)


@pytest.mark.parametrize(
    ("schedule", "steps"), [(50, (0, 7, 49)), (20, (0, 12, 19))], ids=["50 steps", "20 steps"]
)
def test_the_loss_is_the_papers(schedule: int, steps: tuple[int, ...]) -> None:
    """Also at the lowest step, whose lower end is t = 0."""
    teacher = analytic_kit()
    condition = teacher.text(["an image of one", "an image of two", "an image of three"])
    nothing = teacher.text([""])
    x0 = latents(0)
    noise = latents(1)
    step = torch.tensor(steps)
    loss = consistency_loss(
        timid_kit(), teacher, x0, condition, nothing, GUIDANCE, noise, step, schedule
    )

    gap = 1000 // schedule
    t = np.array([gap * (number + 1) - 1 for number in steps])
    lower = np.array([max(0, top - gap) for top in t])
    assert lower[0] == 0
    a = alphas_cumprod()[t][:, None, None, None]
    a_lower = alphas_cumprod()[lower][:, None, None, None]
    with_caption = mu(condition.states.numpy())
    without = mu(nothing.states.numpy())
    z = np.sqrt(a) * x0.numpy() + np.sqrt(1 - a) * noise.numpy()
    # Guidance in diffusers' convention: from nothing's prediction, w times the way to the caption's
    e = (1 - GUIDANCE) * eps(z, a, without) + GUIDANCE * eps(z, a, with_caption)
    clean = (z - np.sqrt(1 - a) * e) / np.sqrt(a)
    z_lower = np.sqrt(a_lower) * clean + np.sqrt(1 - a_lower) * e
    apart = seen(z, t, with_caption) - seen(z_lower, lower, with_caption)
    expected = np.mean(np.sqrt(apart**2 + 1e-6) - 1e-3)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_only_what_is_seen_higher_up_learns() -> None:
    """The target is held: by differences of the share in the upper term alone."""
    teacher = analytic_kit()
    condition = teacher.text(["an image of one", "an image of two", "an image of three"])
    student = timid_kit()
    inputs = (teacher, latents(0), condition, teacher.text([""]), GUIDANCE, latents(1))
    step = torch.tensor([3, 20, 40])
    consistency_loss(student, *inputs, step, 50).backward()
    share = student.unet.share
    slope = share.grad.item()

    call_counts: list[int] = []

    def upper_alone(moved: float) -> float:
        """The loss with the lower term as it was."""
        share.data.fill_(moved)
        calls: list[int] = []
        plain = student.unet.forward

        def forward(*args: torch.Tensor, **named: torch.Tensor) -> SimpleNamespace:
            calls.append(1)
            if len(calls) == 2:
                share.data.fill_(TIMID)
            return plain(*args, **named)

        student.unet.forward = forward  # type: ignore[method-assign]
        loss = consistency_loss(student, *inputs, step, 50).item()
        student.unet.forward = plain  # type: ignore[method-assign]
        call_counts.append(len(calls))
        return loss

    small = 1e-5
    expected = (upper_alone(TIMID + small) - upper_alone(TIMID - small)) / (2 * small)
    assert call_counts == [2, 2]
    assert slope == pytest.approx(expected, rel=1e-5)


def test_at_the_end_a_latent_is_itself() -> None:
    """The boundary condition: f(z, 0) = z."""
    kit = timid_kit()
    z = latents(2)
    condition = kit.text(["an image of one"]).expand(3)
    with torch.no_grad():
        output = consistency(kit, z, torch.zeros(3, dtype=torch.long), condition)
        above = consistency(kit, z, torch.ones(3, dtype=torch.long), condition)
    assert torch.equal(output, z)
    assert not torch.allclose(above, z)
