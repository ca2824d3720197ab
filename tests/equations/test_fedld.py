"""FedLD: the client's mixture against scikit-learn's, and the starts' moments by formula."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from client_app.methods import fedld as client_half
from osfl.config import ConfigError, parse_run_config
from osfl.models.diffusion import load_kit
from osfl.payload.kinds import LatentMixture
from osfl.util.seeds import generator_of, seed_of
from server_app.methods import fedld, prompts_only
from server_app.synthesis.plan import ImageJob, initial_noise, plan_images
from server_app.synthesis.samplers import ddim_schedule
from tests.helpers.client_jobs import images, job_of
from tests.helpers.composition import CPU, NAMES, PLAN, config_of, prompts_of, server
from tests.helpers.settings import quick

LABELS = (0, 4, 0, 0, 4, 0)
STREAM = (0, "fedld mixture", "client-0")


def latents_by_hand(tiny_kit: Any) -> tuple[np.ndarray, torch.Generator, float]:
    """A draw from E(x) of every image, the generator after it, and a_T of the server's schedule."""
    kit = load_kit(tiny_kit)
    mean, logvar = kit.encode(torch.cat(list(images(*LABELS).batches(8))))
    draws = generator_of(*STREAM)
    noise = torch.randn(mean.shape, generator=draws).double().numpy()
    x0 = mean.double().numpy() + np.exp(logvar.double().numpy() / 2) * noise
    return x0, draws, float(ddim_schedule(kit, 2)[0][1])


