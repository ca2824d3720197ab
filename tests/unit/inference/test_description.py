"""A model's file says what the model is, and nothing else is believed."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import osfl
from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.inference.description import ModelDescription, describe
from osfl.models.classifiers import build_classifier, compute_logits
from osfl.run_folder.layout import RunFolder
from osfl.util.files import CorruptFileError
from tests.helpers.settings import quick


def rewritten(file: Path, metadata: dict[str, str]) -> Path:
    """Write the model beside its run, with other metadata."""
    copy = file.parents[3] / "other.safetensors"
    save_file(load_file(file), copy, metadata)
    return copy


def test_a_model_comes_back_with_its_description(
    model_file: Path, state: dict, description: ModelDescription
) -> None:
    model = osfl.load_model(model_file)
    assert model.description == description
    assert model.classes == ("zebra", "ant", "cat")
    assert not model.module.training
    loaded = model.module.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert (description.image_size, description.input_size) == (16, 0)
    assert description.mean == (0.485, 0.456, 0.406)
    assert description.std == (0.229, 0.224, 0.225)
    assert (description.method, description.run, description.name) == ("ceiling", "job", "FT")
    assert description.trained_on == "the images of all clients, pooled"
    assert (description.epsilon, description.delta) == (None, None)
    assert description.base_license == "none: random initial weights"


def test_a_guarantee_is_stated() -> None:
    """A method without one ignores epsilon's default alone; delta is that of the guarantee."""
    private = parse_run_config(quick(method="feddeo", epsilon=2.0, delta=1e-6))
    stated = describe(private, "job", "FT", private.global_model)
    assert (stated.epsilon, stated.delta) == (2.0, 1e-6)


