"""Export of a trained model as ONNX."""

import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from osfl.config import ConfigError
from osfl.inference.loading import TrainedModel, Transform
from osfl.util.text import sanitize

# The exporter's default; ONNX Runtime 1.14 and later read it
OPSET = 18
# A protobuf message has less than 2 GiB; the rest is for the graph
MAX_WEIGHT_BYTES = 2**31 - 2**24
# Largest difference of a logit from PyTorch's, relative to the largest logit if that is above 1.
# Rounding alone gives up to 2e-5; a graph that computes something else gives far more
TOLERANCE = 1e-4


@dataclass(frozen=True)
class OnnxFile:
    """A model as ONNX.

    Attributes:
        content: the file.
        difference: the largest difference of ONNX Runtime's logits from PyTorch's, on random
            images; None if onnxruntime is not installed.
    """

    content: bytes
    difference: float | None


class _WithPreprocessing(nn.Module):
    """A classifier of uint8 images [B, 3, S, S]."""

    def __init__(self, network: nn.Module, transform: Transform):
        super().__init__()
        self._network = network
        self._transform = transform

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, C]."""
        logits: torch.Tensor = self._network(self._transform.normalize(pixels))
        return logits


def require_package(package: str) -> None:
    """Check that a package of the extra `export` is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"osfl export requires the package {package}: pip install 'osfl[export]'")


def to_onnx(model: TrainedModel, preprocessing: bool) -> OnnxFile:
    """Convert a model to ONNX with a batch of any size, and its description as metadata.

    Its input `image` is what `model.transform` returns; its output `logits` is [B, C].

    Args:
        preprocessing: the input is uint8 RGB [B, 3, S, S] instead, S being the model's image size.
            Images of other sizes are not resized in the graph, where rounding would differ.

    Raises:
        ConfigError: the extra is not installed, the model is too large, ONNX cannot express it,
            or ONNX Runtime, if it is installed, computes other logits.
    """
    for package in ("onnx", "onnxscript"):
        require_package(package)
    architecture = model.description.architecture
    _check_size(model)
    network = model.module.eval()
    if preprocessing:
        network = _WithPreprocessing(network, model.transform).eval()
    example = _example(model, 2, preprocessing)
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                network,
                (example,),
                input_names=["image"],
                output_names=["logits"],
                opset_version=OPSET,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise _inexpressible(architecture, error.__cause__ or error) from None
    proto = program.model_proto
    for value in (*proto.graph.input, *proto.graph.output):
        if not value.type.tensor_type.shape.dim[0].dim_param:
            raise _inexpressible(architecture, "its graph depends on the batch size")
    content = _with_metadata(proto, model, preprocessing)
    images = _example(model, 3, preprocessing)
    return OnnxFile(content, _compare(network, content, images, architecture))


def _inexpressible(architecture: str, reason: object) -> ConfigError:
    first_line = str(reason).strip().partition("\n")[0]
    return ConfigError(
        f"MODEL: {architecture} cannot be exported to ONNX with a batch of any size: "
        f"{sanitize(first_line)}; set --to huggingface"
    )


def _check_size(model: TrainedModel) -> None:
    state = model.module.state_dict().values()
    weight_bytes = sum(value.numel() * value.element_size() for value in state)
    if weight_bytes > MAX_WEIGHT_BYTES:
        raise ConfigError(
            f"MODEL: {weight_bytes / 1e9:.1f} GB of weights; an ONNX file must have less than "
            "2 GB: set --to huggingface"
        )


def _example(model: TrainedModel, count: int, preprocessing: bool) -> torch.Tensor:
    """Return random inputs of the model."""
    side = model.description.image_size
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, side, side)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return pixels if preprocessing else model.transform.normalize(pixels)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log, which repeats what its result or its error says."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _with_metadata(proto: Any, model: TrainedModel, preprocessing: bool) -> bytes:
    """Serialize the graph with the model's description as `metadata_props`.

    The metadata of its nodes is removed: stack traces with paths of this machine.
    """
    import onnx

    nodes = [*proto.graph.node]
    for function in proto.functions:
        del function.metadata_props[:]
        nodes += function.node
    for message in (*nodes, *proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        del message.metadata_props[:]
    for node in nodes:
        node.doc_string = ""
    description = model.description
    side = description.input_size or description.image_size
    if preprocessing:
        size = description.image_size
        layout = f"uint8 [batch, 3, {size}, {size}]: RGB"
    else:
        layout = (
            f"float32 [batch, 3, {side}, {side}]: RGB in [0, 1], minus mean, divided by std; "
            f"mean {list(description.mean)}, std {list(description.std)}"
        )
    properties = {
        **description.metadata(),
        "classes": json.dumps(description.classes),
        "input": layout,
        "output": "float32 [batch, classes]: logits",
        "opset": str(OPSET),
    }
    onnx.helper.set_model_props(proto, properties)
    proto.producer_name = "osfl"
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    return content


def _compare(
    network: nn.Module, content: bytes, images: torch.Tensor, architecture: str
) -> float | None:
    """Return the largest difference of ONNX Runtime's logits, if installed, from PyTorch's.

    Raises:
        ConfigError: it is larger than rounding explains, or the graph cannot be run.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    try:
        computed = session.run(None, {"image": images.numpy()})[0]
    # ONNX Runtime's errors have no common class. The graph was traced with another batch size
    except Exception as error:
        raise _inexpressible(architecture, error) from None
    with torch.no_grad():
        expected = network(images).numpy()
    difference = float(np.abs(computed - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ConfigError(
            f"MODEL: ONNX Runtime's logits of {architecture} differ from PyTorch's by "
            f"{difference:.2g}; set --to huggingface"
        )
    return difference
