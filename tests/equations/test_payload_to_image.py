"""From payload to image.

Every image is made from its own client's and its own class's part of a payload, with the config's
own scales.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file
from torch import nn

from client_app.methods import espresso as espresso_half
from client_app.methods import feddisc as feddisc_half
from osfl.models import classifiers
from osfl.models.concepts import encode_concept_prompt
from osfl.models.diffusion import load_embedding_noise, load_kit
from osfl.models.encoders import load_image_encoder
from osfl.payload.kinds import (
    Captions,
    Classifier,
    Concepts,
    Descriptions,
    Domain,
    Embeddings,
    Encodings,
    Mixtures,
)
from server_app import distillation, pipeline
from server_app.expected import run_dimensions
from server_app.methods import (
    espresso,
    fedbip,
    fedcado,
    feddeo,
    feddisc,
    fedlmg,
    fgl,
    oscar,
    prompts_domain,
    prompts_only,
)
from server_app.synthesis.guidance import as_teacher, classifier_loss
from server_app.synthesis.plan import initial_noise
from server_app.synthesis.samplers import ddim_schedule
from tests.helpers.client_jobs import CLASSES, images, job_of
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


def marked(client: str, label: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, {"a": 100.0, "b": 200.0}[client] + label)


def rows(client: str, *shape: int) -> torch.Tensor:
    return torch.stack([marked(client, label, *shape) for label in HELD[client]])


def run_to_the_images(
    method: Any, job: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server half up to its images, all of one batch; no global model is trained."""
    job.held = lambda payloads: HELD
    monkeypatch.setattr(
        pipeline,
        "synthesize",
        lambda job, plan, make, *_: SimpleNamespace(
            pixels=make(CPU)(plan), labels=None, clients=()
        ),
    )
    monkeypatch.setattr(pipeline, "train_global", lambda *args: None)
    method.run(job, payloads)


CLASS_PROMPTS = ("an image of three", "an image of eight", "an image of eight")


def test_prompts_only(tiny_kit, composed) -> None:  # type: ignore[no-untyped-def]
    job = server(tiny_kit, config_of(tiny_kit, prompts_only__guidance=4.0))
    prompts_only.sampler(job, CPU, {})(PLAN)
    c0, (only,) = composed[0]
    assert torch.equal(only.c, prompts_of(tiny_kit, *CLASS_PROMPTS))
    assert torch.equal(c0, prompts_of(tiny_kit, ""))
    assert only.scale == 4.0


