"""Which file a classifier's initial weights come from (`init`).

Clients look for it when they join: torch is imported only where it must be.
"""

import re
from pathlib import Path

from filelock import FileLock

from osfl.config import ClassifierConfig, ConfigError
from osfl.kit.backbones import backbone_to_fetch, backbone_weights
from osfl.kit.kits import initialisation_part


def initial_weights(config: ClassifierConfig, kit: str, key: str = "init") -> Path | None:
    """The file that `init` stands for; None: random weights.

    Args:
        config: of one architecture.
        kit: the kit's folder, where `init` is `kit`.
        key: what the setting is called in the run-config, for the error.

    Raises:
        ConfigError: there is no such file or folder, the folder has nothing for the architecture,
            or torchvision's weights are not on this machine and cannot be fetched.
    """
    if config.init == "none":
        return None
    if config.init == "kit":
        return Path(kit) / initialisation_part(config.architecture, kit)
    if config.init == "pretrained":
        return backbone_weights(config.architecture, key)
    if config.init == "imagenet":
        return _torchvision_weights(config.architecture, key)
    place = Path(config.init).expanduser()
    if place.is_dir():
        return _find_in(place, config.architecture, key)
    if not place.is_file():
        raise ConfigError(
            f"{key} = {config.init!r}: no such file or folder. Name one that is on this machine, "
            "or take 'none' to start from random weights"
        )
    return place


def weights_to_fetch(config: ClassifierConfig, key: str = "init") -> bool:
    """Whether `initial_weights` would fetch the file of the network.

    Raises:
        ConfigError, KitError: as `initial_weights`.
    """
    if config.init == "pretrained":
        return backbone_to_fetch(config.architecture, key)
    return config.init == "imagenet" and not _torchvision_file(config.architecture, key).is_file()


def _find_in(folder: Path, architecture: str, key: str) -> Path:
    """`<architecture>.safetensors` or `.pth`, or a file under the name that torchvision gave it."""
    # Of timm:NAME and hf-hub:OWNER/NAME@REVISION, NAME
    stem = architecture.rpartition(":")[2].partition("@")[0].rpartition("/")[2]
    own_names = [f"{stem}.safetensors", f"{stem}.pth"]
    for name in own_names:
        if (folder / name).is_file():
            return folder / name
    published = [_file_name(url) for url in _torchvision_urls(architecture)]
    for name in published:
        if (folder / name).is_file():
            return folder / name
    wanted = " or ".join([*own_names, *published])
    raise ConfigError(f"{key} = {str(folder)!r}: the folder lacks {wanted}. Put one there")


def _torchvision_weights(architecture: str, key: str) -> Path:
    """Torchvision's default ImageNet weights in torch's own cache, fetched if not there."""
    file = _torchvision_file(architecture, key)
    if not file.is_file():
        _fetch(_torchvision_urls(architecture)[0], file, key)
    return file


def _torchvision_file(architecture: str, key: str) -> Path:
    """Where torch keeps torchvision's default ImageNet weights once they are fetched."""
    import torch

    urls = _torchvision_urls(architecture)
    if not urls:
        raise ConfigError(
            f"{key} = 'imagenet': torchvision has no weights of {architecture}. "
            "Name a file, or take 'none'"
        )
    return Path(torch.hub.get_dir()) / "checkpoints" / _file_name(urls[0])


def _fetch(url: str, file: Path, key: str) -> None:
    """Download a file whose name ends in the first digits of its SHA-256, which must be right."""
    import torch

    digits = re.search(r"-([0-9a-f]{8,})\.", file.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # The simulated clients of one machine all want it
        with FileLock(f"{file}.lock"):
            if not file.is_file():
                prefix = digits.group(1) if digits else None
                torch.hub.download_url_to_file(url, str(file), prefix, progress=False)
    # No network (URLError), no place to write, or another hash
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{key} = 'imagenet': {file} is not there, and {url} cannot be fetched ({error}). Put "
            f"the file there (TORCH_HOME says where), set {key} to a folder that has it, or set "
            f"{key}=none, which begins with random weights"
        ) from error


def _torchvision_urls(architecture: str) -> list[str]:
    """Where torchvision's weights of an architecture are, its default first."""
    # Seconds to import, and only these files are called otherwise than the architecture
    from torchvision.models import get_model_weights

    try:
        weights = get_model_weights(architecture)
    # No such architecture: who builds it says so
    except ValueError:
        return []
    default = getattr(weights, "DEFAULT", None)
    return [each.url for each in sorted(weights, key=lambda each: each is not default)]


def _file_name(url: str) -> str:
    return url.rpartition("/")[2]
