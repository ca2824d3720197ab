"""Conversion of flat keys to a checked configuration and back, and access to the keys' markers."""

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from osfl.config.kinds import all_parts, is_mixed, methods_of
from osfl.config.problems import problems
from osfl.config.sections import NodeConfig, RunConfig
from osfl.methods import METHODS, REFUSED
from osfl.methods.mixed import MixedConfig
from osfl.util.markers import (
    AUTO,
    Approximate,
    ByData,
    ConfigError,
    ManyNames,
    NotIdentity,
    OneOf,
    Range,
    Scalar,
    ServerKey,
    SitePath,
    markers_of,
)
from osfl.util.text import quote

# Characters of a setting's value, which may be a path
MAX_TEXT = 4096
# Characters of a list of names
MAX_NAMES = 2**16
# Characters of an unknown key that are compared with the known keys
MAX_KEY = 100
# Problems that are listed for one configuration
MAX_PROBLEMS = 20
# Keys of version 0.2, and what they are called now
RENAMED = {
    "espresso.at-once": "espresso.conditions-per-batch",
    "feddeo.at-once": "feddeo.conditions-per-batch",
    "influence": "client-contribution",
    "label-check": "label-filter",
    "left-out": "held-out",
    "robust": "defense, where exclude is label-consistency and report is label-consistency-report",
    "synthesis.small-decoder": "synthesis.tiny-decoder",
    "synthesis.units-at-once": "synthesis.parallel-units",
    "votes.electorate": "votes.granularity",
}
# The node-config key that NVFlare gives to every node
_SITE_NAME = "client-name"
# The field of RunConfig that is no key, but the section of an installed package's method
_INSTALLED = "installed_settings"


def parse_run_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Parse and check a flat Flower run-config (dotted keys).

    Keys that are "auto" and depend on the data set are resolved. Keys of an installed package's
    method may be missing, because its dataclass has their defaults.

    Raises:
        ConfigError: a key is unknown or missing, a value has a wrong type or is out of range, or
            values contradict each other. The message lists all problems, one per line.
    """
    method = str(values.get("method"))
    if method in REFUSED:
        raise ConfigError(REFUSED[method])
    keys = _run_keys(method)
    values = resolve_auto({**installed_defaults(method), **values})
    missing = [f"{key}: missing" for key in keys if key not in values]
    _refuse("run-config", [*_unknown_keys(values, keys), *missing, *_invalid(values, keys)])
    config: RunConfig = _build(RunConfig, values, "")
    if settings := METHODS[method].settings:
        config = replace(config, installed_settings=_build(settings, values, f"{method}."))
    _refuse("run-config", list(problems(config)))
    return config


def resolve_auto(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Resolve the "auto" values of a flat run-config that depend on the data set."""
    digits = values.get("data.name") == "digits"
    resolved = dict(values)
    for key, kind in schema().items():
        for mark in markers_of(kind, ByData) if values.get(key) == AUTO else ():
            resolved[key] = mark.digits if digits else mark.others
    return resolved


def parse_node_config(values: Mapping[str, Scalar]) -> NodeConfig:
    """Parse and check a node-config.

    NVFlare, which starts Flower's nodes itself, names its site by `client-name`: the client id,
    unless there is one.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type or is out of range.
    """
    keys = node_schema()
    named = {"client-id": values[_SITE_NAME]} if _SITE_NAME in values else {}
    others = {key: value for key, value in values.items() if key != _SITE_NAME}
    values = {**named, **others}
    _refuse("node-config", [*_unknown_keys(values, keys), *_invalid(values, keys)])
    fields_by_name: dict[str, Any] = {key.replace("-", "_"): values[key] for key in values}
    return NodeConfig(**fields_by_name)


def schema() -> dict[str, Any]:
    """Return every run-config key with its annotated type, also those of installed methods."""
    keys = dict(_schema(RunConfig, ""))
    for name, method in METHODS.items():
        if method.settings:
            keys.update(_schema(method.settings, f"{name}."))
    return keys


def installed_defaults(method: str) -> dict[str, Scalar]:
    """Return the defaults of an installed package's method; {} for a method of OSFL.

    A run with another method does not have these keys, so that it is the same run on a machine
    without the package.

    Raises:
        ConfigError: the method's section has the name of another key.
    """
    settings = METHODS[method].settings if method in METHODS else None
    if settings is None:
        return {}
    if method.replace("-", "_") in key_hints(RunConfig):
        raise ConfigError(
            f"method = {quote(method)}: OSFL has a key of this name; rename the entry point of "
            "the installed package"
        )
    return flatten(settings(), f"{method}.")


