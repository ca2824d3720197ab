"""The systems' own mathematics.

Each part against numbers worked out by hand, a loop, or another library.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, ward
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from client_app.learning import conditions
from client_app.learning.local_training import feddyn_penalty, fedprox_penalty
from client_app.learning.mixtures import fit_mixture
from client_app.methods import espresso as espresso_half
from client_app.methods import fedbip as fedbip_half
from client_app.methods import feddisc as feddisc_half
from client_app.methods import fgl as fgl_half
from client_app.methods import oscar as oscar_half
from osfl.config import NodeConfig, parse_run_config
from osfl.data.load import domain_name
from osfl.kit.kits import KitError
from osfl.methods import oscar as oscar_declaration
from osfl.models import classifiers, encoders
from osfl.models.concepts import encode_concept_prompt, initial_concepts
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import (
    ddim_step,
    forward_noise,
    load_embedding_noise,
    load_kit,
    load_pipeline,
    load_unclip_pipeline,
)
from osfl.models.training import ExtraLoss, fit
from osfl.payload import wire
from osfl.payload.kinds import Captions, Classifier, Concepts, LatentMixture, Mixtures
from osfl.util.costs import FlopMeter
from osfl.util.seeds import generator_of
from server_app import expected
from server_app.baselines import feddf
from server_app.kit import client_download_bytes
from server_app.methods import (
    espresso,
    fedbip,
    fedcado,
    feddeo,
    feddisc,
    fedld,
    fedlmg,
    fgl,
    oscar,
    prompts_only,
)
from server_app.synthesis.guidance import Condition, as_teacher, compose
from server_app.synthesis.plan import ImageJob, initial_noise, plan_images
from server_app.synthesis.samplers import ddim, ddim_schedule, z_sampling
from tests.helpers.client_jobs import CLASSES, images, job_of
from tests.helpers.settings import defaults, plain_classifier, quick

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- Z-Sampling (Espresso) ----


def test_a_ddim_step_is_undone_exactly_when_the_prediction_is_fixed() -> None:
    z = random(2, 4, 8, 8).double()
    e = random(2, 4, 8, 8, seed=1).double()
    for a_t, a_prev in ((0.05, 0.2), (0.5, 0.9), (0.9, 0.999)):
        a_t = torch.tensor(a_t).double()
        a_prev = torch.tensor(a_prev).double()
        assert torch.allclose(
            ddim_step(ddim_step(z, e, a_t, a_prev), e, a_prev, a_t), z, atol=1e-12
        )


def test_a_zig_zag_by_hand(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """Two steps of scalars, strong prediction z/2 and weak prediction 1, written out.

    The second step lies below the threshold.
    """
    kit = load_kit(tiny_kit)
    z = torch.full((1, 4, 8, 8), 2.0)
    (t1, a1, p1), (t2, a2, p2) = ddim_schedule(kit, 2)
    assert t1 > 400

    def strong(z: torch.Tensor, t: object) -> torch.Tensor:
        return z / 2

    def weak(z: torch.Tensor, t: object) -> torch.Tensor:
        return torch.ones_like(z)

    def down(x: float, e: float, a: float, p: float) -> float:
        return p**0.5 * (x - (1 - a) ** 0.5 * e) / a**0.5 + (1 - p) ** 0.5 * e

    a1, p1, a2, p2 = (float(v) for v in (a1, p1, a2, p2))
    zig = down(2.0, 1.0, a1, p1)  # 1. strong: e = 2 / 2
    # 2. weak, backwards: e = 1, as it happens the same; so z is back at 2
    zag = down(zig, 1.0, p1, a1)
    assert zag == pytest.approx(2.0)
    latent = down(zag, zag / 2, a1, p1)  # 3. strong again
    end = down(latent, latent / 2, a2, p2)  # below the threshold: one plain step
    assert torch.allclose(
        z_sampling(kit, z, 2, strong, weak, threshold=400), torch.full_like(z, end), rtol=1e-4
    )

    # Where each prediction is taken
    def strong_at(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return z / 2 + t / 1000

    def weak_at(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return z / 3 + t / 500

    zig = down(2.0, 1.0 + t1 / 1000, a1, p1)
    zag = down(zig, zig / 3 + t1 / 500, p1, a1)  # at the lower latent, and at the upper timestep
    latent = down(zag, zag / 2 + t1 / 1000, a1, p1)
    end = down(latent, latent / 2 + t2 / 1000, a2, p2)
    assert torch.allclose(
        z_sampling(kit, z, 2, strong_at, weak_at, threshold=400), torch.full_like(z, end), rtol=1e-4
    )


@pytest.mark.slow
def test_a_zig_zag_costs_five_unet_rows(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """gamma_2 = 0 needs the unconditional branch alone, 1 the condition's: 2 + 1 + 2 rows above
    T_z, 2 below.

    2 + 2 + 2 with another gamma_2.
    """
    kit = load_kit(tiny_kit)
    rows = []
    settings = parse_run_config(quick(espresso__gmm=False, espresso__z_threshold=800)).espresso
    payload = Mixtures(CLASSES, random(10, 2, *kit.text.shape), torch.full((10, 2), 0.5))
    forward = kit.unet.forward
    monkeypatch.setattr(
        kit.unet,
        "forward",
        lambda z, *args, **kwargs: (rows.append(len(z)), forward(z, *args, **kwargs))[1],
    )
    plan = plan_images("m", 0, {"a": [3]}, 1)
    texts = kit.text(CLASSES)
    above = [t > 800 for t, *_ in ddim_schedule(kit, 10)]
    assert sum(above) == 2
    for weak, zig_zag in ((0.0, [2, 1, 2]), (1.0, [2, 1, 2]), (1.5, [2, 2, 2])):
        rows.clear()
        varied = replace(settings, inversion_guidance=weak)
        espresso.sample(kit, plan, texts, [(payload, 3)], varied, 10)
        assert rows == [n for high in above for n in (zig_zag if high else [2])]
    rows.clear()
    plain = replace(settings, z_sampling=False)
    espresso.sample(kit, plan, texts, [(payload, 3)], plain, 10)
    assert rows == [2] * 10


# ---- Mixtures and clusters (Espresso) ----


@pytest.mark.slow
def test_noise_from_a_mixture_has_its_moments() -> None:
    """Weights 1/4 and 3/4, means -4 and 4 / variances 1 and 0.25.

    Mean 2, variance 0.25 + 0.1875 + 12 = 12.4375.
    """
    weights = torch.tensor([[0.25, 0.75]])
    means = torch.tensor([-4.0, 4.0]).view(1, 2, 1, 1, 1)
    variances = torch.tensor([1.0, 0.25]).view(1, 2, 1, 1, 1)
    payload = Mixtures(("a",), torch.zeros(1, 1, 2, 2), torch.ones(1, 1), weights, means, variances)
    drawn = torch.cat(
        [
            espresso.start_latent(
                payload, 0, random(1, 1, 1, seed=i), generator_of(i, "espresso")
            ).flatten()
            for i in range(20_000)
        ]
    )
    assert drawn.mean().item() == pytest.approx(2.0, abs=0.1)
    assert drawn.var().item() == pytest.approx(12.4375, rel=0.03)
    assert (drawn < 0).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_a_fitted_mixture_finds_two_clouds() -> None:
    clouds = torch.cat([random(300, 1, 2, 2) * 0.5 - 3, random(100, 1, 2, 2, seed=1) + 3])
    weights, means, variances = fit_mixture(clouds, 2, seed=0)
    order = weights.argsort()
    assert torch.allclose(weights[order], torch.tensor([0.25, 0.75]), atol=0.01)
    assert torch.allclose(
        means[order], torch.tensor([3.0, -3.0]).view(2, 1, 1, 1).expand_as(means), atol=0.3
    )
    assert torch.allclose(
        variances[order], torch.tensor([1.0, 0.25]).view(2, 1, 1, 1).expand_as(variances), rtol=0.4
    )


def test_clusters_are_wards() -> None:
    """The same partition as SciPy's implementation, at most J and at most N clusters, every image
    in exactly one.
    """
    features = random(30, 5)
    for count in (1, 2, 4, 7):
        ours = espresso_half.cluster_features(features, count)
        assert sorted(torch.cat(ours).tolist()) == list(range(30))
        theirs = fcluster(ward(features.numpy()), count, criterion="maxclust")
        assert {frozenset(c.tolist()) for c in ours} == {
            frozenset(np.flatnonzero(theirs == n).tolist()) for n in set(theirs)
        }
    assert [c.tolist() for c in espresso_half.cluster_features(features[:1], 4)] == [[0]]
    assert len(espresso_half.cluster_features(features[:3], 4)) == 3


def test_mixed_latents_are_noised_to_the_first_timestep() -> None:
    """Variance of a noised mixture.

    A E[s^2 + (1-s)^2] var(x0) + (1 - a) = 0.5 * 2/3 * (4 + 3) + 0.5, where an image is not mixed
    with itself.
    """
    a_t = torch.tensor(0.5)
    latents = espresso_half.noisy_latents(
        2 * random(4000, 1, 1, 1),
        torch.full((4000, 1, 1, 1), math.log(3)),
        a_t,
        3,
        torch.Generator().manual_seed(1),
    )
    assert latents.shape == (12_000, 1, 1, 1)
    assert latents.mean().item() == pytest.approx(0, abs=0.05)
    assert latents.var().item() == pytest.approx(0.5 * 2 / 3 * 7 + 0.5, rel=0.05)


@pytest.mark.slow
def test_espresso_sends_what_its_ablation_says(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """Two classes, of five images and of one: 2 clusters and 1; weights are shares of the images.

    G alone brings the mixture.
    """
    data = images(0, 0, 0, 0, 0, 4)
    for gmm in (True, False):
        payload = espresso_half.make_payload(
            job_of(tiny_kit, data, method="espresso", espresso__gmm=gmm)
        )
        assert payload.classes == ("zero", "four")
        assert payload.conditions.shape == (2, 2, 8, 32)
        assert torch.allclose(payload.weights.sum(dim=1), torch.ones(2))
        assert payload.weights[1].tolist() == [1, 0]
        assert payload.conditions[1, 1].abs().max() == 0
        assert set((payload.weights[0] * 5).round().tolist()) <= {1.0, 2.0, 3.0, 4.0}
        assert (payload.component_means is not None) == gmm
    start = load_kit(tiny_kit).text.states(["an image of zero"])[0]
    assert not torch.allclose(payload.conditions[0, 0], payload.conditions[0, 1])
    assert (
        payload.conditions[0, 0] - start
    ).abs().max() < 1  # ten images' steps away from the prompt


@pytest.mark.slow
def test_a_condition_is_drawn_by_its_clusters_share(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_kit)
    states = []
    conditions = torch.stack([torch.full((1, *kit.text.shape), float(j)) for j in range(3)], dim=1)
    payload = Mixtures(("zero",), conditions, torch.tensor([[0.5, 0.5, 0.0]]))
    settings = parse_run_config(quick(espresso__gmm=False, espresso__z_sampling=False)).espresso
    eps = kit.unet.forward
    kit.unet.forward = (
        lambda z, t, encoder_hidden_states, class_labels=None: (  # type: ignore[method-assign]
            states.append(encoder_hidden_states[len(z) // 2 :, 0, 0]),
            eps(z, t, encoder_hidden_states),
        )[1]
    )
    plan = plan_images("m", 0, {"a": [0]}, 60)
    espresso.sample(kit, plan, kit.text(["zero"]), [(payload, 0)] * 60, settings, 2)
    counts = torch.bincount(states[0].round().long(), minlength=3)
    assert counts[2] == 0
    assert 18 < counts[0] < 42
    assert torch.equal(states[0], states[1])  # one condition an image, for all of its steps


# ---- FedCADO ----


def test_noise_editing_by_hand() -> None:
    # L = z^2 / 2: z <- z - 0.1 z, three times: 2 * 0.9^3
    z = fedcado.edit_noise(
        torch.full((1, 1, 2, 2), 2.0),
        torch.tensor(0),
        lambda z, t: (z, (z**2 / 2).sum((1, 2, 3))),
        3,
        0.1,
    )
    assert torch.allclose(z, torch.full_like(z, 2 * 0.9**3))
    assert not z.requires_grad


@pytest.mark.slow
def test_edited_noise_has_a_lower_loss_and_other_images(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_kit)
    plan = plan_images("m", 0, {"a": [1, 2]}, 2)
    torch.manual_seed(0)
    teachers = {"a": as_teacher(classifiers.build_classifier("resnet18", 10, small_stem=True))}
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    settings = parse_run_config(quick(fedcado__noise_edits=10, fedcado__noise_edit_lr=0.3)).fedcado
    loss_at = fedlmg.guidance_loss(kit, plan, prompts, teachers, settings, None)
    z = initial_noise(plan, kit.latent_shape, CPU)
    t = torch.tensor(501)
    edited = fedcado.edit_noise(z, t, loss_at, 10, 0.3)
    assert loss_at(edited, t)[1].mean() < loss_at(z, t)[1].mean()
    plain = fedlmg.sample(kit, plan, prompts, teachers, settings, 2)
    assert torch.equal(
        fedcado.sample(kit, plan, prompts, teachers, replace(settings, noise_edits=0), 2), plain
    )
    assert not torch.equal(fedcado.sample(kit, plan, prompts, teachers, settings, 2), plain)


@pytest.mark.slow
def test_a_teacher_without_batchnorm_warns_and_guides() -> None:
    model = classifiers.build_classifier("vgg16", 10, small_stem=True)
    with pytest.warns(UserWarning, match="vgg16 has no BatchNorm layer, so L_BN is 0"):
        teacher = fedlmg._rebuild(Classifier(CLASSES, "vgg16", model.state_dict()), 10, True)
    assert not teacher.norms
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resnet = classifiers.build_classifier("resnet18", 10, small_stem=True)
        fedlmg._rebuild(Classifier(CLASSES, "resnet18", resnet.state_dict()), 10, True)


# ---- OSCAR ----


@pytest.mark.slow
def test_oscars_mean_is_a_loops(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(3, 3, 3, 8)
    captioner = encoders.load_captioner(str(tiny_kit), CPU)
    text = encoders.load_text_encoder(str(tiny_kit), CPU, torch.float32)
    captions = [captioner(data.pixels[i : i + 1])[0] for i in range(4)]
    payload = oscar_half.make_payload(job_of(tiny_kit, data, method="oscar"))
    total = torch.zeros(8, 32)
    for caption in captions[:3]:
        total += text.states([caption])[0]
    assert payload.classes == ("three", "eight")
    assert torch.allclose(payload.vectors[0], total / 3, atol=1e-5)
    assert torch.allclose(payload.vectors[1], text.states([captions[3]])[0], atol=1e-5)
    pooled = oscar_half.make_payload(job_of(tiny_kit, data, method="oscar-pooled"))
    assert pooled.vectors.shape == (2, 32)
    assert torch.allclose(pooled.vectors[1], text.pooled([captions[3]])[0], atol=1e-5)


@pytest.mark.slow
def test_captions_cost_as_much_as_when_all_is_counted(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """The first of equally large batches is counted. Here 16, 16 and 2 images, of 5 words
    and of 3.
    """
    captioner = encoders.load_captioner(str(tiny_kit), CPU)
    meter = FlopMeter()
    counted = []
    for words in (5, 3):
        with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
            patch.setattr(oscar_declaration, "CAPTION_TOKENS", words)
            texts = captioner(random(34, 3, 32, 32).mul(255).byte())
            counted.append(counter.get_total_flops())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(oscar_declaration, "CAPTION_TOKENS", words)
            assert captioner(random(34, 3, 32, 32).mul(255).byte(), meter) == texts
    assert meter.total == sum(counted)
    assert counted[0] > counted[1] > 0


def test_a_pooled_vector_is_laid_out_behind_the_begin_of_text(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_kit)
    p = random(2, 32)
    conditions = oscar.as_states(kit, p)
    assert conditions.shape == (2, 8, 32)
    for text in ("", "an image of six"):  # the begin-of-text state is the same whatever follows
        begin = kit.text.states([text])[:, 0]
        assert torch.allclose(conditions[:, 0], begin.expand(2, -1), atol=1e-6)
    assert all(torch.equal(conditions[:, place], p) for place in range(1, 8))
    full = random(2, 8, 32)
    assert torch.equal(oscar.as_states(kit, full), full)


def test_pooling_takes_the_end_of_text(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    text = load_kit(tiny_kit).text
    for words in ("six", "an image of six"):
        end = (text.tokens([words])[0] == text.tokenizer.eos_token_id).int().argmax()
        assert torch.allclose(text.pooled([words])[0], text.states([words])[0, end])


# ---- FGL ----


@pytest.mark.slow
def test_fgl_sends_every_caption_and_uses_them_in_turn(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(3, 5, 3)
    payload = fgl_half.make_payload(job_of(tiny_kit, data, method="fgl"))
    captioner = encoders.load_captioner(str(tiny_kit), CPU)
    assert payload == Captions(
        ("three", "five"),
        (tuple(captioner(data.pixels[[0, 2]])), tuple(captioner(data.pixels[[1]]))),
    )
    job = SimpleNamespace(config=parse_run_config(quick()), classes=CLASSES)
    texts = {("a", 3): ("red", "blue")}
    prompts = [
        fgl.prompt_of(job, texts["a", 3], image) for image in plan_images("fgl", 0, {"a": [3]}, 3)
    ]  # type: ignore[arg-type]
    assert prompts == ["three, red", "three, blue", "three, red"]


def test_fgl_sends_nothing_that_a_server_refuses(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    texts = ["a cat \N{SKULL} \N{SLICE OF PIZZA}\n", "漢" * 400]

    class Parrot:
        fit = 32

        def __call__(self, pixels: torch.Tensor, meter: object) -> list[str]:
            return texts

    monkeypatch.setattr(fgl_half, "load_captioner", lambda *_: Parrot())
    payload = fgl_half.make_payload(job_of(tiny_kit, images(3, 3), method="fgl"))
    assert payload == Captions(("three",), (("a cat  ", "漢" * 300),))


def test_a_negative_prompt_is_the_other_end_of_the_guidance(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_kit)
    plan = plan_images("m", 0, {"a": [0]}, 1)
    c = Conditioning(random(1, 8, 32))
    bad = Conditioning(random(1, 8, 32, seed=1))
    nothing = kit.text([""])
    z = initial_noise(plan, kit.latent_shape, CPU)
    t = torch.tensor(501)
    away = kit.eps(z, t, bad)
    towards = kit.eps(z, t, c)
    assert torch.allclose(
        compose(kit, z, t, bad, [Condition(c, 2.0)]), away + 2 * (towards - away), atol=1e-5
    )
    assert not torch.equal(
        prompts_only.sample(kit, plan, c, 2.0, 2, bad),
        prompts_only.sample(kit, plan, c, 2.0, 2, nothing),
    )


# ---- FedDISC ----


def test_feddiscs_payload_has_12288_numbers_a_class() -> None:
    """Stable unCLIP 2.1: embeddings of 1024 and their level's encoding, five centres and a mean."""
    vectors = feddisc_half.class_vectors(random(16, 2048), clusters=5, seed=0)
    assert vectors.numel() == 12_288


