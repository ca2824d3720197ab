"""A classifier small enough to train by hand, as a network and with NumPy.

It takes 2 x 2 mean colours through BatchNorm to one linear layer.

BatchNorm comes first, so that no gradient goes through its statistics.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.helpers.analytic import softmax

# torchvision's, of ImageNet
MEAN = np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = np.array([0.229, 0.224, 0.225]).reshape(3, 1, 1)
PARAMETERS = ("1.weight", "1.bias", "3.weight", "3.bias")
State = dict[str, np.ndarray]


def build(architecture: str, num_classes: int, small_stem: bool = False) -> nn.Sequential:
    """In place of `osfl.models.classifiers.build_classifier`.

    The same weights each time, no two alike.
    """
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, num_classes)
    )
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel()) + number).view(p.shape) / 4)
        model[1].weight += 1  # type: ignore[arg-type]
    return model


def features(pixels: torch.Tensor) -> np.ndarray:
    """uint8 [N, 3, S, S] to normalised mean colours of the quarters [N, 3, 2, 2]."""
    x = (pixels.double().numpy() / 255 - MEAN) / STD
    half = x.shape[-1] // 2
    return x.reshape(len(x), 3, 2, half, 2, half).mean(axis=(3, 5))


def in_use(state: State, x: np.ndarray) -> np.ndarray:
    """Logits [N, C] of features, with the running statistics."""
    return _logits(state, _standardised(x, state["1.running_mean"], state["1.running_var"]))


def _standardised(x: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    return (x - mean.reshape(3, 1, 1)) / np.sqrt(var.reshape(3, 1, 1) + 1e-5)


def _logits(state: State, standardised: np.ndarray) -> np.ndarray:
    return _inner(state, standardised) @ state["3.weight"].T + state["3.bias"]


def _inner(state: State, standardised: np.ndarray) -> np.ndarray:
    scale = state["1.weight"].reshape(3, 1, 1)
    shift = state["1.bias"].reshape(3, 1, 1)
    return (scale * standardised + shift).reshape(len(standardised), -1)


@dataclass
class Training:
    """The classifier in training: its state, and the gradient of the last batch."""

    state: State

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Softmax outputs by a batch's own statistics, which move the running ones by a tenth."""
        mean = x.mean(axis=(0, 2, 3))
        var = x.var(axis=(0, 2, 3))
        count = x.size / 3
        for name, value in (("mean", mean), ("var", var * count / (count - 1))):
            old = self.state[f"1.running_{name}"]
            self.state[f"1.running_{name}"] = 0.9 * old + 0.1 * value
        self.standardised = _standardised(x, mean, var)
        return softmax(_logits(self.state, self.standardised))

    def gradient(self, at_logits: np.ndarray) -> State:
        """The gradient of the parameters, from that of the last batch's logits."""
        inner = _inner(self.state, self.standardised)
        back = (at_logits @ self.state["3.weight"]).reshape(self.standardised.shape)
        return {
            "1.weight": (back * self.standardised).sum(axis=(0, 2, 3)),
            "1.bias": back.sum(axis=(0, 2, 3)),
            "3.weight": at_logits.T @ inner,
            "3.bias": at_logits.sum(axis=0),
        }


def sgd(
    state: State,
    x: np.ndarray,
    labels: np.ndarray,
    batches: list[np.ndarray],
    config: Any,
    *,
    teacher: np.ndarray | None = None,
    weight: float = 0.0,
    pull: Any = lambda name, value: 0.0,
) -> State:
    """SGD on the mean of CE + weight KL(teacher || student).

    At the logits the gradient is (p - onehot) + weight (p - teacher), over B.

    Args:
        pull: a further gradient, of a parameter's name and value.
    """
    training = Training(dict(state))
    velocity = {name: np.zeros_like(state[name]) for name in PARAMETERS}
    for rows in batches:
        p = training.probabilities(x[rows])
        at_logits = p - np.eye(p.shape[1])[labels[rows]]
        if teacher is not None:
            at_logits = at_logits + weight * (p - teacher[rows])
        gradient = training.gradient(at_logits / len(rows))
        for name in PARAMETERS:
            value = training.state[name]
            g = gradient[name] + config.weight_decay * value + pull(name, value)
            velocity[name] = config.momentum * velocity[name] + g
            training.state[name] = value - config.lr * velocity[name]
    return training.state


def in_numbers(state: dict[str, torch.Tensor]) -> State:
    """A state dict in float64, without the count of batches."""
    return {
        name: value.double().numpy() for name, value in state.items() if "num_batches" not in name
    }
