"""Checks of models against those that NumPy trains."""

import numpy as np
import torch

from osfl.util.seeds import seed_of
from tests.helpers.analytic import numbers
from tests.helpers.analytic_classifier import (
    State,
)


def order(count: int, size: int, epochs: int, seed: int) -> list[np.ndarray]:
    """The batches of `fit`: a new order every epoch; a batch of one is left out."""
    source = torch.Generator().manual_seed(seed_of(seed, "order"))
    batches: list[np.ndarray] = []
    for _ in range(epochs):
        shuffled = torch.randperm(count, generator=source)
        batches += [rows.numpy() for rows in shuffled.split(size) if len(rows) > 1]
    return batches


def assert_same(made: dict[str, torch.Tensor], expected: State) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(numbers(made[name]), value, rtol=1e-4, atol=1e-5, err_msg=name)