# One image: its vector three times, and as the mean
def test_centres_and_mean_of_two_clouds() -> None:
    cloud = torch.cat([torch.full((3, 4), 1.0), torch.full((1, 4), 5.0)])
    vectors = feddisc_half.class_vectors(cloud, clusters=2, seed=0)
    assert sorted(vectors[:2, 0].tolist()) == [1, 5]
    assert torch.equal(vectors[2], torch.full((4,), 2.0))
    few = feddisc_half.class_vectors(cloud[:1], clusters=3, seed=0)
    assert torch.equal(few, torch.full((4, 4), 1.0))


def test_embedding_noise_is_diffusers_own(tiny_unclip) -> None:  # type: ignore[no-untyped-def]
    pipe = load_unclip_pipeline(tiny_unclip)
    ours = load_embedding_noise(str(tiny_unclip))
    embeddings = random(3, 12)
    noise = random(3, 12, seed=1)
    for level in (0, 500, 999):
        theirs = pipe.noise_image_embeddings(embeddings, level, noise=noise)
        assert torch.allclose(ours(embeddings, torch.full((3,), level), noise), theirs, atol=1e-6)


def test_unclip_sampling_equals_diffusers_own_pipeline(tiny_unclip) -> None:  # type: ignore[no-untyped-def]
    """One image condition, guidance 3: the latents agree to 1e-4."""
    from diffusers import DDIMScheduler

    kit = load_kit(tiny_unclip)
    pipe = load_unclip_pipeline(tiny_unclip)
    noise = load_embedding_noise(str(tiny_unclip))
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    embeddings = random(2, 12)
    z = random(2, 4, 8, 8, seed=2)
    texts = ["an image of one", "an image of two"]
    theirs = pipe(
        prompt=texts,
        image_embeds=embeddings,
        noise_level=500,
        latents=z,
        guidance_scale=3.0,
        num_inference_steps=5,
        output_type="latent",
        generator=torch.Generator().manual_seed(7),
    ).images
    # What the pipeline drew first
    drawn = torch.randn(2, 12, generator=torch.Generator().manual_seed(7))
    image = noise(embeddings, torch.full((2,), 500), drawn)
    with torch.no_grad():
        condition = Condition(kit.text(texts).with_image(image), 3.0)
        nothing = kit.text([""]).with_image(torch.zeros(1, 24))
        ours = ddim(kit, z, 5, lambda z, t: compose(kit, z, t, nothing, [condition]))
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_feddisc_uses_the_centres_in_turn_and_the_mean_for_all(tiny_unclip, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_unclip)
    plan = plan_images("m", 0, {"a": [2]}, 3)
    calls = []
    rows = torch.arange(3.0).view(3, 1).expand(3, 24)  # centres 0 and 1, mean 2
    forward = kit.unet.forward

    def watched(z, t, encoder_hidden_states, class_labels):  # type: ignore[no-untyped-def]
        calls.append(class_labels[:, 0].tolist())
        return forward(z, t, encoder_hidden_states, class_labels=class_labels)

    monkeypatch.setattr(kit.unet, "forward", watched)
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    feddisc.sample(kit, plan, prompts, {("a", 2): rows}, parse_run_config(quick()).feddisc, 2)
    assert calls == [[0, 0, 0, 0, 1, 0, 2, 2, 2]] * 2  # nothing, centres, means


