"""Few-step weights: what they add to the UNet, and LCM's and TCD's steps."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import diffusers
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from osfl.config import ConfigError, parse_run_config
from osfl.kit.check import check_lora, lora_file
from osfl.kit.kits import KitError, kit_digest
from osfl.kit.used_parts import sampling_parts
from osfl.models.diffusion import Kit, Sampling, load_kit, load_lora, load_pipeline, save_lora
from server_app.kit import check_sampling_kit
from server_app.synthesis import images, samplers
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from tests.helpers.settings import quick

CPU = torch.device("cpu")
RANK = 2
ALPHA = 3.0
TEXTS = ["an image of one", "an image of two", "an image of three"]


def attention_weights(kit: Kit) -> dict[str, torch.Tensor]:
    """The projections of the UNet's attention, as LCM's and TCD's weights have them."""
    ends = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
    return {name: w for name, w in kit.unet.state_dict().items() if name.endswith(ends)}


@pytest.fixture(scope="module")
def lora(tiny_kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In kohya's names, as latent-consistency/lcm-lora-sdv1-5 has them."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, weight in attention_weights(load_kit(tiny_kit)).items():
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        rows, columns = weight.shape
        state[f"{key}.lora_down.weight"] = torch.randn(RANK, columns, generator=generator)
        state[f"{key}.lora_up.weight"] = 0.05 * torch.randn(rows, RANK, generator=generator)
        state[f"{key}.alpha"] = torch.tensor(ALPHA)
    folder = tmp_path_factory.mktemp("lora")
    save_file(state, folder / "pytorch_lora_weights.safetensors")
    return folder


def distilled(tiny_kit: Path, lora: Path, fused: bool = True, **sampling: object) -> Kit:
    kit = replace(load_kit(tiny_kit), sampling=Sampling(**sampling))  # type: ignore[arg-type]
    load_lora(lora_file(str(lora), ""), kit, fused)
    return kit


def noise(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def predicted(kit: Kit, texts: list[str] = TEXTS, scale: float = 1.5) -> samplers.Predict:
    nothing = kit.text([""])
    condition = Condition(kit.text(texts), scale)
    return lambda z, t: compose(kit, z, t, nothing, [condition])


def test_a_weight_gets_alpha_over_r_times_b_a(tiny_kit: Path, lora: Path) -> None:
    before = load_kit(tiny_kit).unet.state_dict()
    kit = distilled(tiny_kit, lora)
    after = kit.unet.state_dict()
    stored = load_file(lora / "pytorch_lora_weights.safetensors")
    assert set(after) == set(before)
    changed = 0
    for name, weight in before.items():
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        added = torch.zeros_like(weight)
        if f"{key}.alpha" in stored:
            b = stored[f"{key}.lora_up.weight"]
            added = ALPHA / RANK * b @ stored[f"{key}.lora_down.weight"]
            changed += 1
        assert torch.allclose(after[name], weight + added, atol=1e-5), name
    assert changed == len(attention_weights(kit)) > 4
    assert not any(parameter.requires_grad for parameter in kit.unet.parameters())


def test_no_layer_is_left_out(tiny_kit: Path, tmp_path: Path) -> None:
    """Training scripts call the attention's weights `lora.down`, and a convolution's `lora_A`."""
    generator = torch.Generator().manual_seed(3)
    kit = load_kit(tiny_kit)
    before = load_kit(tiny_kit).unet.state_dict()
    conv = "down_blocks.0.attentions.0.proj_in"
    attention = next(iter(attention_weights(kit))).removesuffix(".weight")
    shape = before[f"{conv}.weight"].shape
    rows, columns = before[f"{attention}.weight"].shape
    state = {
        f"unet.{conv}.lora_A.weight": torch.randn(RANK, *shape[1:], generator=generator),
        f"unet.{conv}.lora_B.weight": torch.randn(shape[0], RANK, 1, 1, generator=generator),
        f"unet.{attention}.lora.down.weight": torch.randn(RANK, columns, generator=generator),
        f"unet.{attention}.lora.up.weight": torch.randn(rows, RANK, generator=generator),
    }
    file = tmp_path / "mixed.safetensors"
    save_file(state, file)
    load_lora(file, kit, fused=True)
    after = kit.unet.state_dict()
    flat = state[f"unet.{conv}.lora_B.weight"].flatten(1) @ state[
        f"unet.{conv}.lora_A.weight"
    ].flatten(1)
    added = {
        conv: flat.view(shape),
        attention: state[f"unet.{attention}.lora.up.weight"]
        @ state[f"unet.{attention}.lora.down.weight"],
    }
    for name, change in added.items():
        weight = before[f"{name}.weight"] + change
        assert torch.allclose(after[f"{name}.weight"], weight, atol=1e-5), name

    state["unet.down_blocks.7.resnets.0.conv1.lora_A.weight"] = torch.zeros(RANK, 4, 3, 3)
    state["unet.down_blocks.7.resnets.0.conv1.lora_B.weight"] = torch.zeros(4, RANK, 1, 1)
    save_file(state, file)
    with pytest.raises(KitError, match="is for 3 layers of a UNet; the kit's UNet has 2 of them"):
        load_lora(file, load_kit(tiny_kit), fused=True)


def test_a_saved_adapter_loads_completely(tiny_kit: Path, tmp_path: Path) -> None:
    """Into our kit and into diffusers' own pipeline, to the bit of 16."""
    unet = load_kit(tiny_kit).unet
    torch.manual_seed(5)
    targets = ["to_q", "proj_in", "conv1"]
    settings = {"r": RANK, "lora_alpha": RANK, "init_lora_weights": False}
    unet.add_adapter(peft.LoraConfig(target_modules=targets, **settings))
    save_lora(unet, tmp_path)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    assert file.stat().st_size < 2.5 * sum(w.numel() for w in load_file(file).values())
    unet.fuse_lora()
    unet.unload_lora()
    kit = load_kit(tiny_kit)
    load_lora(file, kit, fused=True)
    pipeline = load_pipeline(tiny_kit)
    pipeline.load_lora_weights(str(tmp_path))
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    expected = unet.state_dict()
    before = load_kit(tiny_kit).unet.state_dict()
    changed = 0
    for state in (kit.unet.state_dict(), pipeline.unet.state_dict()):
        for name, weight in expected.items():
            assert torch.allclose(state[name], weight, atol=5e-3), name
            changed += not torch.allclose(before[name], weight, atol=1e-2)
    assert changed > 10


def test_the_unet_can_do_without_them_for_a_while(tiny_kit: Path, lora: Path) -> None:
    plain = load_kit(tiny_kit)
    fused = distilled(tiny_kit, lora)
    kit = distilled(tiny_kit, lora, fused=False)
    z, t, text = noise(), torch.tensor(500), plain.text(TEXTS)
    with torch.no_grad():
        assert torch.allclose(kit.eps(z, t, text), fused.eps(z, t, text), atol=1e-4)
        with kit.without_lora():
            assert torch.allclose(kit.eps(z, t, text), plain.eps(z, t, text), atol=1e-5)
        assert torch.allclose(kit.eps(z, t, text), fused.eps(z, t, text), atol=1e-4)
        assert not torch.allclose(fused.eps(z, t, text), plain.eps(z, t, text), atol=1e-2)


SCHEDULERS = {"lcm": diffusers.LCMScheduler, "tcd": diffusers.TCDScheduler}


@pytest.mark.parametrize("solver", ["lcm", "tcd"])
def test_few_steps_are_diffusers_own(tiny_kit: Path, lora: Path, solver: str) -> None:
    """The pipeline has the same weights, scheduler and noise in the steps."""
    kit = distilled(tiny_kit, lora, solver=solver)
    pipeline = load_pipeline(tiny_kit)
    pipeline.load_lora_weights(str(lora))
    pipeline.scheduler = SCHEDULERS[solver].from_config(pipeline.scheduler.config)
    z = noise()
    theirs = pipeline(
        TEXTS,
        latents=z,
        num_inference_steps=4,
        guidance_scale=1.5,
        output_type="latent",
        generator=samplers._own_generators(z),
        # TCD's own, which the pipeline sets to 0 otherwise
        eta=0.3,
    ).images
    with torch.no_grad():
        ours = samplers.denoise(kit, z, 4, predicted(kit))
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


@pytest.mark.parametrize("solver", ["lcm", "tcd"])
def test_an_image_is_the_same_in_any_batch(tiny_kit: Path, lora: Path, solver: str) -> None:
    """Also the noise of its steps; two images have different noise."""
    kit = distilled(tiny_kit, lora, solver=solver)
    z = noise()
    with torch.no_grad():
        together = samplers.denoise(kit, z, 3, predicted(kit))
        for row in range(3):
            alone = samplers.denoise(kit, z[row : row + 1], 3, predicted(kit, TEXTS[row : row + 1]))
            assert (together[row] - alone[0]).norm() / alone.norm() < 1e-4
        # And no noise of torch's own
        torch.manual_seed(7)
        assert torch.equal(samplers.denoise(kit, z, 3, predicted(kit)), together)
    drawn = [torch.randn(4, generator=generator) for generator in samplers._own_generators(z)]
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("solver", ["lcm", "ddim"])
def test_the_first_steps_are_the_base_models(tiny_kit: Path, lora: Path, solver: str) -> None:
    """One of three: by hand, with two UNets."""
    plain = replace(load_kit(tiny_kit), sampling=Sampling(solver))
    fused = distilled(tiny_kit, lora, solver=solver)
    kit = distilled(tiny_kit, lora, fused=False, solver=solver, base_steps=1)
    asked: list[int] = []

    def by_turns(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        asked.append(int(t))
        return predicted(plain if len(asked) == 1 else fused)(z, t)

    with torch.no_grad():
        latents = samplers.denoise(kit, noise(), 3, predicted(kit))
        expected = samplers.denoise(plain, noise(), 3, by_turns)
        fused_latents = samplers.denoise(fused, noise(), 3, predicted(fused))
    assert len(asked) == 3
    assert (latents - expected).norm() / expected.norm() < 1e-4
    assert (fused_latents - expected).norm() / expected.norm() > 1e-3


def test_the_engine_loads_what_the_settings_name(tiny_kit: Path, lora: Path) -> None:
    settings = parse_run_config(
        quick(synthesis__lora=str(lora), synthesis__solver="lcm", synthesis__steps=4)
    ).synthesis
    fused = load_engine(str(tiny_kit), CPU, settings)
    expected = distilled(tiny_kit, lora).unet.state_dict()
    state = fused.unet.state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in state.items())
    assert fused.sampling == Sampling("lcm")
    hybrid = load_engine(str(tiny_kit), CPU, replace(settings, base_steps=1))
    assert hybrid.sampling.base_steps == 1
    with hybrid.without_lora(), torch.no_grad():
        plain = load_kit(tiny_kit)
        text = plain.text(TEXTS)
        assert torch.allclose(
            hybrid.eps(noise(), torch.tensor(3), text),
            plain.eps(noise(), torch.tensor(3), text),
            atol=1e-5,
        )


def test_other_weights_are_other_images(tiny_kit: Path, lora: Path, tmp_path: Path) -> None:
    """Settings that shape an image have the weights' digest, whatever their folder."""

    def shaping(**settings: object) -> dict:
        config = parse_run_config(quick(method="prompts-only", kit=str(tiny_kit), **settings))
        job = SimpleNamespace(config=config, kit=str(tiny_kit), classes=("a", "b"))
        return images._shaping(job)  # type: ignore[arg-type]

    first = shaping(synthesis__lora=str(lora))
    file = lora / "pytorch_lora_weights.safetensors"
    state = load_file(file)
    state[next(iter(state))] += 1
    save_file(state, tmp_path / "other.safetensors")
    second_identity = shaping(synthesis__lora=str(tmp_path / "other.safetensors"))
    assert first["lora"] != second_identity["lora"]
    assert "lora" not in shaping()


def test_a_kit_has_some_of_its_own(tiny_kit: Path, lora: Path, tmp_path: Path) -> None:
    """`kit`: what lies in its `lora/`; they are then a part of it."""
    kit = tmp_path / "kit"
    shutil.copytree(tiny_kit, kit)
    config = parse_run_config(quick(method="prompts-only", kit=str(kit), synthesis__lora="kit"))
    with pytest.raises(KitError, match="lacks lora; this run needs it: set synthesis.lora"):
        check_sampling_kit(config)
    shutil.copytree(lora, kit / "lora")
    check_sampling_kit(config)
    assert sampling_parts(config)[-1] == "lora"
    digest = kit_digest(kit, sampling_parts(config))
    weights = load_engine(str(kit), CPU, config.synthesis).unet.state_dict()
    expected = distilled(tiny_kit, lora).unet.state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in weights.items())

    file = kit / "lora" / "pytorch_lora_weights.safetensors"
    state = load_file(file)
    state[next(iter(state))] += 1
    save_file(state, file)
    assert kit_digest(kit, sampling_parts(config)) != digest
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(KitError, match="lora/pytorch_lora_weights.safetensors has no tensors of"):
        check_sampling_kit(config)


def test_unusable_weights_are_reported_before_work(
    tiny_kit: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickle = tmp_path / "pytorch_lora_weights.bin"
    pickle.write_bytes(b"pickle")
    foreign_file = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(1)}, foreign_file)
    cases = [
        (pickle, "must be a safetensors file; a pickle could run code"),
        (tmp_path, "_weights.safetensors; the only weights there are pytorch_lora_w"),
        (foreign_file, "weights.safetensors has no tensors of a LoRA"),
        (tmp_path / "none", "no such folder"),
    ]
    for source, message in cases:
        config = quick(method="prompts-only", kit=str(tiny_kit), synthesis__lora=str(source))
        with pytest.raises(KitError, match=message):
            check_sampling_kit(parse_run_config(config))
    check_lora(str(lora), str(tiny_kit))
    state = load_file(lora / "pytorch_lora_weights.safetensors")
    wide = {
        name: torch.cat([value, value]) if value.ndim else value for name, value in state.items()
    }
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(KitError, match="does not fit the kit's UNet"):
        distilled(tiny_kit, tmp_path / "wide.safetensors")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KitError, match=r"needs the package peft: pip install 'osfl\[lora\]'"):
        check_lora(str(lora), str(tiny_kit))


