"""Export of a trained model as a folder that timm or transformers loads without OSFL."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import osfl.models
from osfl.config import ConfigError
from osfl.inference.description import KEY, ModelDescription
from osfl.inference.loading import TrainedModel
from osfl.inference.model_card import RunRecord, card_text
from osfl.inference.onnx_export import require_package
from osfl.kit.backbones import (
    SETTINGS_FILE,
    backbone_arguments,
    is_backbone,
    timm_equivalent,
)
from osfl.util.files import write_atomically

WEIGHTS = "model.safetensors"
CARD = "README.md"
PROCESSOR = "preprocessor_config.json"
# Copied from osfl/models: code that transformers runs with trust_remote_code=True
CODE = ("modeling_osfl.py", "small_stem.py", "clip_classifier.py")
FILES = (SETTINGS_FILE, WEIGHTS, CARD, PROCESSOR, *CODE)
# Pillow's number of the bilinear filter
BILINEAR = 2


def write_hub_folder(
    model: TrainedModel, out: Path, run: RunRecord | None, client_names: bool
) -> str:
    """Write the folder; return the library that loads it, `timm` or `transformers`.

    timm (`local-dir:FOLDER`) loads it if timm has the architecture; otherwise transformers
    (`AutoModelForImageClassification`) does, with the architecture's code. Files of an earlier
    export that this one lacks are removed; other files stay.

    Args:
        run: what the card says about the run; None if it is not known.
        client_names: whether the card names the clients.

    Raises:
        ConfigError: the extra is not installed, or no library resizes images as the model requires.
        OSError: the folder cannot be written.
    """
    for package in ("timm", "huggingface_hub"):
        require_package(package)
    _check_resizing(model.description)
    files = _timm_files(model)
    library = "timm" if files else "transformers"
    files = files or _transformers_files(model)
    files[CARD] = card_text(model.description, library, run, client_names).encode()
    for name in FILES:
        if name not in files:
            (out / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return library


def _check_resizing(description: ModelDescription) -> None:
    """Check that images are resized once: neither library's preprocessing resizes twice.

    Raises:
        ConfigError: they are resized twice.
    """
    if description.input_size not in (0, description.image_size):
        raise ConfigError(
            f"MODEL: {description.architecture} was trained on images of "
            f"{description.image_size} px that were enlarged to {description.input_size} px, which "
            "timm and transformers cannot repeat; set --to onnx and --preprocessing, or repeat "
            f"the run with data.image-size={description.input_size}"
        )


def _timm_files(model: TrainedModel) -> dict[str, bytes]:
    """Return the settings and weights for timm; {} if it lacks the architecture."""
    description = model.description
    network: Any = model.module
    arguments: dict[str, Any] = {}
    if is_backbone(description.architecture):
        arguments = backbone_arguments(description.architecture, "MODEL")
    elif not description.small_stem:
        network = timm_equivalent(
            network,
            description.architecture,
            len(description.classes),
            description.image_size,
        )
    else:
        network = None
    if network is None:
        return {}
    pretrained = network.pretrained_cfg
    side = description.image_size
    settings = {
        "architecture": pretrained["architecture"],
        "num_classes": len(description.classes),
        "label_names": description.classes,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": (3, side, side),
            "fixed_input_size": bool(description.input_size),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": description.mean,
            "std": description.std,
            "num_classes": len(description.classes),
            "first_conv": pretrained.get("first_conv"),
            "classifier": pretrained.get("classifier"),
        },
        KEY: asdict(description),
    }
    return {SETTINGS_FILE: _json(settings), WEIGHTS: _weights(model.module.state_dict())}


def _transformers_files(model: TrainedModel) -> dict[str, bytes]:
    """Return settings, weights, preprocessing and code for transformers."""
    description = model.description
    side = description.image_size
    module = CODE[0].removesuffix(".py")
    settings = {
        "model_type": "osfl",
        "architectures": ["OsflForImageClassification"],
        "auto_map": {
            "AutoConfig": f"{module}.OsflConfig",
            "AutoModelForImageClassification": f"{module}.OsflForImageClassification",
        },
        "architecture": description.architecture,
        "small_stem": description.small_stem,
        "id2label": dict(enumerate(description.classes)),
        "label2id": {name: number for number, name in enumerate(description.classes)},
        KEY: asdict(description),
    }
    processor = {
        "image_processor_type": "OsflImageProcessor",
        "auto_map": {"AutoImageProcessor": f"{module}.OsflImageProcessor"},
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": description.mean,
        "image_std": description.std,
    }
    state = {f"network.{name}": value for name, value in model.module.state_dict().items()}
    folder = Path(osfl.models.__path__[0])
    code = {name: (folder / name).read_bytes() for name in CODE}
    return {
        SETTINGS_FILE: _json(settings),
        WEIGHTS: _weights(state),
        PROCESSOR: _json(processor),
        **code,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _weights(state: dict[str, torch.Tensor]) -> bytes:
    # transformers requires this key
    contiguous = {name: value.contiguous() for name, value in state.items()}
    content: bytes = save(contiguous, {"format": "pt"})
    return content
