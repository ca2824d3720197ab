"""`osfl methods`: what is known of every method, from where it is stated."""

from dataclasses import replace

from rich.table import Table

from osfl.cli import display, launch
from osfl.config import RunConfig, parse_run_config
from osfl.methods import METHODS
from osfl.models.used_parts import kit_parts


def show_methods() -> None:
    """Print the table."""
    display.console.print(method_table())


def method_table() -> Table:
    """A row for every method."""
    defaults = parse_run_config(launch.default_config())
    table = Table(
        "method", "a client sends", "it needs of the kit", "server draws", "rounds", "privacy"
    )
    for name, method in METHODS.items():
        table.add_row(
            name,
            method.sends,
            needed_parts(replace(defaults, method=name)),
            "yes" if method.samples else "",
            "many" if method.rounds else "one",
            {"pure": "ε", "approximate": "ε, δ"}.get(method.private, ""),
        )
    return table


def needed_parts(config: RunConfig) -> str:
    """The folders and files of the kit that a client loads with these settings."""
    return ", ".join(kit_parts(config)) or "nothing"
