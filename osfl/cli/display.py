"""What the `osfl` command shows.

It is imported when there is something to show: `osfl --help` does without rich.
"""

import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from osfl.config import ConfigError
from osfl.data.partition import DataError
from osfl.models.kits import KitError
from osfl.run_folder.report_page import human_bytes
from osfl.run_folder.status import read_status
from osfl.words import plain, plain_lines

console = Console(emoji=False)


def watch(streaming: subprocess.Popen, folder: Path, cache: Path) -> None:
    """Show the clients, and the phase the server is in, until the log ends."""
    phases = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    rows: dict[str, TaskID] = {}
    display = Live(console=console, refresh_per_second=4, transient=False)
    with _whole_lines(), display as live:
        while streaming.poll() is None:
            state = read_status(folder)
            phase = state.get("phase", "")
            over = phase in ("finished", "failed")
            if phase not in rows and phase != "failed":
                for task in phases.tasks:  # what is done ends full, and its clock stands still
                    phases.update(task.id, completed=task.total or 1, total=task.total or 1)
            if phase and not over:
                if phase not in rows:
                    rows[phase] = phases.add_task(words(phase), total=None)
                within = "step {} of {}".format(*state["step"]) if state.get("step") else ""
                phases.update(
                    rows[phase],
                    completed=state["done"],
                    total=state["total"] or None,
                    description=words(f"{phase} {within}"),
                )
            live.update(Group(client_rows(state.get("clients", {}), cache), phases))
            if over:
                try:
                    streaming.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    return
            time.sleep(0.3)


@contextmanager
def _whole_lines() -> Iterator[None]:
    """What is printed next begins a line: rich ends a display's last one on a terminal alone."""
    try:
        yield
    finally:
        if not console.is_terminal:
            console.line()


def client_rows(states: dict[str, str], cache: Path) -> Table:
    """One row a client.

    While it works, how far it is (its own progress file, when it runs on this machine).
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for client, state in sorted(states.items()):
        for file in cache.glob(f"{client}-{'?' * 12}/progress") if state == "asked" else ():
            with suppress(OSError, ValueError):  # the client may be writing or removing it
                done, total, what = file.read_text().split(maxsplit=2)
                state = f"{what} {int(done)} of {int(total)}"
        table.add_row(words(client), words(state))
    return table


def words(text: object) -> str:
    """Words from outside, as rich's markup has them."""
    return escape(plain(text))


def print_error(error: Exception) -> None:
    """An error that names its cure."""
    text = escape(plain_lines(error))
    console.print(f"[bold red]error[/] {text}", highlight=False, soft_wrap=True)


@contextmanager
def named_errors() -> Iterator[None]:
    """Errors that name their cure are said, and end the command with 1."""
    try:
        yield
    except (ConfigError, DataError, KitError, OSError) as error:
        print_error(error)
        raise typer.Exit(1) from None


def counting_bar() -> Progress:
    """Of things that are counted: what, a bar, how many of how many, and the time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _percent(value: float | None) -> str:
    """One decimal; "-" where nothing was told."""
    return "-" if value is None or math.isnan(value) else f"{value:.1f}"


def print_metrics(metrics: dict[str, Any]) -> None:
    """The table at the end of a run."""
    names = list(metrics["clients"])
    console.print(
        f"[bold]{words(metrics['method'])}[/]: accuracy on each client's own test images (%)",
        highlight=False,
    )
    table = Table()
    table.add_column("client")
    for model in metrics["accuracy"]:
        table.add_column(words(model), justify="right")
    for name in (*names, "average"):
        cells = [_percent(row.get(name)) for row in metrics["accuracy"].values()]
        table.add_row(
            words(name),
            *cells,
            style="bold" if name == "average" else "",
            end_section=name == names[-1],
        )
    console.print(table)
    if withheld := metrics.get("withheld"):
        console.print(
            "[bold yellow]test results withheld[/] (node-config test-results): "
            f"{', '.join(map(words, withheld))}; averages are over the others"
        )
    if metrics["not_tested"]:
        console.print(
            "[bold yellow]not tested everywhere[/]: "
            f"{', '.join(map(words, metrics['not_tested']))}; averages are over the others"
        )
    upload = sum(about.get("upload_bytes", 0) for about in metrics["clients"].values()) / max(
        1, len(metrics["clients"])
    )
    for warning in metrics.get("warnings", []):
        console.print(f"worth a look: {words(warning)}", highlight=False)
    server = metrics["server"]
    each = f", {server['seconds_per_image']:.2g} s each" if server["seconds_per_image"] else ""
    console.print(
        f"upload {human_bytes(upload)} a client; {server['synthetic_images']} synthetic "
        f"images{each}",
        highlight=False,
    )
