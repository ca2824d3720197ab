"""Conversion of flat keys to a checked configuration and back, and access to the keys' markers."""

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from osfl.config.markers import (
    AUTO,
    Approximate,
    ByData,
    ConfigError,
    ManyNames,
    NotIdentity,
    OneOf,
    Range,
    Scalar,
    SitePath,
    markers_of,
)
from osfl.config.problems import problems
from osfl.config.sections import NodeConfig, RunConfig
from osfl.methods import METHODS
from osfl.util.text import quote

# Characters of a setting's value, which may be a path
MAX_TEXT = 4096
# Characters of a list of names
MAX_NAMES = 2**16
# Characters of an unknown key that are compared with the known keys
MAX_KEY = 100
# Problems that are listed for one configuration
MAX_PROBLEMS = 20


def parse_run_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Parse and check a flat Flower run-config (dotted keys).

    Keys that are "auto" and depend on the data set are resolved.

    Raises:
        ConfigError: a key is unknown or missing, a value has a wrong type or is out of range, or
            values contradict each other. The message lists all problems, one per line.
    """
    keys = schema()
    values = resolve_auto(values)
    missing = [f"{key}: missing" for key in keys if key not in values]
    _refuse("run-config", [*_unknown_keys(values, keys), *missing, *_invalid(values, keys)])
    config: RunConfig = _build(RunConfig, values, "")
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

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type or is out of range.
    """
    keys = node_schema()
    _refuse("node-config", [*_unknown_keys(values, keys), *_invalid(values, keys)])
    fields_by_name: dict[str, Any] = {key.replace("-", "_"): values[key] for key in values}
    return NodeConfig(**fields_by_name)


def schema() -> dict[str, Any]:
    """Return every run-config key with its annotated type."""
    return _schema(RunConfig, "")


def node_schema() -> dict[str, Any]:
    """Return every node-config key with its annotated type."""
    return _schema(NodeConfig, "")


def flatten(config: Any, prefix: str = "") -> dict[str, Scalar]:
    """Return the flat dotted keys of a configuration: the inverse of `parse_run_config`."""
    flat: dict[str, Scalar] = {}
    for item in fields(config):
        key = prefix + item.name.replace("_", "-")
        value = getattr(config, item.name)
        flat.update(flatten(value, key + ".") if is_dataclass(value) else {key: value})
    return flat


def approximations(config: Mapping[str, Scalar]) -> list[str]:
    """List the ways in which a flat run-config's sampling differs from the papers', as texts."""
    marks = {key: mark for key, kind in schema().items() for mark in markers_of(kind, Approximate)}
    values = {key: config.get(key, mark.exact) for key, mark in marks.items()}
    texts = []
    for key, mark in marks.items():
        if values[key] != mark.exact and _affects(key, mark, str(config["method"])):
            prefix = f"{key.rpartition('.')[0]}."
            section = {
                name.removeprefix(prefix).replace("-", "_"): value
                for name, value in values.items()
                if name.startswith(prefix)
            }
            texts.append(mark.words.format(**section))
    return list(dict.fromkeys(texts))


def _affects(key: str, mark: Approximate, method: str) -> bool:
    section = key.partition(".")[0]
    if section in METHODS and section != method:
        return False
    return not mark.methods or method in mark.methods


def _refuse(name: str, errors: list[str]) -> None:
    if errors:
        lines = errors[:MAX_PROBLEMS]
        if len(errors) > len(lines):
            lines.append(f"and {len(errors) - len(lines)} more")
        raise ConfigError(f"invalid {name}:\n  " + "\n  ".join(lines))


def _unknown_keys(values: Mapping[str, Scalar], keys: Mapping[str, Any]) -> Iterator[str]:
    unknown = [key for key in values if key not in keys]
    for number, key in enumerate(unknown):
        # A comparison takes a millisecond, so only the problems that are listed get one
        similar = (
            difflib.get_close_matches(key[:MAX_KEY], keys, n=1) if number < MAX_PROBLEMS else []
        )
        name = key if len(key) <= MAX_KEY and key.isprintable() else quote(key, MAX_KEY)
        yield f"{name}: unknown key" + (f" (did you mean {similar[0]}?)" if similar else "")


def _invalid(values: Mapping[str, Scalar], keys: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key in keys and (problem := _check(key, value, keys[key])):
            yield problem


def _schema(section: Any, prefix: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, annotated in get_type_hints(section, include_extras=True).items():
        key = prefix + name.replace("_", "-")
        kind = getattr(annotated, "__origin__", annotated)
        keys.update(_schema(kind, key + ".") if is_dataclass(kind) else {key: annotated})
    return keys


def _build(section: Any, values: Mapping[str, Scalar], prefix: str) -> Any:
    arguments = {}
    for name, kind in get_type_hints(section).items():
        key = prefix + name.replace("_", "-")
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
