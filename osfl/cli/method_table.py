"""`osfl methods`: what is known of every method, from where it is stated."""

from dataclasses import replace

from rich import box
from rich.table import Table

from osfl.cli import display, launch
from osfl.config import RunConfig, parse_run_config
from osfl.kit.used_parts import kit_parts
from osfl.methods import METHODS

PRIVACY = {"": "", "pure": "ε", "approximate": "ε, δ"}
WIDE = 160  # columns of a terminal


def show_methods(wide: bool) -> None:
    """Print the table.

    Args:
        wide: with all columns, wider than the terminal if need be.
    """
    if wide:
        display.console.width = max(WIDE, display.console.width)
    display.console.print(wide_table() if wide else short_table())


def short_table() -> Table:
    """A row for every method, for a terminal of 80 columns."""
    table = Table("method", "a client sends", "needs a kit at", "privacy", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for name, method in METHODS.items():
        needing = {"client": method.client_parts, "server": method.samples}
        where = ", ".join(side for side, needs in needing.items() if needs) or "neither"
        table.add_row(name, method.sends, where, PRIVACY[method.privacy])
    return table


def wide_table() -> Table:
    """A row for every method, with what it needs of the kit, and what the server does."""
    defaults = parse_run_config(launch.default_config())
    table = Table(
        "method", "a client sends", "it needs of the kit", "server draws", "rounds", "privacy"
    )
    table.columns[0].no_wrap = True
    for name, method in METHODS.items():
        table.add_row(
            name,
            method.sends,
            needed_parts(replace(defaults, method=name)),
            "yes" if method.samples else "",
            "many" if method.rounds else "one",
            PRIVACY[method.privacy],
        )
    return table


def needed_parts(config: RunConfig) -> str:
    """The folders and files of the kit that a client loads with these settings."""
    return ", ".join(kit_parts(config)) or "nothing"
