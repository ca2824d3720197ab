"""Conditions, and a kit whose conditions are of two text encoders and a pooled vector."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from client_app.methods import feddeo as feddeo_half
from client_app.methods import oscar as oscar_half
from osfl.config import parse_run_config
from osfl.kit.check import check_kit
from osfl.kit.compatibility import check_settings
from osfl.kit.folder import KitError, KitFolder
from osfl.kit.kits import kit_digest
from osfl.kit.shapes import kit_shapes
from osfl.methods import DIFFUSION_PARTS, METHODS, client_module, server_module
from osfl.models.conditioning import Conditioning, concatenate
from osfl.models.diffusion import Kit, load_kit, unet_flops
from osfl.models.diffusion_classifier import denoising_errors
from osfl.models.encoders import TextEncoderPair, load_captioner
from server_app.methods import feddeo, fedlmg, oscar
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import initial_noise, plan_images
from server_app.synthesis.samplers import ddim
from tests.helpers.client_jobs import CLASSES, images, job_of
from tests.helpers.settings import quick

CPU = torch.device("cpu")
TEXTS = ["an image of three", "an image of eight"]
PLAN = plan_images("m", 0, {"client-0": [3, 8]}, 1)
METHODS_THAT_SAMPLE = sorted(
    name for name, method in METHODS.items() if method.samples and name not in ("feddisc", "mixed")
)


# Where a method's prompts are not the classes'; None where they depend on what the kit sees
PROMPTS: dict[str, list[str] | None] = {
    "fedbip": ["a x style of a x"] * 2,
    "fgl": None,
    "prompts-domain": ["a neon of a three", "a neon of an eight"],
    "votes": None,
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states_by_hand(kit: Kit, texts: list[str]) -> torch.Tensor:
    """Each encoder's states before its last layer, by its own tokenizer, side by side."""
    text: Any = kit.text
    columns = []
    for model, tokenizer in (
        (text.model, text.tokenizer),
        (text.second, text.second_tokenizer),
    ):
        last_layers: list[torch.Tensor] = []
        encoder = model.text_model if hasattr(model, "text_model") else model
        hook = encoder.encoder.layers[-1].register_forward_pre_hook(
            lambda _, args, kwargs, seen=last_layers: seen.append(
                args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
        ids = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            model(ids)
        hook.remove()
        columns.append(last_layers[0])
    return torch.cat(columns, dim=2)


def pooled_by_hand(kit: Kit, texts: list[str]) -> torch.Tensor:
    """The second encoder's end-of-text state, normalized and projected."""
    text: Any = kit.text
    ids = text.second_tokenizer(
        texts, padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    ends = [row.tolist().index(text.second_tokenizer.eos_token_id) for row in ids]
    with torch.no_grad():
        last = text.second(ids).last_hidden_state
        return last[torch.arange(len(ids)), ends] @ text.second.text_projection.weight.T


@pytest.fixture
def inputs(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every call of a UNet."""
    from diffusers import UNet2DConditionModel

    calls: list[dict[str, Any]] = []
    forward = UNet2DConditionModel.forward

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append({"rows": len(args[0]), **kwargs})
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", recorded)
    return calls


def server_job(kit: Path, config: Any) -> Any:
    return SimpleNamespace(
        kit=str(kit), device=CPU, classes=CLASSES, config=config, clients=("client-0",)
    )


# ---- Operations ----


def test_rows_are_selected_expanded_and_joined_in_all_parts() -> None:
    c = Conditioning(random(3, 2, 4), random(3, 5, seed=1), random(3, 6, seed=2))
    chosen = concatenate([c[[2, 0]], c[torch.tensor([1])].expand(2), c[1:]])
    rows = [2, 0, 1, 1, 1, 2]
    assert len(chosen) == 6
    assert torch.equal(chosen.states, c.states[rows])
    for ours, part in ((chosen.pooled, c.pooled), (chosen.image, c.image)):
        assert ours is not None
        assert part is not None
        assert torch.equal(ours, part[rows])
    new_conditioning = c.with_states(random(3, 7, 4, seed=3))
    assert new_conditioning.states.shape == (3, 7, 4)
    assert new_conditioning.pooled is c.pooled
    assert new_conditioning.image is c.image


def test_parts_that_only_some_have_are_not_joined() -> None:
    states = random(1, 2, 4)
    with pytest.raises(ValueError, match="1 of 2 conditions have pooled vectors; all or none must"):
        concatenate([Conditioning(states), Conditioning(states, random(1, 5))])
    with pytest.raises(ValueError, match="1 of 2 conditions have image conditions"):
        concatenate([Conditioning(states), Conditioning(states).with_image(random(1, 5))])
    assert concatenate([Conditioning(states)] * 2).pooled is None


# ---- A kit of two text encoders ----


def test_a_pair_joins_the_states_before_the_last_layers_and_projects_the_second(
    tiny_pair: Path,
) -> None:
    kit = load_kit(tiny_pair)
    assert isinstance(kit.text, TextEncoderPair)
    c = kit.text(TEXTS)
    assert c.states.shape == (2, 8, 32 + 24)
    assert torch.allclose(c.states, states_by_hand(kit, TEXTS), atol=1e-6)
    assert c.pooled is not None
    assert torch.allclose(c.pooled, pooled_by_hand(kit, TEXTS), atol=1e-6)
    assert not torch.allclose(c.pooled[0], c.pooled[1], atol=1e-3)
    # The end of the text is at another token in each encoder
    text = "old"
    ends = [
        tokenizer(text).input_ids.index(tokenizer.eos_token_id)
        for tokenizer in (kit.text.tokenizer, kit.text.second_tokenizer)
    ]
    assert ends == [4, 2]
    joined = states_by_hand(kit, [text])[0]
    expected = torch.cat([joined[ends[0], :32], joined[ends[1], 32:]])
    assert torch.allclose(kit.text.pooled([text])[0], expected, atol=1e-6)


def test_sampling_equals_diffusers_own_sdxl_pipeline(tiny_pair: Path) -> None:
    """Random weights: every part of the condition must reach the UNet as theirs does."""
    from diffusers import StableDiffusionXLPipeline

    kit = load_kit(tiny_pair)
    text: Any = kit.text
    pipe = StableDiffusionXLPipeline(
        vae=kit.vae,
        text_encoder=text.model,
        text_encoder_2=text.second,
        tokenizer=text.tokenizer,
        tokenizer_2=text.second_tokenizer,
        unet=kit.unet,
        scheduler=kit.scheduler,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    z = initial_noise(PLAN, kit.latent_shape, CPU)
    theirs = pipe(
        prompt=TEXTS,
        negative_prompt=["", ""],
        latents=z,
        num_inference_steps=5,
        guidance_scale=3.0,
        height=32,
        width=32,
        output_type="latent",
    ).images
    condition = Condition(kit.text(TEXTS), 3.0)
    nothing = kit.text([""])
    with torch.no_grad():
        ours = ddim(kit, z, 5, lambda z, t: compose(kit, z, t, nothing, [condition]))
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_shapes_and_flops_are_known_without_the_weights(tiny_pair: Path) -> None:
    kit = load_kit(tiny_pair)
    assert kit_shapes(str(tiny_pair)) == ((8, 56), (4, 8, 8), 0)
    assert kit.text.shape == (8, 56)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        kit.eps(torch.zeros(1, *kit.latent_shape), torch.tensor([1]), kit.text(["a"]))
    assert unet_flops(str(tiny_pair)) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert len(kit.text.parameters()) > len(list(kit.text.model.parameters()))


def test_a_kits_digest_covers_the_second_encoder(tiny_pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    shutil.copytree(tiny_pair, folder)
    before = kit_digest(folder)
    assert before == kit_digest(tiny_pair)
    file = folder / "text_encoder_2" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert kit_digest(folder) != before


# ---- Methods ----


@pytest.mark.slow
def test_oscar_sends_states_and_the_server_adds_the_prompts_pooled_vector(
    tiny_pair: Path, inputs: list[dict[str, Any]]
) -> None:
    data = images(3, 3, 3, 8)
    job = job_of(tiny_pair, data, method="oscar", oscar__guidance=2.0)
    payload = oscar_half.make_payload(job)
    kit = load_kit(tiny_pair)
    captioner = load_captioner(str(tiny_pair), CPU)
    captions = [captioner(data.pixels[i : i + 1])[0] for i in range(4)]
    by_image = states_by_hand(kit, captions)
    assert payload.vectors.shape == (2, 8, 56)
    assert torch.allclose(payload.vectors[0], by_image[:3].mean(dim=0), atol=1e-5)
    assert torch.allclose(payload.vectors[1], by_image[3], atol=1e-5)
    oscar.sampler(server_job(tiny_pair, job.config), CPU, {"client-0": payload})(PLAN)
    assert len(inputs) == 2
    for arguments in inputs:
        states = torch.cat([states_by_hand(kit, ["", ""]), payload.vectors])
        assert torch.allclose(arguments["encoder_hidden_states"], states, atol=1e-5)
        _assert_added(arguments, pooled_by_hand(kit, ["", "", *TEXTS]))


def _assert_added(arguments: dict[str, Any], pooled: torch.Tensor) -> None:
    """The pooled vectors, and the sizes and crop of images of 32 px."""
    added = arguments["added_cond_kwargs"]
    assert torch.allclose(added["text_embeds"], pooled, atol=1e-6)
    assert added["time_ids"].tolist() == [[32, 32, 0, 0, 32, 32]] * len(pooled)


@pytest.mark.parametrize("tokens", ["each", "all"])
def test_feddeo_learns_states_under_the_prompts_pooled_vector(
    tiny_pair: Path, inputs: list[dict[str, Any]], tokens: str
) -> None:
    data = images(3, 3, 8)
    job = job_of(tiny_pair, data, feddeo__tokens=tokens, feddeo__lr=0.1, feddeo__guidance_text=1.5)
    payload = feddeo_half.make_payload(job)
    kit = load_kit(tiny_pair)
    prompts = states_by_hand(kit, TEXTS)
    pooled = pooled_by_hand(kit, TEXTS)
    # One step with every image: two of the first class, one of the second
    (step,) = inputs
    _assert_added(step, pooled[[0, 0, 1]])
    assert torch.allclose(step["encoder_hidden_states"], prompts[[0, 0, 1]], atol=1e-6)
    assert payload.vectors.shape == ((2, 8, 56) if tokens == "each" else (2, 1, 56))
    learned = payload.vectors if tokens == "each" else prompts + payload.vectors
    # Adam's first step moves every number by the learning rate
    assert (learned - prompts).abs().mean().item() == pytest.approx(0.1, rel=0.01)
    inputs.clear()
    feddeo.sampler(server_job(tiny_pair, job.config), CPU, {"client-0": payload})(PLAN)
    assert len(inputs) == 2
    for arguments in inputs:
        nothing = states_by_hand(kit, ["", ""])
        states = torch.cat([nothing, prompts, learned])
        assert torch.allclose(arguments["encoder_hidden_states"], states, atol=1e-5)
        _assert_added(arguments, pooled_by_hand(kit, ["", "", *TEXTS, *TEXTS]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_THAT_SAMPLE)
def test_every_method_but_feddisc_learns_and_samples_with_it(
    tiny_pair: Path, inputs: list[dict[str, Any]], method: str
) -> None:
    """Every UNet call has one pooled vector per row, also with cached features. In the last, the
    images' are those of their prompts.
    """
    settings = {
        "synthesis__cache_interval": 1 if method in ("fedlmg", "fedcado", "espresso") else 2,
        # By default it takes no step
        "latent_gaussian__strength": 0.5,
    }
    job = job_of(tiny_pair, images(3, 8, 8), method=method, **settings)
    payloads = {}
    if METHODS[method].client:
        job = replace(job, domain=lambda: "neon")
        payloads = {"client-0": client_module(method).make_payload(job)}
    module = server_module(method)
    make: Callable[..., Any] = getattr(module, "sampler", fedlmg.sampler)
    options: dict[str, Any] = {}
    if method in ("fedlmg", "fedcado"):
        section = getattr(job.config, method)
        options = {"settings": section, "sample": module.sample}
    pixels = make(server_job(tiny_pair, job.config), CPU, payloads, **options)(PLAN)
    assert pixels.shape == (2, 3, 32, 32)
    assert inputs
    for arguments in inputs:
        assert len(arguments["added_cond_kwargs"]["text_embeds"]) == arguments["rows"]
    last = inputs[-1]["added_cond_kwargs"]["text_embeds"][-2:]
    texts = PROMPTS.get(method, TEXTS)
    if texts is not None:
        assert torch.allclose(last, pooled_by_hand(load_kit(tiny_pair), texts), atol=1e-6)


def test_label_consistency_compares_whole_conditions(tiny_pair: Path) -> None:
    """With equal states, the pooled vectors alone tell two prompts apart."""
    kit = load_kit(tiny_pair)
    prompts = kit.text(TEXTS)
    equal_states = prompts.with_states(prompts.states[[0, 0]])
    errors = denoising_errors(
        kit, random(2, *kit.latent_shape), equal_states, torch.Generator().manual_seed(0)
    )
    assert (errors[:, 0] != errors[:, 1]).all()


# ---- Kits that do not fit ----


def _changed(tiny_pair: Path, folder: Path, file: str, **values: Any) -> Path:
    shutil.copytree(tiny_pair, folder)
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, **values}))
    return folder


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer_2/tokenizer_config.json", {"model_max_length": 6}, "take 8 and 6 tokens"),
        ("unet/config.json", {"addition_embed_type": None}, "addition_embed_type = 'text_time'"),
        ("unet/config.json", {"addition_time_embed_dim": 5}, "must be 50: 30 numbers of time ids"),
        ("model_index.json", {"_class_name": "StableDiffusionXLPipeline"}, "is SDXL"),
        ("text_encoder_2/config.json", {"projection_dim": 21}, "must be 45: 24 numbers"),
        ("text_encoder_2/config.json", {"projection_dim": "20"}, "must be a whole number"),
        ("unet/config.json", {"addition_time_embed_dim": None}, "must be a whole number"),
        ("text_encoder_2/config.json", {"model_type": "t5"}, "describes a 't5'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tiny_pair: Path, tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    check_kit(str(tiny_pair), DIFFUSION_PARTS)
    folder = _changed(tiny_pair, tmp_path / "kit", file, **values)
    with pytest.raises(KitError, match=message):
        check_kit(str(folder), DIFFUSION_PARTS)


def test_a_second_encoder_is_not_left_out(tiny_pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    shutil.copytree(tiny_pair, folder)
    shutil.rmtree(folder / "tokenizer_2")
    with pytest.raises(KitError, match="lacks tokenizer_2"):
        check_kit(str(folder), DIFFUSION_PARTS)
    # As before a fetch from the hub
    with pytest.raises(KitError, match="lacks tokenizer_2"):
        check_settings(KitFolder("kit", folder), DIFFUSION_PARTS)
    shutil.rmtree(folder / "text_encoder_2")
    with pytest.raises(KitError, match="text width 32, but the UNet expects 56"):
        check_kit(str(folder), DIFFUSION_PARTS)


def test_the_settings_of_a_run_are_valid_with_it(tiny_pair: Path) -> None:
    assert parse_run_config(quick(kit=str(tiny_pair))).kit == str(tiny_pair)
