"""Check the paths that a run's settings name: they must be below the site's `allowed-dirs`.

This node reads the files that a run-config names, and their weights may then leave in the payload.
Paths in the node-config are the site's own and are not restricted.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from osfl.config import SITE_PATHS, ConfigError, NodeConfig, RunConfig, flatten, split_names
from osfl.data.named import is_named, repository_of
from osfl.kit.kits import is_hub_id, kit_roots
from osfl.kit.used_parts import kit_parts, models_outside_kit
from osfl.methods import METHODS
from osfl.util.text import sanitize

_INITS = ("kit", "imagenet", "pretrained", "none")
_HUB_PREFIX = "hf-hub:"
# Keys of the models that `osfl advise` measures with, beside the kit
ADVICE_MODELS = {"classifier.architecture", "classifier.init", "image-encoder"}


def check_paths(config: RunConfig, node: NodeConfig) -> None:
    """Reject a run whose settings name files outside the folders that this site allows.

    The message is the same whether the file exists or not.

    Raises:
        ConfigError: a path is outside, or a folder of `allowed-dirs` is not absolute.
    """
    check_settings(_used_keys(config, node), config, node)


def check_settings(keys: set[str], config: RunConfig, node: NodeConfig) -> None:
    """Reject a run of whose settings one of these keys names a file that this site does not allow.

    Raises:
        ConfigError: as `check_paths`.
    """
    folders = allowed_folders(node)
    values = flatten(config)
    for key in SITE_PATHS:
        for place in _places(key, str(values[key])) if key in keys else ():
            _check(key, place, folders)


def check_architecture(architecture: str, node: NodeConfig) -> None:
    """Reject a global model whose architecture is a folder that this site does not allow.

    Raises:
        ConfigError: as `check_paths`.
    """
    for place in _places("global-model.architecture", architecture):
        _check("global-model.architecture", place, allowed_folders(node))


def allowed_folders(node: NodeConfig) -> list[Path]:
    """Return the resolved folders in which a run's settings may name files.

    Raises:
        ConfigError: one of `allowed-dirs` is not absolute.
    """
    from huggingface_hub import constants

    names = split_names(node.allowed_dirs or os.environ.get("OSFL_ALLOWED_DIRS", ""))
    if relative := [name for name in names if not Path(name).expanduser().is_absolute()]:
        raise ConfigError(
            f"node-config allowed-dirs: {relative[0]!r} must be an absolute path; set allowed-dirs "
            "to absolute folders, comma-separated"
        )
    site_folders = [Path(name).expanduser() for name in names]
    return [
        folder.resolve() for folder in (*site_folders, *kit_roots(), Path(constants.HF_HUB_CACHE))
    ]


def _used_keys(config: RunConfig, node: NodeConfig) -> set[str]:
    """Return the keys whose paths this client would read; the server alone may use others.

    A site that only tests makes no payload, and reads its images alone.
    """
    if node.tests_only:
        return _data_keys(config, node)
    if config.advise:
        kits = set() if node.kit else {"kit"}
        return kits | ADVICE_MODELS | _data_keys(config, node)
    method = METHODS[config.method]
    used = {key for key, _, _ in models_outside_kit(config)}
    if kit_parts(config) and not (node.kit and config.sampling_kit == config.kit):
        used.add("kit" if config.sampling_kit == config.kit else config.sampling_kit_key)
    if method.settings:
        used |= {key for key in SITE_PATHS if key.startswith(f"{method.section}.")}
    if method.rounds or method.loads_initial_weights:
        used |= {"classifier.architecture", "classifier.init"}
    return used | _data_keys(config, node)


def _data_keys(config: RunConfig, node: NodeConfig) -> set[str]:
    used = set()
    if not node.data_dir and is_named(config.data):
        used.add("data.name")
    if not node.data_dir and config.data.name != "digits":
        used.add("data.root")
    return used


def _places(key: str, value: str) -> Iterator[str]:
    """Yield the paths and hub ids in a setting."""
    if key.endswith("architecture"):
        for name in split_names(value):
            if name.startswith(_HUB_PREFIX):
                yield name.removeprefix(_HUB_PREFIX)
    elif key == "data.name":
        yield repository_of(value)[0]
    elif key.endswith(".init"):
        yield from () if value in _INITS else (value,)
    elif key.endswith("kit"):
        # A shipped kit is named without a slash
        yield from (value,) if "/" in value or "\\" in value else ()
    elif value:
        yield value


def _check(key: str, place: str, folders: list[Path]) -> None:
    if is_hub_id(place) and ".." not in place.replace("@", "/").split("/"):
        return
    if not _is_allowed(place, folders, key != "data.root"):
        raise ConfigError(
            f"{key} = {sanitize(place, 200)!r}: must be below a folder that this client's site "
            "allows. Set it to a shipped kit or a hub id, or ask the site to add the folder to its "
            "node-config allowed-dirs"
        )


def _is_allowed(place: str, folders: list[Path], links: bool) -> bool:
    """Return whether a path, and with `links` every symlink in it, resolves below one of the
    folders.
    """
    try:
        resolved = Path(place).expanduser().resolve()
        if not _is_below(resolved, folders):
            return False
        entries = resolved.rglob("*") if links and resolved.is_dir() else ()
        return all(_is_below(entry.resolve(), folders) for entry in entries if entry.is_symlink())
    # Unknown user, symlink loop, invalid file name or a folder without permission to list
    except (OSError, ValueError, RuntimeError):
        return False


def _is_below(resolved: Path, folders: list[Path]) -> bool:
    return any(resolved.is_relative_to(folder) for folder in folders)
