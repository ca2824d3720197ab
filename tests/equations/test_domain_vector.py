"""domain-vector: what a client learns, step by step against NumPy, and what is drawn of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.methods import domain_vector as client_half
from osfl.cli.estimate import planned_images
from osfl.cli.run_clients import Client
from osfl.config import parse_run_config
from osfl.models.diffusion import Kit
from osfl.payload.kinds import DomainVector
from server_app.expected import run_dimensions
from server_app.methods import domain_vector
from tests.helpers import analytic
from tests.helpers.analytic import TIMESTEPS, Adam, analytic_kit, numbers
from tests.helpers.analytic_clients import generator, gradient_for_the_mean, images, job_of, normal
from tests.helpers.composition import (
    CPU,
    HELD,
    NAMES,
    OWN,
    PLAN,
    config_of,
    prompts_of,
    server,
)
from tests.helpers.settings import quick

EACH = parse_run_config(quick()).domain_vector


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    bundle = analytic_kit()
    monkeypatch.setattr(client_half, "load_kit_for_training", lambda job: bundle)
    return bundle


@pytest.mark.parametrize(("class_lr", "tokens"), [(0.0, "each"), (0.02, "each"), (0.02, "all")])
def test_the_vector_is_adams_whole_way_along_half_a_cosine(
    kit: Kit, class_lr: float, tokens: str
) -> None:
    """v by every image's gradient, w_y by those of its class; one v for all tokens by their sum.

    Fifteen steps: five passes of batches of three, three and one of seven images.
    """
    data = images(3, 1, 1, 3, 1, 0, 3)
    job = job_of(
        data,
        method="domain-vector",
        domain_vector__epochs=5,
        domain_vector__batch_size=3,
        domain_vector__lr=0.05,
        domain_vector__class_lr=class_lr,
        domain_vector__tokens=tokens,
    )
    payload = client_half.make_payload(job)
    assert payload.classes == ("zero", "one", "three")
    mean, deviation = analytic.encode(data.pixels.numpy())
    prompts = numbers(analytic.prompts(kit))[[0, 1, 3]]
    owner = np.array([2, 1, 1, 2, 1, 0, 2])

    source = generator(job.config.seed, "domain-vector", "client-0")
    order = [torch.randperm(7, generator=source).split(3) for _ in range(5)]
    schedule = [batch.numpy() for batches in order for batch in batches]
    domain = Adam(np.zeros_like(prompts[0][:1] if tokens == "all" else prompts[0]), 0.05)
    offsets = Adam(np.zeros_like(prompts), class_lr)
    for step, batch in enumerate(schedule):
        cosine = (1 + np.cos(np.pi * step / 15)) / 2
        domain.lr = 0.05 * cosine
        offsets.lr = class_lr * cosine
        t = torch.randint(TIMESTEPS, (len(batch),), generator=source).numpy()
        noise = normal(len(batch), source)
        x0 = mean[batch] + deviation[batch] * normal(len(batch), source)
        classes = owner[batch]
        conditions = prompts[classes] + domain.value + offsets.value[classes]
        back = gradient_for_the_mean(x0, noise, t, analytic.mu(conditions))
        gradients = analytic.mu_backward(back, len(prompts[0]))
        of_class = np.zeros_like(prompts)
        np.add.at(of_class, classes, gradients)
        of_all = gradients.sum(axis=0)
        domain.step(of_all.sum(axis=0, keepdims=True) if tokens == "all" else of_all)
        offsets.step(of_class)
    assert np.abs(domain.value).max() > 0.05
    np.testing.assert_allclose(numbers(payload.domain), domain.value, atol=2e-5)
    if class_lr == 0:
        assert payload.offsets is None
    else:
        assert np.abs(offsets.value).max() > 0.02
        np.testing.assert_allclose(numbers(payload.offsets)[:, 0], offsets.value, atol=2e-5)


@pytest.mark.parametrize(("classes", "images"), [("held", 6), ("all", 30)])
def test_a_dry_run_counts_the_classes_that_are_drawn(classes: str, images: int) -> None:
    config = parse_run_config(
        quick(
            method="domain-vector",
            domain_vector__classes=classes,
            synthesis__images_per_class=3,
        )
    )
    assert planned_images(config, [Client(config, (4, 7, 7, 7))]) == images


def vectors(offsets: bool) -> dict[str, DomainVector]:
    """a has 1000, b has 2000; beside them what each class adds, 103, 108 and 208."""
    added = {"a": torch.tensor([103.0, 108.0]), "b": torch.tensor([208.0])}
    return {
        client: DomainVector(
            NAMES[client],
            torch.full((8, 32), {"a": 1000.0, "b": 2000.0}[client]),
            added[client].view(-1, 1, 1, 1).expand(-1, 1, 8, 32) if offsets else None,
        )
        for client in HELD
    }


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [False, True])
def test_the_condition_is_the_prompts_encoding_moved(
    tiny_kit: Path,
    composed: Any,
    offsets: bool,
) -> None:
    class_lr = 0.1 if offsets else 0.0
    config = config_of(tiny_kit, domain_vector__guidance=4.5, domain_vector__class_lr=class_lr)
    domain_vector.sampler(server(tiny_kit, config), CPU, vectors(offsets))(PLAN)
    c0, (only,) = composed[0]
    moved = torch.tensor([1000.0, 1000.0, 2000.0]) + torch.tensor(OWN) * offsets
    prompts = prompts_of(tiny_kit, *(f"an image of {name}" for name in ("three", "eight", "eight")))
    torch.testing.assert_close(only.c, prompts + moved.view(-1, 1, 1))
    assert torch.equal(c0, prompts_of(tiny_kit, ""))
    assert only.scale == 4.5


@pytest.mark.slow
def test_every_token_gets_a_vector_that_is_one_for_all(tiny_kit: Path, composed: Any) -> None:
    config = config_of(tiny_kit, method="domain-vector", domain_vector__tokens="all")
    assert run_dimensions(config)["p"] == 1
    assert run_dimensions(replace(config, domain_vector=EACH))["p"] == 8
    v = torch.linspace(-1, 1, 32).view(1, 32)
    payloads = {client: DomainVector(NAMES[client], v) for client in HELD}
    domain_vector.sampler(server(tiny_kit, config), CPU, payloads)(PLAN)
    _, (only,) = composed[0]
    prompts = prompts_of(tiny_kit, *(f"an image of {name}" for name in ("three", "eight", "eight")))
    torch.testing.assert_close(only.c, prompts + v)


def test_all_classes_can_be_drawn_in_every_domain(
    tiny_kit: Path,
    composed: Any,
) -> None:
    """A holds 3 and 8, b 8: with `all` both have ten classes, under their own vectors, and what a
    class adds is for those that have it.
    """
    held_config = config_of(tiny_kit, synthesis__images_per_class=2)
    every = config_of(tiny_kit, synthesis__images_per_class=2, domain_vector__classes="all")
    job = server(tiny_kit, held_config)
    job.held = lambda payloads: HELD
    planned = [(image.client, image.label) for image in domain_vector.plan(job, vectors(False))]
    assert planned == [("a", 3), ("a", 3), ("a", 8), ("a", 8), ("b", 8), ("b", 8)]
    job = server(tiny_kit, every)
    plan = domain_vector.plan(job, vectors(False))
    assert [(image.client, image.label, image.index) for image in plan] == [
        (client, label, index) for client in "ab" for label in range(10) for index in range(2)
    ]
    assert len({image.noise_seed for image in plan}) == 40
    domain_vector.sampler(job, CPU, vectors(True))(plan[::2])
    (only,) = composed[0][1]
    prompts = prompts_of(tiny_kit, *(f"an image of {name}" for name in job.classes)).repeat(2, 1, 1)
    added = torch.zeros(20)
    added[3], added[8], added[18] = 103, 108, 208
    moved = torch.tensor([1000.0] * 10 + [2000.0] * 10) + added
    torch.testing.assert_close(only.c, prompts + moved.view(-1, 1, 1))
