"""Find the file of a classifier's initial weights (`init`).

Clients look for it when they join, so torch is imported only where it is needed.
"""

import re
from pathlib import Path

from filelock import FileLock

from osfl.config import ClassifierConfig, ConfigError
from osfl.kit.backbones import backbone_needs_fetch, backbone_weights
from osfl.kit.kits import initial_weights_file


def find_initial_weights(config: ClassifierConfig, kit: str, key: str = "init") -> Path | None:
    """Return the file that `init` stands for; None: random weights.

    Args:
        config: settings with a single architecture.
        kit: the kit's folder, for `init = "kit"`.
        key: the setting's name in the run-config, for the error.

    Raises:
        ConfigError: there is no such file or folder, the folder has nothing for the architecture,
            or torchvision's weights are not on this machine and cannot be fetched.
    """
    if config.init == "none":
        return None
    if config.init == "kit":
        return Path(kit) / initial_weights_file(config.architecture, kit)
    if config.init == "pretrained":
        return backbone_weights(config.architecture, key)
    if config.init == "imagenet":
        return _torchvision_weights(config.architecture, key)
    path = Path(config.init).expanduser()
    if path.is_dir():
        return _find_in(path, config.architecture, key)
    if not path.is_file():
        raise ConfigError(
            f"{key} = {config.init!r}: no such file or folder. Set {key} to one on this machine, "
            "or to 'none' for random weights"
        )
    return path


def weights_need_fetch(config: ClassifierConfig, key: str = "init") -> bool:
    """Return whether `find_initial_weights` would fetch the file from the network.

    Raises:
        ConfigError, KitError: as `find_initial_weights`.
    """
    if config.init == "pretrained":
        return backbone_needs_fetch(config.architecture, key)
    return config.init == "imagenet" and not _torchvision_file(config.architecture, key).is_file()


def _find_in(folder: Path, architecture: str, key: str) -> Path:
    """Return `<architecture>.safetensors` or `.pth`, or the file under torchvision's own name."""
    # NAME of timm:NAME and hf-hub:OWNER/NAME@REVISION
    stem = architecture.rpartition(":")[2].partition("@")[0].rpartition("/")[2]
    names = [f"{stem}.safetensors", f"{stem}.pth"]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    # Looked up late: the URLs need torchvision
    published = [_file_name(url) for url in _torchvision_urls(architecture)]
    for name in published:
        if (folder / name).is_file():
            return folder / name
    choices = " or ".join([*names, *published])
    raise ConfigError(f"{key} = {str(folder)!r}: the folder lacks {choices}. Put one there")


def _torchvision_weights(architecture: str, key: str) -> Path:
    """Return torchvision's default ImageNet weights in torch's cache; fetch them if necessary."""
    file = _torchvision_file(architecture, key)
    if not file.is_file():
        _fetch(_torchvision_urls(architecture)[0], file, key)
    return file


def _torchvision_file(architecture: str, key: str) -> Path:
    """Return the path of torchvision's default ImageNet weights in torch's cache."""
    import torch

    urls = _torchvision_urls(architecture)
    if not urls:
        raise ConfigError(
            f"{key} = 'imagenet': torchvision has no weights of {architecture}. "
            f"Set {key} to a file, or to 'none'"
        )
    return Path(torch.hub.get_dir()) / "checkpoints" / _file_name(urls[0])


def _fetch(url: str, file: Path, key: str) -> None:
    """Download a file and verify the start of its SHA-256, which its name contains."""
    import torch

    digits = re.search(r"-([0-9a-f]{8,})\.", file.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # All simulated clients of one machine need the same file
        with FileLock(f"{file}.lock"):
            if not file.is_file():
                prefix = digits.group(1) if digits else None
                torch.hub.download_url_to_file(url, str(file), prefix, progress=False)
    # No network (URLError), an unwritable folder, or another hash
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{key} = 'imagenet': {file} is missing, and {url} cannot be fetched ({error}). Put "
            f"the file there (TORCH_HOME sets the folder), set {key} to a folder that has it, or "
            f"set {key} to 'none' for random weights"
        ) from error


def _torchvision_urls(architecture: str) -> list[str]:
    """Return the URLs of torchvision's weights of an architecture, the default first."""
    # Seconds to import
    from torchvision.models import get_model_weights

    try:
        weights = get_model_weights(architecture)
    # `build_classifier` reports an unknown architecture
    except ValueError:
        return []
    default = getattr(weights, "DEFAULT", None)
    return [entry.url for entry in sorted(weights, key=lambda entry: entry is not default)]


def _file_name(url: str) -> str:
    return url.rpartition("/")[2]