# ---- FedBiP ----


def test_concepts_take_their_words_places(shipped_kit, tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """The condition is the encoding of the bare token ids, of one length whatever the class is
    called, but for S and V.
    """
    text = encoders.load_text_encoder(str(shipped_kit), CPU, torch.float32)
    ids = text.tokenizer("a x style of a x").input_ids
    assert text.tokenizer.convert_ids_to_tokens(ids) == [
        *("<|startoftext|>", "a</w>", "x</w>", "style</w>"),
        *("of</w>", "a</w>", "x</w>", "<|endoftext|>"),
    ]
    bare = text.model(torch.tensor([ids])).last_hidden_state[0]
    domain = random(64, seed=1)
    vectors = random(2, 64, seed=2)
    states = encode_concept_prompt(text).filled(domain, vectors).states
    for row in range(2):
        expected = bare.clone()
        expected[2] = domain
        expected[6] = vectors[row]
        assert torch.allclose(states[row], expected, atol=1e-6)
    filled = encode_concept_prompt(text).filled(random(2, 64, seed=3), vectors)
    assert torch.equal(filled.states[:, 2], random(2, 64, seed=3))
    # eight tokens, too few for the prompt in single letters: V takes the last before the end
    prompt = encode_concept_prompt(load_kit(tiny_kit).text)
    short = prompt.filled(random(32), random(1, 32, seed=1)).states
    assert short.shape == (1, 8, 32)
    assert torch.equal(short[0, [2, 6]], torch.stack([random(32), random(1, 32, seed=1)[0]]))


def test_concepts_begin_at_x_and_at_the_classs_last_token(shipped_kit) -> None:  # type: ignore[no-untyped-def]
    text = encoders.load_text_encoder(str(shipped_kit), CPU, torch.float32)
    words = {"seven": "a seven", "alarm_clock": "an alarm clock", "zero": "a zero"}
    domain, vectors = initial_concepts(text, list(words))
    lengths = []
    for name, vector in zip(words.values(), vectors, strict=True):
        ids = text.tokenizer(f"a x style of {name}").input_ids
        bare = text.model(torch.tensor([ids])).last_hidden_state[0]
        assert torch.allclose(vector, bare[-2], atol=1e-6)
        assert torch.allclose(domain, bare[2], atol=1e-6)
        lengths.append(len(ids))
    assert len(set(lengths)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "shipped"])
