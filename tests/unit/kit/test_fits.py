"""Weights that do not fit their settings: refused before anybody works, never random numbers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.tools import hub_layouts
from osfl.kit import fits, part_check
from osfl.kit.check import (
    check_captioner,
    check_image_encoder,
    check_kit,
    check_tiny_decoder,
)
from osfl.kit.fits import DIFFUSERS_MODELS, check_loaded
from osfl.kit.folder import KitError
from osfl.kit.part_check import MODELS
from osfl.methods import DIFFUSION_PARTS
from osfl.models.diffusion import load_kit, load_noise_schedule, timesteps
from tests.helpers.kit_files import UNET, change, index, linked, rewrite
from tests.helpers.settings import ROOT

State = dict[str, torch.Tensor]
CHECKS = {
    "captioner": check_captioner,
    "image_encoder": check_image_encoder,
    "tiny_decoder": check_tiny_decoder,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def shipped(part: str) -> Path:
    kits = ROOT / "kits"
    return kits / ("digits-unclip" if part == "image_normalizer" else "digits")


def weights_file(part: str) -> str:
    stem = "diffusion_pytorch_model" if part in DIFFUSERS_MODELS else "model"
    return f"{part}/{stem}.safetensors"


def changed(kit: Path, part: str, alter: Callable[[State], State]) -> None:
    file = kit / weights_file(part)
    state = alter(load_file(file))
    file.unlink()
    save_file(state, file)


def without_last(state: State) -> State:
    return {name: state[name] for name in sorted(state)[:-1]}


def wrapped(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: value for name, value in state.items()}


def longer(state: State) -> State:
    name = sorted(state)[-1]
    return {**state, name: torch.cat([state[name], state[name]])}


def parts_with(part: str) -> tuple[str, ...]:
    extra_parts = ("image_noising_scheduler",) if part == "image_normalizer" else ()
    return (part, *extra_parts)


@pytest.mark.parametrize("part", MODELS)
@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (without_last, "(lack|have no) '?{last}"),
        (wrapped("module."), "lack .*All names in the file begin with 'module.'"),
        (wrapped("_orig_mod.module."), "begin with '_orig_mod.module.'"),
        (longer, "{last}.* has the shape"),
    ],
)
def test_a_part_whose_tensors_do_not_fit_is_refused(
    tmp_path: Path, tiny_pair: Path, part: str, alter: Callable[[State], State], message: str
) -> None:
    source = tiny_pair if part in ("text_encoder_2", "clip") else shipped(part)
    kit = linked(source, tmp_path / "kit")
    check_kit(str(kit), parts_with(part))
    last = sorted(load_file(kit / weights_file(part)))[-1]
    changed(kit, part, alter)
    with pytest.raises(KitError, match=message.format(last=last)) as caught:
        check_kit(str(kit), parts_with(part))
    assert part in str(caught.value)


@pytest.mark.parametrize("part", CHECKS)
def test_a_model_that_is_named_apart_is_held_to_its_settings(tmp_path: Path, part: str) -> None:
    kit = linked(shipped(part), tmp_path / "kit")
    changed(kit, part, without_last)
    place = kit if part == "image_encoder" else kit / part
    with pytest.raises(KitError, match="lack"):
        CHECKS[part](str(place))


def test_a_shard_that_lacks_a_tensor_which_its_index_names_is_refused(tmp_path: Path) -> None:
    """diffusers believes the index."""
    kit = linked(shipped("unet"), tmp_path / "kit")
    index(kit)
    check_kit(str(kit), DIFFUSION_PARTS)
    shard = kit / "unet/diffusion_pytorch_model-00002-of-00002.safetensors"
    save_file(without_last(load_file(shard)), shard)
    with pytest.raises(KitError, match="the weights of unet do not fit"):
        check_kit(str(kit), DIFFUSION_PARTS)


def test_old_names_are_taken(tmp_path: Path) -> None:
    """Stable Diffusion 1.5 has query for to_q, text_model., position_ids."""
    kit = hub_layouts.sd15(tmp_path / "kit")
    assert any("proj_attn" in name for name in load_file(kit / weights_file("vae")))
    check_kit(str(kit), DIFFUSION_PARTS)


def test_a_librarys_report_of_missing_tensors_is_read() -> None:
    check_loaded({"missing_keys": [], "mismatched_keys": []}, "kit = 'k'", "vae")
    for info in (
        {"missing_keys": ["a.b"], "mismatched_keys": []},
        {"missing_keys": [], "mismatched_keys": [("a.b", (1,), (2,))]},
    ):
        with pytest.raises(KitError, match="kit = 'k': the weights of vae lack 'a.b'"):
            check_loaded(info, "kit = 'k'", "vae")


@pytest.mark.parametrize("part", ["vae", "unet", "text_encoder"])
def test_loading_refuses_what_a_check_let_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A file that is changed between the check and the loading, say."""
    kit = linked(shipped(part), tmp_path / "kit")
    changed(kit, part, without_last)
    monkeypatch.setattr(part_check, "check_tensor_shapes", lambda *about: None)
    with pytest.raises(KitError, match=f"the weights of {part} lack"):
        load_kit(kit)


