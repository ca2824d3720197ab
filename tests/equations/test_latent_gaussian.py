"""latent-gaussian: moments by NumPy, draws by their moments, SDEdit by formula."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.methods import fedpft
from client_app.methods import latent_gaussian as client_half
from client_app.privacy import mechanisms
from osfl.config import ConfigError, parse_run_config
from osfl.models.diffusion import load_kit
from osfl.payload import wire
from osfl.payload.kinds import LatentStatistics
from osfl.payload.wire import PayloadError
from osfl.util.pixels import to_uint8
from osfl.util.seeds import generator_of
from server_app.costs import rows_per_image
from server_app.expected import check_plausible
from server_app.methods import latent_gaussian
from server_app.synthesis.plan import ImageJob, initial_noise, plan_images
from server_app.synthesis.samplers import ddim_schedule
from tests.helpers.client_jobs import images, job_of
from tests.helpers.composition import CPU, NAMES, PLAN, config_of, prompts_of, server
from tests.helpers.settings import quick

LABELS = (0, 4, 0, 0, 4, 0, 4)


def moments_by_hand(tiny_kit: Any) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the posteriors' means and of their squares, for the labels 0 and 4."""
    pixels = torch.cat(list(images(*LABELS).batches(8)))
    latents = load_kit(tiny_kit).encode(pixels)[0].double().numpy()
    rows = [latents[np.array(LABELS) == label] for label in (0, 4)]
    return np.stack([z.sum(axis=0) for z in rows]), np.stack([(z**2).sum(axis=0) for z in rows])


