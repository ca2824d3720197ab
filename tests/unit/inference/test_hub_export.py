"""Folders that timm and transformers load without OSFL: the same logits on real digits."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import list_models
from typer.testing import CliRunner

import osfl
from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.inference.hub_export import write_hub_folder
from osfl.kit.backbones import timm_equivalent
from osfl.models.classifiers import build_classifier
from osfl.models.clip_classifier import ImageTower
from tests.helpers.described_models import digit_files, stored_model

# Prints the logits that each folder's own preprocessing and weights give, and whether OSFL was
# loaded
TIMM = """
import json, sys, timm, torch
from PIL import Image
for folder, files in json.loads(sys.argv[1]):
    model = timm.create_model("local-dir:" + folder, pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    with torch.no_grad():
        logits = model(images)
    print(json.dumps([logits.tolist(), list(model.pretrained_cfg["label_names"])]))
print("osfl" in sys.modules)
"""
TRANSFORMERS = """
import json, sys, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
for folder, files in json.loads(sys.argv[1]):
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    inputs = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    print(json.dumps([logits.tolist(), list(model.config.id2label.values())]))
print("osfl" in sys.modules)
"""
# A zero-shot model's image tower
SMALL_CLIP = str(ImageTower(32, 8, 16, 2, 2, 32, 8, "quick_gelu"))
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def check_elsewhere(program: str, place: Path, *models: tuple[Path, Path, list[Path]]) -> None:
    """Compare logits with those of a process that lies elsewhere and fetches nothing.

    Args:
        place: an empty folder.
        models: of each the file, the folder made of it, and images.
    """
    request = json.dumps([[str(folder), [*map(str, files)]] for _, folder, files in models])
    result = subprocess.run(
        [sys.executable, "-c", program, request],
        cwd=place,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *answers, loaded = result.stdout.splitlines()[-len(models) - 1 :]
    assert loaded == "False"
    for (file, folder, files), answer in zip(models, answers, strict=True):
        logits, names = json.loads(answer)
        assert names == NAMES
        np.testing.assert_allclose(
            np.array(logits), expected(file, files), atol=1e-5, rtol=0, err_msg=folder.name
        )


def expected(file: Path, files: list[Path]) -> np.ndarray:
    model = osfl.load_model(file)
    with torch.no_grad():
        logits = model.module(torch.stack([model.transform(name) for name in files]))
    assert logits.std() > 0.05
    return logits.numpy()


def export(file: Path, out: Path, *options: str) -> str:
    command = ["export", str(file), "--to", "huggingface", "--out", str(out), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize("small_stem", [False, True])
def test_the_code_in_the_card_runs(small_stem: bool, tmp_path: Path) -> None:
    file = stored_model(tmp_path, "resnet18", small_stem)
    (image,) = digit_files(tmp_path / "digits", 1)
    image.rename(tmp_path / "image.png")
    export(file, tmp_path / "FOLDER")
    code = (tmp_path / "FOLDER" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    best = expected(file, [tmp_path / "image.png"] * 2)[0].argmax()
    assert shown.stdout.splitlines()[-1] == NAMES[best]


def timm_folder(root: Path, architecture: str, side: int = 32) -> tuple[Path, Path, list[Path]]:
    """A model's file, the folder for timm that is made of it, and images of the model's size."""
    file = stored_model(root, architecture, side=side)
    folder = root / root.name
    assert "timm: " in export(file, folder)
    return file, folder, digit_files(root / "digits", side=side)


@pytest.mark.slow
def test_timm_loads_its_architectures_and_equal_ones(tmp_path: Path) -> None:
    check_elsewhere(
        TIMM,
        tmp_path,
        timm_folder(tmp_path / "resnet18", "resnet18"),
        timm_folder(tmp_path / "vit", "timm:test_vit", 160),
        timm_folder(tmp_path / "resnet", "timm:test_resnet"),
    )


@pytest.mark.slow
def test_transformers_loads_other_architectures(tmp_path: Path) -> None:
    """Also images of another size, which its processor resizes as a run does; and one that timm
    loads too.
    """
    models = [timm_folder(tmp_path / "both", "resnet18")]
    for architecture, small_stem, side in (
        ("resnet18", True, 32),
        ("shufflenet_v2_x1_0", True, 16),
        ("vgg11_bn", True, 32),
        ("regnet_y_400mf", False, 64),
        (SMALL_CLIP, False, 32),
    ):
        root = tmp_path / f"model-{len(models)}"
        file = stored_model(root, architecture, small_stem, side)
        files = digit_files(root / "digits", 6, side)
        files += digit_files(root / "large", 3, 2 * side + 7, 3 * side)
        # The library names its copy of the code by the folder's name
        folder = root / root.name
        assert "transformers: " in export(file, folder)
        models.append((file, folder, files))
    check_elsewhere(TRANSFORMERS, tmp_path, *models)


@pytest.mark.slow
def test_timm_prepares_images_as_a_run_does(tmp_path: Path) -> None:
    """Within one level of a pixel, by which the libraries round differently."""
    file = stored_model(tmp_path, "timm:test_resnet")
    export(file, tmp_path / "folder")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(loaded))
    model = osfl.load_model(file)
    std = torch.tensor(model.description.std)[:, None, None]
    for name in digit_files(tmp_path / "digits", 6, 71, 96):
        images = transform(Image.open(name).convert("RGB")), model.transform(name)
        assert images[0].shape == (3, 32, 32)
        assert ((images[0] - images[1]) * std * 255).abs().max() < 1.01


@pytest.mark.slow
def test_a_hub_model_keeps_its_arguments(tmp_path: Path) -> None:
    """The folder says that the ViT has two blocks and no class token."""
    arguments = {"depth": 2, "class_token": False, "global_pool": "avg", "num_classes": 1000}
    base = tmp_path / "base"
    base.mkdir()
    settings = {"architecture": "test_vit", "num_classes": 1000, "model_args": arguments}
    pretrained = timm.create_model("test_vit").pretrained_cfg
    settings["pretrained_cfg"] = {**pretrained, "mean": (0.1, 0.2, 0.3)}
    (base / "config.json").write_text(json.dumps(settings))
    file = stored_model(tmp_path, f"hf-hub:{base}", side=160)
    files = digit_files(tmp_path / "digits", 3, side=160)
    export(file, tmp_path / "folder")
    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    del arguments["num_classes"]
    assert written["model_args"] == arguments
    assert written["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]
    check_elsewhere(TIMM, tmp_path, (file, tmp_path / "folder", files))


def test_images_that_are_resized_twice_are_refused(tmp_path: Path) -> None:
    model = osfl.load_model(stored_model(tmp_path, "timm:test_vit"))
    with pytest.raises(ConfigError, match=r"32 px that were enlarged to 160 px.*--preprocessing"):
        write_hub_folder(model, tmp_path / "folder", None, False)
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_timm_has_exactly_the_resnets_and_densenets() -> None:
    """Compare tensors' names and shapes of all models of torchvision that timm also names."""
    equal = set()
    for name in list_models(module=sys.modules["torchvision.models"]):
        try:
            with torch.device("meta"):
                state = build_classifier(name, 2).state_dict()
                timm_state = timm.create_model(name, num_classes=2).state_dict()
        # timm has no such model, or OSFL refuses it
        except (RuntimeError, ValueError):
            continue
        if {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in timm_state.items()}:
            equal.add(name)
    families = ("densenet", "resnet", "resnext", "wide_resnet")
    assert len(equal) == 14
    assert all(name.startswith(families) for name in equal)


@pytest.mark.slow
def test_equal_names_do_not_suffice() -> None:
    """A model whose BatchNorm adds another epsilon has the same tensors."""
    torch.manual_seed(0)
    network = build_classifier("resnet18", 3).eval()
    equivalent = timm_equivalent(network, "resnet18", 3, 32)
    assert equivalent is not None
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(equivalent.eval()(images), network(images))
    network.bn1.eps = 0.1  # type: ignore[union-attr]
    assert timm_equivalent(network, "resnet18", 3, 32) is None
    assert timm_equivalent(network, "vgg11", 3, 32) is None
    assert timm_equivalent(network, "mobilenet_v2", 3, 32) is None


def test_a_folder_is_only_replaced_on_demand(tmp_path: Path) -> None:
    file = stored_model(tmp_path, "shufflenet_v2_x1_0", True, 16)
    model = osfl.load_model(file)
    out = tmp_path / "folder"
    out.mkdir()
    export(file, out)
    (out / "notes.txt").write_text("mine")
    command = ["export", str(file), "--to", "huggingface", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "is not empty; set another folder, or --overwrite" in result.stderr
    (out / "model.safetensors").unlink()
    export(file, out, "--overwrite")
    state = load_file(out / "model.safetensors")
    weights = model.module.state_dict()
    assert all(torch.equal(state[f"network.{name}"], value) for name, value in weights.items())
    # timm's has neither code nor a file for the preprocessing
    timm_model = osfl.load_model(stored_model(tmp_path / "other", "timm:test_resnet"))
    write_hub_folder(timm_model, out, None, False)
    names = {"README.md", "config.json", "model.safetensors", "notes.txt"}
    assert {name.name for name in out.iterdir()} == names
