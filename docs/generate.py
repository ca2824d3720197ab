"""Writes docs/configuration.md from osfl/config, osfl/methods and the defaults in pyproject.toml.

Writes the defaults into deploy/hub-app/pyproject.toml, too: Flower accepts no other key of a run.

python docs/generate.py, or make docs-pages
"""

import inspect
import json
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from osfl.config import NodeConfig, RunConfig, Scalar, installed_defaults, schema
from osfl.config.parse import key_hints
from osfl.methods import METHODS
from osfl.settings import default_config, shipped
from osfl.util.markers import (
    AUTO,
    Approximate,
    ByData,
    Doc,
    NotIdentity,
    OneOf,
    Range,
    ServerKey,
    markers_of,
)

PAGE = Path(__file__).with_name("configuration.md")
HUB_APP = PAGE.parents[1] / "deploy" / "hub-app" / "pyproject.toml"
CONFIG_TABLE = "[tool.flwr.app.config]"
HEAD = """# Configuration

<!-- Made by make docs-pages from osfl/config, osfl/methods and pyproject.toml. Change those. -->

*Run-config* is what is equal on all nodes of a run. *Node-config* is what differs by machine.

Give run-config as TOML files and as `key=value`. What comes later wins:
`osfl run configs/demo.toml seed=1 domain-vector.lr=0.05`. A section's keys are written
`section.key`, or below `[section]` in a file. Every default is in `pyproject.toml`. Where a paper
has another value, the comment there says so, and `configs/methods/` has the paper's.

Each key is listed with its default and the values that it accepts. Marks:

- ᵐ: may change when a run is resumed. All other keys are its identity: with another value of one
  of them the same `job-id` is refused.
- ˢ: shapes no payload; may change with `payloads-from`.
- *approximate*: any other value than the one named samples otherwise than the papers, for speed.
  The report says so.
"""
NODE_HEAD = """## Node-config

What differs by machine. Give it with `flower-supernode --node-config 'data-dir="/data"'`. A
simulation gives it by itself. A pin that is empty or 0 accepts, at a site with a guarantee, only
the default, and otherwise any value.
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
    defaults = default_config()
    hints = key_hints(RunConfig)
    parts = [HEAD, "## The run", "", *_items(RunConfig, "", defaults), ""]
    described: dict[type, str] = {}
    for name, annotated in hints.items():
        section: Any = getattr(annotated, "__origin__", annotated)
        if is_dataclass(section):
            key = name.replace("_", "-")
            meanings = [mark.meaning for mark in markers_of(annotated, Doc)]
            meanings.append(inspect.cleandoc(section.__doc__ or ""))
            parts += [f"## `[{key}]`", "", " ".join(meanings), ""]
            base = next((known for known in section.__mro__ if known in described), None)
            if base is None:
                parts += [*_items(section, f"{key}.", defaults), ""]
            else:
                parts += [_same_keys(base, key, described[base], defaults), ""]
            if base not in (None, section):
                parts += [*_items(section, f"{key}.", defaults, key_hints(base)), ""]
            described.setdefault(section, key)
    # The sections of runs with one method alone
    for name in ("mixed",):
        own_section = METHODS[name].settings
        assert own_section is not None
        meaning = inspect.cleandoc(own_section.__doc__ or "")
        own_items = _items(own_section, f"{name}.", installed_defaults(name))
        parts += [f"## `[{name}]`", "", meaning, "", *own_items, ""]
    node_defaults = {item.name.replace("_", "-"): item.default for item in fields(NodeConfig)}
    parts += [NODE_HEAD, *_items(NodeConfig, "", node_defaults)]
    return "\n".join(parts) + "\n"


def _items(
    section: type, prefix: str, defaults: dict[str, Scalar], described: Collection[str] = ()
) -> Iterator[str]:
    """Yield a list item for each key of a section; nested sections have their own lists.

    Args:
        described: names of keys to omit.
    """
    for name, annotated in key_hints(section).items():
        if name in described or is_dataclass(getattr(annotated, "__origin__", annotated)):
            continue
        key = prefix + name.replace("_", "-")
        meaning = " ".join([mark.meaning for mark in markers_of(annotated, Doc)] + _auto(annotated))
        auto = f", {_code(AUTO)}" if markers_of(annotated, ByData) else ""
        allowed = _allowed(annotated) + auto if _allowed(annotated) else ""
        sides = [] if section is NodeConfig else markers_of(schema()[key], ServerKey)
        notes = "; ".join([*filter(None, [allowed, *map(_exceptions, sides)]), *_marks(annotated)])
        marks = ("ˢ" if sides else "") + ("ᵐ" if markers_of(annotated, NotIdentity) else "")
        default = f"`{key}={json.dumps(defaults[key])}`{marks}"
        yield f"- {default}{f' ({notes})' if notes else ''}: {meaning}"


def _same_keys(section: type, key: str, first: str, defaults: dict[str, Scalar]) -> str:
    """Describe a section with the keys of an earlier one by the defaults that differ."""
    names = [name.replace("_", "-") for name in key_hints(section)]
    different = [
        f"`{key}.{name}={json.dumps(defaults[f'{key}.{name}'])}`"
        for name in names
        if defaults[f"{key}.{name}"] != defaults[f"{first}.{name}"]
    ]
    changes = f" Other defaults: {', '.join(different)}." if different else ""
    is_on_server = all(markers_of(schema()[f"{key}.{name}"], ServerKey) for name in names)
    return f"It has the keys of `[{first}]`{', all ˢ' if is_on_server else ''}.{changes}"


def _auto(annotated: Any) -> list[str]:
    """Return the meaning of `auto`, for a key whose default depends on the kind of data."""
    return [
        f"{_code(AUTO)}: {_code(mark.digits)} with the digits, {_code(mark.others)} with all other "
        "data."
        for mark in markers_of(annotated, ByData)
    ]


def _allowed(annotated: Any) -> str:
    """Format the values that a key accepts; "" for any of its type."""
    kind = getattr(annotated, "__origin__", annotated)
    for rule in markers_of(annotated, OneOf):
        return ", ".join(_code(choice) for choice in rule.choices)
    for rule in markers_of(annotated, Range):
        style = ",.0f" if kind is int else ",.12g"
        return f"{rule.low:{style}}–{rule.high:{style}}"
    return ""


def _marks(annotated: Any) -> list[str]:
    """Say of a key that approximates with which value it does not."""
    marks = markers_of(annotated, Approximate)
    return [f"*approximate* but for {_code(mark.exact)}" for mark in marks]


def _exceptions(mark: ServerKey) -> str:
    """List the methods with which a server's key shapes payloads all the same; "" for none."""
    names = [name for name, method in METHODS.items() if method.client in mark.except_for]
    return f"not ˢ with {', '.join(names)}" if names else ""


def _code(value: Scalar) -> str:
    """Format a value as TOML, in backticks."""
    return f"`{json.dumps(value)}`"


def hub_app() -> str:
    """Return the text of deploy/hub-app/pyproject.toml, with the defaults of every key."""
    head = HUB_APP.read_text(encoding="utf-8").partition(CONFIG_TABLE)[0]
    project = shipped("pyproject.toml").read_text(encoding="utf-8")
    table, _, _ = project.partition(CONFIG_TABLE)[2].partition("\n[tool.ruff]")
    return f"{head}{CONFIG_TABLE}{table}"


if __name__ == "__main__":
    PAGE.write_text(page())
    HUB_APP.write_text(hub_app(), encoding="utf-8")
