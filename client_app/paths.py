"""The files of a site that a run's settings may name: those below the site's `allowed-dirs`.

What a run-config names is read here, and weights then travel in the payload. Paths of the
node-config are the site's own, and free.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from osfl.config import SITE_PATHS, ConfigError, NodeConfig, RunConfig, flatten, split_names
from osfl.data.named import is_named, repository_of
from osfl.kit.kits import is_hub_id, kit_roots
from osfl.kit.used_parts import kit_parts, models_apart
from osfl.methods import METHODS
from osfl.util.text import plain

_INITS = ("kit", "imagenet", "pretrained", "none")
_OF_THE_HUB = "hf-hub:"


def check_paths(config: RunConfig, node: NodeConfig) -> None:
    """Refuse a run whose settings name files outside the folders that this site allows.

    The words are the same whether there is such a file or not.

    Raises:
        ConfigError: a path is outside, or a folder of `allowed-dirs` is not absolute.
    """
    folders = allowed_folders(node)
    values = flatten(config)
    used = _used_keys(config, node)
    for key in SITE_PATHS:
        for place in _places(key, str(values[key])) if key in used else ():
            _check(key, place, folders)


def check_architecture(architecture: str, node: NodeConfig) -> None:
    """Refuse a global model whose architecture is a folder outside those that this site allows.

    Raises:
        ConfigError: as `check_paths`.
    """
    for place in _places("global-model.architecture", architecture):
        _check("global-model.architecture", place, allowed_folders(node))


def allowed_folders(node: NodeConfig) -> list[Path]:
    """Return the real paths of the folders that a run's settings may name files of.

    Raises:
        ConfigError: one of `allowed-dirs` is not absolute.
    """
    from huggingface_hub import constants

    named = split_names(node.allowed_dirs or os.environ.get("OSFL_ALLOWED_DIRS", ""))
    if relative := [name for name in named if not Path(name).expanduser().is_absolute()]:
        raise ConfigError(
            f"node-config allowed-dirs: {relative[0]!r} must be an absolute path; set allowed-dirs "
            "to absolute folders, comma-separated"
        )
    own = [Path(name).expanduser() for name in named]
    return [folder.resolve() for folder in (*own, *kit_roots(), Path(constants.HF_HUB_CACHE))]


def _used_keys(config: RunConfig, node: NodeConfig) -> set[str]:
    """Return the keys whose paths this client would read: others may be the server's alone."""
    method = METHODS[config.method]
    used = {key for key, _, _ in models_apart(config)}
    if kit_parts(config) and not (node.kit and config.sampling_kit == config.kit):
        used.add("kit" if config.sampling_kit == config.kit else "feddisc.kit")
    if method.rounds or method.features or method.payload == "Classifier":
        used |= {"classifier.architecture", "classifier.init"}
    if not node.data_dir and is_named(config.data):
        used.add("data.name")
    if not node.data_dir and config.data.name != "digits":
        used.add("data.root")
    return used


def _places(key: str, value: str) -> Iterator[str]:
    """The paths and hub ids in a setting."""
    if key.endswith("architecture"):
        for name in split_names(value):
            if name.startswith(_OF_THE_HUB):
                yield name.removeprefix(_OF_THE_HUB)
    elif key == "data.name":
        yield repository_of(value)[0]
    elif key.endswith(".init"):
        yield from () if value in _INITS else (value,)
    elif key.endswith("kit"):
        # A shipped one has a name alone
        yield from (value,) if "/" in value or "\\" in value else ()
    elif value:
        yield value


def _check(key: str, place: str, folders: list[Path]) -> None:
    if is_hub_id(place) and ".." not in place.replace("@", "/").split("/"):
        return
    if not _is_allowed(place, folders, key != "data.root"):
        raise ConfigError(
            f"{key} = {plain(place, 200)!r}: this client may not use the path, for it is not below "
            "a folder that its site allows. Name a shipped kit or a hub id; or the site adds the "
            "folder to its node-config allowed-dirs"
        )


def _is_allowed(place: str, folders: list[Path], links: bool) -> bool:
    """Whether a path is below one of the folders; and, with `links`, where its links lead."""
    try:
        real = Path(place).expanduser().resolve()
        if not _is_below(real, folders):
            return False
        entries = real.rglob("*") if links and real.is_dir() else ()
        return all(_is_below(entry.resolve(), folders) for entry in entries if entry.is_symlink())
    # No such user, a loop of links, a name that no disk takes, a folder that this user may not list
    except (OSError, ValueError, RuntimeError):
        return False


def _is_below(real: Path, folders: list[Path]) -> bool:
    return any(real.is_relative_to(folder) for folder in folders)
