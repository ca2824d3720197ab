"""Where the figures in README and docs come from.

Each module is a command: `python -m benchmarks.NAME`.
"""

import io
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.cli.compare import machine
from osfl.files import PUBLIC, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = Path(__file__).resolve().parent / "tables"


def write_table(out: Path, rows: Sequence[Mapping[str, object]], about: str) -> None:
    """Rows as `<out>.md` and `<out>.json`, with what they are `about`, the machine and the
    versions.
    """
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [head, ["---:"] * len(head), *([str(row.get(key, "")) for key in head] for row in rows)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr", "diffusers"))
    about = f"{about} {machine()}, {versions}."
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