def test_concepts_are_sampled_as_diffusers_own_pipeline_samples_them(
    tiny_kit, shipped_kit, monkeypatch, name: str
) -> None:  # type: ignore[no-untyped-def]
    """Given the short condition, the pipeline makes the unconditional one of its length."""
    kit = load_kit(tiny_kit if name == "tiny" else shipped_kit)
    pipeline = load_pipeline(tiny_kit if name == "tiny" else shipped_kit)
    pipeline.scheduler = kit.scheduler
    width = kit.text.shape[1]
    classes = ("zero", "alarm clock")
    payload = Concepts(
        classes,
        random(width),
        random(2, width, seed=1),
        torch.arange(2),
        random(2, 4, 8, 8),
        torch.ones(2, 4, 8, 8),
    )
    settings = parse_run_config(quick(fedbip__guidance=3.0, fedbip__domain_noise=0.0)).fedbip
    starts = []
    ends = []
    denoise = fedbip.denoise
    monkeypatch.setattr(
        fedbip, "denoise", lambda kit, z, *rest: (starts.append(z), denoise(kit, z, *rest))[1]
    )
    monkeypatch.setattr(fedbip, "to_images", lambda kit, z: ends.append(z))
    plan = plan_images("m", 0, {"a": [0, 1]}, 1)
    fedbip.sample(kit, plan, classes, {"a": payload}, settings, 4)
    condition = encode_concept_prompt(kit.text).filled(payload.domain, payload.vectors)
    theirs = pipeline(
        prompt_embeds=condition.states,
        latents=starts[0],
        num_inference_steps=4,
        guidance_scale=3.0,
        output_type="latent",
    ).images
    assert (ends[0] - theirs).norm() / theirs.norm() < 1e-4