@pytest.mark.parametrize(
    ("card", "license_text"),
    [
        ("---\ntags: [x]\nlicense: cc-by-4.0\n---\n\n# A kit\n", "cc-by-4.0"),
        ("---\ntags: [x]\n---\n\nlicense: cc-by-4.0\n", "unknown"),
        ("# A kit\nlicense: cc-by-4.0\n", "unknown"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_license_of_a_kit_is_that_of_its_card(
    tmp_path: Path, card: str | None, license_text: str
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    config = parse_run_config(quick(kit=str(tmp_path)))
    assert describe(config, "job", "FT", config.global_model).base_license == license_text


@pytest.mark.parametrize(
    ("kit", "license_text"),
    [("digits", "apache-2.0"), ("no-such-kit", "unknown"), ("owner/name", "unknown")],
)
def test_a_shipped_kit_has_a_license(kit: str, license_text: str) -> None:
    config = parse_run_config(quick(kit=kit))
    assert describe(config, "job", "FT", config.global_model).base_license == license_text


def test_a_stored_model_has_the_same_bytes_every_time_and_resumes(
    model_file: Path, run: RunFolder, state: dict, description: ModelDescription
) -> None:
    """Safetensors writes several keys of metadata in an order of its own."""
    first = model_file.read_bytes()
    assert json.loads(model_file.with_suffix(".json").read_text())["sha256"] == (
        hashlib.sha256(first).hexdigest()
    )
    for _ in range(5):
        run.store_model("FT", state, {"inputs": "0", "seconds": 1.0}, description.metadata())
        assert model_file.read_bytes() == first
    stored = run.stored_model("FT", "0")
    assert stored is not None
    assert all(torch.equal(stored[name], value) for name, value in state.items())
    assert list(description.metadata()) == ["osfl"]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("format", 2, "reads format 1; update OSFL"),
        ("classes", ["ant", "ant", "cat"], "a list of 2 to 32,768 different names"),
        ("classes", ["ant", "a/b", "cat"], "different names"),
        ("classes", "abc", "different names"),
        ("image_size", 10**9, "image_size = 1000000000: must be from 8 to 2048"),
        ("image_size", True, "image_size = True: must be from 8"),
        ("input_size", -1, "input_size = -1: must be 0, or"),
        ("mean", [0.5, 0.5], "mean = .* must be a list of 3 numbers"),
        ("mean", [0.5, 0.5, 10**400], "must be a list of 3 numbers"),
        ("std", [0.2, 0.2, float("nan")], "must be a list of 3 numbers from 0.001"),
        ("std", [0.2, 0.2, 0.0], "must be a list of 3 numbers from 0.001"),
        ("resize", "stretch", "must be 'short-side-bilinear-center-crop'"),
        ("run", "\x1b[2J", "run = .* must be a printable text"),
        ("trained_on", "x" * 1001, "1 to 1000 characters"),
        ("epsilon", 1.0, "epsilon and delta: must both be"),
        ("surprise", 1, "'surprise' is missing from its description, or unknown"),
    ],
)
def test_a_wrong_description_is_refused(
    model_file: Path, description: ModelDescription, key: str, value: Any, problem: str
) -> None:
    values = {**json.loads(description.metadata()["osfl"]), key: value}
    with pytest.raises(CorruptFileError, match=problem):
        osfl.load_model(rewritten(model_file, {"osfl": json.dumps(values)}))


def test_another_architecture_and_other_classes_are_refused(
    model_file: Path, description: ModelDescription
) -> None:
    values = json.loads(description.metadata()["osfl"])

    def load(**changes: Any) -> None:
        text = json.dumps({**values, **changes})
        osfl.load_model(rewritten(model_file, {"osfl": text}))

    load()
    with pytest.raises(ConfigError, match="'evil' is not a torchvision model"):
        load(architecture="evil")
    with pytest.raises(CorruptFileError, match="tensors are not those of resnet18"):
        load(architecture="resnet18")
    with pytest.raises(CorruptFileError, match="with 2 classes"):
        load(classes=["zebra", "ant"])


def test_files_that_are_no_models_are_refused(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        osfl.load_model(tmp_path / "none.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(model_file.read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match="is corrupt"):
        osfl.load_model(cut)
    torch.save({}, cut)
    with pytest.raises(CorruptFileError, match="it is a pickle"):
        osfl.load_model(cut)
    with pytest.raises(CorruptFileError, match="its description must be a JSON object"):
        osfl.load_model(rewritten(model_file, {"osfl": "[]"}))
    state = load_file(model_file)
    state["fc.bias"][0] = float("nan")
    save_file(state, cut, {"osfl": json.dumps(0)} | _metadata(model_file))
    with pytest.raises(CorruptFileError, match="NaN"):
        osfl.load_model(cut)


def _metadata(file: Path) -> dict[str, str]:
    return osfl.load_model(file).description.metadata()


def test_an_older_model_is_loaded_in_its_run_and_refused_elsewhere(
    run: RunFolder, config: RunConfig, state: dict, description: ModelDescription, tmp_path: Path
) -> None:
    run.store_model("FT", state, {"inputs": "0", "seconds": 1.0})
    (file,) = run.model_files()
    assert osfl.load_model(file).description == description
    shutil.copy(file, tmp_path / "alone.safetensors")
    with pytest.raises(ConfigError, match="its classes, architecture and image size are missing"):
        osfl.load_model(tmp_path / "alone.safetensors")
    run.write_json("config.json", {**run.stored_config(), "of-another-version": 1})
    with pytest.raises(ConfigError, match="Repeat the run with this version"):
        osfl.load_model(file)


def test_a_backbone_of_fixed_size_keeps_its_own_input(run: RunFolder) -> None:
    settings = {"global-model.architecture": "timm:test_vit", "data.image-size": 32}
    settings |= {"global-model.init": "none", "global-model.small-stem": False}
    config = parse_run_config({**quick(), **settings})
    torch.manual_seed(0)
    model = build_classifier("timm:test_vit", 10)
    stated = describe(config, "job", "FT", config.global_model, model)
    run.store_model("FT", model.state_dict(), {}, stated.metadata())
    loaded = osfl.load_model(run.model_files()[0])
    assert (stated.image_size, stated.input_size) == (32, 160)
    assert stated.mean == (0.5, 0.5, 0.5)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        logits = loaded.module(loaded.transform.normalize(pixels))
    torch.testing.assert_close(logits, compute_logits(model, pixels, torch.device("cpu")))


@pytest.mark.slow
def test_the_package_is_light_until_a_model_is_loaded() -> None:
    code = "import sys, osfl; print('torch' in sys.modules, callable(osfl.load_model))"
    code += "\nprint('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "True", "True"]
