"""Flat keys to a checked configuration and back; what is marked on the keys."""

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
    marks_of,
)
from osfl.config.problems import problems
from osfl.config.sections import NodeConfig, RunConfig
from osfl.methods import METHODS
from osfl.util.text import quoted

MOST_TEXT = 4096  # characters of a setting's value, as of a path
MOST_NAMES = 2**16  # characters of a list of names
MOST_KEY = 100  # characters of a key that is compared with those that there are
MOST_PROBLEMS = 20  # that are shown of one configuration


def parse_run_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Check a flat Flower run-config (dotted keys) and make it a `RunConfig`.

    A key that is "auto" because the kind of the images decides it gets its value here.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a value out of range, values that do
            not go together. All of them, one a line.
    """
    known = schema()
    values = by_data(values)
    missing = [f"{key}: missing" for key in known if key not in values]
    _refuse("run-config", [*_unknown(values, known), *missing, *_wrong(values, known)])
    config: RunConfig = _build(RunConfig, values, "")
    _refuse("run-config", list(problems(config)))
    return config


def by_data(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """A flat run-config whose "auto" values that depend on the kind of the data are resolved."""
    digits = values.get("data.name") == "digits"
    chosen = dict(values)
    for key, kind in schema().items():
        for mark in marks_of(kind, ByData) if values.get(key) == AUTO else ():
            chosen[key] = mark.digits if digits else mark.others
    return chosen


def parse_node_config(values: Mapping[str, Scalar]) -> NodeConfig:
    """Check a node-config; unknown keys and wrong types are refused.

    Raises:
        ConfigError: as `parse_run_config`.
    """
    known = node_schema()
    _refuse("node-config", [*_unknown(values, known), *_wrong(values, known)])
    named: dict[str, Any] = {key.replace("-", "_"): value for key, value in values.items()}
    return NodeConfig(**named)


def schema() -> dict[str, Any]:
    """Every run-config key with its annotated type."""
    return _schema(RunConfig, "")


def node_schema() -> dict[str, Any]:
    """Every node-config key with its annotated type."""
    return _schema(NodeConfig, "")


def flatten(config: Any, prefix: str = "") -> dict[str, Scalar]:
    """The inverse of `parse_run_config`: dotted kebab-case keys."""
    flat: dict[str, Scalar] = {}
    for item in fields(config):
        key = prefix + item.name.replace("_", "-")
        value = getattr(config, item.name)
        flat.update(flatten(value, key + ".") if is_dataclass(value) else {key: value})
    return flat


def approximations(config: Mapping[str, Scalar]) -> list[str]:
    """What of a flat run-config samples otherwise than the papers do, for speed, in words."""
    marked = {key: mark for key, kind in schema().items() for mark in marks_of(kind, Approximate)}
    values = {key: config.get(key, mark.exact) for key, mark in marked.items()}
    found = []
    for key, mark in marked.items():
        if values[key] != mark.exact and _matters(key, mark, str(config["method"])):
            section = key.rpartition(".")[0]
            beside = {
                other.removeprefix(f"{section}.").replace("-", "_"): value
                for other, value in values.items()
                if other.startswith(f"{section}.")
            }
            found.append(mark.words.format(**beside))
    return list(dict.fromkeys(found))


def _matters(key: str, mark: Approximate, method: str) -> bool:
    section = key.partition(".")[0]
    if section in METHODS and section != method:
        return False
    return not mark.methods or method in mark.methods


def _refuse(what: str, found: list[str]) -> None:
    if found:
        shown = found[:MOST_PROBLEMS]
        if len(found) > len(shown):
            shown.append(f"and {len(found) - len(shown)} more")
        raise ConfigError(f"bad {what}:\n  " + "\n  ".join(shown))


def _unknown(values: Mapping[str, Scalar], known: Mapping[str, Any]) -> Iterator[str]:
    unknown = [key for key in values if key not in known]
    for number, key in enumerate(unknown):
        # Comparing takes a millisecond a key, and no more problems than these are shown
        near = (
            difflib.get_close_matches(key[:MOST_KEY], known, n=1) if number < MOST_PROBLEMS else []
        )
        name = key if len(key) <= MOST_KEY and key.isprintable() else quoted(key, MOST_KEY)
        yield f"{name}: unknown key" + (f" (did you mean {near[0]}?)" if near else "")


def _wrong(values: Mapping[str, Scalar], known: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key in known and (problem := _check(key, value, known[key])):
            yield problem


def _schema(section: Any, prefix: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, annotated in get_type_hints(section, include_extras=True).items():
        key = prefix + name.replace("_", "-")
        kind = getattr(annotated, "__origin__", annotated)
        keys.update(_schema(kind, key + ".") if is_dataclass(kind) else {key: annotated})
    return keys


def _build(section: Any, values: Mapping[str, Scalar], prefix: str) -> Any:
    made = {}
    for name, kind in get_type_hints(section).items():
        key = prefix + name.replace("_", "-")
        made[name] = _build(kind, values, key + ".") if is_dataclass(kind) else kind(values[key])
    return section(**made)


def _check(key: str, value: Scalar, annotated: Any) -> str | None:
    """What is wrong with one value, or None."""
    kind = getattr(annotated, "__origin__", annotated)
    accepted: Any = (int | float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
        return f"{key} = {quoted(value)}: must be {_type_name(accepted)}"
    limit = MOST_NAMES if marks_of(annotated, ManyNames) else MOST_TEXT
    if isinstance(value, str) and (problem := _text_problem(value, limit)):
        return f"{key} = {quoted(value)}: {problem}"
    for rule in marks_of(annotated, OneOf):
        if value not in rule.choices:
            return f"{key} = {quoted(value)}: {_choices(str(value), rule)}"
    for rule in marks_of(annotated, Range):
        if not rule.low <= value <= rule.high:
            return f"{key} = {quoted(value)}: must be from {rule.low:g} to {rule.high:g}"
    return None


def _text_problem(text: str, limit: int) -> str:
    """What is wrong with a text of at most `limit` characters, whatever its key; "" for nothing."""
    if len(text) > limit:
        return f"must have at most {limit:,} characters"
    # Names in a list have a check of their own
    if "\0" in text and limit == MOST_TEXT:
        return "must have no null character"
    # Arguments and folders in another encoding than UTF-8 reach Python so
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "must be UTF-8; rename the file or folder, or set the terminal to UTF-8"
    return ""


def _choices(value: str, rule: OneOf) -> str:
    """The texts that a key takes, and the one that was probably meant."""
    choices = ", ".join(choice or "empty" for choice in rule.choices)
    near = difflib.get_close_matches(value[:MOST_KEY], rule.choices, n=1)
    return f"must be one of {choices}" + (f" (did you mean {near[0]}?)" if near else "")


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", str: "a text", bool: "true or false"}
    return "a number" if isinstance(kind, types.UnionType) else names[kind]


# Keys that may differ between a run and its resumption: how long to wait and where, not what is
# computed.
NOT_IDENTITY = frozenset(key for key, kind in schema().items() if marks_of(kind, NotIdentity))
NODE_NOT_IDENTITY = frozenset(
    key for key, kind in node_schema().items() if marks_of(kind, NotIdentity)
)
# Keys that can name a file or folder of the machine that uses them, and where that is.
SITE_PATHS = {key: mark.on for key, kind in schema().items() for mark in marks_of(kind, SitePath)}