def test_a_check_is_remembered_by_settings_and_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = linked(shipped("vae"), tmp_path / "kit")
    change(kit, "vae/config.json", sample_size=99)
    asked: list[str] = []
    misfit = fits._misfit
    monkeypatch.setattr(fits, "_misfit", lambda *about: (asked.append("vae"), misfit(*about))[1])
    for _ in range(2):
        check_kit(str(kit), ("vae",))
    assert asked == ["vae"]
    change(kit, "vae/config.json", sample_size=98)
    check_kit(str(kit), ("vae",))
    assert asked == ["vae"] * 2
    rewrite(tmp_path / "cache" / "fits.json", b"damaged")
    check_kit(str(kit), ("vae",))
    assert asked == ["vae"] * 3


CHECK_SHIPPED = """
import sys
from dataclasses import replace
from osfl.settings import default_config
from osfl.config import parse_run_config
from osfl.kit.check import check_kit
from osfl.kit.kits import find_kit
from osfl.kit.part_check import MODELS
from osfl.kit.run_check import check_initial_weights, check_noise_schedule

kit, unclip = find_kit("digits"), find_kit("digits-unclip")
parts = [part for part in MODELS if part not in ("text_encoder_2", "clip")]
check_kit(kit, [*(part for part in parts if part != "image_normalizer"), "lora"])
check_kit(unclip, [part for part in parts if part not in ("captioner", "tiny_decoder")])
check_noise_schedule(kit, 50)
check_noise_schedule(unclip, 50)
settings = parse_run_config(default_config()).classifier
names = "mobilenet_v2 mobilenet_v3_small resnet18 resnet34 resnet50 shufflenet_v2_x1_0 vgg16"
for name in names.split():
    check_initial_weights(replace(settings, architecture=name), kit, "classifier.init")
"""


@pytest.mark.slow
def test_the_shipped_kits_are_checked_without_torch() -> None:
    """Joining stays cheap. Their parts really fit, which the parts' own test shows."""
    code = CHECK_SHIPPED + "print({'torch', 'diffusers', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.slow
