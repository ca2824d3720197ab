"""Plans and closed forms of sampling with the analytic denoiser."""

from typing import Any

import numpy as np
import torch

from osfl.models.diffusion import Kit
from osfl.util.seeds import seed_of
from server_app.synthesis.plan import ImageJob, plan_images
from tests.helpers import analytic
from tests.helpers.analytic import numbers

HELD = {"a": [1, 3], "b": [0]}
PLAN = plan_images("m", 0, HELD, 3)  # a 1 three times, a 3, b 0
LABELS = [job.label for job in PLAN]
SHAPE = (analytic.CHANNELS, analytic.SIDE, analytic.SIDE)


def noise_of(plan: list[ImageJob]) -> np.ndarray:
    """z_T of every image: standard normal numbers of a seed of its own."""
    rows = []
    for job in plan:
        seed = seed_of(job.seed, job.method, job.client, job.label, job.index)
        rows.append(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))
    return numbers(torch.stack(rows))


def assert_made(kit: Kit, pictures: torch.Tensor, z_0: np.ndarray) -> None:
    """The latents that were decoded are z_0, and the pictures are what D makes of them."""
    decoded: Any = kit.vae.decoded
    np.testing.assert_allclose(numbers(decoded) * analytic.SCALING, z_0, rtol=1e-4, atol=1e-4)
    difference = numbers(pictures) - analytic.as_picture(analytic.decode(z_0))
    assert np.abs(difference).max() <= 1
    assert (difference == 0).mean() > 0.99


def empty_mean(kit: Kit) -> np.ndarray:
    return analytic.mu(numbers(kit.text([""])))
