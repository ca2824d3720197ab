"""Kits by their names on a hub: one on loopback, through the hub's own client library."""

import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.tools import hub_layouts
from client_app.app import app
from osfl.cli.main import app as cli
from osfl.config import parse_run_config
from osfl.kit import hub as hub_of_kits
from osfl.kit.check import check_captioner, check_kit
from osfl.kit.hub import missing_bytes
from osfl.kit.kits import KitError, find_kit, find_model
from osfl.methods import DIFFUSION_PARTS
from osfl.models.diffusion import load_kit
from osfl.models.encoders import load_captioner, load_image_encoder
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers.hub_requests import unused_address, use_hub, weights_of
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.loopback_hub import REVISION, Handler, Hub
from tests.helpers.settings import quick
from tests.helpers.whole_runs import nodes

pytestmark = pytest.mark.slow

UNET = "unet/diffusion_pytorch_model.safetensors"
CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_files_of_a_role_are_fetched_once(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that learns no image needs the text encoder; then the rest; then nothing. Without a
    network the same folder is found.
    """
    settings = find_kit("owner/sd15")
    assert weights_of(served) == []
    assert json.loads((Path(settings) / "unet" / "config.json").read_text())["sample_size"] == 64
    size = (served.root / "owner" / "sd15" / "text_encoder" / "model.safetensors").stat().st_size
    assert missing_bytes("owner/sd15", ["text_encoder", "tokenizer"]) == size
    progress: list[tuple[int, int]] = []
    find_kit("owner/sd15", ["text_encoder", "tokenizer"], lambda *bytes: progress.append(bytes))
    assert weights_of(served) == ["sd15/text_encoder/model.safetensors"]
    assert progress[-1] == (size, size)
    assert [count for count, _ in progress] == sorted(count for count, _ in progress)
    folder = find_kit("owner/sd15", DIFFUSION_PARTS)
    assert folder == settings
    check_kit(folder, DIFFUSION_PARTS)
    weights = ["sd15/unet/diffusion_pytorch_model.safetensors"]
    weights.append("sd15/vae/diffusion_pytorch_model.safetensors")
    assert weights_of(served) == ["sd15/text_encoder/model.safetensors", *weights]
    served.fetched.clear()
    assert missing_bytes("owner/sd15", DIFFUSION_PARTS) == 0
    use_hub(monkeypatch, unused_address(), tmp_path / "cache")
    assert find_kit("owner/sd15", DIFFUSION_PARTS) == folder
    assert find_kit(f"owner/sd15@{REVISION}", DIFFUSION_PARTS) == folder
    assert served.fetched == []
    theirs = load_kit(served.root / "owner" / "sd15").unet.state_dict()
    ours = load_kit(folder).unet.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_only_lost_files_are_fetched_again(served: Hub) -> None:
    folder = Path(find_kit("owner/sd15", DIFFUSION_PARTS))
    for file in (folder / UNET, folder / "tokenizer" / "merges.txt"):
        file.resolve().unlink()
        file.unlink()
    served.fetched.clear()
    assert find_kit("owner/sd15", DIFFUSION_PARTS) == str(folder)
    assert served.fetched == ["owner/sd15/tokenizer/merges.txt", f"owner/sd15/{UNET}"]


@pytest.mark.slow
def test_a_captioner_and_an_image_encoder_are_fetched_by_their_names(served: Hub) -> None:
    check_captioner("owner/blip")
    assert weights_of(served) == ["blip/model.safetensors"]
    caption = load_captioner("owner/blip", CPU)
    local = load_captioner(str(served.root / "owner" / "blip"), CPU)
    pixels = torch.randint(256, (2, 3, 40, 40), dtype=torch.uint8)
    assert caption(pixels) == local(pixels)
    encode = load_image_encoder("owner/dinov2", CPU)
    local = load_image_encoder(str(served.root / "owner" / "dinov2"), CPU)
    assert torch.equal(encode(pixels), local(pixels))
    assert weights_of(served) == ["blip/model.safetensors", "dinov2/model.safetensors"]


def half_in_shards(folder: Path) -> Path:
    hub_layouts.half(folder)
    hub_layouts.in_shards(folder, "unet", "diffusion_pytorch_model", ".fp16")
    hub_layouts.in_shards(folder, "text_encoder", "model", ".fp16")
    return folder


def in_shards(folder: Path) -> Path:
    hub_layouts.in_shards(folder, "unet", "diffusion_pytorch_model")
    hub_layouts.in_shards(folder, "text_encoder", "model")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "exact"),
    [(hub_layouts.half, False), (half_in_shards, False), (in_shards, True)],
)
def test_half_precision_and_shards_are_fetched_and_loaded(
    served: Hub, tmp_path: Path, stored: Callable[[Path], Path], exact: bool
) -> None:
    """Half precision alone counts where there is nothing else; it is used in single."""
    torch.manual_seed(0)
    folder = served.root / "owner" / f"stored-{stored.__name__}"
    base_kit = load_kit(shutil.copytree(hub_layouts.sd15(folder), tmp_path / "whole"))
    stored(folder)
    fetched = find_kit(f"owner/{folder.name}", DIFFUSION_PARTS)
    check_kit(fetched, DIFFUSION_PARTS)
    kit = load_kit(fetched)
    for ours, theirs in (
        (kit.unet, base_kit.unet),
        (kit.vae, base_kit.vae),
        (kit.text, base_kit.text),
    ):
        model = ours if isinstance(ours, torch.nn.Module) else ours.model
        reference = theirs if isinstance(theirs, torch.nn.Module) else theirs.model
        for name, value in model.state_dict().items():
            tensor = reference.state_dict()[name]
            expected = tensor if exact or not tensor.is_floating_point() else tensor.half().float()
            assert torch.equal(value, expected), name


def settings_alone(folder: Path, pipeline: str, **changed: dict[str, object]) -> Path:
    """The layout of Stable Diffusion 1.5 with another pipeline, or other settings of some parts."""
    hub_layouts.sd15(folder)
    files = {"scheduler": "scheduler/scheduler_config.json", "unet": "unet/config.json"}
    overrides = {"model_index.json": {"_class_name": pipeline}}
    overrides |= {files[part]: settings for part, settings in changed.items()}
    for name, settings in overrides.items():
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **settings}))
    return folder


TURBO = {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing"}


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (
            "pickles",
            lambda folder: hub_layouts.pickled(hub_layouts.sd15(folder)),
            "a pickle, which could run code. Use a repository with safetensors",
        ),
        ("xl", lambda folder: settings_alone(folder, "StableDiffusionXLPipeline"), "is SDXL "),
        ("sd3", lambda folder: settings_alone(folder, "StableDiffusion3Pipeline"), "is SD3 "),
        (
            "lcm",
            lambda folder: settings_alone(folder, "LatentConsistencyModelPipeline"),
            "is a few-step model (LCM)",
        ),
        (
            "lcm-unet",
            lambda folder: settings_alone(
                folder, "StableDiffusionPipeline", unet={"time_cond_proj_dim": 256}
            ),
            "is a few-step model (LCM: its UNet takes the guidance scale)",
        ),
        (
            "turbo",
            lambda folder: settings_alone(folder, "StableDiffusionPipeline", scheduler=TURBO),
            "is a few-step model (like SD-Turbo",
        ),
        ("blip", lambda folder: folder, "is a blip, not a diffusion model"),
    ],
)
def test_an_unsupported_model_is_named_before_it_is_fetched(
    served: Hub, name: str, make: Callable[[Path], Path], message: str
) -> None:
    make(served.root / "owner" / name)
    with pytest.raises(KitError, match=f"kit = 'owner/{name}'.*{re.escape(message)}"):
        find_kit(f"owner/{name}", DIFFUSION_PARTS)
    assert weights_of(served) == []


def with_code(folder: Path, file: str) -> Path:
    """A repository whose settings name code of its own."""
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, "auto_map": {"AutoProcessor": "code.P"}}))
    return folder


@pytest.mark.parametrize(
    ("layout", "kind", "file"),
    [
        (hub_layouts.blip, "captioner", "preprocessor_config.json"),
        (hub_layouts.blip, "captioner", "tokenizer_config.json"),
        (hub_layouts.dinov2, "image_encoder", "preprocessor_config.json"),
        (hub_layouts.dinov2, "image_encoder", "config.json"),
    ],
)
def test_a_model_that_brings_code_is_refused_before_its_weights_are_fetched(
    served: Hub, layout: Callable[[Path], Path], kind: str, file: str
) -> None:
    name = f"code-{kind}-{file.partition('.')[0]}"
    with_code(layout(served.root / "owner" / name), file)
    with pytest.raises(KitError, match=f"{file} has auto_map, which names Python code"):
        find_model(f"owner/{name}", kind, kind)
    assert weights_of(served) == []


def test_weights_of_another_digest_than_the_hub_states_are_removed(served: Hub) -> None:
    file = "text_encoder/model.safetensors"
    served.tampered.add(f"owner/sd15/{file}")
    with pytest.raises(KitError, match=f"{file} as fetched has another SHA-256 than the hub"):
        find_kit("owner/sd15", ["text_encoder"])
    folder = Path(find_kit("owner/sd15"))
    assert not os.path.lexists(folder / file)
    served.tampered.clear()
    find_kit("owner/sd15", ["text_encoder"])
    check_kit(str(folder), ["text_encoder"])
    # A copy that lay there unchecked
    copy = (folder / file).resolve()
    copy.write_bytes(copy.read_bytes()[:-1] + b"!")
    with pytest.raises(KitError, match=f"{file} as fetched has another SHA-256 than the hub"):
        find_kit("owner/sd15", ["text_encoder"])


def test_settings_of_many_megabytes_are_not_fetched(served: Hub) -> None:
    folder = served.root / "owner" / "large"
    shutil.copytree(served.root / "owner" / "dinov2", folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text + " " * 9_000_000)
    with pytest.raises(KitError, match="config.json has 9 MB; settings must have at most 8 MB"):
        find_model("owner/large", "image_encoder", "image-encoder")
    assert served.fetched == []


def test_a_listing_that_leads_out_of_its_folder_is_refused(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Handler.files

    def listed(self: Handler, repository: Path) -> list[dict]:
        size = {"size": 9, "oid": "0" * 40}
        return [*files(self, repository), {"type": "file", "path": "../../config.json", **size}]

    monkeypatch.setattr(Handler, "files", listed)
    monkeypatch.setattr(
        Handler, "send_tree", lambda self, repository, below: self.send_json(self.files(repository))
    )
    (served.root / "config.json").write_text("{}")
    with pytest.raises(KitError, match="image-encoder = 'owner/dinov2'"):
        find_model("owner/dinov2", "image_encoder", "image-encoder")
    outside = [file for file in tmp_path.rglob("config.json") if "snapshots" not in file.parts]
    assert outside == []


def test_a_missing_repository_is_reported(served: Hub) -> None:
    with pytest.raises(KitError, match="kit = 'owner/nothing': the hub has no such model"):
        find_kit("owner/nothing")
    with pytest.raises(KitError, match="kit = 'owner/sd15@no': the model has no revision 'no'"):
        find_kit("owner/sd15@no")
    with pytest.raises(KitError, match="captioner = 'owner/a..b': not a hub id"):
        find_model("owner/a..b", "captioner", "captioner")


def test_a_hub_that_is_not_reached_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, unused_address(), tmp_path)
    began = time.monotonic()
    with pytest.raises(
        KitError, match="kit = 'owner/model': hub not reached .*hf download owner/model"
    ):
        find_kit("owner/model", DIFFUSION_PARTS)
    with pytest.raises(KitError, match="captioner = 'owner/blip': hub not reached"):
        check_captioner("owner/blip")
    assert time.monotonic() - began < 20


def test_a_full_disk_is_no_missing_hub(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_of_kits, "hf_hub_download", full)
    with pytest.raises(KitError, match=r"'owner/sd15': cannot be stored in .*cache: .*Free some"):
        find_kit("owner/sd15", DIFFUSION_PARTS)


def test_a_hub_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_of_kits, "HUB_TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        use_hub(monkeypatch, f"http://127.0.0.1:{mute.getsockname()[1]}", tmp_path)
        with pytest.raises(KitError, match="hub not reached"):
            find_kit("owner/model", DIFFUSION_PARTS)


@pytest.mark.slow
def test_a_run_takes_its_kit_from_the_hub(
    served: Hub, tiny_kit: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run equals one from a folder to the last bit; when the hub is gone the job continues."""
    shutil.copytree(tiny_kit, served.root / "owner" / "tiny", dirs_exist_ok=True)
    runs = {}
    for name, kit in (("folder", str(tiny_kit)), ("hub", f"owner/tiny@{REVISION}")):
        config = quick(method="feddeo", kit=kit, **{"runs-dir": str(tmp_path / name)})
        run_job(LoopGrid(app, config, nodes(2)), parse_run_config(config), "job")
        runs[name] = tmp_path / name / "job"
    images = {name: sorted((run / "images").rglob("*.png")) for name, run in runs.items()}
    assert images["folder"]
    for ours, theirs in zip(images["hub"], images["folder"], strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    use_hub(monkeypatch, unused_address(), tmp_path / "cache")
    again = LoopGrid(app, config, nodes(2))
    run_job(again, parse_run_config(config), "job")
    assert {kind for _, kind in again.sent} == {"query.join", "query.acknowledge", "evaluate"}


@pytest.mark.slow
def test_a_clients_own_kit_is_compared_with_the_hubs(
    served: Hub, tiny_kit: Path, home: Path, tmp_path: Path
) -> None:
    """The run names a kit of the hub and a client has a folder: a copy may join, and one with other
    weights may not.
    """
    shutil.copytree(tiny_kit, served.root / "owner" / "tiny", dirs_exist_ok=True)
    config = quick(method="feddeo", kit=f"owner/tiny@{REVISION}")
    client_kit = shutil.copytree(tiny_kit, tmp_path / "other")

    def run(job_id: str) -> None:
        node_configs = [nodes(2)[0], {**nodes(2)[1], "kit": str(client_kit)}]
        run_job(LoopGrid(app, config, node_configs), parse_run_config(config), job_id)

    run("with-a-copy")
    weights = client_kit / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    message = r"other': its unet/diffusion_pytorch_model.safetensors \(\w{8}\) is not the server's"
    with pytest.raises(RoundError, match=message):
        run("with-another")


@pytest.mark.slow
def test_the_models_of_a_run_are_fetched_before_it(served: Hub) -> None:
    """A client's share, then all; a hub that is gone is told in a line."""
    settings = ["method=oscar", "kit=owner/sd15", "captioner=owner/blip", "data.name=folder"]
    settings += ["data.classes=dog,guitar", "global-model.init=none"]
    result = CliRunner().invoke(cli, ["fetch", *settings, "--client"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert weights_of(served) == ["sd15/text_encoder/model.safetensors", "blip/model.safetensors"]
    assert "captioner" in result.output
    result = CliRunner().invoke(cli, ["fetch", *settings], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert weights_of(served)[2:] == [f"sd15/{UNET}", f"sd15/{UNET.replace('unet', 'vae')}"]
    result = CliRunner().invoke(cli, ["fetch", "method=feddeo", "kit=owner/nothing", *settings[3:]])
    assert result.exit_code == 1
    assert "the hub has no such model" in " ".join(result.output.split())