State = dict[str, torch.Tensor]


def first_of(state: State) -> str:
    return next(name for name in state if not name.endswith("alpha"))


def under(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: value for name, value in state.items()}


def of_another_unet(state: State) -> State:
    """One layer that the kit's UNet lacks: the others are its own."""
    name = "lora_unet_down_blocks_7_resnets_0_conv1"
    return {
        **state,
        f"{name}.lora_down.weight": torch.zeros(RANK, 4, 3, 3),
        f"{name}.lora_up.weight": torch.zeros(4, RANK, 1, 1),
    }


def wider(state: State) -> State:
    name = first_of(state)
    return {**state, name: torch.cat([state[name], state[name]], dim=1)}


def halved(state: State) -> State:
    name = next(name for name in state if "lora_up" in name or "lora_B" in name)
    return {key: value for key, value in state.items() if key != name}


def with_dora(state: State) -> State:
    """Return weights that diffusers ignores, with a warning in its log."""
    name = first_of(state).replace("lora_down.weight", "dora_scale")
    return {**state, name: torch.ones(32, 1)}


def in_pefts_names(state: State, layers: Mapping[str, str]) -> State:
    """Rename weights to the names that `save_lora` writes.

    Args:
        layers: the UNet's, by what kohya's scripts call them.
    """
    renamed = {}
    for name, value in state.items():
        for old, new in ((".lora_down.", ".lora_A."), (".lora_up.", ".lora_B.")):
            if old in name:
                renamed[f"unet.{layers[name.partition('.')[0]]}{new}weight"] = value
    return renamed


