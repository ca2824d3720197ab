"""Classifier-guided runs of FedLMG and FedCADO, against NumPy with gradients worked out by hand.

With u = z - sqrt(a) mu and v = a s^2 + 1 - a, the analytic denoiser says

    x0hat = mu + sqrt(a) s^2 u / v,

so that

    d x0hat / d z = sqrt(a) s^2 / v,

whatever the classifier-free guidance is. Decoder, normalisation and the classifier's layers are
linear, and the derivatives of cross-entropy and of the BatchNorm term are those of
`Guide.gradient`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from osfl.config import FedCADOConfig, parse_run_config
from osfl.models.diffusion import Kit
from server_app.methods import fedcado, fedlmg
from server_app.synthesis.guidance import Teacher, as_teacher
from server_app.synthesis.plan import ImageJob, plan_images
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, DEVIATION, IMAGE_SIDE, analytic_kit, numbers, softmax
from tests.helpers.analytic_sampling import HELD, LABELS, PLAN, assert_made, empty_mean, noise_of
from tests.helpers.settings import quick

# torchvision's, of ImageNet
MEAN = np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = np.array([0.229, 0.224, 0.225]).reshape(3, 1, 1)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network(seed: int, side: int = IMAGE_SIDE) -> nn.Sequential:
    """A linear classifier with two BatchNorm layers."""
    model = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * side**2, len(CLASSES)),
    )
    state = model.state_dict()
    for number, (name, value) in enumerate(state.items()):
        if value.is_floating_point():
            drawn = random(*value.shape, seed=100 * seed + number)
            spread = 0.2 if name == "4.weight" else 0.5
            state[name] = drawn.square() + 0.5 if name.endswith("running_var") else spread * drawn
    model.load_state_dict(state)
    return model.eval()


@dataclass
class Guide:
    """A client's classifier, its weights in the loss, and the side that it was trained at."""

    state: dict[str, np.ndarray]
    classifier_weight: float
    bn_weight: float
    size: int | None = None
    over_unit: bool = False

    def affine(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """A BatchNorm layer in use: factor and shift of each channel."""
        scale = np.sqrt(self.state[f"{layer}.running_var"] + 1e-5)
        factor = self.state[f"{layer}.weight"] / scale
        shift = self.state[f"{layer}.bias"] - factor * self.state[f"{layer}.running_mean"]
        return factor.reshape(-1, 1, 1), shift.reshape(-1, 1, 1)

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The inputs of both BatchNorm layers, and the probabilities, of images about [-1, 1]."""
        pixels = np.clip(x, -1, 1)
        if self.size is not None:
            shrink = halving(self.size)
            pixels = np.einsum("oh,pw,bchw->bcop", shrink, shrink, pixels)
        first = ((pixels + 1) / 2 - MEAN) / STD
        factor, shift = self.affine(0)
        mixed = np.einsum(
            "oc,bchw->bohw", self.state["1.weight"][:, :, 0, 0], factor * first + shift
        )
        second = mixed + self.state["1.bias"].reshape(-1, 1, 1)
        factor, shift = self.affine(2)
        flat = (factor * second + shift).reshape(len(x), -1)
        return first, second, softmax(flat @ self.state["4.weight"].T + self.state["4.bias"])

    def cross_entropy(self, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """-log p_y of every image."""
        return -np.log(self.forward(x)[2][np.arange(len(x)), labels])

    def gradient(self, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The gradient of w CE + lambda L_BN for the images. CE: p - onehot at the logits."""
        first, second, p = self.forward(x)
        at_logits = self.classifier_weight * (p - np.eye(len(CLASSES))[labels])
        at_flat = (at_logits @ self.state["4.weight"]).reshape(second.shape)
        factor, _ = self.affine(2)
        at_second = factor * at_flat + self.of_statistics(2, second)
        factor, _ = self.affine(0)
        mixing = self.state["1.weight"][:, :, 0, 0]
        at_first = factor * np.einsum("oc,bohw->bchw", mixing, at_second)
        at_first = at_first + self.of_statistics(0, first)
        at_seen = at_first / STD / 2
        if self.size is not None:
            shrink = halving(self.size)
            at_seen = np.einsum("oh,pw,bcop->bchw", shrink, shrink, at_seen)
        return at_seen * (np.abs(x) < 1)

    def of_statistics(self, layer: int, u: np.ndarray) -> np.ndarray:
        """lambda d/du of ||mean - m||_2 + ||var - V||_2, mean and var over n positions.

        d mean / d u = 1 / n and d var / d u = 2 (u - mean) / n; d ||y|| / d y = y / ||y||. Over a
        unit of B images, n is B times as large, but all B losses have the term.
        """
        axes = (0, 2, 3) if self.over_unit else (2, 3)
        mean = u.mean(axis=axes, keepdims=True)
        var = u.var(axis=axes, keepdims=True)
        to_mean = mean - self.state[f"{layer}.running_mean"].reshape(-1, 1, 1)
        to_var = var - self.state[f"{layer}.running_var"].reshape(-1, 1, 1)
        to_mean = to_mean / np.sqrt((to_mean**2).sum(axis=1, keepdims=True))
        to_var = to_var / np.sqrt((to_var**2).sum(axis=1, keepdims=True))
        positions = u.shape[2] * u.shape[3]
        return self.bn_weight * (to_mean + 2 * (u - mean) * to_var) / positions


def halving(side: int) -> np.ndarray:
    """Rows of weights that make `side` pixels of twice as many, bilinear with antialiasing.

    A triangle of two pixels' half-width about the new pixel's centre meets old pixels at 1/2 and
    3/2: weights 3/4 and 1/4 on each side, over their sum, which is 2 inside and 7/4 at the border.
    """
    weights = np.zeros((side, 2 * side))
    for row in range(side):
        for offset, weight in ((-1, 0.25), (0, 0.75), (1, 0.75), (2, 0.25)):
            if 0 <= 2 * row + offset < 2 * side:
                weights[row, 2 * row + offset] = weight
    return weights / weights.sum(axis=1, keepdims=True)


Gradient = Callable[[np.ndarray, float], np.ndarray]  # (z, a_t) -> d loss / d z


def gradient_of(
    guides: dict[str, Guide], plan: list[ImageJob], mean: np.ndarray, through_unet: bool
) -> Gradient:
    """d loss / d z: each row by its own client's classifier."""
    labels = np.array([job.label for job in plan])
    clients = np.array([job.client for job in plan])

    def at(z: np.ndarray, a: float) -> np.ndarray:
        x0 = analytic.x0_of(z, analytic.eps(z, a, mean), a)
        x = analytic.decode(x0)
        back = np.zeros_like(z)
        for client, guide in guides.items():
            rows = clients == client
            if rows.any():
                back[rows] = analytic.decode_backward(guide.gradient(x[rows], labels[rows]))
        # through the UNet as above; without it sqrt(a), as of latents from N(0, 1)
        return back * (
            np.sqrt(a) * DEVIATION**2 / analytic.variance(a) if through_unet else np.sqrt(a)
        )

    return at


def guided_run(
    z: np.ndarray, steps: int, mean: np.ndarray, gradient: Gradient, scale: float
) -> np.ndarray:
    """e + scale sqrt(1 - a_t) grad at every step, then DDIM's step with it."""
    for _, a, a_prev in analytic.step_down(steps):
        e = analytic.eps(z, a, mean) + scale * np.sqrt(1 - a) * gradient(z, a)
        z = np.sqrt(a_prev) * analytic.x0_of(z, e, a) + np.sqrt(1 - a_prev) * e
    return z


def edited(z: np.ndarray, steps: int, gradient: Gradient, edits: int, lr: float) -> np.ndarray:
    """z_T - eta grad, again and again, all at the first level."""
    _, a, _ = analytic.step_down(steps)[0]
    for _ in range(edits):
        z = z - lr * gradient(z, a)
    return z


def teachers_of(networks: dict[str, nn.Sequential]) -> dict[str, Teacher]:
    return {client: as_teacher(model) for client, model in networks.items()}


def guides_of(networks: dict[str, nn.Sequential], *weights: Any) -> dict[str, Guide]:
    states = {
        client: {name: numbers(value) for name, value in model.state_dict().items()}
        for client, model in networks.items()
    }
    return {client: Guide(state, *weights) for client, state in states.items()}


def settings(**overrides: object) -> FedCADOConfig:
    """FedCADO's are FedLMG's and two more."""
    named = {f"fedcado__{key}": value for key, value in overrides.items()}
    return parse_run_config(quick(**named)).fedcado


def towards(kit: Kit, guidance: float, labels: list[int]) -> np.ndarray:
    """The target of classifier-free guidance: mu_0 + g (mu_c - mu_0)."""
    mean = analytic.mu(numbers(analytic.prompts(kit)[labels]))
    return empty_mean(kit) + guidance * (mean - empty_mean(kit))


CASES = {
    "classifier": {"classifier_weight": 1.0, "bn_weight": 0.0, "gradient_scale": 6.0},
    "batchnorm": {"classifier_weight": 0.0, "bn_weight": 1.0, "gradient_scale": 2.0},
    "both": {"classifier_weight": 2.0, "bn_weight": 0.3, "gradient_scale": 3.0},
    "of a unit": {
        "classifier_weight": 2.0,
        "bn_weight": 1.5,
        "bn_statistics": "unit",
        "gradient_scale": 4.0,
    },
    "without the UNet": {
        "classifier_weight": 2.0,
        "bn_weight": 0.3,
        "gradient": "x0",
        "gradient_scale": 4.0,
    },
}


@pytest.mark.parametrize("side", [IMAGE_SIDE, IMAGE_SIDE // 2])
@pytest.mark.parametrize("case", CASES)
def test_fedlmgs_and_fedcados_runs(case: str, side: int) -> None:
    """Two clients' classifiers, three classes; all steps, and FedCADO's edits before them.

    FedCADO's settings serve both: of FedLMG's sampler they are a superset.
    """
    kit = analytic_kit()
    steps = 6
    config = settings(guidance=1.5, noise_edits=3, noise_edit_lr=4.0, **CASES[case])
    networks = {client: network(number, side) for number, client in enumerate(HELD)}
    size = None if side == IMAGE_SIDE else side
    weights = (config.classifier_weight, config.bn_weight, size, config.bn_statistics == "unit")
    mean = towards(kit, 1.5, LABELS)
    gradient = gradient_of(guides_of(networks, *weights), PLAN, mean, config.gradient == "full")
    scale = config.gradient_scale
    start = noise_of(PLAN)
    arguments = (kit, PLAN, analytic.prompts(kit), teachers_of(networks), config, steps, size)

    plain = guided_run(start, steps, mean, gradient, 0.0)
    expected = guided_run(start, steps, mean, gradient, scale)
    assert np.abs(expected - plain).max() > 0.1  # the guidance is seen
    assert_made(kit, fedlmg.sample(*arguments), expected)

    begin = edited(start, steps, gradient, 3, 4.0)
    assert np.abs(begin - start).max() > 1e-3
    assert_made(kit, fedcado.sample(*arguments), guided_run(begin, steps, mean, gradient, scale))


def test_the_noise_that_fedcado_edits_is_what_is_denoised(monkeypatch: pytest.MonkeyPatch) -> None:
    """After M edits at the first timestep the UNet is given, there again, z_T less M gradients."""
    kit = analytic_kit()
    steps = 4
    config = settings(
        noise_edits=2, noise_edit_lr=50.0, gradient_scale=0.0, bn_weight=0.0, guidance=1.5
    )
    networks = {client: network(number) for number, client in enumerate(HELD)}
    guides = guides_of(networks, 1.0, 0.0)
    gradient = gradient_of(guides, PLAN, towards(kit, 1.5, LABELS), True)
    fedcado.sample(kit, PLAN, analytic.prompts(kit), teachers_of(networks), config, steps)
    unet: Any = kit.unet
    latents = [numbers(z[: len(PLAN)]) for z, _, _ in unet.calls[:3]]
    timesteps = [set(t.tolist()) for _, t, _ in unet.calls[:4]]
    assert timesteps == [{751}, {751}, {751}, {501}]
    for edits, z in enumerate(latents):
        expected = edited(noise_of(PLAN), steps, gradient, edits, 50.0)
        np.testing.assert_allclose(z, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(latents[2] - latents[0]).max() > 0.1


# ---- What it is for ----


def classified(method: Any, config: FedCADOConfig, plan: list[ImageJob]) -> float:
    """The classifiers' mean cross-entropy on the images that a sampler makes."""
    kit = analytic_kit()
    networks = {client: network(number) for number, client in enumerate(HELD)}
    method.sample(kit, plan, analytic.prompts(kit), teachers_of(networks), config, 10)
    decoded: Any = kit.vae.decoded
    x = analytic.decode(numbers(decoded) * analytic.SCALING)
    losses = []
    for client, guide in guides_of(networks, 1.0, 0.0).items():
        rows = np.array([row for row, job in enumerate(plan) if job.client == client])
        labels = np.array([plan[row].label for row in rows])
        losses.append(guide.cross_entropy(x[rows], labels))
    return float(np.concatenate(losses).mean())


def test_guidance_lowers_the_classifiers_loss() -> None:
    """On average over 150 noises: to under half of what the same noises give unguided; FedCADO's
    edits alone to under 0.8.
    """
    plan = plan_images("m", 0, HELD, 50)
    common = {"guidance": 1.0, "bn_weight": 0.0}
    unguided = classified(fedlmg, settings(gradient_scale=0.0, **common), plan)
    guided = classified(fedlmg, settings(gradient_scale=20.0, **common), plan)
    assert guided < 0.5 * unguided
    edits = settings(gradient_scale=0.0, noise_edits=5, noise_edit_lr=20.0, **common)
    assert classified(fedcado, edits, plan) < 0.8 * unguided
