"""Classifiers that torchvision does not have, by their names in timm: ViT, DINOv2, medical ones.

`timm:NAME` is one of timm's models, `hf-hub:OWNER/NAME@REVISION` one that the Hugging Face hub has
in timm's format. The only file that imports timm.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from osfl.config import ConfigError
from osfl.config.names import BACKBONES, problem_of_backbone
from osfl.kit.kits import find_model, is_hub_id
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from torch import nn


def is_backbone(architecture: str) -> bool:
    """Whether it is one of timm's, or of the hub's."""
    return architecture.startswith(BACKBONES)


def build_backbone(architecture: str, num_classes: int, key: str) -> "nn.Module":
    """A backbone with random weights and a new head.

    Its `pretrained_cfg` has the mean, deviation and size that its own weights were trained with.

    Args:
        key: of the configuration, for the errors.

    Raises:
        ConfigError: timm is not installed, or has no such model.
        KitError: the hub is not reached, or has no such model.
    """
    try:
        import timm
    except ImportError:
        raise ConfigError(
            f"{key} = {architecture!r} needs the package timm: pip install 'osfl[backbones]'"
        ) from None
    source, _, name = architecture.partition(":")
    if problem := problem_of_backbone(architecture, key):
        raise ConfigError(problem)
    wanted = name if source == "timm" else f"local-dir:{_folder(name, '', key)}"
    try:
        return timm.create_model(wanted, pretrained=False, num_classes=num_classes)
    # Whatever timm raises for a name or a file of settings
    except Exception as error:
        reason = sanitize(error) or type(error).__name__
        raise ConfigError(f"{key} = {architecture!r}: timm cannot build it: {reason}") from error


def backbone_weights(architecture: str, key: str) -> Path:
    """The file of a backbone's own weights, in safetensors, fetched unless it is there.

    Raises:
        ConfigError: it has none on the hub, or timm is not installed.
        KitError: as `build_backbone`.
    """
    return Path(_folder(_weights_name(architecture, key), "backbone", key)) / "model.safetensors"


def backbone_to_fetch(architecture: str, key: str) -> bool:
    """Whether `backbone_weights` would fetch the file of the hub.

    Raises:
        ConfigError, KitError: as `backbone_weights`.
    """
    name = _weights_name(architecture, key)
    if not is_hub_id(name):
        return False
    # A client that needs no model of the hub stays small
    from osfl.kit.hub import missing_model_bytes

    return missing_model_bytes(name, "backbone", key) > 0


def _weights_name(architecture: str, key: str) -> str:
    source, _, name = architecture.partition(":")
    return _repository(name, key) if source == "timm" else name


def _repository(name: str, key: str) -> str:
    """Where timm keeps a model's weights on the hub."""
    try:
        import timm
    except ImportError:
        raise ConfigError(
            f"{key} = 'timm:{name}' needs the package timm: pip install 'osfl[backbones]'"
        ) from None
    known = timm.get_pretrained_cfg(name)
    if known is None or not known.hf_hub_id:
        raise ConfigError(
            f"{key}: timm has no weights of {name!r} on the hub; name a file, or take 'none'"
        )
    return str(known.hf_hub_id)


def _folder(name: str, kind: str, key: str) -> str:
    """A hub's model, or a folder's path as it is."""
    if not is_hub_id(name) and not Path(name).is_dir():
        raise ConfigError(f"{key}: {name!r} is no hub id (owner/name) and no folder here")
    return find_model(name, kind, key)
