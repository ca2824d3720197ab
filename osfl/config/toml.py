"""Reading of the user's TOML files: settings, presets of data sets, tables.

Their size, depth and numbers are limited, so that a corrupt or malicious file is refused at once.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from osfl.util.markers import ConfigError
from osfl.util.text import quote, sanitize

MAX_BYTES = 2**20
# The deepest value of a table file is rows.NAME.SECTION.KEY
MAX_DEPTH = 16
# TOML's integers have 64 bits
_LOWEST = -(2**63)
_HIGHEST = 2**63 - 1


def read_toml(file: Path, name: str = "") -> dict[str, Any]:
    """Read the table in a TOML file; a byte order mark is skipped.

    Args:
        name: the file's name in errors; its path if empty.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not valid TOML in UTF-8.
    """
    name = sanitize(name or file, 1000)
    try:
        with open(file, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {sanitize(error.strerror)}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{name}: has more than {MAX_BYTES // 2**20} MiB; a settings file must be smaller"
        )
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not valid TOML: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    return parse_toml(text.replace("\r\n", "\n"), name)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse a TOML text into a table.

    Args:
        name: the text's name in errors.

    Raises:
        ConfigError: the text is not valid TOML, is nested too deeply, or has an integer of more
            than 64 bits.
    """
    try:
        table = tomli.loads(text)
    # A number of thousands of digits raises a ValueError that is not tomli's
    except ValueError as error:
        raise ConfigError(f"{name}: not valid TOML: {sanitize(error)}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid TOML: nested too deeply") from None
    for value, depth in _values(table):
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{name}: nested more than {MAX_DEPTH} levels deep; settings are keys in sections"
            )
        if isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
            raise ConfigError(f"{name}: {quote(value)}: a whole number must fit in 64 bits")
    return table


def _values(table: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield every value of a table with its depth, breadth first, to just below `MAX_DEPTH`."""
    level: list[Any] = [table]
    for depth in range(MAX_DEPTH + 2):
        yield from ((value, depth) for value in level)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        level = inner