@pytest.mark.slow
def test_words_learn_to_lower_the_denoising_loss(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(*[3] * 6)
    kit = load_kit(tiny_kit)
    job = job_of(tiny_kit, data, method="fedbip", fedbip__epochs=60, fedbip__batch_size=6)
    payload = fedbip_half.make_payload(job)
    prompt = encode_concept_prompt(kit.text)
    start = initial_concepts(kit.text, ["three"])

    @torch.no_grad()
    def loss(condition: Conditioning) -> float:
        x0, _ = kit.encode(next(data.batches(100)))
        t = torch.arange(0, 1000, 8)
        eps = random(len(t), 4, 8, 8)
        z = forward_noise(x0[torch.arange(len(t)) % 6], eps, kit.alphas_cumprod[t])
        return (eps - kit.eps(z, t, condition.expand(len(t)))).square().mean().item()

    learned = prompt.filled(payload.domain, payload.vectors)
    assert loss(learned) < loss(prompt.filled(*start)) - 0.005
    mean, logvar = kit.encode(next(data.batches(100)))
    assert torch.allclose(payload.means, mean, atol=1e-5)
    assert torch.allclose(payload.deviations, (0.5 * logvar).exp(), atol=1e-5)
    assert payload.labels.tolist() == [3] * 6


# E (1 + 2u)^2 of u uniform on [0, 1]
def test_latents_are_drawn_between_two_images_of_the_class() -> None:
    labels = torch.tensor([0, 0, 1])
    means = torch.tensor([1.0, 3.0, 50.0]).view(3, 1, 1, 1)
    payload = Concepts(
        ("zero", "one"), torch.zeros(2), torch.zeros(2, 2), labels, means, torch.zeros(3, 1, 1, 1)
    )
    drawn = [fedbip.draw_latent(payload, 0, generator_of(i)).item() for i in range(500)]
    assert min(drawn) >= 1
    assert max(drawn) <= 3
    assert np.mean(drawn) == pytest.approx(2, abs=0.1)
    assert np.std(drawn) == pytest.approx(2 / 12**0.5, abs=0.05)  # uniform on [1, 3]
    assert fedbip.draw_latent(payload, 1, generator_of(0)).item() == 50
    wide = replace(
        payload,
        means=torch.zeros(3, 1, 1, 1),
        deviations=torch.tensor([1.0, 3.0, 0.0]).view(3, 1, 1, 1),
    )
    drawn = [fedbip.draw_latent(wide, 0, generator_of(i)).item() for i in range(2000)]
    assert np.std(drawn) == pytest.approx((13 / 3) ** 0.5, rel=0.05)


def test_every_posterior_stays_with_its_image_and_its_word(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Two classes in turn, the later one's images first."""
    data = images(8, 3, 8, 3, 8)
    kit = load_kit(tiny_kit)
    calls = []
    monkeypatch.setattr(
        fedbip_half,
        "learn_words",
        lambda *args: (calls.append(args[1:5]), torch.zeros(32), torch.zeros(2, 32))[1:],
    )
    payload = fedbip_half.make_payload(job_of(tiny_kit, data, method="fedbip"))
    ((names, owner, means, _),) = calls
    assert (names, owner.tolist()) == (["three", "eight"], [0, 0, 1, 1, 1])
    assert payload.labels.tolist() == [3, 3, 8, 8, 8]
    expected, _ = kit.encode(next(data.batches(100)))
    assert torch.allclose(payload.means, expected[[1, 3, 0, 2, 4]], atol=1e-5)
    assert torch.allclose(means, payload.means)


# ---- What all share ----


def test_latents_are_scaled_as_diffusers_pipelines_scale_them(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_kit)
    x = random(2, 3, 32, 32)
    theirs = kit.vae.encode(x).latent_dist
    scale = kit.vae.config.scaling_factor
    assert scale != 1
    mean, logvar = kit.encode(x)
    assert torch.allclose(mean, scale * theirs.mean, atol=1e-6)
    assert torch.allclose((0.5 * logvar).exp(), scale * theirs.std, atol=1e-6)
    assert torch.allclose(kit.decode(mean), kit.vae.decode(theirs.mean).sample, atol=1e-5)


def test_conditions_learn_from_draws_of_the_posterior(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The posterior has mean 5 and variance 4."""
    kit = load_kit(tiny_kit)
    drawn = []
    monkeypatch.setattr(
        conditions, "forward_noise", lambda z, noise, a: (drawn.append(z), noise)[1]
    )
    mean = torch.full((64, 4, 8, 8), 5.0)
    logvar = torch.full((64, 4, 8, 8), math.log(4))
    job = job_of(tiny_kit, images(3), feddeo__epochs=1, feddeo__batch_size=64)
    start = kit.text(["an image of three"])
    conditions.train_conditions(
        kit, start, mean, logvar, [torch.arange(64)], ["three"], job.config.feddeo, job
    )
    (latents,) = drawn
    assert latents.mean().item() == pytest.approx(5, abs=0.05)
    assert latents.std().item() == pytest.approx(2, rel=0.03)


# ---- Every sampler ----


def every_sampler(
    kit, unclip, plan: list[ImageJob], steps: int, **settings: Any
) -> dict[str, Callable[..., torch.Tensor]]:  # type: ignore[no-untyped-def]
    """For whatever images of a plan, with payloads of random numbers."""
    config = parse_run_config(quick(espresso__clusters=2, **settings))
    clients = sorted({job.client for job in plan})
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    torch.manual_seed(0)
    teachers = {
        c: as_teacher(classifiers.build_classifier("resnet18", 10, small_stem=True))
        for c in clients
    }
    mixtures = {
        c: Mixtures(
            CLASSES,
            random(10, 2, 8, 32, seed=n),
            torch.full((10, 2), 0.5),
            torch.full((10, 2), 0.5),
            random(10, 2, 4, 8, 8),
            random(10, 2, 4, 8, 8).square(),
        )
        for n, c in enumerate(clients)
    }
    latents = {
        c: LatentMixture(
            CLASSES, torch.full((2,), 0.5), random(2, 4, 8, 8), random(2, 4, 8, 8).square()
        )
        for c in clients
    }
    concepts = {
        c: Concepts(
            CLASSES,
            random(32, seed=n),
            random(10, 32),
            torch.arange(10),
            random(10, 4, 8, 8),
            torch.ones(10, 4, 8, 8),
        )
        for n, c in enumerate(clients)
    }
    vectors = {(j.client, j.label): random(3, 24, seed=j.label) for j in plan}
    learned = {(j.client, j.label): random(8, 32, seed=j.label) for j in plan}
    scales = (config.feddeo.guidance_text, config.feddeo.guidance_description)
    return {
        "prompts-only": lambda jobs: prompts_only.sample(
            kit, jobs, prompts[[j.label for j in jobs]], 3.0, steps
        ),
        "feddeo": lambda jobs: feddeo.sample(kit, jobs, prompts, learned, scales, steps),
        "fedlmg": lambda jobs: fedlmg.sample(kit, jobs, prompts, teachers, config.fedlmg, steps),
        "fedcado": lambda jobs: fedcado.sample(kit, jobs, prompts, teachers, config.fedcado, steps),
        "espresso": lambda jobs: espresso.sample(
            kit,
            jobs,
            prompts,
            [(mixtures[j.client], j.label) for j in jobs],
            config.espresso,
            steps,
        ),
        "fedld": lambda jobs: prompts_only.sample(
            kit,
            jobs,
            prompts[[j.label for j in jobs]],
            3.0,
            steps,
            z=fedld.start_latents(jobs, latents, initial_noise(jobs, kit.latent_shape, CPU)),
        ),
        "feddisc": lambda jobs: feddisc.sample(
            unclip, jobs, prompts, vectors, config.feddisc, steps
        ),
        "fedbip": lambda jobs: fedbip.sample(kit, jobs, CLASSES, concepts, config.fedbip, steps),
    }


@pytest.mark.slow
def test_rows_of_every_sampler_do_not_depend_on_their_batch(tiny_kit, tiny_unclip) -> None:  # type: ignore[no-untyped-def]
    plan = plan_images("m", 0, {"a": [0, 3], "b": [3]}, 1)
    for name, sample in every_sampler(load_kit(tiny_kit), load_kit(tiny_unclip), plan, 3).items():
        together = sample(plan)
        for row, job in enumerate(plan):
            difference = (together[row].int() - sample([job])[0].int()).abs()
            assert difference.float().mean() < 0.5, name
            assert difference.max() <= 8, name
        assert not torch.equal(together[0], together[1]), name


def flops(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.slow
def test_no_sampler_does_more_than_its_formula(tiny_kit, tiny_unclip) -> None:  # type: ignore[no-untyped-def]
    """FLOPs an image, in parts counted one by one.

    F a UNet pass, V a decoding, G(x) forward and back to z of one that is differentiated.

    Three steps, one of them above T_z = 600, two edits of the noise; the empty prompt's encoding,
    once for all images, and FedBiP's prompt's.
    """
    kit = load_kit(tiny_kit)
    unclip = load_kit(tiny_unclip)
    steps = 3
    edits = 2
    above = 1
    plan = plan_images("m", 0, {"a": [0], "b": [3]}, 1)
    z = random(1, *kit.latent_shape).requires_grad_()
    t = torch.tensor(500)
    c = Conditioning(random(1, *kit.text.shape))
    F = flops(lambda: kit.eps(z.detach(), t, c))
    V = flops(lambda: kit.decode(z.detach()))
    T = flops(lambda: kit.text([""]))
    F_unclip = flops(lambda: unclip.eps(z.detach(), t, c.with_image(random(1, 24))))
    classifier = as_teacher(classifiers.build_classifier("resnet18", 10, small_stem=True)).model
    x = random(1, 3, 32, 32).requires_grad_()
    # The counter cannot hook on to a leaf
    G_F = flops(lambda: torch.autograd.grad(kit.eps(z * 1, t, c).sum(), z))
    G_V = flops(lambda: torch.autograd.grad(kit.decode(z).sum(), z))
    G_C = flops(lambda: torch.autograd.grad(classifier(x * 1).sum(), x))
    guided = 2 * G_F + G_V + G_C
    full = {
        "prompts-only": steps * 2 * F + V,
        "feddeo": steps * 3 * F + V,
        "fedlmg": steps * guided + V,
        "fedcado": (steps + edits) * guided + V,
        "espresso": (steps * 2 + above * 3) * F + V,
        "fedld": steps * 2 * F + V,
        "feddisc": steps * 3 * F_unclip + V,
        "fedbip": steps * 2 * F + V,
    }
    cheaper = {"feddeo": steps * 2 * F + V, "fedlmg": steps * (guided + 2 * (F - G_F)) + V}
    for options, formulas in (
        ({"feddeo__guidance_text": 3.0}, full),
        ({"feddeo__guidance_text": 0.0, "fedlmg__gradient": "x0"}, cheaper),
    ):
        samplers = every_sampler(
            kit,
            unclip,
            plan,
            steps,
            **options,
            fedcado__noise_edits=edits,
            espresso__z_threshold=600,
            espresso__inversion_guidance=0.0,
        )
        for name, formula in formulas.items():
            counted = flops(partial(samplers[name], plan)) - T * (1 + (name == "fedbip"))
            assert len(plan) * formula == pytest.approx(counted, rel=0.02), name


# ---- Rounds ----


def linear(weight: list[float]) -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([weight])
    return model


def test_the_local_objectives_by_hand() -> None:
    """Terms beside the gradient (1, 1): FedProx mu (theta - theta_global) = 0.5 (2, -1). FedDyn
    that, less grad L_k = (2, 7).
    """
    start = {"weight": torch.tensor([[1.0, 1.0]])}
    gradient = {"weight": torch.tensor([[2.0, 7.0]])}
    for penalty, added in (
        (fedprox_penalty(start, 0.5), [1 + 1, 1 - 0.5]),
        (feddyn_penalty(start, gradient, 0.5), [1 + 1 - 2, 1 - 0.5 - 7]),
    ):
        model = linear([3.0, 0.0])
        model.weight.grad = torch.ones(1, 2)  # type: ignore[assignment]
        penalty(model)
        assert model.weight.grad.tolist() == [added]  # type: ignore[union-attr, operator]


def test_the_penalties_gradients_are_their_objectives() -> None:
    """Against autograd of the objectives as the papers write them."""
    model = classifiers.build_classifier("mobilenet_v3_small", 3, True)
    start = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    gradient = {n: torch.randn_like(p) for n, p in model.named_parameters()}

    def objective(kind: str) -> torch.Tensor:
        quadratic = (
            0.3 / 2 * sum((p - start[n]).square().sum() for n, p in model.named_parameters())
        )
        linear = (
            sum((gradient[n] * p).sum() for n, p in model.named_parameters())
            if kind == "dynamic"
            else 0
        )
        return quadratic - linear  # type: ignore[return-value]

    for kind, penalty in (
        ("proximal", fedprox_penalty(start, 0.3)),
        ("dynamic", feddyn_penalty(start, gradient, 0.3)),
    ):
        expected = torch.autograd.grad(objective(kind), list(model.parameters()))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        penalty(model)
        assert all(
            torch.allclose(p.grad, e, atol=1e-6)
            for p, e in zip(model.parameters(), expected, strict=True)
        )  # type: ignore[arg-type]


def test_a_penalty_enters_every_step() -> None:
    """One SGD step with lr 1 on a model whose cross-entropy has no gradient.

    The weight moves by minus the penalty's gradient.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1, bias=False))
    before = model[1].weight.detach().clone()  # type: ignore[union-attr]
    settings = plain_classifier(epochs=1, batch_size=2, lr=1.0)
    start = {"1.weight": torch.zeros_like(before)}
    pixels = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    labels = torch.zeros(2, dtype=torch.long)
    extra = ExtraLoss(penalty=fedprox_penalty(start, 0.25))
    fit(model, pixels, labels, settings, 0, CPU, extra=extra)
    assert torch.allclose(model[1].weight.detach(), 0.75 * before)  # type: ignore[union-attr]


def test_feddyns_server_step_by_hand() -> None:
    """theta = 1.

    Clients send 2 and 4: mean 3, h = 0 - 0.5 * (2/2) * (3 - 1) = -1, theta = 3 + 1/0.5 = 5. Next
    round: clients send 5 and 7.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

    from server_app.baselines.feddyn import FedDyn

    strategy = FedDyn(
        0.5, clients=2, parameters=frozenset({"w"}), min_train_nodes=2, min_available_nodes=2
    )
    grid = SimpleNamespace(get_node_ids=lambda: [1, 2])

    def arrays(w: float, mean: float) -> ArrayRecord:
        return ArrayRecord(
            {
                "w": Array(np.array([w], np.float32)),
                "bn.running_mean": Array(np.array([mean], np.float32)),
            }
        )

    def reply(w: float, mean: float) -> Message:
        metrics = MetricRecord({"num-examples": int(w), "clients": 1})
        return Message(
            RecordDict({"arrays": arrays(w, mean), "metrics": metrics}),
            dst_node_id=1,
            message_type="train",
        )

    request = ConfigRecord()
    list(strategy.configure_train(1, arrays(1, 0), request, grid))  # type: ignore[arg-type]
    assert request["dyn-alpha"] == 0.5
    after, _ = strategy.aggregate_train(1, [reply(2, 10), reply(4, 20)])
    assert after is not None
    assert after["w"].numpy().tolist() == [5.0]
    # Statistics are averaged and not corrected
    assert after["bn.running_mean"].numpy().tolist() == [15.0]
    list(strategy.configure_train(2, after, request, grid))  # type: ignore[arg-type]
    after, _ = strategy.aggregate_train(2, [reply(5, 0), reply(7, 0)])
    assert after is not None
    # mean 6, h = -1 - 0.5 * (6 - 5) = -1.5, theta = 6 + 3 = 9
    assert after["w"].numpy().tolist() == [9.0]


def test_distillation_brings_the_student_to_the_teachers(home, tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """KL to the mean of the teachers' logits falls on the proxy images; labels play no part."""
    torch.manual_seed(0)
    proxy = torch.randint(256, (32, 3, 16, 16), dtype=torch.uint8)
    student, *teachers = (nn.Sequential(nn.Flatten(), nn.Linear(768, 10)) for _ in range(3))
    config = parse_run_config(
        quick(
            rounds__distillation_steps=40,
            rounds__distillation_batch_size=12,
            rounds__distillation_lr=1e-3,
        )
    )
    job = SimpleNamespace(config=config, device=CPU)
    target = (
        torch.stack([classifiers.compute_logits(t, proxy, CPU) for t in teachers])
        .mean(0)
        .softmax(1)
    )

    def distance() -> float:
        return nn.functional.kl_div(
            classifiers.compute_logits(student, proxy, CPU).log_softmax(1),
            target,
            reduction="batchmean",
        ).item()

    before = distance()
    batches = list[int]()
    student.register_forward_hook(lambda module, images, logits: batches.append(len(images[0])))
    feddf.distill([student], teachers, proxy, job, 1)  # type: ignore[arg-type]
    assert batches == [12] * 40
    assert distance() < 0.3 * before


# ---- Sizes, architectures, other encoders ----


def test_the_papers_payloads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers per class of a payload with a kit of Stable Diffusion's shapes (512 px. UnCLIP 2.1
    for FedDISC).
    """
    monkeypatch.setattr(expected, "shapes_of_kit", lambda kit: ((77, 768), (4, 64, 64), 2048))

    def numbers(method: str, classes: int = 1, images: int = 1) -> int:
        config = parse_run_config(
            {
                **defaults(),
                "method": method,
                "kit": "/stable-diffusion/v1-5",
                "feddisc.kit": "/stable/unclip",
            }
        )
        size = {"classes": classes, "images": images}
        return sum(
            math.prod(wire._resolve(shape, size))
            for shape, _ in expected.expected_tensors(config).values()
        )

    assert numbers("feddeo", classes=60) == 3_548_160  # the paper's 3.54 M
    assert numbers("oscar") == 59_136
    assert numbers("oscar-pooled") == 768
    assert numbers("espresso") == 4 * 59_136 + 4 + 4 * (1 + 2 * 16_384) == 367_624
    assert numbers("fedld", classes=60) == 4 * (1 + 2 * 16_384) == 131_076
    assert numbers("latent-gaussian") == 1 + 2 * 16_384
    assert numbers("feddisc") == 12_288
    assert numbers("fedbip") == 768 + 768 + 1 + 2 * 16_384
    with torch.device("meta"):
        resnet = classifiers.build_classifier("resnet18", 1000)
    # FedCADO's and FedLMG's 11.69 M
    assert sum(p.numel() for p in resnet.parameters()) == 11_689_512
    assert sum(b.numel() for name, b in resnet.named_buffers() if "running" in name) == 9_600


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["mobilenet_v3_small", "mobilenet_v2", "shufflenet_v2_x1_0", "resnet34", "resnet50", "vgg16"],
)
def test_small_stems_take_small_images(architecture: str) -> None:
    """At 32 px a small stem leaves more positions to the last stage than the ImageNet stem does,
    and training reaches every parameter.
    """
    small = classifiers.build_classifier(architecture, 10, small_stem=True)
    x = random(2, 3, 32, 32)
    small(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    if architecture == "vgg16":
        assert sum(p.numel() for p in small.parameters()) < 16e6
        return
    inputs: dict[bool, int] = {}
    for stem in (True, False):
        model = classifiers.build_classifier(architecture, 10, small_stem=stem).eval()
        last = [m for m in model.modules() if isinstance(m, nn.Conv2d)][-1]
        last.register_forward_hook(
            lambda m, a, out, stem=stem: inputs.__setitem__(stem, out.shape[-1])
        )
        model(x)
    assert inputs[True] == 2 * inputs[False]


def test_a_resnet34_begins_as_the_kits_resnet18(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    config = replace(parse_run_config(quick()).classifier, architecture="resnet34")
    deep = classifiers.new_classifier(config, 10, str(tiny_kit), 0).eval()
    shallow = classifiers.new_classifier(
        replace(config, architecture="resnet18"), 10, str(tiny_kit), 0
    ).eval()
    deep.fc = nn.Identity()
    shallow.fc = nn.Identity()
    x = random(2, 3, 32, 32)
    assert torch.equal(deep(x), shallow(x))
    assert sum(p.numel() for p in deep.parameters()) > 1.8 * sum(
        p.numel() for p in shallow.parameters()
    )


def test_a_client_is_charged_with_its_own_architectures_file(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    config = parse_run_config(
        quick(
            method="fedlmg",
            kit=str(tiny_kit),
            classifier__architecture="resnet18,shufflenet_v2_x1_0",
        )
    )
    for architecture in ("resnet18", "shufflenet_v2_x1_0"):
        file = tiny_kit / "classifiers" / f"{architecture}.safetensors"
        assert (
            client_download_bytes(config, Classifier(CLASSES, architecture, {}))
            == file.stat().st_size
        )
    assert (
        client_download_bytes(
            parse_run_config(quick(method="prompts-only", kit=str(tiny_kit))), None
        )
        == 0
    )


def test_the_size_of_a_model_outside_the_kit_is_unknown(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    named = parse_run_config(quick(method="oscar", kit=str(tiny_kit), captioner="owner/blip"))
    classifier = parse_run_config(
        quick(method="fedlmg", kit="owner/model", classifier__init="none")
    )
    unneeded = parse_run_config(quick(method="fedavg", kit="nowhere", classifier__init="none"))
    assert [client_download_bytes(config, None) for config in (named, classifier, unneeded)] == [
        None,
        0,
        0,
    ]


@pytest.mark.slow
def test_a_simulated_client_knows_its_domain() -> None:
    config = parse_run_config(quick()).data
    assert [domain_name(config, NodeConfig(partition_id=k), 0) for k in (0, 2, 5)] == [
        "clipart",
        "neon",
        "sketch",
    ]
    assert (
        domain_name(
            replace(config, partition="iid"), NodeConfig(partition_id=0, num_partitions=2), 0
        )
        == ""
    )


def test_dinov2_is_taken_as_image_encoder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    folder = tmp_path / "dinov2"
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    Dinov2Model(config).save_pretrained(folder)
    BitImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(folder)
    encoder = encoders.load_image_encoder(str(folder), CPU)
    assert (encoder.width, encoder.image_size) == (16, 28)
    assert encoder(torch.randint(256, (3, 3, 28, 28), dtype=torch.uint8)).shape == (3, 16)


def test_missing_or_wrong_encoders_are_named(tmp_path, tiny_kit) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KitError, match="image-encoder = .*nowhere.*: no such folder"):
        encoders.load_image_encoder(str(tmp_path / "nowhere"), CPU)
    with pytest.raises(KitError, match="captioner = .*nowhere.*: no such folder"):
        encoders.load_captioner(str(tmp_path / "nowhere"), CPU)
    with pytest.raises(KitError, match=r"describes a 'blip'; image encoder must be one of"):
        encoders.load_image_encoder(str(tiny_kit / "captioner"), CPU)
    with pytest.raises(KitError, match="is not a Stable unCLIP"):
        load_embedding_noise(str(tiny_kit))
