"""Load a trained model with its preprocessing and description."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from osfl.config import ConfigError, parse_run_config
from osfl.data.pictures import open_image, to_pixels
from osfl.inference.description import ModelDescription, describe, read_description
from osfl.kit.headers import check_header
from osfl.kit.used_parts import global_settings
from osfl.models.classifiers import (
    ClassifierError,
    InputRule,
    apply_rule,
    rebuild_classifier,
)
from osfl.run_folder.layout import RunFolder
from osfl.util.files import CorruptFileError
from osfl.util.pixels import to_float
from osfl.util.text import sanitize


@dataclass(frozen=True)
class Transform:
    """Preparation of an image as the clients of the run prepared their test images.

    Attributes:
        image_size: side in pixels to which an image is resized.
        rule: normalization and input size of the architecture.
    """

    image_size: int
    rule: InputRule

    def __call__(self, image: Image.Image | Path | str) -> torch.Tensor:
        """Return the model's input of an image or of its file: float32 [3, S, S].

        Raises:
            ValueError: the image is too large, or its pixels or its format are unknown.
            Exception: whatever Pillow raises for a corrupt file.
        """
        return self.normalize(self.pixels(image)[None])[0]

    def pixels(self, image: Image.Image | Path | str) -> torch.Tensor:
        """Decode and resize an image to uint8 [3, S, S]; raises as a call does."""
        if isinstance(image, Image.Image):
            return to_pixels(image, self.image_size)
        with open_image(Path(image)) as picture:
            return to_pixels(picture, self.image_size)

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Convert decoded images, uint8 [B, 3, S, S], to the model's input, float32."""
        return apply_rule(to_float(pixels), self.rule)


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, ready for use: `model.module(model.transform("image.png")[None])`.

    Attributes:
        module: the classifier in eval mode; its outputs are logits [B, C].
        transform: converts an image to the module's input.
        description: the classes, and how the model was made.
    """

    module: nn.Module
    transform: Transform
    description: ModelDescription

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the outputs."""
        return self.description.classes


def load_model(path: Path | str) -> TrainedModel:
    """Load a global model of a run, on the CPU.

    An older file does not describe itself. It is loaded from within its run's folder,
    by the run's config.json.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is not safetensors, or its description or tensors are not a model's.
        ConfigError: the architecture cannot be built here, or nothing describes the model.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"{sanitize(file, 1000)}: no such file; set MODEL to a model's file"
        )
    try:
        check_header(file)
        with safe_open(file, framework="pt") as weights:
            metadata = weights.metadata() or {}
        description = read_description(metadata)
        state = load_file(file)
    # `read_description` raises ValueError, as torch does for an unknown type of numbers
    except (CorruptFileError, SafetensorError, ValueError) as error:
        raise CorruptFileError(
            f"{sanitize(file, 1000)} is not a model of OSFL, or is corrupt: "
            f"{sanitize(error, 1000)}; copy it again from its run, or repeat the run"
        ) from None
    if description is None:
        return _load_undescribed(file, state)
    return _assemble(_rebuild(file, state, description), description)


def _assemble(module: nn.Module, description: ModelDescription) -> TrainedModel:
    rule = InputRule(description.mean, description.std, description.input_size)
    return TrainedModel(module, Transform(description.image_size, rule), description)


def _rebuild(
    file: Path, state: dict[str, torch.Tensor], description: ModelDescription
) -> nn.Module:
    name = sanitize(file, 1000)
    architecture = description.architecture
    try:
        module = rebuild_classifier(
            state, architecture, len(description.classes), description.small_stem
        )
    except ClassifierError as error:
        raise ConfigError(f"{name}: {error}") from None
    # The tensors are not this architecture's
    except RuntimeError as error:
        reason = sanitize(str(error).splitlines()[-1].strip())
        raise CorruptFileError(
            f"{name}: its tensors are not those of {architecture} with "
            f"{len(description.classes)} classes: {reason}; copy it again from its run"
        ) from None
    if not all(torch.isfinite(value.float()).all() for value in module.state_dict().values()):
        raise CorruptFileError(f"{name}: its weights contain NaN or infinity; repeat the run")
    return module


def _load_undescribed(file: Path, state: dict[str, torch.Tensor]) -> TrainedModel:
    """Load a model without a description by the configuration of the run that it lies in."""
    name = sanitize(file, 1000)
    run = RunFolder(file.resolve().parent.parent)
    if file.resolve() not in run.model_files() or (stored := run.stored_config()) is None:
        raise ConfigError(
            f"{name} does not describe itself: its classes, architecture and image size are "
            "missing, as in older models. Set MODEL to the file within its run's folder, "
            "beside config.json, or repeat the run with this version"
        )
    try:
        config = parse_run_config(stored)
    except ConfigError as error:
        raise ConfigError(
            f"{name} does not describe itself, and {sanitize(run.config_file, 1000)} is of another "
            f"version: {error}. Repeat the run with this version"
        ) from None
    settings = global_settings(config)
    # The rule depends on the architecture, which is built first
    draft = describe(config, run.path.name, file.stem, settings)
    module = _rebuild(file, state, draft)
    description = describe(config, run.path.name, file.stem, settings, module)
    return _assemble(module, description)
