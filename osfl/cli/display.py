"""Terminal output of the `osfl` command.

Import this module only where there is output: `osfl --help` runs without rich.
"""

import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

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
from osfl.kit.kits import KitError
from osfl.run_folder.report.page import human_bytes
from osfl.run_folder.status import read_status, split_details
from osfl.util.text import sanitize, sanitize_lines

# Final phases of a run
FINAL_PHASES = ("finished", "failed")
# Seconds between two lines on a phase's progress
LINE_INTERVAL = 60.0


console = Console(emoji=False)


def watch(streaming: subprocess.Popen, folder: Path, cache: Path) -> None:
    """Show the clients and the server's phase until the log ends."""
    with new_view(cache) as view:
        while streaming.poll() is None:
            state = read_status(folder)
            view.show(state)
            if state.get("phase") in ("finished", "failed"):
                with suppress(subprocess.TimeoutExpired):
                    streaming.wait(timeout=20)
                break
            time.sleep(0.3)
        view.show(read_status(folder))


class View(Protocol):
    """A display of a run's status."""

    def show(self, state: Mapping[str, Any]) -> None:
        """Show the content of a `status.json`; {} changes nothing."""


@contextmanager
def new_view(cache: Path | None = None) -> Iterator[View]:
    """Yield a live table on a terminal, or else a view that prints a line for each change.

    Args:
        cache: folder in which clients on this machine write their progress.
    """
    if not console.is_terminal:
        yield LineView()
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield LiveView(live, cache)


class LineView:
    """Lines for phases and client states, and one per minute during a long phase."""

    def __init__(self) -> None:
        self._phases = 0
        self._clients: dict[str, str] = {}
        self._completed = 0
        self._last_line = time.monotonic()

    def show(self, state: Mapping[str, Any]) -> None:
        """Print what has changed."""
        for phase in state.get("phases", [])[self._phases :]:
            self._phases += 1
            if phase["phase"] not in FINAL_PHASES:
                self._print(phase["phase"])
        for client, client_state in state.get("clients", {}).items():
            if self._clients.get(client) != client_state:
                self._clients[client] = client_state
                self._print(f"{client}: {client_state}")
        completed = state.get("done", 0)
        if completed != self._completed and time.monotonic() - self._last_line > LINE_INTERVAL:
            self._completed = completed
            self._print(f"{state['phase']}: {completed} of {state['total']}")

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        console.print(
            f"{time.strftime('%H:%M:%S')} {escape_text(text)}", highlight=False, soft_wrap=True
        )


class LiveView:
    """A live table of the clients, and a progress bar per phase."""

    def __init__(self, live: Live, cache: Path | None):
        self._live = live
        self._cache = cache
        self._rows: dict[str, TaskID] = {}
        self._phases = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    def show(self, state: Mapping[str, Any]) -> None:
        """Update the table and the bars."""
        phase = state.get("phase", "")
        if phase not in self._rows and phase != "failed":
            self._fill()
        if phase and phase not in FINAL_PHASES:
            if phase not in self._rows:
                self._rows[phase] = self._phases.add_task(escape_text(phase), total=None)
            step = "step {} of {}".format(*state["step"]) if state.get("step") else ""
            self._phases.update(
                self._rows[phase],
                completed=state["done"],
                total=state["total"] or None,
                description=escape_text(f"{phase} {step}"),
            )
        rows = client_rows(state.get("clients", {}), self._cache)
        self._live.update(Group(rows, self._phases))

    def _fill(self) -> None:
        """Complete the bars of earlier phases, which also stops their clocks."""
        for task in self._phases.tasks:
            end = task.total or 1
            self._phases.update(task.id, completed=end, total=end)


def client_rows(states: Mapping[str, str], cache: Path | None) -> Table:
    """Return a table of the clients' states, with the progress of those on this machine.

    Args:
        states: by client.
        cache: as in `new_view`.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for client, state in sorted(states.items()):
        pattern = f"{client}-{'?' * 12}/progress"
        for file in cache.glob(pattern) if cache and state == "asked" else ():
            # The client may be writing or removing the file
            with suppress(OSError, ValueError):
                completed, total, task = file.read_text().split(maxsplit=2)
                state = f"{task} {int(completed)} of {int(total)}"
        table.add_row(escape_text(client), escape_text(state))
    return table


def escape_text(text: object) -> str:
    """Sanitize a text and escape rich's markup in it."""
    return escape(sanitize(text))


def print_error(error: Exception) -> None:
    """Print an error's message."""
    text = escape(sanitize_lines(error))
    console.print(f"[bold red]error[/] {text}", highlight=False, soft_wrap=True)


@contextmanager
def expected_errors() -> Iterator[None]:
    """Print expected errors without a traceback, and exit with 1."""
    try:
        yield
    except (ConfigError, DataError, KitError, OSError) as error:
        print_error(error)
        raise typer.Exit(1) from None


def counting_progress() -> Progress:
    """Return a progress bar with a description, a count and the elapsed time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _percent(value: float | None) -> str:
    """Format with one decimal; "-" for an unknown value."""
    return "-" if value is None or math.isnan(value) else f"{value:.1f}"


def progress_callback(bar: Progress, description: str) -> Callable[[int, int], None]:
    """Return a callback that shows (done, total) as a row of the bar, from its first call."""
    task = bar.add_task(description, visible=False)

    def show(completed: int, total: int) -> None:
        bar.update(task, completed=completed, total=total, visible=True)

    return show


def print_metrics(metrics: dict[str, Any]) -> None:
    """Print the results of a run."""
    names = list(metrics["clients"])
    console.print(
        f"[bold]{escape_text(metrics['method'])}[/]: accuracy on each client's own test images (%)",
        highlight=False,
    )
    table = Table()
    table.add_column("client")
    for model in metrics["accuracy"]:
        table.add_column(escape_text(model), justify="right")
    for name in (*names, "average"):
        cells = [_percent(row.get(name)) for row in metrics["accuracy"].values()]
        table.add_row(
            escape_text(name),
            *cells,
            style="bold" if name == "average" else "",
            end_section=name == names[-1],
        )
    console.print(table)
    if withheld := metrics.get("withheld"):
        console.print(
            "[bold yellow]test results withheld[/] (node-config test-results): "
            f"{', '.join(map(escape_text, withheld))}; averages are over the others"
        )
    if metrics["not_tested"]:
        console.print(
            "[bold yellow]clients that did not test every model[/]: "
            f"{', '.join(map(escape_text, metrics['not_tested']))}; averages are over the others"
        )
    total_upload = sum(costs.get("upload_bytes", 0) for costs in metrics["clients"].values())
    upload = total_upload / max(1, len(metrics["clients"]))
    for warning in metrics.get("warnings", []):
        text, _ = split_details(warning)
        console.print(f"warning: {escape_text(text)}", highlight=False)
    server = metrics["server"]
    time_per_image = ""
    if server["seconds_per_image"]:
        time_per_image = f", {server['seconds_per_image']:.2g} s each"
    console.print(
        f"upload {human_bytes(upload)} per client; {server['synthetic_images']} synthetic "
        f"images{time_per_image}",
        highlight=False,
    )
