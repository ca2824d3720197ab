"""The sampling engine: solvers, guidance interval, precision, memory format, calibration."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from osfl.config import ConfigError, SynthesisConfig, parse_run_config
from osfl.kit.kits import KitError
from osfl.models.classifiers import build_classifier
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Attention, Kit, Sampling, load_kit, load_pipeline, new_solver
from osfl.run_folder.report.metrics import gather
from osfl.util.devices import uses_checkpointing
from server_app.app import check_server
from server_app.methods import fedlmg, prompts_only
from server_app.synthesis import engine
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, as_teacher, compose
from server_app.synthesis.plan import plan_images
from server_app.synthesis.samplers import denoise, first_timestep, to_images
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start

CPU = torch.device("cpu")


def settings(**overrides: object) -> SynthesisConfig:
    return replace(parse_run_config(quick()).synthesis, **overrides)  # type: ignore[arg-type]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("solver", ["dpm-solver++", "unipc"])
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_solvers_sample_as_diffusers_own_pipeline(
    tiny_kit: Path, tmp_path: Path, solver: str, predicts: str
) -> None:
    shutil.copytree(tiny_kit, tmp_path / "kit")
    file = tmp_path / "kit" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "prediction_type": predicts}))
    kit = load_engine(str(tmp_path / "kit"), CPU, settings(solver=solver))
    pipe = load_pipeline(tmp_path / "kit")
    pipe.scheduler = type(new_solver(kit.sampling.solver, kit.scheduler)).from_config(
        pipe.scheduler.config, timestep_spacing="trailing"
    )
    assert pipe.scheduler.config.prediction_type == predicts
    z = random(2, 4, 8, 8)
    texts = ["an image of one", "an image of two"]
    theirs = pipe(
        texts, latents=z, num_inference_steps=8, guidance_scale=3.0, output_type="latent"
    ).images
    with torch.no_grad():
        condition = Condition(kit.text(texts), 3.0)
        ours = denoise(kit, z, 8, lambda z, t: compose(kit, z, t, kit.text([""]), [condition]))
    assert (ours - theirs).norm() / theirs.norm() < 1e-4
    assert first_timestep(kit, 8) == int(pipe.scheduler.timesteps[0])


@pytest.mark.parametrize("solver", ["ddim", "dpm-solver++", "unipc"])
def test_a_solver_on_a_known_distribution(tiny_kit: Path, solver: str) -> None:
    """With the exact noise prediction of a point mass at 5, every start ends at 5, up to the
    schedule's last a_t.
    """
    kit = replace(load_kit(tiny_kit), sampling=Sampling(solver))
    a = kit.alphas_cumprod
    z = denoise(kit, random(3, 4, 8, 8), 10, lambda z, t: (z - a[t].sqrt() * 5) / (1 - a[t]).sqrt())
    assert torch.allclose(z, torch.full_like(z, 5.0), atol=0.15)


def test_the_guidance_interval_by_hand(tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guided at 200 to 800, both included.

    Outside: the one condition's prediction, or two weighted 3 to 1; and no pass for the empty
    prompt.
    """
    kit = replace(load_kit(tiny_kit), sampling=Sampling("ddim", 200, 800))
    rows = []
    eps = Kit.eps
    monkeypatch.setattr(
        Kit, "eps", lambda self, z, *rest: (rows.append(len(z)), eps(self, z, *rest))[1]
    )
    z = random(2, 4, 8, 8)
    c0 = kit.text([""])
    c1 = Conditioning(random(2, *kit.text.shape, seed=1))
    c2 = Conditioning(random(2, *kit.text.shape, seed=2))
    for t, guided in ((801, False), (800, True), (500, True), (200, True), (199, False)):
        at = torch.tensor(t)
        e0, e1, e2 = (eps(kit, z, at, c) for c in (c0.expand(2), c1, c2))
        rows.clear()
        single = compose(kit, z, at, c0, [Condition(c1, 3.0)])
        both = compose(kit, z, at, c0, [Condition(c1, 3.0), Condition(c2, 1.0)])
        assert rows == ([4, 6] if guided else [2, 4])
        assert torch.allclose(single, e0 + 3 * (e1 - e0) if guided else e1, atol=1e-5)
        assert torch.allclose(
            both, e0 + 3 * (e1 - e0) + (e2 - e0) if guided else 0.75 * e1 + 0.25 * e2, atol=1e-5
        )


