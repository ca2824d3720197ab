"""ONNX files: the same logits as PyTorch on real digits, and a description that is read again."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import osfl
from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.inference import onnx_export
from osfl.inference.description import read_description
from osfl.inference.onnx_export import to_onnx
from tests.helpers.described_models import digit_files, stored_model
from tests.helpers.settings import ROOT


def run_onnx(content: bytes, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    logits: np.ndarray = session.run(["logits"], {"image": images})[0]
    return logits


def export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.slow
def test_logits_are_pytorchs_for_every_batch_size(tmp_path: Path) -> None:
    """Also with preprocessing, whose expected value is computed by hand from the pixels."""
    file = stored_model(tmp_path, "resnet18", small_stem=True)
    files = digit_files(tmp_path / "digits")
    model = osfl.load_model(file)
    pixels = np.stack([np.asarray(Image.open(name)) for name in files])
    normalized = (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    inputs = torch.from_numpy(normalized.transpose(0, 3, 1, 2).astype(np.float32))
    with torch.no_grad():
        expected = model.module(inputs).numpy()
    assert expected.std(axis=0).mean() > 0.05
    for option, images in (
        ([], torch.stack([model.transform(name) for name in files]).numpy()),
        (["--preprocessing"], pixels.transpose(0, 3, 1, 2)),
    ):
        out = tmp_path / f"{len(option)}.onnx"
        result = export(file, "--to", "onnx", "--out", out, *option)
        assert result.exit_code == 0, result.output
        assert "opset 18" in result.output
        content = out.read_bytes()
        for count in (1, 2, 5, len(files)):
            logits = run_onnx(content, images[:count])
            np.testing.assert_allclose(logits, expected[:count], atol=1e-5, rtol=0)
        _check_description(content, model)
    assert export(file, "--to", "onnx", "--out", out).exit_code == 1


def _check_description(content: bytes, model: osfl.inference.loading.TrainedModel) -> None:
    proto = onnx.load_from_string(content)
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    assert read_description(properties) == model.description
    assert tuple(json.loads(properties["classes"])) == model.classes
    assert [opset.version for opset in proto.opset_import] == [18]
    assert properties["opset"] == "18"
    # The exporter's stack traces name files of this machine
    assert b"site-packages" not in content
    assert str(ROOT).encode() not in content


@pytest.mark.slow
def test_a_backbone_of_fixed_size_enlarges_images_in_the_graph(tmp_path: Path) -> None:
    """32 px to 160 px, bicubic."""
    model = osfl.load_model(stored_model(tmp_path, "timm:test_vit"))
    files = digit_files(tmp_path / "digits", 3)
    pixels = torch.stack([model.transform.pixels(name) for name in files])
    images = torch.stack([model.transform(name) for name in files])
    assert images.shape == (3, 3, 160, 160)
    with torch.no_grad():
        expected = model.module(images).numpy()
    logits = run_onnx(to_onnx(model, preprocessing=True).content, pixels.numpy())
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)
    logits = run_onnx(to_onnx(model, preprocessing=False).content, images.numpy())
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "small_stem", "side"),
    [
        ("shufflenet_v2_x1_0", True, 32),
        ("vgg11_bn", True, 32),
        ("regnet_y_400mf", False, 64),
        ("timm:test_resnet", False, 32),
    ],
)
def test_architectures_are_exported(
    architecture: str, small_stem: bool, side: int, tmp_path: Path
) -> None:
    model = osfl.load_model(stored_model(tmp_path, architecture, small_stem, side))
    files = digit_files(tmp_path / "digits", 3, side)
    images = torch.stack([model.transform(name) for name in files])
    with torch.no_grad():
        expected = model.module(images).numpy()
    logits = run_onnx(to_onnx(model, preprocessing=False).content, images.numpy())
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


def test_what_onnx_cannot_do_is_refused(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = osfl.load_model(model_file)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_export, "MAX_WEIGHT_BYTES", 10**6)
        with pytest.raises(ConfigError, match="must have less than 2 GB: set --to huggingface"):
            to_onnx(model, False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package onnx: pip install 'osfl.export.'"):
        to_onnx(model, False)


class OneByOne(torch.nn.Module):
    """A model whose graph depends on the batch's size, which the exporter cannot know."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([image.mean(dim=(1, 2)) for image in images])


@pytest.mark.slow
def test_a_batch_of_one_size_alone_is_refused(model_file: Path) -> None:
    model = osfl.load_model(model_file)
    fixed = osfl.inference.loading.TrainedModel(OneByOne(), model.transform, model.description)
    with pytest.raises(
        ConfigError, match="with a batch of any size: its graph depends on the batch size"
    ):
        to_onnx(fixed, False)


def test_a_graph_with_other_logits_is_refused(model_file: Path) -> None:
    """ONNX Runtime is given a model that adds 1."""
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    images = torch.zeros(2, 3)
    node = helper.make_node("Add", ["image", "one"], ["logits"])
    shape = ["batch", 3]
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("image", kind, shape)],
        [helper.make_tensor_value_info("logits", kind, shape)],
        [helper.make_tensor("one", kind, [1], [1.0])],
    )
    opset = helper.make_opsetid("", onnx_export.OPSET)
    content = helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()
    assert onnx_export._compare(lambda x: x + 1, content, images, "it") == 0  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="differ from PyTorch's by 1; set --to huggingface"):
        onnx_export._compare(torch.nn.Identity(), content, images, "it")
