"""Where the figures in README and docs come from.

Each module that its README lists is a command: `python -m benchmarks.NAME`.
"""

import argparse
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from osfl.tables.markdown import machine
from osfl.util.files import PUBLIC, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = Path(__file__).resolve().parent / "tables"
Name = TypeVar("Name")


def command_line(text: str | None) -> argparse.ArgumentParser:
    """Of a module whose docstring is its help."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def listed(names: Iterable[object]) -> str:
    """In a line; a name may have commas."""
    return "; ".join(map(str, names))


def some_of(
    given: Sequence[Name], known: Collection[Name], parser: argparse.ArgumentParser
) -> list[Name]:
    """What was asked for, or all that is known. Ends the command where something is unknown."""
    for name in given:
        if name not in known:
            parser.error(f"{name!r}: must be some of {listed(known)}")
    return list(given or known)


def with_others(
    rows: Sequence[dict[str, str]], file: Path, about: str, order: Iterable[str]
) -> list[dict[str, str]]:
    """Rows, and those that a table of the same seeds and settings has beside them.

    Args:
        file: of the table, `.json`.
        about: what the rows are; a table that says something else is given up.
        order: of the rows' names.
    """
    before = json.loads(file.read_text()) if file.is_file() else {"rows": [], "about": ""}
    kept = before["rows"] if before["about"].startswith(about) else []
    named = {row[""]: row for row in (*kept, *rows)}
    return [named[name] for name in order if name in named]


def write_table(out: Path, rows: Sequence[Mapping[str, object]], about: str) -> None:
    """Rows as `<out>.md` and `<out>.json`, with what they are `about`, the machine and the
    versions.
    """
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [head, ["---:"] * len(head), *([str(row.get(key, "")) for key in head] for row in rows)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr", "diffusers"))
    about = f"{about} Written on {machine()}, {versions}."
    page = "\n".join([*(f"| {' | '.join(line)} |" for line in cells), "", about, ""])
    write_atomically(out.with_suffix(".md"), page.encode(), PUBLIC)
    kept = json.dumps({"rows": rows, "about": about}, indent=1) + "\n"
    write_atomically(out.with_suffix(".json"), kept.encode(), PUBLIC)
    print(page)


def write_figure(file: Path, figure: "Figure") -> None:
    """A plot as PNG."""
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(file, picture.getvalue(), PUBLIC)