def test_a_client_sends_the_moments_of_its_latents(tiny_kit: Path, tmp_path: Path) -> None:
    """The autoencoder alone makes them: no other weights are there."""
    for part in ("vae", "unet"):
        shutil.copytree(tiny_kit / part, tmp_path / part)
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    payload = client_half.make_payload(job_of(tmp_path, images(*LABELS), method="latent-gaussian"))
    sums, squares = moments_by_hand(tiny_kit)
    assert payload.classes == ("zero", "four")
    assert payload.counts.tolist() == [4, 3]
    np.testing.assert_allclose(payload.sums, sums, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(payload.squares, squares, rtol=1e-4, atol=1e-5)
    check_plausible(payload, "a", parse_run_config(quick(method="latent-gaussian")))


@pytest.mark.parametrize(
    ("images_of_class", "epsilon", "clip"), [(1, 0.1, 1.5), (50, 1.0, 1.5), (1, 0.1, 10.0)]
)
def test_a_server_accepts_the_noise_of_large_latents(
    images_of_class: int, epsilon: float, clip: float
) -> None:
    """Stable Diffusion's at 512 px. A refused payload would have spent its epsilon for nothing."""
    latents = torch.randn(images_of_class, 4, 64, 64, generator=generator_of(0, "latents"))
    settings = quick(method="latent-gaussian", epsilon=epsilon, clip_norm=clip)
    config = parse_run_config(settings)
    moments = client_half.class_moments(latents.double(), config)
    sums, squares = (moment.float()[None] for moment in moments)
    payload = LatentStatistics(("zero",), torch.tensor([images_of_class]), sums, squares)
    encoded = wire.encode(payload, "latent-gaussian", "job", "a")
    accepted = wire.decode_trusted(encoded, "latent-gaussian", ("zero",))
    assert isinstance(accepted, LatentStatistics)
    check_plausible(accepted, "a", config)


def test_a_guarantee_clips_latents_and_keeps_their_moments(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its noise: the same moments far from the bound, and a mean within it below."""
    for place in (fedpft, mechanisms):
        monkeypatch.setattr(place, "noise_deviation", lambda *_: 0.0)
    sums, squares = moments_by_hand(tiny_kit)

    def sent(clip_norm: float) -> LatentStatistics:
        settings = {"method": "latent-gaussian", "epsilon": 1.0, "clip_norm": clip_norm}
        return client_half.make_payload(job_of(tiny_kit, images(*LABELS), **settings))

    loose = sent(10.0)
    np.testing.assert_allclose(loose.sums, sums, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(loose.squares, squares, rtol=1e-3, atol=1e-3)
    tight = sent(1e-3)
    norms = (tight.sums / tight.counts.view(2, 1, 1, 1)).flatten(1).norm(dim=1)
    assert (norms <= 1e-3 * 256**0.5 * 1.001).all()
    assert (norms > 0).all()


MEANS = np.array([-2.0, 0.5, 3.0])
VARIANCES = np.array([0.25, 4.0, 1e-9])


def gaussian(count: int = 8) -> LatentStatistics:
    sums = torch.tensor(count * MEANS).float().view(1, 1, 1, 3)
    squares = torch.tensor(count * (VARIANCES + MEANS**2)).float().view(1, 1, 1, 3)
    return LatentStatistics(("three",), torch.tensor([count]), sums, squares)


def test_draws_have_the_classes_moments() -> None:
    """Mean S / n and variance Q / n - (S / n)^2, each within five standard errors."""
    jobs = plan_images("latent-gaussian", 0, {"a": [3]}, 10_000)
    (moments,) = latent_gaussian.class_gaussians(gaussian())
    draws = latent_gaussian.draw_latents(jobs, {("a", 3): moments}).flatten(1).double().numpy()
    errors = 5 * np.sqrt(VARIANCES / len(jobs)) + 1e-3
    assert (abs(draws.mean(axis=0) - MEANS) < errors).all()
    errors = 5 * VARIANCES * np.sqrt(2 / len(jobs)) + 1e-5
    assert (abs(draws.var(axis=0) - VARIANCES) < errors).all()


def test_a_draw_depends_on_its_own_image_alone() -> None:
    image = ImageJob("latent-gaussian", 0, "a", 3, 1)
    variants = [replace(image, index=0), replace(image, client="b"), replace(image, seed=1)]
    (moments,) = latent_gaussian.class_gaussians(gaussian())
    gaussians = {("a", 3): moments, ("b", 3): moments}
    together = latent_gaussian.draw_latents([*variants, image], gaussians)
    assert torch.equal(together[-1], latent_gaussian.draw_latents([image], gaussians)[0])
    assert len(together.unique(dim=0)) == 4


def payloads_of(value: float) -> dict[str, LatentStatistics]:
    """Means of `value` and of twice as much, times the number of the class, and variances 0.25."""
    payloads = {}
    for client, factor in (("a", 1.0), ("b", 2.0)):
        count = len(NAMES[client])
        means = factor * value * torch.arange(1.0, count + 1).view(-1, 1, 1, 1)
        sums = 4 * means.expand(count, 4, 8, 8)
        squares = 4 * (0.25 + means.square()).expand(count, 4, 8, 8)
        payloads[client] = LatentStatistics(
            NAMES[client], torch.full((count,), 4), sums.clone(), squares.clone()
        )
    return payloads


def expected_latents(value: float) -> torch.Tensor:
    """Return the latents of the images of `PLAN`: a's classes 3 and 8, and b's only one."""
    means = value * torch.tensor([1.0, 2.0, 2.0]).view(3, 1, 1, 1)
    return means + 0.5 * initial_noise(PLAN, (4, 8, 8), CPU)


def test_without_strength_latents_are_decoded_as_they_are(tiny_kit: Path) -> None:
    config = config_of(tiny_kit, method="latent-gaussian")
    pixels = latent_gaussian.sampler(server(tiny_kit, config), CPU, payloads_of(0.3))(PLAN)
    expected = to_uint8(load_kit(tiny_kit).decode(expected_latents(0.3)))
    assert (pixels.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize(("strength", "taken"), [(0.5, 2), (1.0, 4), (0.2, 1)])
def test_sdedit_noises_to_its_first_timestep_and_denoises_under_the_prompt(
    tiny_kit: Path, composed: Any, monkeypatch: pytest.MonkeyPatch, strength: float, taken: int
) -> None:
    """Without noise to predict, DDIM scales: z_0 = z_t / sqrt(a_t), whatever the steps between."""
    decoded = []
    monkeypatch.setattr(latent_gaussian, "to_images", lambda kit, z: decoded.append(z))
    settings = {"latent_gaussian__strength": strength, "latent_gaussian__guidance": 4.5}
    config = config_of(tiny_kit, method="latent-gaussian", synthesis__steps=4, **settings)
    latent_gaussian.sampler(server(tiny_kit, config), CPU, payloads_of(0.3))(PLAN)
    assert len(composed) == taken
    c0, (only,) = composed[0]
    texts = ("an image of three", "an image of eight", "an image of eight")
    assert torch.equal(only.c, prompts_of(tiny_kit, *texts))
    assert torch.equal(c0, prompts_of(tiny_kit, ""))
    assert only.scale == 4.5
    a_t = float(ddim_schedule(load_kit(tiny_kit), 4)[4 - taken][1])
    final = float(ddim_schedule(load_kit(tiny_kit), 4)[-1][2])
    noise = torch.stack(
        [torch.randn(4, 8, 8, generator=generator_of(image.noise_seed, "sdedit")) for image in PLAN]
    )
    start = a_t**0.5 * expected_latents(0.3) + (1 - a_t) ** 0.5 * noise
    torch.testing.assert_close(decoded[0], (final / a_t) ** 0.5 * start, rtol=1e-4, atol=1e-4)
    assert rows_per_image(config, []) == 2 * taken


def test_moments_of_no_latents_are_refused() -> None:
    config = parse_run_config(quick(method="latent-gaussian"))
    sound = gaussian()
    check_plausible(sound, "a", config)
    for harm in (
        {"squares": sound.squares * 0.9},
        {"counts": sound.counts - 1},
        {"squares": -sound.squares},
    ):
        with pytest.raises(PayloadError, match="squares: cannot come from latents"):
            check_plausible(replace(sound, **harm), "a", config)
    with pytest.raises(PayloadError, match="counts: .* more than max-images = 7"):
        check_plausible(sound, "a", replace(config, max_images=7))


def test_another_solver_is_refused_where_steps_are_taken() -> None:
    settings = {"method": "latent-gaussian", "synthesis__solver": "unipc"}
    parse_run_config(quick(**settings))
    with pytest.raises(ConfigError, match=r"latent-gaussian.strength requires 'ddim'"):
        parse_run_config(quick(**settings, latent_gaussian__strength=0.5))
