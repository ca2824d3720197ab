"""Kits in the hub's shapes.

Whether one can be used, which of its files count, what is remembered of them.
"""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from client_app.app import app
from osfl.config import ConfigError, parse_run_config
from osfl.kit import digests
from osfl.kit.check import check_captioner, check_image_encoder, check_kit
from osfl.kit.kits import (
    DIFFUSION_PARTS,
    KitError,
    download_bytes,
    file_digests,
    kit_digest,
    weights_digests,
)
from osfl.models.diffusion import load_kit
from osfl.models.encoders import load_captioner, load_image_encoder
from osfl.run_folder.layout import RunFolder, open_run_folder
from osfl.run_folder.status import Status
from osfl.util.files import write_atomically
from server_app import pipeline
from server_app.app import run_job
from server_app.context import ServerJob
from server_app.kit import bind_job_to_kit, check_sampling_kit
from server_app.synthesis.images import synthesize
from server_app.synthesis.plan import ImageJob, plan_images
from tests.helpers.kit_files import UNET, change, index, linked, rewrite
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick

VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


def cut(kit: Path, file: str, keep: int) -> None:
    rewrite(kit / file, (kit / file).read_bytes()[:keep])


def reshaped(kit: Path, file: str, tensor: str, *shape: int) -> None:
    weights = load_file(kit / file)
    weights[next(name for name in weights if name.endswith(tensor))] = torch.zeros(*shape)
    (kit / file).unlink()
    save_file(weights, kit / file)


def renamed(kit: Path, file: str, name: str) -> None:
    (kit / file).rename((kit / file).with_name(name))


def overlong_header(kit: Path, file: str) -> None:
    rewrite(kit / file, struct.pack("<Q", 2**40) + (kit / file).read_bytes()[8:])


