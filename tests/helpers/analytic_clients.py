"""Client jobs on the analytic kit, and the closed form of what clients learn."""

import numpy as np
import torch

from client_app.context import ClientJob
from osfl.config import parse_run_config
from osfl.data.load import Images
from osfl.util.seeds import seed_of
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, TIMESTEPS, Adam, numbers
from tests.helpers.settings import quick

SHAPE = (analytic.CHANNELS, analytic.SIDE, analytic.SIDE)
SIZE = int(np.prod(SHAPE))  # D


def job_of(data: Images, **overrides: object) -> ClientJob:
    return ClientJob(
        parse_run_config(quick(**overrides)),
        "client-0",
        CLASSES,
        lambda size: data,
        "no kit is loaded",
        torch.device("cpu"),
    )


def images(*labels: int) -> Images:
    return Images(analytic.random_pixels(len(labels)), torch.tensor(labels))


def generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts))


def normal(count: int, source: torch.Generator) -> np.ndarray:
    return numbers(torch.randn(count, *SHAPE, generator=source))


def gradient_for_the_mean(
    x0: np.ndarray, noise: np.ndarray, t: np.ndarray, mean: np.ndarray
) -> np.ndarray:
    """d / d mu of the mean of a batch's losses, for every row [B, 2, 4, 4]."""
    a = analytic.alphas_cumprod()[t].reshape(-1, 1, 1, 1)
    z = np.sqrt(a) * x0 + np.sqrt(1 - a) * noise  # DDPM, eq. 4
    residual = noise - analytic.eps(z, a, mean)
    return 2 / SIZE / len(x0) * residual * np.sqrt(1 - a) * np.sqrt(a) / analytic.variance(a)


def learned_alone(
    start: np.ndarray,
    mean: np.ndarray,
    deviation: np.ndarray,
    epochs: int,
    size: int,
    lr: float,
    source: torch.Generator,
    alike: bool = False,
) -> np.ndarray:
    """One condition [L, d] over its own images: all orders first; then for each batch t, the
    posterior's noise and eps. Or what it has beside its start [1, d], which all tokens get.
    """
    rows = torch.arange(len(mean))
    batches = []
    for _ in range(epochs):
        batches += list(rows[torch.randperm(len(rows), generator=source)].split(size))
    adam = Adam(np.zeros_like(start[:1]) if alike else start, lr)
    for batch in batches:
        t = torch.randint(TIMESTEPS, (len(batch),), generator=source).numpy()
        x0 = mean[batch] + deviation[batch] * normal(len(batch), source)
        noise = normal(len(batch), source)
        condition = start + adam.value if alike else adam.value
        current = np.repeat(condition[None], len(batch), axis=0)
        back = gradient_for_the_mean(x0, noise, t, analytic.mu(current))
        gradient = analytic.mu_backward(back, len(start)).sum(axis=0)
        adam.step(gradient.sum(axis=0, keepdims=True) if alike else gradient)
    return adam.value
