"""What the `osfl` command shows.

It is imported when there is something to show: `osfl --help` does without rich.
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

ENDS = ("finished", "failed")  # phases in which a run does nothing more
EVERY_LINE = 60.0  # seconds between two lines on how far a phase is


console = Console(emoji=False)


def watch(streaming: subprocess.Popen, folder: Path, cache: Path) -> None:
    """Show the clients, and the phase the server is in, until the log ends."""
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
    """What shows a run's status as it changes."""

    def show(self, state: Mapping[str, Any]) -> None:
        """Show a status, which is as in `status.json`; an empty one changes nothing."""


@contextmanager
def new_view(cache: Path | None = None) -> Iterator[View]:
    """Yield a live table on a terminal, and else what prints a line for each change.

    Args:
        cache: where clients on this machine say how far they are.
    """
    if not console.is_terminal:
        yield LineView()
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield LiveView(live, cache)


class LineView:
    """A line for every phase and every state of a client, and one a minute of a long phase."""

    def __init__(self) -> None:
        self._phases = 0
        self._clients: dict[str, str] = {}
        self._done = 0
        self._since = time.monotonic()

    def show(self, state: Mapping[str, Any]) -> None:
        """Print what is new."""
        for phase in state.get("phases", [])[self._phases :]:
            self._phases += 1
            if phase["phase"] not in ENDS:
                self._say(phase["phase"])
        for client, told in state.get("clients", {}).items():
            if self._clients.get(client) != told:
                self._clients[client] = told
                self._say(f"{client}: {told}")
        done = state.get("done", 0)
        if done != self._done and time.monotonic() - self._since > EVERY_LINE:
            self._done = done
            self._say(f"{state['phase']}: {done} of {state['total']}")

    def _say(self, text: str) -> None:
        self._since = time.monotonic()
        console.print(f"{time.strftime('%H:%M:%S')} {words(text)}", highlight=False, soft_wrap=True)


class LiveView:
    """A table of the clients and a bar for every phase."""

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
        """Draw it anew."""
        phase = state.get("phase", "")
        if phase not in self._rows and phase != "failed":
            self._fill()
        if phase and phase not in ENDS:
            if phase not in self._rows:
                self._rows[phase] = self._phases.add_task(words(phase), total=None)
            within = "step {} of {}".format(*state["step"]) if state.get("step") else ""
            self._phases.update(
                self._rows[phase],
                completed=state["done"],
                total=state["total"] or None,
                description=words(f"{phase} {within}"),
            )
        rows = client_rows(state.get("clients", {}), self._cache)
        self._live.update(Group(rows, self._phases))

    def _fill(self) -> None:
        """What is done ends full, and its clock stands still."""
        for task in self._phases.tasks:
            end = task.total or 1
            self._phases.update(task.id, completed=end, total=end)


def client_rows(states: Mapping[str, str], cache: Path | None) -> Table:
    """One row a client.

    While it works, how far it is (its own progress file, when it runs on this machine).
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for client, state in sorted(states.items()):
        own = f"{client}-{'?' * 12}/progress"
        for file in cache.glob(own) if cache and state == "asked" else ():
            with suppress(OSError, ValueError):  # the client may be writing or removing it
                done, total, what = file.read_text().split(maxsplit=2)
                state = f"{what} {int(done)} of {int(total)}"
        table.add_row(words(client), words(state))
    return table


def words(text: object) -> str:
    """Words from outside, as rich's markup has them."""
    return escape(sanitize(text))


def print_error(error: Exception) -> None:
    """An error that names its cure."""
    text = escape(sanitize_lines(error))
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


def counter(bar: Progress, what: str) -> Callable[[int, int], None]:
    """Return what shows (done, total) as a row of the bar; without a call there is no row."""
    task = bar.add_task(what, visible=False)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total, visible=True)

    return show


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
        text, _ = split_details(warning)
        console.print(f"worth a look: {words(text)}", highlight=False)
    server = metrics["server"]
    each = f", {server['seconds_per_image']:.2g} s each" if server["seconds_per_image"] else ""
    console.print(
        f"upload {human_bytes(upload)} a client; {server['synthetic_images']} synthetic "
        f"images{each}",
        highlight=False,
    )