# Fmt: skip
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda kit: change(kit, "model_index.json", _class_name="StableDiffusionXLPipeline"),
            r"is SDXL \(StableDiffusionXLPipeline\); "
            r"OSFL supports kits of Stable Diffusion 1.x and 2.x",
        ),
        (
            lambda kit: (
                change(kit, "model_index.json", _class_name="StableDiffusion3Pipeline"),
                shutil.rmtree(kit / "unet"),
            ),
            r"is SD3 \(StableDiffusion3Pipeline\)",
        ),
        (lambda kit: change(kit, "model_index.json", _class_name="FluxPipeline"), "is FLUX"),
        (
            lambda kit: change(kit, "model_index.json", _class_name="KandinskyPipeline"),
            r"is another model \(KandinskyPipeline\)",
        ),
        (
            lambda kit: renamed(kit, UNET, "diffusion_pytorch_model.non_ema.safetensors"),
            f"lacks {UNET}; the only weights there are the variant "
            "diffusion_pytorch_model.non_ema.safetensors. Copy it",
        ),
        (
            lambda kit: renamed(kit, TEXT, "pytorch_model.bin"),
            f"lacks {TEXT}; the only weights there are pytorch_model.bin, a pickle",
        ),
        (lambda kit: (kit / VAE).unlink(), f"lacks {VAE}; fetch it"),
        (lambda kit: cut(kit, UNET, 4), f"{UNET} cannot be loaded: .*header too small"),
        (lambda kit: cut(kit, VAE, -1), f"{VAE} cannot be loaded: .*not fully covered"),
        (lambda kit: overlong_header(kit, TEXT), f"{TEXT} cannot be loaded: .*header too large"),
        (
            lambda kit: index(kit, missing=True),
            "lacks unet/.*-00002-of-00002.safetensors, which its",
        ),
        (lambda kit: rewrite(kit / "vae/config.json", b"{"), "vae/config.json cannot be loaded"),
        (lambda kit: (kit / "unet/config.json").unlink(), "lacks unet/config.json"),
        (
            lambda kit: (kit / "tokenizer/tokenizer.json").unlink(),
            "lacks tokenizer/tokenizer.json or",
        ),
        (lambda kit: shutil.rmtree(kit / "scheduler"), "lacks scheduler; this run needs it"),
        (
            lambda kit: change(kit, "scheduler/scheduler_config.json", prediction_type="sample"),
            "predicts 'sample'; it must be epsilon or v_prediction",
        ),
        (
            lambda kit: change(
                kit,
                "scheduler/scheduler_config.json",
                _class_name="FlowMatchEulerDiscreteScheduler",
            ),
            "predicts 'flow'",
        ),
        (
            lambda kit: change(kit, "unet/config.json", _class_name="UNet3DConditionModel"),
            "unet/config.json describes a 'UNet3DConditionModel'; unet must be one of UNet2DCond",
        ),
        (
            lambda kit: change(kit, "text_encoder/config.json", model_type="t5"),
            "describes a 't5'; text encoder must be one of clip_text_model",
        ),
        (
            lambda kit: change(kit, "unet/config.json", cross_attention_dim=40),
            r"attn2.to_k.weight in unet/ has the shape \[64, 32\], but .* cross_attention_dim = 40",
        ),
        (
            lambda kit: (
                change(kit, "text_encoder/config.json", hidden_size=48),
                reshaped(kit, TEXT, "token_embedding.weight", 300, 48),
                change(kit, "text_encoder/config.json", vocab_size=300),
            ),
            "text width 48, but the UNet expects 32",
        ),
        (
            lambda kit: (
                change(kit, "unet/config.json", in_channels=9),
                reshaped(kit, UNET, "conv_in.weight", 64, 9, 3, 3),
            ),
            r"latents have 4 channels, but the UNet takes 9 \(is it a model for inpainting",
        ),
        (
            lambda kit: reshaped(kit, VAE, "decoder.conv_in.weight", 48, 16, 3, 3),
            r"decoder.conv_in.weight in vae/ has the shape .* "
            r"but vae/config.json says latent_channels = 4",
        ),
        (
            lambda kit: change(kit, "unet/config.json", sample_size=None),
            "sample_size = None; it must be a whole number",
        ),
        (
            lambda kit: change(kit, "unet/config.json", addition_embed_type="text_time"),
            "its UNet requires another condition .'text_time'",
        ),
        (
            lambda kit: change(kit, "unet/config.json", class_embed_type="projection"),
            "is a Stable unCLIP, which is conditioned on an image embedding; only FedDISC",
        ),
    ],
)
def test_a_wrong_kit_is_reported_before_any_client_works(
    tiny_kit: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    kit = linked(tiny_kit, tmp_path / "kit")
    config = parse_run_config(quick(method="feddeo", kit=str(kit)))
    check_sampling_kit(config)
    spoil(kit)
    with pytest.raises(KitError, match=message) as error:
        check_sampling_kit(config)
    assert str(error.value).startswith(f"kit = '{kit}'")


def test_a_kit_without_initial_weights_names_the_settings(tiny_kit: Path, tmp_path: Path) -> None:
    """Stable Diffusion has none."""
    kit = linked(tiny_kit, tmp_path / "kit")
    shutil.rmtree(kit / "classifiers")
    parts = ("unet", "classifiers/resnet18.safetensors")
    message = r"lacks classifiers/resnet18.safetensors; .*: set global-model.init or .* to imagenet"
    with pytest.raises(KitError, match=message):
        check_kit(str(kit), parts)


def test_a_checkpoint_in_one_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "v1-5-pruned.safetensors").write_bytes(b"")
    with pytest.raises(
        KitError, match="is a checkpoint in one file. Convert it to a kit: .*from_single"
    ):
        check_kit(str(tmp_path), DIFFUSION_PARTS)


def test_a_kit_in_shards_is_taken(tiny_kit: Path, tmp_path: Path) -> None:
    kit = linked(tiny_kit, tmp_path / "kit")
    index(kit)
    check_kit(str(kit), DIFFUSION_PARTS)
    unet = load_kit(kit).unet.state_dict()
    expected = load_kit(tiny_kit).unet.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in unet.items())
    assert len([name for name in file_digests(str(kit), ["unet"]) if "-of-" in name]) == 2


def test_feddisc_wants_a_stable_unclip_whose_parts_fit(
    tiny_kit: Path, tiny_unclip: Path, tmp_path: Path
) -> None:
    def check(kit: Path) -> None:
        config = quick(method="feddisc", kit=str(tiny_kit), feddisc__kit=str(kit))
        check_sampling_kit(parse_run_config(config))

    check(tiny_unclip)
    with pytest.raises(KitError, match="is not a Stable unCLIP, which FedDISC requires"):
        check(tiny_kit)
    kit = linked(tiny_unclip, tmp_path / "kit")
    change(kit, "image_encoder/config.json", projection_dim=9)
    with pytest.raises(KitError, match="embeddings have 9 numbers, but image_normalizer's have 12"):
        check(kit)
    change(kit, "image_encoder/config.json", projection_dim=12)
    change(kit, "unet/config.json", projection_class_embeddings_input_dim=20)
    with pytest.raises(KitError, match="takes an image condition of 20 numbers, but .* makes 24"):
        check(kit)