def _run_keys(method: str) -> dict[str, Any]:
    """Return every key of a run with this method."""
    return {key: kind for key, kind in schema().items() if _installed_owner(key) in ("", method)}


def _installed_owner(key: str) -> str:
    """Return the installed package's method that a key belongs to; "" for a key of OSFL."""
    section = key.partition(".")[0]
    return section if section in METHODS and METHODS[section].settings else ""


def node_schema() -> Mapping[str, Any]:
    """Return every node-config key with its annotated type."""
    return _schema(NodeConfig, "")


def flatten(config: Any, prefix: str = "") -> dict[str, Scalar]:
    """Return the flat dotted keys of a configuration: the inverse of `parse_run_config`."""
    flat: dict[str, Scalar] = {}
    for item in fields(config):
        key = prefix + item.name.replace("_", "-")
        value = getattr(config, item.name)
        if item.name == _INSTALLED:
            flat.update({} if value is None else flatten(value, f"{config.method}."))
        else:
            flat.update(flatten(value, key + ".") if is_dataclass(value) else {key: value})
    return flat


def payload_settings(config: RunConfig) -> dict[str, Scalar]:
    """Return the flat settings that can shape a payload of this run: its clients' keys.

    An installed package's client half may read every key but those that its own section marks.
    """
    if is_mixed(config):
        settings = {}
        for part in all_parts(config).values():
            settings.update(payload_settings(part))
        return {**settings, **_shared_settings(config)}
    half = METHODS[config.method].client or ""
    is_installed = "." in half
    sections = {method.section for method in METHODS.values() if method.client == half}
    other_sections = {method.section for method in METHODS.values()} - sections
    kinds = schema()
    settings = {}
    for key, value in flatten(config).items():
        section = key.partition(".")[0]
        is_read = is_installed or section not in other_sections
        has_marks = not is_installed or section in sections
        marks = markers_of(kinds[key], ServerKey) if has_marks else []
        is_marked = any(half not in mark.except_for for mark in marks)
        if is_read and not is_marked and key not in NOT_IDENTITY:
            settings[key] = value
    return settings


def _shared_settings(config: RunConfig) -> dict[str, Scalar]:
    """Return the keys of a mixed run that its parts do not have, or with other values."""
    names = ("mixed.methods", "mixed.assignment")
    kinds = {key: value for key, value in flatten(config).items() if key in names}
    return {"method": config.method, "payload-codec": config.payload_codec, **kinds}


