"""Classifiers that torchvision does not have, by their names in timm: ViT, DINOv2, medical ones.

`timm:NAME` is a model of timm, `hf-hub:OWNER/NAME@REVISION` a model on the Hugging Face Hub in
timm's format. The only file that imports timm.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.config import ConfigError
from osfl.kit.kits import find_model, is_hub_id
from osfl.util.files import read_json
from osfl.util.names import BACKBONES, problem_of_backbone
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from torch import nn

# Of a folder that timm or transformers loads
SETTINGS_FILE = "config.json"


def is_backbone(architecture: str) -> bool:
    """Return whether an architecture is a model of timm or of the hub."""
    return architecture.startswith(BACKBONES)


def build_backbone(architecture: str, num_classes: int, key: str) -> "nn.Module":
    """Build a backbone with random weights and a new head.

    Its `pretrained_cfg` has the mean, standard deviation and image size of its pretraining.

    Args:
        key: of the configuration, for the errors.

    Raises:
        ConfigError: timm is not installed, or has no such model.
        KitError: the hub cannot be reached, or has no such model.
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
    model = name if source == "timm" else f"local-dir:{_find_folder(name, '', key)}"
    try:
        return timm.create_model(model, pretrained=False, num_classes=num_classes)
    # timm raises anything for a bad name or settings file
    except Exception as error:
        reason = sanitize(error) or type(error).__name__
        raise ConfigError(f"{key} = {architecture!r}: timm cannot build it: {reason}") from error


def backbone_arguments(architecture: str, key: str) -> dict[str, Any]:
    """Return timm's arguments (`model_args`) beside the name and the classes of a backbone.

    A hub's model states them in its config.json; timm's own models have none.

    Raises:
        ConfigError, KitError, CorruptFileError: as `build_backbone`, or config.json is corrupt.
    """
    source, _, name = architecture.partition(":")
    if source == "timm":
        return {}
    settings = read_json(Path(_find_folder(name, "", key)) / SETTINGS_FILE)
    return {
        argument: value
        for argument, value in settings.get("model_args", {}).items()
        if argument != "num_classes"
    }


def timm_equivalent(
    network: "nn.Module", architecture: str, num_classes: int, side: int
) -> "nn.Module | None":
    """Rebuild a classifier of torchvision as timm's model of the same name.

    Args:
        side: size in pixels of the images that it classifies.

    Returns:
        the model with the same weights; None if timm has none whose tensors have the same names
        and whose logits are the same.
    """
    import timm
    import torch

    if not timm.is_model(architecture):
        return None
    state = network.state_dict()
    equivalent: nn.Module = timm.create_model(architecture, num_classes=num_classes)
    shapes = {name: value.shape for name, value in equivalent.state_dict().items()}
    if shapes != {name: value.shape for name, value in state.items()}:
        return None
    equivalent.load_state_dict(state)
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network.eval()(images)
        computed = equivalent.eval()(images)
    difference = (computed - expected).abs().max()
    return equivalent if difference <= 1e-5 * max(1, expected.abs().max()) else None


def backbone_weights(architecture: str, key: str) -> Path:
    """Return the safetensors file of a backbone's pretrained weights; fetch it if necessary.

    Raises:
        ConfigError: the backbone has none on the hub, or timm is not installed.
        KitError: as `build_backbone`.
    """
    folder = _find_folder(_weights_name(architecture, key), "backbone", key)
    return Path(folder) / "model.safetensors"


def backbone_needs_fetch(architecture: str, key: str) -> bool:
    """Return whether `backbone_weights` would fetch the file from the hub.

    Raises:
        ConfigError, KitError: as `backbone_weights`.
    """
    name = _weights_name(architecture, key)
    if not is_hub_id(name):
        return False
    # The import stays here so that a client without a hub model stays small
    from osfl.kit.hub import missing_model_bytes

    return missing_model_bytes(name, "backbone", key) > 0


def _weights_name(architecture: str, key: str) -> str:
    source, _, name = architecture.partition(":")
    return _repository(name, key) if source == "timm" else name


def _repository(name: str, key: str) -> str:
    """Return the hub's repository of a timm model's weights."""
    try:
        import timm
    except ImportError:
        raise ConfigError(
            f"{key} = 'timm:{name}' needs the package timm: pip install 'osfl[backbones]'"
        ) from None
    pretrained = timm.get_pretrained_cfg(name)
    if pretrained is None or not pretrained.hf_hub_id:
        raise ConfigError(
            f"{key}: timm has no weights of {name!r} on the hub; set {key} to a file, or to 'none'"
        )
    return str(pretrained.hf_hub_id)


def _find_folder(name: str, kind: str, key: str) -> str:
    """Return the folder of a hub's model, or a local folder's path unchanged."""
    if not is_hub_id(name) and not Path(name).is_dir():
        raise ConfigError(f"{key}: {name!r} is neither a hub id (owner/name) nor a folder")
    return find_model(name, kind, key)