# ---- Encoders that are named apart ----


def test_a_named_captioner_is_checked_by_its_header(tiny_kit: Path, tmp_path: Path) -> None:
    place = linked(tiny_kit / "captioner", tmp_path / "blip")
    check_captioner(str(place))
    check_captioner(str(tiny_kit))  # a kit that has one
    cut(place, "model.safetensors", -1)
    for look in (check_captioner, lambda source: load_captioner(source, torch.device("cpu"))):
        with pytest.raises(KitError, match=r"captioner = '.*blip'.* cannot be loaded"):
            look(str(place))
    with pytest.raises(KitError, match="captioner = '/nowhere': no such folder"):
        check_captioner("/nowhere")
    rewrite(place / "config.json", (tiny_kit / "image_encoder/config.json").read_bytes())
    with pytest.raises(KitError, match="describes a 'clip_vision_model'; captioner must be one of"):
        check_captioner(str(place))


def test_a_named_image_encoder_is_checked_by_its_header(tiny_kit: Path, tmp_path: Path) -> None:
    place = linked(tiny_kit / "image_encoder", tmp_path / "clip")
    with pytest.raises(KitError, match="image-encoder = .* lacks preprocessor_config.json or"):
        check_image_encoder(str(place))
    shutil.copy(tiny_kit / "feature_extractor" / "preprocessor_config.json", place)
    check_image_encoder(str(place))
    check_image_encoder(str(tiny_kit))
    rewrite(place / "config.json", b'{"model_type": "nonsense"}')
    for look in (
        check_image_encoder,
        lambda source: load_image_encoder(source, torch.device("cpu")),
    ):
        with pytest.raises(KitError, match="image-encoder = '.*clip'"):
            look(str(place))


# ---- Identity, figures, memory ----


def with_variants(kit: Path) -> None:
    """Files beside the weights in a clone of a hub's repository."""
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        for name in (f"{stem}.fp16.safetensors", f"{stem}.non_ema.bin", "flax_model.msgpack"):
            (kit / part / name).write_bytes(os.urandom(2**21))
        (kit / part / "pytorch_model.bin.index.json").write_text("{}")
    (kit / "v1-5-pruned.safetensors").write_bytes(b"whole")
    (kit / "safety_checker").mkdir(exist_ok=True)
    (kit / "safety_checker" / "model.safetensors").write_bytes(b"checker")


def test_only_what_is_loaded_counts(tiny_kit: Path, tmp_path: Path) -> None:
    kit = linked(tiny_kit, tmp_path / "kit")
    digest = kit_digest(kit)
    size = download_bytes(str(kit), DIFFUSION_PARTS)
    with_variants(kit)
    assert (kit_digest(kit), download_bytes(str(kit), DIFFUSION_PARTS)) == (digest, size)
    assert set(weights_digests(str(kit), DIFFUSION_PARTS)) == {UNET, VAE, TEXT}
    files = file_digests(str(kit), DIFFUSION_PARTS)
    assert size == sum((kit / name).stat().st_size for name in files)
    for part in DIFFUSION_PARTS:  # and every file that is loaded does
        name = next(name for name in files if name.startswith(part))
        content = (kit / name).read_bytes()
        rewrite(kit / name, content + b" ")
        assert kit_digest(kit) != digest, name
        rewrite(kit / name, content)
    assert kit_digest(kit) == digest


def large(file: Path, seconds_ago: float = 60) -> Path:
    """A file that is remembered: large, and not of this moment."""
    file.write_bytes(os.urandom(digests.SMALL_BYTES))
    then = time.time() - seconds_ago
    os.utime(file, (then, then))
    return file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[Path]:
    """The files that were read for a digest, as by a new process each time."""
    read = digests._read
    files = []

    def watched(file: Path, progress: digests.Progress) -> str:
        files.append(file)
        digests._memory_cache.clear()
        return read(file, progress)

    digests._memory_cache.clear()
    monkeypatch.setattr(digests, "_read", watched)
    return files