@cache
def key_hints(section: Any) -> Mapping[str, Any]:
    """Return the annotated type of every key and section in a section, by its Python name."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != _INSTALLED}


def approximations(config: Mapping[str, Scalar]) -> list[str]:
    """List the ways in which a flat run-config's sampling differs from the papers', as texts."""
    marks = {key: mark for key, kind in schema().items() for mark in markers_of(kind, Approximate)}
    values = {key: config.get(key, mark.exact) for key, mark in marks.items()}
    methods = flat_methods(config)
    texts = []
    for key, mark in marks.items():
        if values[key] != mark.exact and any(_affects(key, mark, name) for name in methods):
            prefix = f"{key.rpartition('.')[0]}."
            section = {
                name.removeprefix(prefix).replace("-", "_"): value
                for name, value in values.items()
                if name.startswith(prefix)
            }
            texts.append(mark.words.format(**section))
    return list(dict.fromkeys(texts))


def flat_methods(config: Mapping[str, Scalar]) -> list[str]:
    """Return the method of a flat run-config, or all those of a mixed run."""
    method = str(config["method"])
    if method not in METHODS or METHODS[method].settings is not MixedConfig:
        return [method]
    kinds = MixedConfig(str(config["mixed.methods"])).kinds
    return [name for kind in kinds for name in methods_of(kind)]


def _affects(key: str, mark: Approximate, method: str) -> bool:
    section = key.partition(".")[0]
    sections = {row.section for row in METHODS.values()}
    if section in sections and section != METHODS[method].section:
        return False
    return not mark.methods or method in mark.methods


def _refuse(name: str, errors: list[str]) -> None:
    if errors:
        lines = errors[:MAX_PROBLEMS]
        if len(errors) > len(lines):
            lines.append(f"and {len(errors) - len(lines)} more")
        raise ConfigError(f"invalid {name}:\n  " + "\n  ".join(lines))


def new_key(key: str) -> str:
    """Return what a key of version 0.2 is called now; "" for another key."""
    section, dot, name = key.partition(".")
    if section == "adaptation" and dot:
        return f"personalization.{name}"
    return RENAMED.get(key, "")


def _unknown_keys(values: Mapping[str, Scalar], keys: Mapping[str, Any]) -> Iterator[str]:
    unknown = [key for key in values if key not in keys]
    for number, key in enumerate(unknown):
        if new_name := new_key(key):
            yield f"{key}: renamed to {new_name}"
            continue
        name = key if len(key) <= MAX_KEY and key.isprintable() else quote(key, MAX_KEY)
        if owner := _installed_owner(key):
            yield f"{name}: is a key of method {owner!r}; set method={owner}, or leave the key out"
            continue
        # A comparison takes a millisecond, so only the problems that are listed get one
        similar = _similar_key(key, keys) if number < MAX_PROBLEMS else ""
        yield f"{name}: unknown key" + (f" (did you mean {similar}?)" if similar else "")


def _similar_key(key: str, keys: Mapping[str, Any]) -> str:
    """Return the key that was probably meant: by its spelling, or by its name in a section."""
    matches: list[str] = difflib.get_close_matches(key[:MAX_KEY], keys, n=1)
    if matches:
        return matches[0]
    return next((known for known in keys if known.rpartition(".")[2] == key), "")


def _invalid(values: Mapping[str, Scalar], keys: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key in keys and (problem := _check(key, value, keys[key])):
            yield problem


@cache
def _schema(section: Any, prefix: str, mark: ServerKey | None = None) -> Mapping[str, Any]:
    """Return the annotated type of every key.

    Args:
        mark: the section's own, which its keys inherit.
    """
    keys: dict[str, Any] = {}
    for name, annotated in key_hints(section).items():
        key = prefix + name.replace("_", "-")
        kind = getattr(annotated, "__origin__", annotated)
        # A name of its own, because mypy would take a narrowed `kind` for unhashable
        is_section = is_dataclass(kind)
        if is_section:
            marks = markers_of(annotated, ServerKey)
            keys.update(_schema(kind, key + ".", marks[0] if marks else None))
        elif mark is not None and not markers_of(annotated, ServerKey):
            keys[key] = Annotated[annotated, mark]
        else:
            keys[key] = annotated
    return keys


def _build(section: Any, values: Mapping[str, Scalar], prefix: str) -> Any:
    arguments = {}
    for name, annotated in key_hints(section).items():
        key = prefix + name.replace("_", "-")
        kind = getattr(annotated, "__origin__", annotated)
        arguments[name] = (
            _build(kind, values, key + ".") if is_dataclass(kind) else kind(values[key])
        )
    return section(**arguments)


def _check(key: str, value: Scalar, annotated: Any) -> str | None:
    """Return the problem with one value, or None."""
    kind = getattr(annotated, "__origin__", annotated)
    accepted: Any = (int | float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
        return f"{key} = {quote(value)}: must be {_type_name(accepted)}"
    limit = MAX_NAMES if markers_of(annotated, ManyNames) else MAX_TEXT
    if isinstance(value, str) and (problem := _text_problem(value, limit)):
        return f"{key} = {quote(value)}: {problem}"
    for rule in markers_of(annotated, OneOf):
        if value not in rule.choices:
            return f"{key} = {quote(value)}: {_choices(str(value), rule)}"
    for rule in markers_of(annotated, Range):
        if not rule.low <= value <= rule.high:
            return f"{key} = {quote(value)}: must be between {rule.low:g} and {rule.high:g}"
    return None


def _text_problem(text: str, limit: int) -> str:
    """Return the problem with a text, whatever its key; "" if there is none."""
    if len(text) > limit:
        return f"must have at most {limit:,} characters"
    # Names in a list are checked one by one elsewhere
    if "\0" in text and limit == MAX_TEXT:
        return "must not contain a null character"
    # Python represents arguments and paths that are not UTF-8 with surrogates
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "must be UTF-8; rename the file or folder, or set the terminal to UTF-8"
    return ""


def _choices(value: str, rule: OneOf) -> str:
    """List the texts that a key allows, and the one that was probably meant."""
    choices = ", ".join(choice or "empty" for choice in rule.choices)
    similar = difflib.get_close_matches(value[:MAX_KEY], rule.choices, n=1)
    return f"must be one of {choices}" + (f" (did you mean {similar[0]}?)" if similar else "")


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", str: "a text", bool: "true or false"}
    return "a number" if isinstance(kind, types.UnionType) else names[kind]


# Keys that may differ between a run and its resumption, because they change no result
NOT_IDENTITY = frozenset(key for key, kind in schema().items() if markers_of(kind, NotIdentity))
NODE_NOT_IDENTITY = frozenset(
    key for key, kind in node_schema().items() if markers_of(kind, NotIdentity)
)
# Keys that can name a file or folder on the machine that uses them, and which side that is
SITE_PATHS = {key: mark.on for key, kind in schema().items() for mark in markers_of(kind, SitePath)}