@pytest.mark.parametrize("named", ["a file", "kit"])
@pytest.mark.parametrize(
    ("names", "alter", "message"),
    [
        ("kohya", of_another_unet, "'lora_unet_down_blocks_7_resnets_0_conv1.lora_down.weight' is"),
        ("kohya", wider, "'lora_unet_.* has the shape .*; it must be"),
        ("kohya", halved, "lacks 'lora_unet_.*.lora_up.weight'"),
        ("peft", halved, "'unet.*lora_A.weight' is without its .lora_B.weight"),
        ("kohya", with_dora, "dora_scale' is for no layer of the UNet"),
        ("kohya", under("module."), "'module.lora_unet_.* names .* begin with 'module.'"),
        ("kohya", under("_orig_mod.module."), "begin with '_orig_mod.module.'"),
        ("peft", under("base_model."), "'base_model.unet.* begin with 'base_model.'"),
    ],
)
def test_few_step_weights_that_fit_no_layer_are_refused_before_work(
    tiny_kit: Path,
    lora: Path,
    tmp_path: Path,
    named: str,
    names: str,
    alter: Callable[[State], State],
    message: str,
) -> None:
    layers = [name.removesuffix(".weight") for name in attention_weights(load_kit(tiny_kit))]
    state = load_file(lora / "pytorch_lora_weights.safetensors")
    if names == "peft":
        called = {"lora_unet_" + layer.replace(".", "_"): layer for layer in layers}
        state = in_pefts_names(state, called)
    kit = tmp_path / "kit"
    shutil.copytree(tiny_kit, kit)
    place = kit / "lora" if named == "kit" else tmp_path / "apart"
    place.mkdir()
    file = place / "pytorch_lora_weights.safetensors"
    source = "kit" if named == "kit" else str(file)
    config = parse_run_config(quick(method="prompts-only", kit=str(kit), synthesis__lora=source))
    save_file(state, file)
    check_sampling_kit(config)
    save_file(alter(state), file)
    with pytest.raises(KitError, match=f"pytorch_lora_weights.safetensors.*{message}"):
        check_sampling_kit(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"synthesis__base_steps": 1}, "base-steps = 1: requires synthesis.lora"),
        (
            {"synthesis__lora": "/a", "synthesis__base_steps": 2, "synthesis__steps": 2},
            "base-steps = 2: must be below synthesis.steps = 2",
        ),
        (
            {"synthesis__lora": "/a", "synthesis__base_steps": 1, "synthesis__compile": "on"},
            "base-steps: must be 0 with synthesis.compile",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_config(quick(method="prompts-only", **settings))