def fit_by_hand(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    seed = seed_of(*STREAM) % 2**32
    fit = GaussianMixture(2, covariance_type="diag", random_state=seed)
    fit.fit(rows.reshape(len(rows), -1))
    shape = (2, *rows.shape[1:])
    return fit.weights_, fit.means_.reshape(shape), fit.covariances_.reshape(shape)


@pytest.mark.parametrize("how", ["closed", "sampled"])
def test_a_client_sends_one_mixture_of_all_its_noisy_latents(tiny_kit: Any, how: str) -> None:
    """Closed: N(m, s^2) of z_0 becomes N(sqrt(a) m, a s^2 + 1 - a). Sampled: two draws an image."""
    x0, draws, a = latents_by_hand(tiny_kit)
    if how == "closed":
        weights, means, variances = fit_by_hand(x0)
        means, variances = a**0.5 * means, a * variances + 1 - a
    else:
        noise = torch.randn((12, *x0.shape[1:]), generator=draws).double().numpy()
        noisy = a**0.5 * np.concatenate([x0, x0]) + (1 - a) ** 0.5 * noise
        weights, means, variances = fit_by_hand(noisy)
    job = job_of(tiny_kit, images(*LABELS), method="fedld", fedld__mixture_fit=how)
    payload = client_half.make_payload(job)
    assert payload.classes == ("zero", "four")
    assert parse_run_config(quick()).fedld.mixture_fit == "closed"
    np.testing.assert_allclose(payload.weights, weights, rtol=1e-4)
    np.testing.assert_allclose(payload.means, means, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(payload.variances, variances, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["closed", "sampled"])
def test_a_client_with_one_image_pads_its_mixture(tiny_kit: Any, how: str) -> None:
    settings = {"fedld__mixture_fit": how, "fedld__components": 3, "fedld__noise_draws": 1}
    payload = client_half.make_payload(job_of(tiny_kit, images(4), method="fedld", **settings))
    assert payload.weights.tolist() == [1, 0, 0]
    assert payload.means.shape == payload.variances.shape == (3, 4, 8, 8)


WEIGHTS = np.array([0.5, 0.3, 0.2])
MEANS = np.array([[-2.0, 0, 1], [0, 3, 1], [2, 1, -4]])
VARIANCES = np.array([[0.25, 1, 2], [1, 0.5, 0.1], [4, 1, 0.5]])


def mixture() -> LatentMixture:
    means, variances = (torch.tensor(v).float().view(3, 1, 1, 3) for v in (MEANS, VARIANCES))
    return LatentMixture(("three",), torch.tensor(WEIGHTS).float(), means, variances)


@pytest.mark.slow
def test_starts_have_the_mixtures_moments() -> None:
    """E z = sum_m w mu and Cov z = diag(sum_m w v) + sum_m w mu mu' - E z E z'."""
    jobs = plan_images("fedld", 0, {"a": [3]}, 10_000)
    noise = initial_noise(jobs, (1, 1, 3), CPU)
    starts = fedld.start_latents(jobs, {"a": mixture()}, noise).flatten(1).double().numpy()
    mean = WEIGHTS @ MEANS
    covariance = np.diag(WEIGHTS @ VARIANCES) + (MEANS.T * WEIGHTS) @ MEANS - np.outer(mean, mean)
    # Five standard errors of a mean; of the covariance's entries, by the draws' own products
    errors = 5 * np.sqrt(np.diag(covariance) / len(jobs))
    assert (abs(starts.mean(axis=0) - mean) < errors).all()
    products = (starts - mean)[:, :, None] * (starts - mean)[:, None, :]
    errors = 5 * products.std(axis=0) / np.sqrt(len(jobs))
    assert (abs(products.mean(axis=0) - covariance) < errors).all()


def test_a_start_depends_on_its_own_image_alone() -> None:
    """On method, client, class, index and seed, and not on its batch."""
    image = ImageJob("fedld", 0, "a", 3, 1)
    variants = [
        replace(image, **change)
        for change in ({"method": "m"}, {"seed": 1}, {"client": "b"}, {"label": 4}, {"index": 0})
    ]
    payloads = {"a": mixture(), "b": mixture()}

    def starts(*jobs: ImageJob) -> torch.Tensor:
        return fedld.start_latents(jobs, payloads, initial_noise(jobs, (1, 1, 3), CPU))

    together = starts(*variants, image)
    assert torch.equal(together[-1], starts(image)[0])
    assert len(together.unique(dim=0)) == 6


def test_images_start_from_their_clients_mixture_under_their_classes_prompts(
    tiny_kit: Any, composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One component that counts; a second with weight 0 is marked otherwise."""
    marks = {"a": 100.0, "b": 200.0}
    payloads = {
        client: LatentMixture(
            NAMES[client],
            torch.tensor([0.0, 1.0]),
            torch.tensor([5000.0, mark]).view(2, 1, 1, 1).expand(2, 4, 8, 8),
            torch.full((2, 4, 8, 8), 0.25),
        )
        for client, mark in marks.items()
    }
    starts = []

    def denoise(kit: Any, z: torch.Tensor, steps: int, predict: Any) -> torch.Tensor:
        starts.append(z)
        return predict(z, torch.tensor(1))

    monkeypatch.setattr(prompts_only, "denoise", denoise)
    config = config_of(tiny_kit, method="fedld", fedld__guidance=4.5)
    pixels = fedld.sampler(server(tiny_kit, config), CPU, payloads)(PLAN)
    assert (pixels.shape, pixels.dtype) == ((3, 3, 32, 32), torch.uint8)
    c0, (only,) = composed[0]
    texts = ("an image of three", "an image of eight", "an image of eight")
    assert torch.equal(only.c, prompts_of(tiny_kit, *texts))
    assert torch.equal(c0, prompts_of(tiny_kit, ""))
    assert only.scale == 4.5
    noise = initial_noise(PLAN, (4, 8, 8), CPU)
    expected = torch.tensor([100.0, 100.0, 200.0]).view(3, 1, 1, 1) + 0.5 * noise
    torch.testing.assert_close(starts[0], expected)


def test_another_solver_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"synthesis.solver = 'unipc': FedLD requires 'ddim'"):
        parse_run_config(quick(method="fedld", synthesis__solver="unipc"))
