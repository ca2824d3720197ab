"""Displays of a job's progress and results: a terminal, lines, a notebook, or nothing."""

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
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

from osfl.run_folder.client_progress import client_progress
from osfl.run_folder.listing import FINAL_PHASES
from osfl.run_folder.report.gain import gain_rows, interval_text
from osfl.run_folder.status import ASKED_STATE
from osfl.util.text import sanitize

# Seconds between two lines on a phase's progress
LINE_INTERVAL = 60.0
# Characters of a line in a notebook's output
NOTEBOOK_WIDTH = 100


class View(Protocol):
    """A display of a run's status."""

    def show(self, state: Mapping[str, Any]) -> None:
        """Show the content of a `status.json`; {} changes nothing."""


class Display(Protocol):
    """The place where a job's progress is shown.

    Attributes:
        is_live: whether a view is updated in place; otherwise every change is a line.
    """

    is_live: bool

    def print(self, text: str) -> None:
        """Print a text."""

    def view(self, cache: Path | None = None) -> AbstractContextManager[View]:
        """Return a context with a view of the job's status.

        Args:
            cache: folder in which clients on this machine write their progress.
        """


class ConsoleDisplay:
    """A live table on a terminal, or else a line for each change."""

    def __init__(self, console: Console):
        self._console = console
        self.is_live = console.is_terminal

    def print(self, text: str) -> None:
        """Print a text."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def view(self, cache: Path | None = None) -> Iterator[View]:
        """Yield the view."""
        if not self.is_live:
            yield LineView(self.print)
            return
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            yield LiveView(live.update, cache)


class NotebookDisplay:
    """The live table as an output of a notebook's cell; needs no widgets."""

    is_live = True

    def print(self, text: str) -> None:
        """Print a text."""
        print(text)

    @contextmanager
    def view(self, cache: Path | None = None) -> Iterator[View]:
        """Yield the view."""
        # A notebook has it; nothing else needs it
        ipython: Any = import_module("IPython.display")
        output = ipython.display(ipython.HTML(""), display_id=True)
        yield LiveView(lambda rows: output.update(ipython.HTML(as_html(rows))), cache)


class QuietDisplay:
    """A display that shows nothing."""

    is_live = True

    def print(self, text: str) -> None:
        """Print nothing."""

    def show(self, state: Mapping[str, Any]) -> None:
        """Show nothing."""

    @contextmanager
    def view(self, cache: Path | None = None) -> Iterator[View]:
        """Yield the view."""
        yield self


def pick_display(progress: bool) -> Display:
    """Return the display of this process.

    Args:
        progress: whether to show progress: a live table on a terminal and in a notebook, or else
            a line for each phase.
    """
    if not progress:
        return QuietDisplay()
    console = Console(emoji=False)
    return NotebookDisplay() if console.is_jupyter else ConsoleDisplay(console)


def accuracy_table(metrics: Mapping[str, Any]) -> Table:
    """Return a table of each model's accuracy at every client in percent, and their average.

    With `local-baseline` it has the accuracy of training alone and the gain, too.
    """
    names = list(metrics["clients"])
    gains = gain_rows(metrics.get("gain", {}))
    table = Table()
    table.add_column("client")
    for model in (*(["local only"] if gains else []), *metrics["accuracy"]):
        table.add_column(_escape(model), justify="right")
    if gains:
        table.add_column(f"gain of {_escape(metrics['gain']['model'])} (95 % interval)")
    for name in (*names, "average"):
        cells = [_percent(row.get(name)) for row in metrics["accuracy"].values()]
        if gains:
            row = gains.get(name, {})
            cells = [_percent(row.get("local")), *cells, interval_text(row) if row else "-"]
        table.add_row(
            _escape(name),
            *cells,
            style="bold" if name == "average" else "",
            end_section=name == names[-1],
        )
    return table


def _percent(value: float | None) -> str:
    """Format with one decimal; "-" for an unknown value."""
    return "-" if value is None or math.isnan(value) else f"{value:.1f}"


def as_html(rows: RenderableType) -> str:
    """Return what a terminal would show as HTML."""
    recorder = Console(
        file=io.StringIO(), record=True, width=NOTEBOOK_WIDTH, emoji=False, force_jupyter=False
    )
    recorder.print(rows)
    return recorder.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


class LineView:
    """Lines for phases and client states, and one per minute during a long phase."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
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
        self._write(f"{time.strftime('%H:%M:%S')} {sanitize(text)}")


class LiveView:
    """A live table of the clients, and a progress bar per phase."""

    def __init__(self, update: Callable[[RenderableType], None], cache: Path | None):
        self._update = update
        self._cache = cache
        self._rows: dict[str, TaskID] = {}
        self._phases = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )

    def show(self, state: Mapping[str, Any]) -> None:
        """Update the table and the bars."""
        phase = state.get("phase", "")
        if phase not in self._rows and phase != "failed":
            self._fill()
        if phase and phase not in FINAL_PHASES:
            if phase not in self._rows:
                self._rows[phase] = self._phases.add_task(_escape(phase), total=None)
            step = "step {} of {}".format(*state["step"]) if state.get("step") else ""
            self._phases.update(
                self._rows[phase],
                completed=state["done"],
                total=state["total"] or None,
                description=_escape(f"{phase} {step}"),
            )
        rows = client_rows(state.get("clients", {}), self._cache)
        self._update(Group(rows, self._phases))

    def _fill(self) -> None:
        """Complete the bars of earlier phases, which also stops their clocks."""
        for task in self._phases.tasks:
            end = task.total or 1
            self._phases.update(task.id, completed=end, total=end)


def client_rows(states: Mapping[str, str], cache: Path | None) -> Table:
    """Return a table of the clients' states, with the progress of those on this machine.

    Args:
        states: by client.
        cache: as in `Display.view`.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for client, state in sorted(states.items()):
        progress = client_progress(cache, client) if cache and state == ASKED_STATE else ""
        table.add_row(_escape(client), _escape(progress or state))
    return table


def _escape(text: object) -> str:
    """Sanitize a text and escape rich's markup in it."""
    return escape(sanitize(text))
