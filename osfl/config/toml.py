"""TOML files that a user hands in: settings, presets of data sets, tables.

Their size, depth and numbers are bounded, so that a broken or hostile file is refused in a moment.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from osfl.config.markers import ConfigError
from osfl.util.text import plain, quoted

MOST_BYTES = 2**20
# A table file's deepest value is in rows.NAME.SECTION.KEY
MOST_DEPTH = 16
# TOML's whole numbers have 64 bits
_LOWEST = -(2**63)
_HIGHEST = 2**63 - 1


def read_toml(file: Path, name: str = "") -> dict[str, Any]:
    """The table in a TOML file. A byte order mark is skipped.

    Args:
        name: what errors call the file; empty: its path.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not valid TOML in UTF-8.
    """
    name = plain(name or file, 1000)
    try:
        with open(file, "rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {plain(error.strerror)}") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{name}: has more than {MOST_BYTES // 2**20} MB; a file of settings must be smaller"
        )
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not valid TOML: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    return parse_toml(text.replace("\r\n", "\n"), name)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The table in a TOML text.

    Args:
        name: what errors call the text.

    Raises:
        ConfigError: the text is not valid TOML, is nested too deeply, or has a number of more than
            64 bits.
    """
    try:
        table = tomli.loads(text)
    # A number of thousands of digits is a plain ValueError
    except ValueError as error:
        raise ConfigError(f"{name}: not valid TOML: {plain(error)}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid TOML: nested too deeply") from None
    for value, depth in _values(table):
        if depth > MOST_DEPTH:
            raise ConfigError(
                f"{name}: nested more than {MOST_DEPTH} levels deep; no setting is deeper than a "
                "key in a section"
            )
        if isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
            raise ConfigError(f"{name}: {quoted(value)}: a whole number must fit in 64 bits")
    return table


def _values(table: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """Every value of a table with its depth, breadth first; nothing below the deepest level."""
    level: list[Any] = [table]
    for depth in range(MOST_DEPTH + 2):
        yield from ((value, depth) for value in level)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        level = inner
