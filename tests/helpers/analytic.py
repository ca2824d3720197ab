"""A kit whose mathematics is known in closed form, and the same mathematics in float64 with NumPy.

Latents of condition c are x0 ~ N(mu(c), s^2 I), where mu is linear in c. Then z_t = sqrt(a) x0 +
sqrt(1 - a) eps is Gaussian too, with mean sqrt(a) mu and variance v = a s^2 + 1 - a, and the best
prediction of the noise is

    eps*(z, t, c) = E[eps | z_t = z] = sqrt(1 - a) / v (z - sqrt(a) mu(c)).

The kit's other networks are as simple: the encoder is linear in the mean of 2 x 2 pixels, the
decoder is linear, and the scheduler and the text encoder are real ones. What the product computes
with this kit, the tests compute again with NumPy, below and by formulas of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from osfl.kit_training.untrained import new_scheduler, new_text_encoder
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.models.encoders import TextEncoder

CHANNELS = 2
SIDE = 4
IMAGE_SIDE = 8
# of a condition
LENGTH = 12
WIDTH = 8
EMBEDDING = 6  # of an image condition
CLASSES = ("zero", "one", "two", "three")
SCALING = 0.5
TIMESTEPS = 1000

_draw = np.random.default_rng(20)
DEVIATION = 0.7  # s
FROM_TEXT = _draw.normal(size=(WIDTH, CHANNELS * SIDE * SIDE)) * 0.15
FROM_IMAGE = _draw.normal(size=(EMBEDDING, CHANNELS * SIDE * SIDE)) * 0.3
ENCODER = _draw.normal(size=(CHANNELS, 3))
ENCODER_BIAS = np.array([0.3, -0.2])
LOGVAR_BIAS = np.array([-2.0, -1.0])
LOGVAR_SLOPE = 0.5
DECODER = _draw.normal(size=(3, CHANNELS)) * 0.15
DECODER_BIAS = np.array([0.1, -0.1, 0.05])


def place_weights(length: int) -> np.ndarray:
    """The weight of each place of a condition: 1, 1/2, 1/3 ..., whatever its length."""
    return 1 / np.arange(1, length + 1)


class Denoiser(nn.Module):
    """eps*, or the v that stands for it, with the call of diffusers' UNets. It keeps its inputs."""

    def __init__(self, predicts_v: bool = False):
        super().__init__()
        self.config = SimpleNamespace(
            sample_size=SIDE, in_channels=CHANNELS, cross_attention_dim=WIDTH
        )
        self.predicts_v = predicts_v
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # z, t, c
        self.register_buffer("a", torch.from_numpy(alphas_cumprod()))
        self.register_buffer("from_text", torch.from_numpy(FROM_TEXT))
        self.register_buffer("from_image", torch.from_numpy(FROM_IMAGE))

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        class_labels: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        c = encoder_hidden_states
        t = timestep.expand(len(sample)) if timestep.ndim == 0 else timestep
        self.calls.append((sample.detach().clone(), t.clone(), c.detach().clone()))
        weights = torch.from_numpy(place_weights(c.shape[1]))
        mu = torch.einsum("l,bld,dn->bn", weights, c, self.from_text)
        if class_labels is not None:
            mu = mu + class_labels @ self.from_image
        a = self.a[t].view(-1, 1, 1, 1)
        v = a * DEVIATION**2 + 1 - a
        e = (1 - a).sqrt() / v * (sample - a.sqrt() * mu.view_as(sample))
        if self.predicts_v:  # v = sqrt(a) eps - sqrt(1 - a) x0, with x0 as eps has it
            x0 = (sample - (1 - a).sqrt() * e) / a.sqrt()
            return SimpleNamespace(sample=a.sqrt() * e - (1 - a).sqrt() * x0)
        return SimpleNamespace(sample=e)


class Autoencoder(nn.Module):
    """Linear both ways, with the calls of diffusers' AutoencoderKL. It keeps its last input."""

    def __init__(self) -> None:
        super().__init__()
        # as many blocks as say that an image has twice the latents' side
        self.config = SimpleNamespace(scaling_factor=SCALING, block_out_channels=(1, 1))
        self.decoded = torch.empty(0)

    def encode(self, images: torch.Tensor) -> SimpleNamespace:
        cells = nn.functional.avg_pool2d(images, 2)
        mixed = torch.einsum("oc,bchw->bohw", torch.from_numpy(ENCODER), cells)
        mean = mixed + torch.from_numpy(ENCODER_BIAS).view(-1, 1, 1)
        logvar = LOGVAR_SLOPE * mixed + torch.from_numpy(LOGVAR_BIAS).view(-1, 1, 1)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean, logvar=logvar))

    def decode(self, latents: torch.Tensor) -> SimpleNamespace:
        self.decoded = latents.detach().clone()
        mixed = torch.einsum("oc,bchw->bohw", torch.from_numpy(DECODER), latents)
        small = mixed + torch.from_numpy(DECODER_BIAS).view(-1, 1, 1)
        return SimpleNamespace(sample=small.repeat_interleave(2, 2).repeat_interleave(2, 3))