def test_a_digest_is_remembered_until_the_file_changes(
    home: Path, tmp_path: Path, reads: list[Path]
) -> None:
    file = large(tmp_path / "weights")
    assert digests.uncached_bytes([file]) == digests.SMALL_BYTES
    first = digests.file_sha256(file)
    digests._memory_cache.clear()
    assert (digests.file_sha256(file), reads, digests.uncached_bytes([file])) == (first, [file], 0)
    cache = home / "cache" / "digests.json"
    assert cache.stat().st_mode & 0o777 == 0o600
    # another time, another file of the same size and time, another size
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert digests.file_sha256(file) == first
    stat = file.stat()
    replacement = large(tmp_path / "other")
    os.utime(replacement, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    replacement.replace(file)
    digests._memory_cache.clear()
    second = digests.file_sha256(file)
    assert second != first
    with open(file, "ab") as stream:
        stream.write(b"x")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    digests._memory_cache.clear()
    assert digests.file_sha256(file) not in (first, second)
    assert len(reads) == 4


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, reads: list[Path]) -> None:
    """The file may change again within the same tick of the file system's clock."""
    file = large(tmp_path / "weights", seconds_ago=0)
    for _ in range(2):
        digests.file_sha256(file)
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1]", b'{"x": 1}', b"\xff", json.dumps({"W": {"about": 1}}).encode()]
)
def test_a_damaged_memory_is_none(
    home: Path, tmp_path: Path, reads: list[Path], damage: bytes
) -> None:
    file = large(tmp_path / "weights")
    first = digests.file_sha256(file)
    (home / "cache" / "digests.json").write_bytes(damage.replace(b"W", bytes(file)))
    digests._memory_cache.clear()
    assert digests.file_sha256(file) == first
    assert len(reads) == 2
    digests._memory_cache.clear()
    assert digests.file_sha256(file) == first
    assert len(reads) == 2


def test_a_remembered_digest_that_changed_at_rest_is_not_taken(
    home: Path, tmp_path: Path, reads: list[Path]
) -> None:
    """The digest would be another kit's, and with a guarantee another noisy payload."""
    file = large(tmp_path / "weights")
    first = digests.file_sha256(file)
    memory = home / "cache" / "digests.json"
    wrong_digest = first[:-1] + ("0" if first[-1] != "0" else "1")
    memory.write_text(memory.read_text().replace(first, wrong_digest))
    digests._memory_cache.clear()
    assert digests.file_sha256(file) == first
    assert len(reads) == 2


def test_without_a_place_to_remember_files_are_read(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "file" / "below"))
    file = large(tmp_path / "weights")
    first = digests.file_sha256(file)
    digests._memory_cache.clear()
    assert digests.file_sha256(file) == first
    assert len(reads) == 2


# ---- A job and its kit ----


def begun(method: str, kit: Path, **more: object) -> tuple[Callable[[], None], RunFolder]:
    """Binding a job to a kit, as at a server's start."""
    config = parse_run_config(quick(method=method, kit=str(kit), **more))
    folder = open_run_folder(config, method, 0)
    return lambda: bind_job_to_kit(config, folder, Status(folder.path)), folder