def test_the_shipped_kits_parts_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is known of them is what their check remembers: of a kit that is made anew, too."""
    marks = fits.SHIPPED_MARKS
    monkeypatch.setattr(fits, "SHIPPED_MARKS", frozenset())
    exec(CHECK_SHIPPED, {})
    assert set(fits._cached_marks()) == marks


# ---- Settings that somebody wrote ----


def deep(key: str) -> bytes:
    return b'{"' + key.encode() + b'": ' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.parametrize(
    "file",
    [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "unet/config.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
        f"{UNET}.index.json",
    ],
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (deep("a"), "nested deeper"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 100 levels"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b" " * (2**23 + 1), "more than 8,388,608 bytes"),
        (b"", "is empty"),
    ],
    ids=["deep", "deeper than 100", "pointer", "page", "large", "empty"],
)
def test_settings_that_are_something_else_are_named(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    rewrite(kit / file, content)
    with pytest.raises(KitError, match=f"{file} cannot be loaded: .*{message}"):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize("file", ["tokenizer/tokenizer.json", "tokenizer/merges.txt", UNET])
def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path, file: str) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    rewrite(kit / file, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(KitError, match=f"{file} cannot be loaded: it is a Git LFS pointer"):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("beta_schedule", "sigmoid"),
        ("beta_schedule", []),
        ("beta_schedule", ""),
        ("beta_start", float("nan")),
        ("beta_end", [0.012]),
        ("beta_end", None),
        ("beta_end", 2),
        ("num_train_timesteps", 0),
        ("num_train_timesteps", 1e3),
        ("timestep_spacing", "even"),
        ("steps_offset", 7),
        ("set_alpha_to_one", "no"),
        ("trained_betas", []),
        ("trained_betas", [float("nan")] * 1000),
    ],
)
def test_an_odd_schedule_is_refused_before_anybody_works(
    tmp_path: Path, key: str, value: object
) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    change(kit, "scheduler/scheduler_config.json", **{key: value})
    for look in (lambda kit: check_kit(kit, DIFFUSION_PARTS), load_noise_schedule):
        with pytest.raises(KitError, match=f"scheduler_config.json says {key} = .*; it must be"):
            look(str(kit))


@pytest.mark.parametrize(("offset", "most"), [(0, 20), (1, 19)])
def test_more_steps_than_a_schedule_has_are_refused(tmp_path: Path, offset: int, most: int) -> None:
    """20 steps of 20 timesteps end at t = 20 where `steps_offset` is 1: beyond 0 to 19."""
    kit = linked(shipped("unet"), tmp_path / "kit")
    settings = {"timestep_spacing": "leading", "steps_offset": offset}
    change(kit, "scheduler/scheduler_config.json", num_train_timesteps=20, **settings)
    scheduler = load_noise_schedule(str(kit))
    assert timesteps(scheduler, most) == list(range(19, 19 - most, -1))
    for steps in (most + 1, 21):
        with pytest.raises(KitError, match=f"steps = {steps}: .* 20 timesteps.* set synthesis.st"):
            timesteps(scheduler, steps)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("text_encoder", {"text_config": 5}, "text_config = 5; it must be an object"),
        (
            "text_encoder",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers = 1e.09; it must be at most 1000",
        ),
        ("text_encoder", {"num_attention_heads": "four"}, "describes no model"),
        ("vae", {"down_block_types": 5}, "describes no model"),
        ("captioner", {"text_config": 5}, "describes no model"),
    ],
)
def test_settings_that_describe_no_model_are_refused(
    tmp_path: Path, part: str, settings: dict[str, object], message: str
) -> None:
    kit = linked(shipped(part), tmp_path / "kit")
    change(kit, f"{part}/config.json", **settings)
    with pytest.raises(KitError, match=message):
        check_kit(str(kit), (part,))


@pytest.mark.parametrize(
    "file",
    [
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
        "image_encoder/config.json",
        "feature_extractor/preprocessor_config.json",
        "captioner/processor_config.json",
    ],
)
def test_code_of_a_models_own_is_refused(tmp_path: Path, file: str) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    change(kit, file, auto_map={"AutoProcessor": "code.Processor"})
    part = file.partition("/")[0].replace("feature_extractor", "image_encoder")
    with pytest.raises(KitError, match=f"{file} has auto_map, which names Python code"):
        check_kit(str(kit), (part,))


def test_a_header_of_a_million_tensors_is_not_read(tmp_path: Path) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor.{number}": empty for number in range(200_000)}).encode()
    rewrite(kit / UNET, len(header).to_bytes(8, "little") + header)
    with pytest.raises(KitError, match=f"{UNET} cannot be loaded: header too large"):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize("shape", ["5", "[1.5]", "[-1]", '"a"'])
def test_a_header_with_odd_shapes_is_refused(tmp_path: Path, shape: str) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    header = f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    rewrite(kit / UNET, len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(KitError, match=f"{UNET} cannot be loaded"):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize(
    "name", ["../vae/x.safetensors", "a\\b.safetensors", "/etc/x.safetensors", "\x1b[2J", 5, ["x"]]
)
def test_an_index_names_plain_files_beside_it(tmp_path: Path, name: object) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    content = {"metadata": {}, "weight_map": {"a": name}}
    rewrite(kit / f"{UNET}.index.json", json.dumps(content).encode())
    with pytest.raises(KitError, match="index.json names .*; it must name safetensors") as caught:
        check_kit(str(kit), DIFFUSION_PARTS)
    assert "\x1b" not in str(caught.value)


def test_a_tokenizer_without_a_length_has_the_text_encoders(tmp_path: Path) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    for length in (None, 500, 9):
        change(kit, "tokenizer/tokenizer_config.json", model_max_length=length)
        text = load_kit(kit).text
        assert text.shape[0] == min(length or 16, 16)
        assert text.states(["zero"]).shape[1] == text.shape[0]


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "image_encoder", "captioner"])
def test_quantized_weights_are_refused(tmp_path: Path, part: str) -> None:
    """Names and shapes fit; without the scales the numbers are others."""
    kit = linked(shipped(part), tmp_path / "kit")
    changed(kit, part, lambda state: {name: t.to(torch.int8) for name, t in state.items()})
    with pytest.raises(KitError, match=f"{weights_file(part)} .* is of type I8, as quantized"):
        check_kit(str(kit), (part,))


def test_settings_of_quantized_weights_are_refused(tmp_path: Path) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    change(kit, "unet/config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(KitError, match="unet/config.json says quantization_config = .*absent"):
        check_kit(str(kit), ("unet",))


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), torch.float32, "as float32; fetch or save them again"),
        (1e9, torch.float16, "as float16; set synthesis.dtype to float32"),
    ],
)
def test_weights_that_are_not_finite_blame_no_client(
    tmp_path: Path, part: str, value: float, dtype: torch.dtype, message: str
) -> None:
    def filled(state: State) -> State:
        name = sorted(state)[0]
        return {**state, name: torch.full_like(state[name].float(), value)}

    kit = linked(shipped(part), tmp_path / "kit")
    changed(kit, part, filled)
    with pytest.raises(KitError, match=f"weights of {part} have NaN or infinity in .* {message}"):
        load_kit(kit, dtype=dtype)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_max_length", 0),
        ("model_max_length", "16"),
        ("model_max_length", True),
        ("eos_token", None),
        ("bos_token", 5),
        ("pad_token", 5),
    ],
)
def test_an_odd_tokenizer_is_refused_before_anybody_works(
    tmp_path: Path, key: str, value: object
) -> None:
    """`change` removes a key whose value is None."""
    kit = linked(shipped("unet"), tmp_path / "kit")
    file = kit / "tokenizer/tokenizer_config.json"
    content = json.loads(file.read_text()) | {key: value}
    rewrite(file, json.dumps(content).encode())
    with pytest.raises(KitError, match=f"tokenizer_config.json says {key} = .*; it must be"):
        check_kit(str(kit), DIFFUSION_PARTS)


def test_a_tokenizer_without_its_model_is_refused(tmp_path: Path) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    rewrite(kit / "tokenizer/tokenizer.json", b"{}")
    with pytest.raises(KitError, match="tokenizer/tokenizer.json lacks its object model"):
        check_kit(str(kit), DIFFUSION_PARTS)


def test_a_special_token_that_the_text_encoder_lacks_is_refused(tmp_path: Path) -> None:
    """Every text is padded with it: an index beyond the embeddings."""
    kit = linked(shipped("unet"), tmp_path / "kit")
    change(kit, "tokenizer/tokenizer_config.json", pad_token="<pad>")
    with pytest.raises(KitError, match="special token '<pad>'.*lacks; set pad_token to"):
        check_kit(str(kit), DIFFUSION_PARTS)
    with pytest.raises(KitError, match="special token '<pad>'"):
        load_kit(str(kit))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("vae/config.json", "scaling_factor", "x"),
        ("vae/config.json", "scaling_factor", 0),
        ("vae/config.json", "scaling_factor", float("nan")),
        ("vae/config.json", "shift_factor", 0.1),
        ("vae/config.json", "latents_mean", [0.1, 0.2, 0.3, 0.4]),
        ("unet/config.json", "sample_size", 0),
        ("unet/config.json", "sample_size", -8),
        ("unet/config.json", "sample_size", 10**6),
        ("unet/config.json", "sample_size", True),
        ("scheduler/scheduler_config.json", "_class_name", 5),
    ],
)
def test_odd_latents_are_refused_before_anybody_works(
    tmp_path: Path, file: str, key: str, value: object
) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    change(kit, file, **{key: value})
    with pytest.raises(KitError, match=f"{file} says {key} = .*; it must be"):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("LCMScheduler", "is a few-step model .its scheduler is a LCMScheduler"),
        ("TCDScheduler", "is a few-step model .its scheduler is a TCDScheduler"),
        ("EDMEulerScheduler", "predicts .EDM's mix"),
        ("FlowMatchEulerDiscreteScheduler", "predicts 'flow'"),
    ],
)
def test_schedulers_of_other_models_are_refused(
    tmp_path: Path, scheduler: str, message: str
) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    change(kit, "scheduler/scheduler_config.json", _class_name=scheduler)
    with pytest.raises(KitError, match=message):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize("file", ["unet/config.json", "tokenizer/tokenizer_config.json"])
@pytest.mark.parametrize(
    ("encoding", "message"), [("utf-8-sig", "byte order mark"), ("utf-16", "byte 0 is not UTF-8")]
)
def test_settings_in_an_encoding_that_the_libraries_do_not_read_are_named(
    tmp_path: Path, file: str, encoding: str, message: str
) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    rewrite(kit / file, (kit / file).read_text().encode(encoding))
    with pytest.raises(KitError, match=f"{file} cannot be loaded: .*{message}"):
        check_kit(str(kit), DIFFUSION_PARTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": "Repository not found"}', 'a text, not weights: .*"Repository not found"'),
        (b"Access denied", "a text, not weights: 'Access denied'"),
        (b"PK\x03\x04" + bytes(40), "a pickle, as torch.save writes"),
        (b"\x80\x04\x95" + bytes(range(90, 130)), "a pickle, as torch.save writes"),
    ],
)
def test_a_file_that_is_no_weights_is_named_by_its_kind(
    tmp_path: Path, content: bytes, message: str
) -> None:
    kit = linked(shipped("unet"), tmp_path / "kit")
    rewrite(kit / UNET, content)
    with pytest.raises(KitError, match=f"{UNET} cannot be loaded: it is {message}"):
        check_kit(str(kit), DIFFUSION_PARTS)


def test_a_file_of_two_types_is_loaded_in_the_runs_type(tmp_path: Path) -> None:
    def mixed(state: State) -> State:
        return {
            name: tensor.float() if name.endswith(".bias") else tensor.half()
            for name, tensor in state.items()
        }

    kit = linked(shipped("unet"), tmp_path / "kit")
    for part in ("unet", "vae", "text_encoder"):
        changed(kit, part, mixed)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loaded_kit = load_kit(kit, dtype=dtype)
        for network in (loaded_kit.unet, loaded_kit.vae, loaded_kit.text.model):
            assert {tensor.dtype for tensor in network.parameters()} == {dtype}