def test_prompts_domain(tiny_kit, composed, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    config = config_of(
        tiny_kit, prompts_domain__guidance=4.0, prompts_domain__prompt="{domain} {class}"
    )
    payloads = {"a": Domain(NAMES["a"], "neon"), "b": Domain(NAMES["b"], "photo")}
    run_to_the_images(prompts_domain, server(tiny_kit, config), payloads, monkeypatch)
    (only,) = composed[0][1]
    assert torch.equal(only.c, prompts_of(tiny_kit, "neon three", "neon eight", "photo eight"))
    assert only.scale == 4.0


def test_feddeo(tiny_kit, composed) -> None:  # type: ignore[no-untyped-def]
    payloads = {client: Descriptions(NAMES[client], rows(client, 8, 32)) for client in HELD}
    config = config_of(tiny_kit, feddeo__guidance_text=1.5, feddeo__guidance_description=2.5)
    feddeo.sampler(server(tiny_kit, config), CPU, payloads)(PLAN)
    text, description = composed[0][1]
    assert torch.equal(text.c, prompts_of(tiny_kit, *CLASS_PROMPTS))
    assert description.c[:, 3, 3].tolist() == OWN
    assert (text.scale, description.scale) == (1.5, 2.5)


def test_feddeos_vectors_for_all_tokens_move_the_prompts(tiny_kit: Any, composed: Any) -> None:
    config = config_of(tiny_kit, feddeo__tokens="all")
    assert run_dimensions(config)["p"] == 1
    # Nor does the one's key change the other's
    assert run_dimensions(replace(config, method="domain-vector"))["p"] == 8
    payloads = {client: Descriptions(NAMES[client], rows(client, 1, 32)) for client in HELD}
    feddeo.sampler(server(tiny_kit, config), CPU, payloads)(PLAN)
    (description,) = composed[0][1]
    moved = torch.tensor(OWN).view(-1, 1, 1)
    torch.testing.assert_close(description.c, prompts_of(tiny_kit, *CLASS_PROMPTS) + moved)


@pytest.mark.parametrize("method", ["oscar", "oscar-pooled"])
def test_oscar(tiny_kit, composed, method: str) -> None:  # type: ignore[no-untyped-def]
    shape = (8, 32) if method == "oscar" else (32,)
    payloads = {client: Encodings(NAMES[client], rows(client, *shape)) for client in HELD}
    oscar.sampler(
        server(tiny_kit, config_of(tiny_kit, method=method, oscar__guidance=4.5)), CPU, payloads
    )(PLAN)
    (only,) = composed[0][1]
    assert only.c[:, 3, 3].tolist() == OWN
    assert only.scale == 4.5


def test_fgl(tiny_kit, composed, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    prompts = {("a", 3): "neon", ("a", 8): "photo", ("b", 8): "sketch"}
    payloads = {
        c: Captions(NAMES[c], tuple((prompts[c, label],) for label in HELD[c])) for c in HELD
    }
    job = server(
        tiny_kit,
        config_of(
            tiny_kit,
            fgl__guidance=4.5,
            fgl__prompt="{class} {caption}",
            fgl__negative_prompt="nine",
        ),
    )
    run_to_the_images(fgl, job, payloads, monkeypatch)
    c0, (only,) = composed[0]
    assert torch.equal(only.c, prompts_of(tiny_kit, "three neon", "eight photo", "eight sketch"))
    assert torch.equal(c0, prompts_of(tiny_kit, "nine"))
    assert only.scale == 4.5


def test_feddisc(tiny_unclip, composed) -> None:  # type: ignore[no-untyped-def]
    """Three rows a class: two centres, then the mean, marked 1000 higher."""
    payloads = {
        client: Embeddings(
            NAMES[client], rows(client, 3, 24) + torch.tensor([0.0, 0.0, 1000.0])[:, None]
        )
        for client in HELD
    }
    config = config_of(
        tiny_unclip,
        method="feddisc",
        feddisc__kit="",
        feddisc__guidance_cluster=1.5,
        feddisc__guidance_domain=2.5,
    )
    feddisc.sampler(server(tiny_unclip, config), CPU, payloads)(PLAN)
    cluster, domain = composed[0][1]
    for branch in (cluster, domain):
        assert torch.equal(branch.c, prompts_of(tiny_unclip, *CLASS_PROMPTS))
    assert cluster.image is not None
    assert cluster.image[:, 5].tolist() == OWN
    assert domain.image is not None
    assert domain.image[:, 5].tolist() == [1000 + center for center in OWN]
    assert (cluster.scale, domain.scale) == (1.5, 2.5)


def test_feddiscs_sum_is_the_expected_condition_at_the_level(tiny_unclip) -> None:  # type: ignore[no-untyped-def]
    """The server computes mu + s sqrt(a) z of a class's mean z, and encodes the level."""
    state = load_file(tiny_unclip / "image_normalizer" / "diffusion_pytorch_model.safetensors")
    mu, s = state["mean"], state["std"]
    width = mu.numel()
    z = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    settings = {"method": "feddisc", "feddisc__kit": "", "feddisc__noise_level": 400}
    payload = Embeddings(("three", "eight"), z.unsqueeze(1))
    job = server(tiny_unclip, config_of(tiny_unclip, **settings, secure_sum=True))
    conditions = feddisc.image_conditions(job, payload)
    betas = DDPMScheduler.from_pretrained(tiny_unclip, subfolder="image_noising_scheduler").betas
    a = (1 - betas[:401].double()).prod()
    assert conditions.shape == (2, 2, 2 * width)
    assert torch.equal(conditions[:, 0], conditions[:, 1])
    expected = mu + s * a.sqrt() * z
    assert torch.allclose(conditions[:, 0, :width].double(), expected.double(), atol=1e-5)
    # Sinusoids, cosines first, of 10,000^(-2i / e) times the level
    angles = 400 * 10_000 ** (-torch.arange(width // 2) / (width // 2))
    level = torch.cat([angles.cos(), angles.sin()])
    assert torch.allclose(conditions[:, 0, width:], level.expand(2, -1), atol=1e-4)
    # Its noise is in all e numbers of a mean, as it is without a sum
    sizes = run_dimensions(job.config)
    assert (sizes["K + 1"], sizes["2e"]) == (1, width)
    assert feddisc.noisy_mean(sizes).dimensions == width
    assert feddisc.noisy_mean({**sizes, "K + 1": 6, "2e": 2 * width}).dimensions == width
    # Without a secure sum, a payload has its own centers
    alone = server(tiny_unclip, config_of(tiny_unclip, **settings))
    assert feddisc.image_conditions(alone, payload) is payload.vectors


def test_feddiscs_summand_is_the_mean_of_scaled_embeddings(tiny_unclip) -> None:  # type: ignore[no-untyped-def]
    data = images(3, 8, 3)
    settings = {"method": "feddisc", "feddisc__kit": str(tiny_unclip), "secure_sum": True}
    payload = feddisc_half.make_payload(job_of(tiny_unclip, data, **settings))
    state = load_file(tiny_unclip / "image_normalizer" / "diffusion_pytorch_model.safetensors")
    embeddings = load_image_encoder(str(tiny_unclip), CPU)(data.pixels)
    scaled = (embeddings - state["mean"]) / state["std"]
    assert payload.classes == ("three", "eight")
    assert torch.allclose(payload.vectors[0], scaled[[0, 2]].mean(0, keepdim=True), atol=1e-5)
    assert torch.allclose(payload.vectors[1], scaled[[1]], atol=1e-5)
    # With an epsilon, clipped to `clip-norm` times sqrt(e); the noise comes later
    job = job_of(tiny_unclip, data, **settings, epsilon=1.0, delta=1e-5, clip_norm=0.01)
    limit = 0.01 * math.sqrt(scaled.shape[1])
    clipped = scaled * (limit / scaled.norm(dim=1, keepdim=True)).clamp(max=1)
    payload = feddisc_half.make_payload(job)
    assert torch.allclose(payload.vectors[0], clipped[[0, 2]].mean(0, keepdim=True), atol=1e-6)
    assert job.sum_noise.limit == pytest.approx(limit)


def test_fedbip(tiny_kit, composed, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """S is the client's, V the class's, and the latent begins at the first timestep, where hardly
    anything of it is left.
    """
    started = []
    forward = fedbip.forward_noise
    monkeypatch.setattr(
        fedbip,
        "forward_noise",
        lambda z, noise, a: (started.append((z, noise, a)), forward(z, noise, a))[1],
    )
    payloads = {
        client: Concepts(
            NAMES[client],
            marked(client, 0, 32),
            rows(client, 32),
            torch.tensor(HELD[client]),
            rows(client, 4, 8, 8),
            torch.zeros(len(HELD[client]), 4, 8, 8),
        )
        for client in HELD
    }
    config = config_of(tiny_kit, fedbip__guidance=4.5, fedbip__domain_noise=0.0)
    fedbip.sampler(server(tiny_kit, config), CPU, payloads)(PLAN)
    (only,) = composed[0][1]
    kit = load_kit(tiny_kit)
    domains = torch.tensor([100.0, 100.0, 200.0])
    words = torch.tensor(OWN)
    prompt = encode_concept_prompt(kit.text)
    expected = prompt.filled(*(values[:, None].expand(-1, 32) for values in (domains, words)))
    assert torch.equal(only.c, expected.states)
    length = prompt.base.states.shape[1]
    assert torch.equal(composed[0][0], kit.text([""]).states[:, :length])
    assert only.scale == 4.5
    ((z, noise, a),) = started
    assert z[:, 0, 0, 0].tolist() == OWN
    assert torch.equal(noise, initial_noise(PLAN, kit.latent_shape, CPU))
    assert a.tolist() == [ddim_schedule(kit, 2)[0][1].item()] * 3


def mixtures(deviation: float = 0.0) -> dict[str, Mixtures]:
    """One cluster and one component that count; a second with weight 0, marked otherwise."""
    offsets = torch.tensor([0.0, 5000.0])
    return {
        client: Mixtures(
            NAMES[client],
            rows(client, 2, 8, 32) + offsets[:, None, None],
            torch.tensor([[1.0, 0.0]] * len(HELD[client])),
            torch.tensor([[1.0, 0.0]] * len(HELD[client])),
            rows(client, 2, 4, 8, 8) + offsets[:, None, None, None],
            torch.full((len(HELD[client]), 2, 4, 8, 8), deviation**2),
        )
        for client in HELD
    }


@pytest.mark.parametrize("gmm", [True, False])
def test_espresso(tiny_kit, composed, monkeypatch, gmm: bool) -> None:  # type: ignore[no-untyped-def]
    starts = []
    monkeypatch.setattr(
        espresso,
        "denoise",
        lambda kit, z, steps, predict: (starts.append(z), predict(z, torch.tensor(1)))[0] or z,
    )
    config = config_of(
        tiny_kit, espresso__z_sampling=False, espresso__guidance=4.5, espresso__gmm=gmm
    )
    espresso.sampler(server(tiny_kit, config), CPU, mixtures(deviation=0.5))(PLAN)
    (only,) = composed[0][1]
    assert only.c[:, 3, 3].tolist() == OWN
    assert only.scale == 4.5
    noise = initial_noise(PLAN, load_kit(tiny_kit).latent_shape, CPU)
    expected = torch.tensor(OWN).view(3, 1, 1, 1) + 0.5 * noise if gmm else noise
    assert torch.allclose(starts[0], expected, atol=1e-3)


def test_espressos_two_guidances(tiny_kit, composed) -> None:  # type: ignore[no-untyped-def]
    """Zig with gamma_1, zag with gamma_2, and the step that stays with gamma_1."""
    config = config_of(
        tiny_kit,
        espresso__guidance=4.5,
        espresso__inversion_guidance=1.5,
        espresso__z_threshold=400,
    )
    espresso.sampler(server(tiny_kit, config), CPU, mixtures())(PLAN)
    assert [condition.scale for _, (condition,) in composed] == [4.5, 1.5, 4.5, 4.5]
    assert all(condition.c[:, 3, 3].tolist() == OWN for _, (condition,) in composed)


# ---- Guidance by classifiers ----


def resnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return classifiers.build_classifier("shufflenet_v2_x1_0", 10, small_stem=True)


@pytest.mark.parametrize("gradient", ["full", "x0"])
def test_each_client_guides_its_classifiers_images(tiny_kit, monkeypatch, gradient: str) -> None:  # type: ignore[no-untyped-def]
    calls = []

    def record(kit, z, t, c0, conditions):  # type: ignore[no-untyped-def]
        calls.append((conditions, torch.is_grad_enabled()))
        return 0 * z

    monkeypatch.setattr(fedlmg, "compose", record)
    settings = config_of(tiny_kit, fedlmg__guidance=4.5, fedlmg__gradient=gradient).fedlmg
    kit = load_kit(tiny_kit)
    teachers = {client: as_teacher(resnet(n)) for n, client in enumerate(HELD)}
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    loss_at = fedlmg.guidance_loss(kit, PLAN, prompts, teachers, settings, None)
    loss_at(initial_noise(PLAN, kit.latent_shape, CPU).requires_grad_(), torch.tensor(501))
    (((only,), differentiable),) = calls
    assert torch.equal(only.c.states, prompts_of(tiny_kit, *CLASS_PROMPTS))
    assert only.scale == 4.5
    assert differentiable == (gradient == "full")


def test_the_gradient_at_x0_takes_the_latents_as_standard_normal(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """If e does not depend on z, x0hat = z / sqrt(a_t) + ..., whose derivative is 1 / sqrt(a_t);
    sqrt(a_t) replaces it.
    """
    monkeypatch.setattr(
        fedlmg, "compose", lambda kit, z, t, c0, conditions: torch.full_like(z, 0.1)
    )
    kit = load_kit(tiny_kit)
    teachers = {client: as_teacher(resnet(n)) for n, client in enumerate(HELD)}
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    t = torch.tensor(501)
    losses = []
    gradients = []
    for gradient in ("full", "x0"):
        settings = config_of(tiny_kit, fedlmg__gradient=gradient).fedlmg
        z = initial_noise(PLAN, kit.latent_shape, CPU).requires_grad_()
        _, loss = fedlmg.guidance_loss(kit, PLAN, prompts, teachers, settings, None)(z, t)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss.sum(), z)[0])
    assert torch.equal(*losses)
    assert gradients[0].abs().max() > 0
    assert torch.allclose(
        gradients[1], kit.alphas_cumprod[501] * gradients[0], rtol=1e-4, atol=1e-7
    )


@pytest.mark.slow
def test_fedcado_edits_at_the_first_timestep(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    edits = []
    monkeypatch.setattr(
        fedcado, "edit_noise", lambda z, t, loss_at, *rest: (edits.append((int(t), *rest)), z)[1]
    )
    settings = config_of(tiny_kit, fedcado__noise_edits=3, fedcado__noise_edit_lr=0.7).fedcado
    kit = load_kit(tiny_kit)
    teachers = {client: as_teacher(resnet(n)) for n, client in enumerate(HELD)}
    fedcado.sample(
        kit, PLAN, kit.text([f"an image of {name}" for name in CLASSES]), teachers, settings, 4
    )
    assert edits == [(ddim_schedule(kit, 4)[0][0], 3, 0.7)]
    assert edits[0][0] > 700


def test_every_batchnorm_layer_counts() -> None:
    """Against a hook on every layer, summed layer by layer."""
    model = resnet(0).eval()
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    expected = torch.zeros(2)
    handles = []

    def add(norm: nn.BatchNorm2d, args: tuple[torch.Tensor]) -> None:
        nonlocal expected
        mean = args[0].mean((2, 3))
        variance = args[0].var((2, 3), unbiased=False)
        expected = (
            expected
            + (mean - norm.running_mean).norm(dim=1)
            + (variance - norm.running_var).norm(dim=1)
        )

    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for number, norm in enumerate(norms):
        norm.running_mean.fill_(0.1 * number)  # type: ignore[union-attr]
        handles.append(norm.register_forward_pre_hook(add))
    with torch.no_grad():
        model(classifiers.normalize(x))
    for handle in handles:
        handle.remove()
    assert len(norms) > 50
    with torch.no_grad():
        ours = classifier_loss(as_teacher(model), x, torch.tensor([2, 7]), 0.0, 1.0)
    assert torch.allclose(ours, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("teacher_mean", "statistics"), [("known-classes", "image"), ("plain", "unit")]
)
def test_each_strategy_has_its_own_teacher(
    tiny_kit, monkeypatch, teacher_mean: str, statistics: str
) -> None:  # type: ignore[no-untyped-def]
    """a knows 0 and 1, b knows 1 and 2.

    FT has no target, MD the mean over those that know a class, SD the image's own client's.

    A unit whose images share their statistics may not be sampled in parts.
    """
    client_labels = {"a": [0, 1], "b": [1, 2]}
    states = {client: resnet(n).state_dict() for n, client in enumerate(client_labels)}
    payloads = {
        c: Classifier(tuple(CLASSES[k] for k in client_labels[c]), "shufflenet_v2_x1_0", states[c])
        for c in client_labels
    }
    job = server(
        tiny_kit,
        config_of(
            tiny_kit,
            method="fedlmg",
            fedlmg__teacher_mean=teacher_mean,
            fedlmg__bn_statistics=statistics,
        ),
    )
    job.held = lambda payloads: client_labels
    owners = ("a", "a", "b", "b")
    pixels = torch.randint(
        256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    images = SimpleNamespace(pixels=pixels, labels=torch.tensor([0, 1, 1, 2]), clients=owners)
    targets = {}
    parted = []
    monkeypatch.setattr(
        pipeline,
        "synthesize",
        lambda job, plan, make, divisible, *_: (parted.append(divisible), images)[1],
    )
    monkeypatch.setattr(
        distillation,
        "train_global",
        lambda job, name, x, y, target, weight: targets.__setitem__(name, target),
    )
    fedlmg.run(job, payloads)
    assert parted == [statistics == "image"]
    p = {}
    for number, client in enumerate(client_labels):
        model = resnet(number)
        model.load_state_dict(states[client])
        p[client] = classifiers.compute_logits(model.eval(), pixels, CPU).softmax(1)
    assert targets["FT"] is None
    assert torch.allclose(targets["SD"], torch.cat([p["a"][:2], p["b"][2:]]), atol=1e-6)
    if teacher_mean == "plain":
        mean = (p["a"] + p["b"]) / 2
    else:
        mean = torch.zeros(4, 10)
        mean[:, 0] = p["a"][:, 0]
        mean[:, 1] = (p["a"] + p["b"])[:, 1] / 2
        mean[:, 2] = p["b"][:, 2]
        mean = mean / mean.sum(1, keepdim=True)
    assert torch.allclose(targets["MD"], mean, atol=1e-6)


# ---- Client halves ----


def test_espressos_clusters_learn_from_their_own_images(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Class 0 has images 0, 2, 3, 4 and 5, class 4 image 1.

    Rows, shares and latents are the class's own; the noise is the first timestep's.
    """
    data = images(0, 4, 0, 0, 0, 0)
    learned = {}
    noised = []
    monkeypatch.setattr(
        espresso_half,
        "cluster_features",
        lambda x, count: (
            [torch.arange(4), torch.tensor([4])] if len(x) == 5 else [torch.arange(len(x))]
        ),
    )

    def learn(kit, start, mean, logvar, rows_of, names, settings, job):  # type: ignore[no-untyped-def]
        learned.update(rows=[rows.tolist() for rows in rows_of], names=names, start=start.states)
        return start.states

    latents = espresso_half.noisy_latents
    monkeypatch.setattr(espresso_half, "train_conditions", learn)
    monkeypatch.setattr(
        espresso_half,
        "noisy_latents",
        lambda mean, *rest: (noised.append((mean, *rest)), latents(mean, *rest))[1],
    )
    payload = espresso_half.make_payload(
        job_of(
            tiny_kit,
            data,
            method="espresso",
            espresso__components=1,
            espresso__mixture_fit="sampled",
        )
    )
    assert learned["rows"] == [[0, 2, 3, 4], [5], [1]]
    assert learned["names"] == ["zero/0", "zero/1", "four/0"]
    assert torch.equal(
        learned["start"],
        prompts_of(tiny_kit, "an image of zero", "an image of zero", "an image of four"),
    )
    assert torch.allclose(payload.weights, torch.tensor([[0.8, 0.2], [1.0, 0.0]]))
    assert torch.equal(payload.conditions[1, 0], learned["start"][2])
    kit = load_kit(tiny_kit)
    mean, logvar = (
        torch.cat(part) for part in zip(*[kit.encode(x) for x in data.batches(8)], strict=True)
    )
    for (centers, deviation, a_first, draws, _), rows_of in zip(
        noised, ([0, 2, 3, 4, 5], [1]), strict=True
    ):
        assert torch.equal(centers, mean[rows_of])
        assert torch.equal(deviation, logvar[rows_of])
        assert a_first == ddim_schedule(kit, 2)[0][1]
        assert draws == 2


def test_feddisc_clusters_each_classs_noised_embeddings(tiny_unclip, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The mean of a class is that of its own images' embeddings, noised at the config's level."""
    data = images(3, 8, 3)
    levels = []
    add = load_embedding_noise(str(tiny_unclip))
    noisy_vectors: list[torch.Tensor] = []

    def watched(embeddings, level, noise):  # type: ignore[no-untyped-def]
        levels.append(level.tolist())
        noisy_vectors.append(add(embeddings, level, noise))
        assert torch.equal(embeddings, load_image_encoder(str(tiny_unclip), CPU)(data.pixels))
        return noisy_vectors[0]

    monkeypatch.setattr(feddisc_half, "load_embedding_noise", lambda kit: watched)
    payload = feddisc_half.make_payload(
        job_of(
            tiny_unclip,
            data,
            method="feddisc",
            feddisc__noise_level=300,
            feddisc__kit=str(tiny_unclip),
        )
    )
    assert levels == [[300] * 3]
    assert payload.classes == ("three", "eight")
    assert torch.allclose(payload.vectors[0, -1], noisy_vectors[0][[0, 2]].mean(0), atol=1e-6)
    assert torch.allclose(payload.vectors[1], noisy_vectors[0][[1]].expand(3, -1), atol=1e-6)
