"""Resolve a run's configuration: TOML files and `key=value` arguments over the defaults."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

from flwr.common.config import flatten_dict

from osfl.config import ConfigError, RunConfig, Scalar, parse_run_config, schema
from osfl.config.toml import parse_toml, read_toml
from osfl.data.named import is_named, resolve_classes
from osfl.data.partition import DataError
from osfl.util.text import quote, sanitize

# The folder of the app's packages: a checkout, or site-packages
PACKAGES = Path(__file__).resolve().parents[1]
RECOMMENDED = "configs/recommended.toml"


# A TOML file, a `key=value` argument, or settings by key as TOML would give them
Setting = str | Path | Mapping[str, Any]


class InstallationError(ConfigError):
    """An installation of osfl that is incomplete."""


class UnseenDataError(ConfigError):
    """A data set that is unavailable, so that its classes are unknown."""


def shipped(name: str) -> Path:
    """Return the path of a file that comes with osfl: `pyproject.toml`, `LICENSE` or `configs`.

    It is in the checkout's root, or in `osfl_app`, where the wheel installs it.

    Raises:
        InstallationError: the file is missing.
    """
    for folder in (PACKAGES, PACKAGES / "osfl_app"):
        if (folder / "pyproject.toml").is_file() and (folder / name).exists():
            return folder / name
    raise InstallationError(
        f"this installation lacks {name}: reinstall osfl from a wheel, or from a checkout with "
        "`pip install -e '.[simulation]'`"
    )


def default_config() -> dict[str, Scalar]:
    """Return the default of every run-config key, from pyproject.toml."""
    project = tomllib.loads(shipped("pyproject.toml").read_text(encoding="utf-8"))
    return flatten_dict(project["tool"]["flwr"]["app"]["config"])


def resolve_config(arguments: Iterable[Setting]) -> tuple[RunConfig, dict[str, Scalar]]:
    """Merge TOML files, `key=value` arguments and mappings, left to right, over the defaults.

    Values are TOML (`seed=1`, `classifier.small-stem=false`); anything else is a string
    (`method=fedlmg`).

    Returns:
        the checked configuration and the overrides.

    Raises:
        ConfigError: a file is missing or invalid, a key is unknown, or a value is invalid.
    """
    defaults = default_config()
    overrides = read_overrides(arguments)
    config = parse_run_config({**defaults, **overrides})
    if is_named(config.data):
        # Nodes receive the class names, so that all of them agree
        overrides["data.classes"] = ",".join(_classes(config))
        config = parse_run_config({**defaults, **overrides})
    return config, overrides


def read_overrides(arguments: Iterable[Setting]) -> dict[str, Scalar]:
    """Read the settings of files, `key=value` arguments and mappings, without checking them.

    An existing file is read even if its path has an equals sign.

    Raises:
        ConfigError: a file is missing or invalid, or a value has a type that no key has.
    """
    overrides = dict[str, Scalar]()
    for argument in arguments:
        if isinstance(argument, Mapping):
            layer = flatten_toml(argument)
        else:
            layer = _read_layer(str(argument))
        overrides = merge_settings(overrides, layer)
    return overrides


def _read_layer(argument: str) -> dict[str, Scalar]:
    """Read the settings of a file or of a `key=value` argument."""
    key, equals, text = argument.partition("=")
    if equals and not _is_file(argument):
        return {key.strip(): _value(key.strip(), text.strip(" \t"))}
    return flatten_toml(read_toml(find_config(argument), argument))


def merge_settings(
    settings: Mapping[str, Scalar], later: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Merge later settings over earlier ones.

    Epochs that are set later reset earlier steps to 0, which would take precedence over them.
    """
    reset_keys = {f"{key.removesuffix('epochs')}steps" for key in later if key.endswith(".epochs")}
    return {**settings, **dict.fromkeys(reset_keys & set(settings), 0), **later}


def _classes(config: RunConfig) -> tuple[str, ...]:
    try:
        return resolve_classes(config.data)
    except DataError as error:
        raise UnseenDataError(str(error)) from None


def _value(key: str, text: str) -> Scalar:
    """Parse the value of a `key=value` argument.

    Raises:
        ConfigError: the value has a type that no key has.
    """
    kind = schema().get(key)
    if getattr(kind, "__origin__", kind) is str and not text.startswith("["):
        return text.strip("\"'")
    try:
        table = parse_toml(f"value = {text}", key)
    except ConfigError:
        return text
    if list(table) != ["value"]:
        return text
    return _scalar(key, table["value"])


def with_recommended(settings: Iterable[str] | None) -> list[str]:
    """Prepend configs/recommended.toml unless the settings contain a method.

    Raises:
        ConfigError: as `read_overrides`.
    """
    arguments = list(settings or [])
    return arguments if "method" in read_overrides(arguments) else [RECOMMENDED, *arguments]


def _is_file(name: str) -> bool:
    # A `key=value` argument may be longer than any file name
    with suppress(OSError):
        return Path(name).is_file()
    return False


def find_config(name: str) -> Path:
    """Find a settings file here, or among those that come with osfl, such as configs/demo.toml.

    `demo` is short for configs/demo.toml, unless a file here has that name.

    Raises:
        ConfigError: there is no such file.
    """
    file = Path(name)
    if _is_file(name):
        return file
    packaged = shipped("configs")
    if file.name == name and not file.suffix:
        file = Path(packaged.name, f"{name}.toml")
    shipped_file = packaged.parent / file
    is_inside = file.parts[:1] == (packaged.name,) and ".." not in file.parts
    if is_inside and _is_file(str(shipped_file)):
        return shipped_file
    raise ConfigError(f"{quote(name)}: no such file, and not key=value{_similar(name, packaged)}")


def _similar(name: str, packaged: Path) -> str:
    """Return a hint that names shipped settings files like a missing one, or where they are."""
    names = sorted(
        path.relative_to(packaged.parent).as_posix() for path in packaged.rglob("*.toml")
    )
    stem = PurePosixPath(name).stem
    similar = [other for other in names if PurePosixPath(other).stem == stem]
    similar = similar or get_close_matches(name, names, n=1, cutoff=0.8)
    if similar:
        return f"; did you mean {' or '.join(similar)}?"
    files = [other for other in names if other.count("/") == 1]
    folders = sorted({PurePosixPath(other).parent.as_posix() for other in names} - {packaged.name})
    return f". osfl comes with {', '.join(files)}, and more in {', '.join(folders)}"


def flatten_toml(table: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flatten a TOML table to dotted keys; lists become comma-separated strings.

    Raises:
        ConfigError: a value has a type that no run-config key has.
    """
    return dict(_flat(table, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        # Empty sections disappear, but `seed = {}` is an invalid value
        if isinstance(value, Mapping) and (value or prefix + key not in schema()):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _scalar(prefix + key, value)


def _scalar(key: str, value: Any) -> Scalar:
    """Convert a TOML value for the run-config; a list becomes a comma-separated string.

    Raises:
        ConfigError: a table, a date, or a list with other items than strings and numbers.
    """
    if isinstance(value, list | tuple) and all(
        isinstance(item, int | float | str) for item in value
    ):
        return ",".join(map(str, value))
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(
        f"{sanitize(key)} = {sanitize(value)}: must be a string, a number, true, false, or a "
        "list of "
        "these"
    )
