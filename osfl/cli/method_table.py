"""`osfl methods`: a table of all methods, from their declarations."""

from dataclasses import replace

from rich import box
from rich.table import Table

from osfl.cli import display
from osfl.config import RunConfig, parse_run_config
from osfl.kit.used_parts import kit_parts
from osfl.methods import METHODS, REFUSED
from osfl.settings import default_config

PRIVACY = {"": "", "pure": "ε", "approximate": "ε, δ"}
# Minimum columns of the wide table
WIDE = 160


def show_methods(wide: bool) -> None:
    """Print the table of methods.

    Args:
        wide: show all columns, in at least 160 characters.
    """
    if wide:
        display.console.width = max(WIDE, display.console.width)
    display.console.print(wide_table() if wide else short_table())
    for problem in REFUSED.values():
        display.print_text(problem)


def short_table() -> Table:
    """Return a table with a row for every method, for a terminal of 80 columns."""
    table = Table("method", "a client sends", "kit used by", "privacy", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for name, method in METHODS.items():
        needs_kit = {"client": method.client_parts, "server": method.samples or method.zero_shot}
        sides = ", ".join(side for side, needs in needs_kit.items() if needs) or "neither"
        table.add_row(name, method.sends, sides, PRIVACY[method.privacy])
    return table


def wide_table() -> Table:
    """Return a table with a row for every method, its kit parts, synthesis and rounds."""
    defaults = parse_run_config(default_config())
    table = Table(
        "method", "a client sends", "kit parts at clients", "synthesis", "rounds", "privacy"
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
    """Return the folders and files of the kit that a client loads with these settings."""
    return ", ".join(kit_parts(config)) or "none"
