"""Writes docs/configuration.md from osfl/config/sections.py and the defaults in pyproject.toml.

python docs/generate.py, or make docs-pages
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from osfl.config import NodeConfig, RunConfig, Scalar
from osfl.config.markers import (
    AUTO,
    Approximate,
    ByData,
    Doc,
    NotIdentity,
    OneOf,
    Range,
    markers_of,
)
from osfl.settings import default_config

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

<!-- Made by make docs-pages from osfl/config/sections.py and pyproject.toml. Change those. -->

*Run-config* is what is equal on all nodes of a run. *Node-config* is what differs by machine.

Give run-config as TOML files and as `key=value`. What comes later wins:
`osfl run configs/demo.toml seed=1 domain-vector.lr=0.05`. A section's keys are written
`section.key`, or below `[section]` in a file. Every default is in `pyproject.toml`. Where a paper
has another value, the comment there says so, and `configs/methods/` has the paper's.

Some keys are marked in the last column:

- *may change*: a run that is resumed may have another value. All other keys are part of the run's
  identity: with another value of one of them, the same `job-id` is refused.
- *approximate*: any value but the one named samples otherwise than the papers do, for speed. The
  report says so.
"""
NODE_HEAD = """## Node-config

What differs by machine. Give it with `flower-supernode --node-config 'data-dir="/data"'`. A
simulation gives it by itself.
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
    defaults = default_config()
    hints = get_type_hints(RunConfig, include_extras=True)
    parts = [HEAD, "## The run", "", *_table(RunConfig, "", defaults, marked=True), ""]
    for name, annotated in hints.items():
        section = getattr(annotated, "__origin__", annotated)
        if is_dataclass(section):
            key = name.replace("_", "-")
            meanings = [mark.meaning for mark in markers_of(annotated, Doc)]
            meanings.append(inspect.cleandoc(section.__doc__ or ""))
            parts += [f"## `[{key}]`", "", " ".join(meanings), ""]
            parts += [*_table(section, f"{key}.", defaults, marked=True), ""]
    node_defaults = {item.name.replace("_", "-"): item.default for item in fields(NodeConfig)}
    parts += [NODE_HEAD, *_table(NodeConfig, "", node_defaults, marked=False)]
    return "\n".join(parts) + "\n"


def _table(section: type, prefix: str, defaults: dict[str, Scalar], marked: bool) -> Iterator[str]:
    """Yield the rows of a section's table; nested sections have their own."""
    titles = ["Key", "Default", "Allowed", "Meaning", *(["Marks"] if marked else [])]
    yield _row(titles)
    yield _row(["---"] * len(titles))
    for name, annotated in get_type_hints(section, include_extras=True).items():
        if is_dataclass(getattr(annotated, "__origin__", annotated)):
            continue
        key = prefix + name.replace("_", "-")
        meaning = " ".join([mark.meaning for mark in markers_of(annotated, Doc)] + _auto(annotated))
        auto = f", {_code(AUTO)}" if markers_of(annotated, ByData) else ""
        cells = [f"`{key}`", _code(defaults[key]), _allowed(annotated) + auto, meaning]
        yield _row([*cells, _marks(annotated)] if marked else cells)


def _auto(annotated: Any) -> list[str]:
    """Return the meaning of `auto`, for a key whose default depends on the kind of data."""
    return [
        f"{_code(AUTO)}: {_code(mark.digits)} with the digits, {_code(mark.others)} with all other "
        "data."
        for mark in markers_of(annotated, ByData)
    ]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _allowed(annotated: Any) -> str:
    """Format the values that a key accepts."""
    kind = getattr(annotated, "__origin__", annotated)
    for rule in markers_of(annotated, OneOf):
        return ", ".join(_code(choice) for choice in rule.choices)
    for rule in markers_of(annotated, Range):
        style = ",.0f" if kind is int else ",.12g"
        return f"{rule.low:{style}} to {rule.high:{style}}"
    return {bool: "`true`, `false`", str: "a text", int: "a whole number"}[kind]


def _marks(annotated: Any) -> str:
    """Format a key's marks: whether it may change, and whether it approximates."""
    marks = ["may change"] if markers_of(annotated, NotIdentity) else []
    for mark in markers_of(annotated, Approximate):
        marks.append(f"approximate, but for {_code(mark.exact)}")
    return "; ".join(marks)


def _code(value: Scalar) -> str:
    """Format a value as TOML, in backticks."""
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