def test_a_condition_with_the_scale_one_needs_no_other_branch(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few-step weights have the guidance within them."""
    kit = load_kit(tiny_kit)
    rows = []
    eps = Kit.eps
    monkeypatch.setattr(
        Kit, "eps", lambda self, z, *rest: (rows.append(len(z)), eps(self, z, *rest))[1]
    )
    z = random(2, 4, 8, 8)
    c0 = kit.text([""])
    t = torch.tensor(500)
    first_condition = Condition(Conditioning(random(2, *kit.text.shape, seed=1)), 1.0)
    second_condition = Condition(Conditioning(random(2, *kit.text.shape, seed=2)), 1.0)
    alone = compose(kit, z, t, c0, [first_condition])
    assert torch.allclose(alone, eps(kit, z, t, first_condition.c), atol=1e-5)
    both = compose(kit, z, t, c0, [first_condition, second_condition])
    e0, e1, e2 = (eps(kit, z, t, c) for c in (c0.expand(2), first_condition.c, second_condition.c))
    assert torch.allclose(both, e1 + e2 - e0, atol=1e-5)
    assert rows == [2, 6]


def test_outside_the_interval_an_image_still_conditions(tiny_unclip: Path) -> None:
    kit = replace(load_kit(tiny_unclip), sampling=Sampling("ddim", 200, 800))
    z = random(2, 4, 8, 8)
    t = torch.tensor(900)
    image = random(2, kit.unet.config.projection_class_embeddings_input_dim, seed=2)
    c = Conditioning(random(2, *kit.text.shape, seed=1)).with_image(image)
    assert torch.allclose(
        compose(kit, z, t, kit.text([""]), [Condition(c, 3.0)]), kit.eps(z, t, c), atol=1e-6
    )


def test_without_guidance_an_interval_changes_nothing(tiny_kit: Path) -> None:
    """All scales 0: the empty prompt's prediction at every step."""
    kit = replace(load_kit(tiny_kit), sampling=Sampling("ddim", 200, 800))
    z = random(2, 4, 8, 8)
    c0 = kit.text([""])
    nothing = [Condition(Conditioning(random(2, *kit.text.shape, seed=1)), 0.0)]
    for t in (torch.tensor(900), torch.tensor(500)):
        assert torch.allclose(
            compose(kit, z, t, c0, nothing), kit.eps(z, t, c0.expand(2)), atol=1e-6
        )


def test_sixteen_bits_are_the_networks_alone(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = load_engine(str(tiny_kit), CPU, settings(dtype="bfloat16"))
    dtypes = []
    forward = kit.unet.forward
    monkeypatch.setattr(
        kit.unet,
        "forward",
        lambda z, *rest, **named: (dtypes.append(z.dtype), forward(z, *rest, **named))[1],
    )
    z = random(2, 4, 8, 8)
    c = kit.text(["an image of one"] * 2)
    e = kit.eps(z, torch.tensor(500), c)
    assert (e.dtype, kit.decode(z).dtype, set(dtypes)) == (
        torch.float32,
        torch.float32,
        {torch.bfloat16},
    )
    exact = load_kit(tiny_kit)
    assert torch.allclose(
        e, exact.eps(z, torch.tensor(500), exact.text(["an image of one"] * 2)), atol=0.1
    )
    gradient = torch.autograd.grad(
        kit.decode(kit.eps(leaf := z.clone().requires_grad_(), torch.tensor(500), c)).sum(), leaf
    )[0]
    assert gradient.dtype == torch.float32
    assert torch.isfinite(gradient).all()


@pytest.mark.slow
def test_the_faster_is_taken_and_remembered(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real measurement first. Then given seconds, of another batch, so that it is
    measured again.
    """
    auto_settings = settings(memory_format="auto", unit_size=1)
    measured = []
    seconds = engine._seconds
    monkeypatch.setattr(
        engine, "_seconds", lambda kit, batch: measured.append(batch) or seconds(kit, batch)
    )
    load_engine(str(tiny_kit), CPU, auto_settings)
    load_engine(str(tiny_kit), CPU, auto_settings)
    assert measured == [2, 2]  # both formats, once
    ((key, first),) = json.loads((home / "cache" / "calibration.json").read_text()).items()
    assert "float32" in key
    durations = first["seconds a pass"]["memory_format"]
    assert first["choice"] == {"memory_format": min(durations, key=durations.get)}
    times = iter([2.0, 1.0])
    monkeypatch.setattr(engine, "_seconds", lambda kit, batch: next(times))
    kit = load_engine(str(tiny_kit), CPU, replace(auto_settings, unit_size=2))
    for network in (kit.unet, kit.vae.decoder):
        assert network.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    for name in ("kit_digest", "_device_name"):  # another kit, another card
        times = iter([2.0, 1.0])
        monkeypatch.setattr(engine, name, lambda kit: "another")
        load_engine(str(tiny_kit), CPU, auto_settings)
    assert len(json.loads((home / "cache" / "calibration.json").read_text())) == 4


def test_settings_that_exceed_memory_are_not_chosen(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(kit: Kit, batch: int) -> float:
        if kit.dtype == torch.float32:
            raise torch.OutOfMemoryError
        return 1.0

    monkeypatch.setattr(engine, "_seconds", seconds)
    for _ in range(2):
        assert load_engine(str(tiny_kit), CPU, settings(dtype="auto")).dtype == torch.bfloat16


def test_a_gpu_has_more_choices() -> None:
    auto = settings(dtype="auto", attention="auto", memory_format="auto", compile="auto")
    options = engine._options(torch.device("cuda"), auto)
    assert options["attention"] == ("default", "flash", "cudnn", "efficient")
    assert options["compile"] == ("off", "on")
    assert all(
        uses_checkpointing(how, torch.device(device))
        for how, device in (("auto", "cuda"), ("on", "cpu"), ("on", "cuda"))
    )
    assert not any(
        uses_checkpointing(how, torch.device(device))
        for how, device in (("auto", "cpu"), ("off", "cuda"))
    )


def test_float32_is_not_tf32(tiny_kit: Path) -> None:
    for dtype, tf32 in (("bfloat16", True), ("float32", False)):
        load_engine(str(tiny_kit), CPU, settings(dtype=dtype))
        assert torch.backends.cudnn.allow_tf32 == tf32


def test_images_are_rounded_not_cut(tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """127.5 (x + 1): -1 and below is 0, 0.0008 is 127.6, 1 and above 255."""
    monkeypatch.setattr(
        Kit, "decode", lambda self, z: torch.tensor([-1.5, -1.0, 0.0008, 1.0, 1.5]).view(1, 1, 1, 5)
    )
    assert to_images(load_kit(tiny_kit), torch.zeros(1, 4, 8, 8)).flatten().tolist() == [
        0,
        0,
        128,
        255,
        255,
    ]


@pytest.mark.slow
def test_other_weights_of_a_tiny_decoder_are_other_images(
    tiny_kit: Path, home: Path, tmp_path: Path
) -> None:
    """In the same folder: a run that goes on makes them anew."""
    units = []
    for seed in (1, 2):
        file = tiny_decoder(tmp_path / "small", seed=seed)
        start(quick(method="fedlmg", kit=str(tiny_kit), synthesis__tiny_decoder=file))
        units.append({unit.name for unit in (home / "runs" / "job" / "units").iterdir()})
    assert not units[0] & units[1]


@pytest.mark.slow
def test_other_settings_of_the_sampling_are_other_images(tiny_kit: Path, home: Path) -> None:
    """The number of workers and the batch size are not among them."""

    def units(job_id: str, **given: object) -> set[str]:
        start(quick(method="prompts-only", kit=str(tiny_kit), **given), job_id)
        return {unit.name for unit in (home / "runs" / job_id / "units").iterdir()}

    names = units("one")
    assert units("two", synthesis__checkpointing="on") == names
    assert not units("three", synthesis__steps=3) & names


@pytest.mark.slow
def test_every_setting_is_measured_with_what_was_chosen_before(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Precision, then attention, then the memory format.

    What is pinned is not measured, and neither is a compilation on a CPU.
    """
    measurements: list[tuple[torch.dtype, bool, bool]] = []

    def seconds(kit: Kit, batch: int) -> float:
        by_hand = [
            isinstance(processor, Attention) for processor in kit.unet.attn_processors.values()
        ]
        channels_last = kit.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
        measurements.append((kit.dtype, all(by_hand), channels_last))
        return [2.0, 1.0, 1.0, 2.0, 2.0, 1.0][len(measurements) - 1]

    monkeypatch.setattr(engine, "_seconds", seconds)
    auto = settings(dtype="auto", attention="auto", memory_format="auto", compile="auto")
    kit = load_engine(str(tiny_kit), CPU, auto)
    half = torch.bfloat16
    assert measurements == [
        (torch.float32, False, False),
        (half, False, False),
        (half, False, False),
        (half, True, False),
        (half, False, False),
        (half, False, True),
    ]
    assert kit.dtype == half
    assert kit.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    measurements.clear()
    load_engine(str(tiny_kit), CPU, replace(auto, dtype="float32", memory_format="contiguous"))
    assert {(dtype, layout) for dtype, _, layout in measurements} == {(torch.float32, False)}
    assert len(measurements) == 2


@pytest.mark.slow
@pytest.mark.parametrize("which", ["flash", "math", "cudnn"])
def test_the_attention_is_by_the_implementation_that_is_named(tiny_kit: Path, which: str) -> None:
    """The UNet's, not the autoencoder's, which has one head too wide for flash attention on a GPU.

    Mathematics where it cannot. The same images.
    """
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    plan = plan_images("m", 0, {"a": [0, 3]}, 1)
    images = []
    for attention in ("default", which):
        kit = load_engine(str(tiny_kit), CPU, settings(attention=attention))
        text = kit.text(["an image of zero", "an image of three"])
        with torch.profiler.profile() as profile:
            kit.eps(random(2, 4, 8, 8), torch.tensor(500), text)
        assert (flash in {event.key for event in profile.key_averages()}) == (
            attention in ("default", "flash")
        )
        with torch.profiler.profile() as profile:
            kit.decode(random(2, 4, 8, 8))
        assert flash in {event.key for event in profile.key_averages()}
        images.append(prompts_only.sample(kit, plan, text, 3.0, 3).int())
    assert (images[0] - images[1]).abs().max() <= 1


@pytest.mark.parametrize("which", ["flash", "efficient", "cudnn", "math"])
def test_the_named_implementation_is_asked_first(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """torch would prefer others of a GPU's several implementations."""
    kit = load_engine(str(tiny_kit), CPU, settings(attention=which))
    orders = []
    attend = F.scaled_dot_product_attention
    text = kit.text(["x"])
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *a, **k: (orders.append(torch._C._get_sdp_priority_order()), attend(*a, **k))[1],
    )
    kit.eps(random(1, 4, 8, 8), torch.tensor(500), text)
    assert {order[0] for order in orders} == {int(Attention.IMPLEMENTATIONS[which])}


def test_attention_and_checkpointing_go_together(tiny_kit: Path) -> None:
    """Recomputation has the same implementation. The same gradient to the bit."""
    gradients = []
    for checkpointing in ("off", "on"):
        kit = load_engine(
            str(tiny_kit), CPU, settings(attention="math", checkpointing=checkpointing)
        )
        z = random(2, 4, 8, 8).requires_grad_()
        gradients.append(
            torch.autograd.grad(
                kit.eps(z, torch.tensor(500), kit.text(["x"] * 2)).square().sum(), z
            )[0]
        )
    assert torch.equal(*gradients)


def test_a_memory_format_changes_no_image(tiny_kit: Path) -> None:
    plan = plan_images("m", 0, {"a": [0, 3]}, 1)
    images = []
    for layout in ("contiguous", "channels-last"):
        kit = load_engine(str(tiny_kit), CPU, settings(memory_format=layout))
        images.append(
            prompts_only.sample(
                kit, plan, kit.text(["an image of zero", "an image of three"]), 3.0, 3
            ).int()
        )
    assert (images[0] - images[1]).abs().max() <= 1


def test_compilation_is_of_the_unet(tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it is done; `auto` leaves a CPU alone."""
    monkeypatch.setattr(torch, "compile", lambda network: ("compiled", network))
    assert load_engine(str(tiny_kit), CPU, settings(compile="on")).unet[0] == "compiled"
    assert not isinstance(load_engine(str(tiny_kit), CPU, settings(compile="auto")).unet, tuple)


# A recomputation ends as soon as it has what it needs
def called(module: torch.nn.Module, calls: list) -> None:
    """Note every time that a module is computed."""
    module.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))


def test_cached_features_are_computed_at_every_other_step(tiny_kit: Path) -> None:
    """The first and third pass are exact.

    The second takes the inner blocks' outputs from the first. A sampling begins anew, and so does
    another batch.
    """
    exact = load_kit(tiny_kit)
    kit = load_engine(str(tiny_kit), CPU, settings(cache_interval=2))
    calls = []
    called(kit.unet.mid_block.resnets[0], calls)
    z = random(2, 4, 8, 8)
    c = Conditioning(random(2, *kit.text.shape, seed=1))

    # t, rows of the batch, whether all is computed
    for t, rows, full_pass in (
        (900, 2, True),
        (850, 2, False),
        (800, 2, True),
        (750, 1, True),
        (900, 2, True),
        (850, 2, False),
    ):
        calls.clear()
        ours, theirs = (k.eps(z[:rows], torch.tensor(t), c[:rows]) for k in (kit, exact))
        assert (len(calls) == 1) == torch.equal(ours, theirs) == full_pass, t
    # by hand: the exact UNet with its inner blocks' outputs of t = 900 gives what the second pass
    # gave
    inner = [*exact.unet.down_blocks[1:], exact.unet.mid_block, *exact.unet.up_blocks[:-1]]
    outputs: dict[int, object] = {}
    hooks = [
        block.register_forward_hook(lambda _, args, out, i=i: outputs.update({i: out}))
        for i, block in enumerate(inner)
    ]
    exact.eps(z, torch.tensor(900), c)
    for hook in hooks:
        hook.remove()
    for i, block in enumerate(inner):
        block.register_forward_hook(lambda _, args, out, i=i: outputs[i])
    assert torch.equal(ours, exact.eps(z, torch.tensor(850), c))


def test_cached_features_do_not_go_from_unit_to_unit(tiny_kit: Path) -> None:
    kit = load_engine(str(tiny_kit), CPU, settings(cache_interval=3))
    prompts = kit.text(["an image of zero", "an image of three"])
    plan = plan_images("m", 0, {"a": [0, 3], "b": [0, 3]}, 1)
    images = [
        prompts_only.sample(kit, jobs, prompts, 3.0, 5) for jobs in (plan[2:], plan[:2], plan[2:])
    ]
    assert torch.equal(images[0], images[2])


def tiny_decoder(folder: Path, channels: int = 4, blocks: int = 3, seed: int = 0) -> str:
    """TAESD's format, untrained; each block but the last doubles the size."""
    from diffusers import AutoencoderTiny

    widths = (8,) * blocks
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        small = AutoencoderTiny(
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            num_encoder_blocks=(1,) * blocks,
            num_decoder_blocks=(1,) * blocks,
            latent_channels=channels,
        )
    small.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_tiny_decoder_guides_and_draws_nothing(tiny_kit: Path, tmp_path: Path) -> None:
    """The classifier sees what the small decoder makes, once a step; D makes the images, once."""
    file = tiny_decoder(tmp_path / "small")
    config = parse_run_config(quick(method="fedlmg"))
    teachers = {"a": as_teacher(build_classifier("resnet18", 10, small_stem=True))}
    plan = plan_images("m", 0, {"a": [0, 3]}, 1)
    images = []
    for source in ("", file):
        kit = load_engine(str(tiny_kit), CPU, settings(tiny_decoder=source))
        small = []
        large = []
        called(kit.vae.decoder, large)
        if kit.tiny_decoder is not None:
            called(kit.tiny_decoder.decoder, small)
        images.append(
            fedlmg.sample(kit, plan, kit.text(["x"] * 10), teachers, config.fedlmg, 3, 32)
        )
        assert (len(small), len(large)) == ((3, 1) if source else (0, 4))
    assert not torch.equal(*images)
    shutil.copytree(tiny_kit, tmp_path / "kit")
    shutil.copytree(file, tmp_path / "kit" / "tiny_decoder")
    assert (
        load_engine(str(tmp_path / "kit"), CPU, settings(tiny_decoder="kit")).tiny_decoder
        is not None
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": 3}, "takes 3 channels; the kit's latents have 4"),
        ({"blocks": 2}, "makes images of 16 px; the kit's have 32"),
        ({}, "lacks config.json"),
    ],
)
def test_a_tiny_decoder_of_another_kit_is_refused(
    tiny_kit: Path, tmp_path: Path, wrong: dict, message: str
) -> None:
    source = tiny_decoder(tmp_path / "small", **wrong) if wrong else str(tmp_path)
    with pytest.raises(KitError, match=message):
        load_engine(str(tiny_kit), CPU, settings(tiny_decoder=source))


def test_a_missing_tiny_autoencoder_is_reported_before_the_clients_work(
    tiny_kit: Path,
) -> None:
    for source, message in (("kit", "lacks tiny_decoder"), ("/nowhere", "no such folder")):
        with pytest.raises(KitError, match=message):
            check_server(
                parse_run_config(
                    quick(kit=str(tiny_kit), method="fedlmg", synthesis__tiny_decoder=source)
                )
            )


@pytest.mark.slow
def test_checkpointing_computes_again_and_changes_nothing(tiny_kit: Path) -> None:
    config = parse_run_config(quick(method="fedlmg"))
    images = []
    passes = []
    teachers = {"a": as_teacher(build_classifier("resnet18", 10, small_stem=True))}
    plan = plan_images("m", 0, {"a": [0, 3]}, 1)
    for how in ("off", "on", "auto"):
        kit = load_engine(str(tiny_kit), CPU, settings(checkpointing=how))
        unet = []
        vae = []
        (
            called(kit.unet.down_blocks[1].resnets[0], unet),
            called(kit.vae.decoder.mid_block.resnets[0], vae),
        )
        images.append(
            fedlmg.sample(kit, plan, kit.text(["x"] * 10), teachers, config.fedlmg, 3, 32)
        )
        passes.append((len(unet), len(vae)))
    assert torch.equal(images[0], images[1])
    assert passes[0] == passes[2] == (3, 4)
    assert passes[1] == (6, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"synthesis__cache_interval": 2, "synthesis__compile": "on"},
            "cache-interval: must be 1 with synthesis.compile",
        ),
        (
            {"method": "fedlmg", "synthesis__cache_interval": 2},
            "must be 1 with fedlmg.gradient = 'full'",
        ),
        (
            {"method": "fedcado", "fedcado__gradient": "x0", "synthesis__cache_interval": 2},
            "fedcado.noise-edits to 0",
        ),
        (
            {"method": "espresso", "synthesis__cache_interval": 2},
            "must be 1 with espresso.z-sampling",
        ),
        (
            {"synthesis__guided_from": 800, "synthesis__guided_to": 200},
            "synthesis.guided-from = 800: must be at most guided-to = 200",
        ),
        (
            {"method": "espresso", "synthesis__solver": "unipc"},
            "synthesis.solver = 'unipc': Espresso requires 'ddim'",
        ),
    ],
)
def test_incompatible_settings_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_config(quick(**given))


def test_the_report_says_what_is_approximate(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "FT.json").write_text(json.dumps({"a": [[3, 1], [0, 4]]}))
    base = {"method": "fedlmg", "seed": 0}
    for overrides, expected in (
        (
            {
                "synthesis.solver": "ddim",
                "synthesis.guided-from": 0,
                "synthesis.guided-to": 1000,
                "fedlmg.gradient": "full",
            },
            [],
        ),
        ({"synthesis.solver": "unipc"}, ["solver unipc"]),
        ({"synthesis.guided-to": 800}, ["guidance only at timesteps 0 to 800"]),
        ({"fedlmg.gradient": "x0"}, ["the classifier's gradient at x0"]),
        ({"synthesis.cache-interval": 3}, ["the UNet's inner blocks in one of 3 steps"]),
        ({"synthesis.tiny-decoder": "kit"}, ["guidance through a tiny decoder"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**base, **overrides}))
        assert gather(tmp_path)["approximations"] == expected