def test_uploads_that_did_not_come_from_the_kit_survive_its_repair(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    """FedLMG's classifiers know the kit's initialisation, not its UNet.

    Images hold the job to all that draws.
    """
    kit = linked(tiny_kit, tmp_path / "kit")
    bind, folder = begun("fedlmg", kit)
    cut(kit, UNET, -1)
    bind()
    folder.store_payload("a", b"blob", {})
    rewrite(kit / UNET, (tiny_kit / UNET).read_bytes())
    bind()
    write_atomically(folder.path / "units" / "u.jsonl", b"")
    with_variants(kit)
    bind()
    change(kit, "scheduler/scheduler_config.json", steps_offset=0)
    with pytest.raises(
        ConfigError, match="'fedlmg': its images were made with another scheduler/sch"
    ):
        bind()


def test_uploads_that_came_from_the_kit_hold_the_job_to_it(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    kit = linked(tiny_kit, tmp_path / "kit")
    bind, folder = begun("feddeo", kit)
    bind()
    cut(kit, UNET, -1)
    bind()  # nothing has come of it yet
    folder.store_payload("a", b"blob", {})
    bind()
    rewrite(kit / UNET, (tiny_kit / UNET).read_bytes())
    with pytest.raises(
        ConfigError, match=f"its payloads were made with another {UNET} than the kit"
    ):
        bind()


def test_a_model_holds_the_job_to_its_initialisation(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    kit = linked(tiny_kit, tmp_path / "kit")
    bind, folder = begun("fedavg", kit)
    bind()
    folder.write_json("rounds/done.json", {})
    start = kit / "classifiers" / "shufflenet_v2_x1_0.safetensors"
    cut(kit, UNET, -1)
    bind()  # which FedAvg does not use
    rewrite(start, start.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="its models were made with another classifiers/shuffle"):
        bind()


def test_images_of_another_kit_are_made_anew(home: Path, tiny_kit: Path, tmp_path: Path) -> None:
    """A unit's name holds what it was drawn with.

    All that is loaded, and nothing that lies beside it.
    """
    kit = linked(tiny_kit, tmp_path / "kit")
    calls = []
    config = parse_run_config(quick(kit=str(kit)))
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a",))

    def paint(jobs: Sequence[ImageJob]) -> torch.Tensor:
        calls.append(len(jobs))
        return torch.zeros(len(jobs), 3, 32, 32, dtype=torch.uint8)

    def made() -> int:
        synthesize(job, plan_images("m", 0, {"a": [1]}, 2), lambda device: paint)
        return len(calls)

    assert made() == 1
    with_variants(kit)
    assert made() == 1
    cut(kit, UNET, -1)
    assert made() == 2
    change(kit, "scheduler/scheduler_config.json", steps_offset=0)
    assert made() == 3


@pytest.mark.slow
def test_a_run_continues_with_a_repaired_kit_and_asks_no_client_again(
    home: Path, tiny_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedLMG's classifiers are there when drawing fails.

    With another UNet the run ends, and from then on it is that UNet's.
    """
    kit = linked(tiny_kit, tmp_path / "kit")
    config = quick(method="fedlmg", kit=str(kit), fedlmg__strategies="ft")

    def start() -> list[str]:
        grid = LoopGrid(app, config, [{"partition-id": k, "num-partitions": 2} for k in range(2)])
        run_job(grid, parse_run_config(config), "job")
        return [kind for _, kind in grid.sent]

    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "synthesize", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start()
    weights = {name: value + 0.01 for name, value in load_file(kit / UNET).items()}
    (kit / UNET).unlink()
    save_file(weights, kit / UNET)
    assert "train" not in start()
    rewrite(kit / UNET, (tiny_kit / UNET).read_bytes())
    with pytest.raises(ConfigError, match=f"'job': its images were made with another {UNET}"):
        start()


def test_a_job_of_an_older_version_is_refused_and_left_as_it_was(
    home: Path, tiny_kit: Path
) -> None:
    config = parse_run_config(quick(kit=str(tiny_kit)))
    folder = open_run_folder(config, "job", 0)
    folder.write_json("config.json", {**folder.read_json("config.json"), "kit-sha256": "0123"})
    before = (folder.path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="'job' was started by an older version of OSFL"):
        open_run_folder(config, "job", 0)
    assert (folder.path / "config.json").read_bytes() == before


def test_reading_the_kit_is_a_phase(
    home: Path, tiny_kit: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = linked(tiny_kit, tmp_path / "kit")
    for file in kit.rglob("*"):
        os.utime(file, (1e9, 1e9))
    calls: list[tuple[str, int, int]] = []
    config = parse_run_config(quick(method="feddeo", kit=str(kit)))
    folder = open_run_folder(config, "job", 0)
    status = Status(folder.path)
    phase = status.phase
    advance = status.advance
    monkeypatch.setattr(status, "phase", lambda *a: calls.append(a) or phase(*a))
    monkeypatch.setattr(status, "advance", lambda *a: calls.append(("", *a)) or advance(*a))
    bind_job_to_kit(config, folder, status)
    (name, total), *steps = calls
    assert name == "reading the kit"
    assert steps[-1] == ("", total, total)
    calls.clear()
    digests._memory_cache.clear()
    bind_job_to_kit(config, folder, status)  # known now
    assert calls == [] or all(count == total for _, count, total in calls)
