"""Espresso's mixtures of initial noise (G), by value.

Fitted to clean latents, diffused forward in closed form.
"""

import math

import numpy as np
import pytest
import torch

from client_app.learning.mixtures import fit_mixture
from client_app.methods import espresso
from osfl.config import ConfigError, parse_run_config
from osfl.models.diffusion import load_kit
from osfl.util.seeds import generator_of, seed_of
from server_app.synthesis.samplers import ddim_schedule
from tests.helpers.client_jobs import images, job_of
from tests.helpers.settings import quick

SHAPE = (4, 8, 8)
A_T = torch.tensor(0.0058)  # about Stable Diffusion 1.5's at the first of 50 steps


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def posterior(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of one class: power 0.33 that they share, variance 0.5 between them, 0.05 of their
    own.
    """
    generator = torch.Generator().manual_seed(3)
    shared = 0.33**0.5 * torch.randn(1, *SHAPE, generator=generator)
    deviations = 0.5**0.5 * torch.randn(count, *SHAPE, generator=generator)
    return shared + deviations, torch.full((count, *SHAPE), math.log(0.05))


def mixed_by_hand(mean: torch.Tensor, logvar: torch.Tensor) -> np.ndarray:
    """MixUp in NumPy, from the same draws."""
    draws = stream()
    noise = torch.randn(mean.shape, generator=draws).double().numpy()
    share = torch.rand(len(mean), 1, 1, 1, generator=draws).double().numpy()
    partner = torch.randperm(len(mean), generator=draws).numpy()
    x0 = mean.double().numpy() + np.exp(logvar.double().numpy() / 2) * noise
    return share * x0 + (1 - share) * x0[partner]


@pytest.mark.parametrize("count", [4, 16])
def test_the_closed_mixture_has_the_moments_of_all_noised_latents(count: int) -> None:
    """E z_T = sqrt(a) E z_0 and E z_T^2 = a E z_0^2 + 1 - a, whatever the groups are.

    1e-6 is scikit-learn's floor.
    """
    mean, logvar = posterior(count)
    mixed = mixed_by_hand(mean, logvar)
    weights, means, variances = (
        part.double().numpy() for part in espresso.closed_mixture(mean, logvar, A_T, 4, stream(), 0)
    )
    share = weights[:, None, None, None]
    a = float(A_T)
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose((share * means).sum(0), a**0.5 * mixed.mean(0), atol=1e-6)
    second = a * ((mixed**2).mean(0) + 1e-6) + 1 - a
    np.testing.assert_allclose((share * (variances + means**2)).sum(0), second, rtol=1e-6)
    assert variances.min() > 1 - a - 1e-6


def test_the_closed_mixtures_components_are_groups_diffused_forward(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Two groups far apart, three images against one.

    Their means and variances, each by N(sqrt(a) mu, a s^2 + 1 - a).
    """
    mean = torch.tensor([10.0, -10.0, 10.0, 10.0]).view(4, 1, 1, 1).expand(4, *SHAPE)
    mean = mean + torch.randn(4, *SHAPE, generator=stream())
    weights, *_ = fit_mixture(mean, 2, seed=0)
    monkeypatch.setattr(espresso, "mixed_latents", lambda mean, logvar, generator: mean)
    mixture = espresso.closed_mixture(mean, mean, torch.tensor(0.25), 2, stream(), 0)
    assert sorted(weights.tolist()) == pytest.approx([0.25, 0.75])
    assert torch.allclose(mixture[0], weights)
    many = int(weights.argmax())
    group = mean[[0, 2, 3]].double().numpy()
    np.testing.assert_allclose(mixture[1][many].numpy(), 0.5 * group.mean(0), rtol=1e-4)
    np.testing.assert_allclose(mixture[2][many].numpy(), 0.25 * group.var(0) + 0.75, rtol=1e-4)
    np.testing.assert_allclose(mixture[1][1 - many].numpy(), 0.5 * mean[1].numpy(), rtol=1e-4)
    np.testing.assert_allclose(mixture[2][1 - many].numpy(), 0.75, rtol=1e-4)


def test_a_fit_to_draws_is_a_fit_to_their_noise() -> None:
    """The class's signal at T has power 0.0019.

    16 images with 10 draws give means ten times as loud, the closed form does not.
    """
    mean, logvar = posterior(16)
    signal = float(A_T) * 0.33
    latents = espresso.noisy_latents(mean, logvar, A_T, 10, stream())
    drawn = fit_mixture(latents, 4, seed=0)
    closed = espresso.closed_mixture(mean, logvar, A_T, 4, stream(), 0)

    def power(mixture: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
        return float((mixture[0] * mixture[1].square().mean(dim=(1, 2, 3))).sum())

    assert signal == pytest.approx(0.0019, abs=1e-4)
    assert 0.020 < power(drawn) < 0.044
    assert signal < power(closed) < 2 * signal


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_class_with_fewer_images_than_components(count: int) -> None:
    """Each image is a component, with the noise's variance about it.

    The places left over have no weight.
    """
    mean, logvar = posterior(count)
    weights, means, variances = espresso.closed_mixture(mean, logvar, A_T, 4, stream(), 0)
    assert weights.shape == (4,)
    assert means.shape == variances.shape == (4, *SHAPE)
    assert weights.tolist() == pytest.approx([1 / count] * count + [0] * (4 - count))
    assert torch.allclose(variances, (1 - A_T).expand_as(variances), atol=1e-6)
    mixed = torch.from_numpy(mixed_by_hand(mean, logvar)).float()
    order = means[:count, 0, 0, 0].argsort()
    theirs = mixed[:, 0, 0, 0].argsort()
    assert torch.allclose(means[order], A_T.sqrt() * mixed[theirs], atol=1e-6)


@pytest.mark.slow
def test_clients_send_the_closed_mixture_unless_the_sampled_is_asked_for(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """A class of five images and one of a single image, whose starts would all be the same with a
    variance of 1e-6.
    """
    data = images(0, 0, 0, 0, 0, 4)
    kit = load_kit(tiny_kit)
    encoded = [kit.encode(batch) for batch in data.batches(8)]
    mean, logvar = (torch.cat(part) for part in zip(*encoded, strict=True))
    a_first = ddim_schedule(kit, 2)[0][1]
    for how in ("closed", "sampled"):
        job = job_of(tiny_kit, data, method="espresso", espresso__mixture_fit=how)
        payload = espresso.make_payload(job)
        sent = payload.component_weights, payload.component_means, payload.component_variances
        for row, name, rows in ((0, "zero", slice(0, 5)), (1, "four", slice(5, 6))):
            purpose = ("espresso mixture", "client-0", name)
            generator = generator_of(0, *purpose)
            seed = seed_of(0, *purpose)
            latents = mean[rows], logvar[rows], a_first
            if how == "closed":
                expected = espresso.closed_mixture(*latents, 2, generator, seed)
            else:
                noised = espresso.noisy_latents(*latents, 2, generator)
                expected = fit_mixture(noised, 2, seed)
            for ours, theirs in zip(sent, expected, strict=True):
                assert ours is not None
                assert torch.equal(ours[row], theirs)
    assert parse_run_config(quick()).espresso.mixture_fit == "closed"


def test_draws_are_counted_only_where_they_are_made() -> None:
    few = {"espresso__noise_draws": 1, "espresso__components": 2}
    parse_run_config(quick(**few))
    parse_run_config(quick(**few, espresso__mixture_fit="sampled", espresso__gmm=False))
    with pytest.raises(ConfigError, match=r"espresso.noise-draws = 1: must be at least"):
        parse_run_config(quick(**few, espresso__mixture_fit="sampled"))