@cache
def _text() -> TextEncoder:
    """A real CLIP text encoder, untrained; every word of the prompts is a token."""
    captions = [
        text for name in CLASSES for text in (f"an image of {name}", f"a x style of a {name}")
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = new_text_encoder(captions, LENGTH, WIDTH)
    encoder.model.double().eval().requires_grad_(False)
    return encoder


def analytic_kit(predicts_v: bool = False) -> Kit:
    """The kit, in float64."""
    scheduler = new_scheduler()
    if predicts_v:
        scheduler = type(scheduler).from_config(scheduler.config, prediction_type="v_prediction")
    return Kit(
        vae=Autoencoder(),  # type: ignore[arg-type]
        unet=Denoiser(predicts_v),  # type: ignore[arg-type]
        text=_text(),
        scheduler=scheduler,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


# ---- The same with NumPy ----


@cache
def alphas_cumprod() -> np.ndarray:
    """a_t of Stable Diffusion 1.5: betas whose roots are equally spaced."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, TIMESTEPS) ** 2
    return np.cumprod(1 - betas)


def step_down(steps: int) -> list[tuple[int, float, float]]:
    """(t, a_t, a_prev) of each DDIM step: t = 1 + k (1000 // steps) from above; the last to a_0."""
    a = alphas_cumprod()
    gap = TIMESTEPS // steps
    rows = []
    for t in range((steps - 1) * gap + 1, 0, -gap):
        rows.append((t, a[t], a[t - gap] if t > gap else a[0]))
    return rows


def mu(c: np.ndarray, image: np.ndarray | None = None) -> np.ndarray:
    """mu(c) [B, 2, 4, 4] of conditions [B, L, d] and image conditions [B, e]."""
    flat = np.einsum("l,bld,dn->bn", place_weights(c.shape[1]), c, FROM_TEXT)
    if image is not None:
        flat = flat + image @ FROM_IMAGE
    return flat.reshape(-1, CHANNELS, SIDE, SIDE)


def mu_backward(gradient: np.ndarray, length: int) -> np.ndarray:
    """The gradient for c [B, L, d] of a gradient for mu(c) [B, 2, 4, 4]."""
    back = gradient.reshape(len(gradient), -1) @ FROM_TEXT.T
    return place_weights(length)[None, :, None] * back[:, None, :]


def variance(a: np.ndarray | float) -> np.ndarray | float:
    """v = a s^2 + 1 - a, of z_t about sqrt(a) mu."""
    return a * DEVIATION**2 + 1 - a


def eps(z: np.ndarray, a: np.ndarray | float, mean: np.ndarray) -> np.ndarray:
    """eps* at a level a_t ([] or [B, 1, 1, 1]) for latents about `mean`."""
    return np.sqrt(1 - a) / variance(a) * (z - np.sqrt(a) * mean)


def x0_of(z: np.ndarray, e: np.ndarray, a: float) -> np.ndarray:
    """z = sqrt(a) x0 + sqrt(1 - a) e, solved for x0."""
    return (z - np.sqrt(1 - a) * e) / np.sqrt(a)


def cells(pixels: np.ndarray) -> np.ndarray:
    """uint8 [N, 3, 8, 8] to [-1, 1], and the mean of every 2 x 2 pixels: [N, 3, 4, 4]."""
    scaled = pixels.astype(np.float64) / 255 * 2 - 1
    return scaled.reshape(-1, 3, SIDE, 2, SIDE, 2).mean(axis=(3, 5))


def encode(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the latents, scaled: m f and exp(logvar / 2) f."""
    mixed = np.einsum("oc,bchw->bohw", ENCODER, cells(pixels))
    mean = (mixed + ENCODER_BIAS[:, None, None]) * SCALING
    logvar = LOGVAR_SLOPE * mixed + LOGVAR_BIAS[:, None, None]
    return mean, np.exp(logvar / 2) * SCALING


def decode(z: np.ndarray) -> np.ndarray:
    """Images [B, 3, 8, 8] of scaled latents."""
    small = np.einsum("oc,bchw->bohw", DECODER, z / SCALING) + DECODER_BIAS[:, None, None]
    return small.repeat(2, axis=2).repeat(2, axis=3)


def decode_backward(gradient: np.ndarray) -> np.ndarray:
    """The gradient for z of a gradient for its image."""
    small = gradient.reshape(-1, 3, SIDE, 2, SIDE, 2).sum(axis=(3, 5))
    return np.einsum("oc,bohw->bchw", DECODER, small) / SCALING


def as_picture(x: np.ndarray) -> np.ndarray:
    """Images about [-1, 1] as whole numbers 0 .. 255."""
    return np.rint((np.clip(x, -1, 1) + 1) * 127.5)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


@dataclass
class Adam:
    """Kingma & Ba, arXiv 1412.6980, algorithm 1, with its own constants."""

    value: np.ndarray
    lr: float
    first: np.ndarray | float = 0.0  # m
    second: np.ndarray | float = 0.0  # v
    steps: int = field(default=0)

    def step(self, gradient: np.ndarray) -> None:
        """theta <- theta - lr m_hat / (sqrt(v_hat) + 1e-8)."""
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        corrected = self.first / (1 - 0.9**self.steps)
        scale = np.sqrt(self.second / (1 - 0.999**self.steps))
        self.value = self.value - self.lr * corrected / (scale + 1e-8)


def numbers(value: torch.Tensor | Conditioning) -> np.ndarray:
    """A tensor's numbers, or those of a condition's states, in float64."""
    tensor = value.states if isinstance(value, Conditioning) else value
    return tensor.detach().double().numpy()


def random_pixels(count: int, side: int = IMAGE_SIDE, seed: int = 5) -> torch.Tensor:
    """uint8 images that differ in brightness and color, [N, 3, S, S]."""
    generator = torch.Generator().manual_seed(seed)
    brightness = torch.randint(30, 200, (count, 3, 1, 1), generator=generator)
    speckle = torch.randint(-30, 55, (count, 3, side, side), generator=generator)
    return (brightness + speckle).to(torch.uint8)


def prompts(kit: Kit, names: Sequence[str] = CLASSES) -> Conditioning:
    """tau of the class prompts."""
    return kit.text([f"an image of {name}" for name in names])
