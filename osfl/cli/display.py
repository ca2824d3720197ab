"""Terminal output of the `osfl` command.

Import this module only where there is output: `osfl --help` runs without rich.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from osfl.config import ConfigError
from osfl.data.partition import DataError
from osfl.kit.folder import KitError
from osfl.launch.views import accuracy_table
from osfl.metrics.text import figure_text
from osfl.run_folder.report.page import human_bytes
from osfl.run_folder.report.senders import partial_senders, senders_text
from osfl.run_folder.status import split_details
from osfl.util.text import sanitize, sanitize_lines

console = Console(emoji=False)
# For progress bars, and for the errors of commands whose output another program reads
error_console = Console(emoji=False, stderr=True)


def escape_text(text: object) -> str:
    """Sanitize a text and escape rich's markup in it."""
    return escape(sanitize(text))


def print_text(text: str) -> None:
    """Print a text as it is: no markup, no colors, and no line breaks of its own."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_error(error: Exception, where: Console = console) -> None:
    """Print an error's message."""
    text = escape(sanitize_lines(error))
    where.print(f"[bold red]error[/] {text}", highlight=False, soft_wrap=True)


@contextmanager
def expected_errors(where: Console = console) -> Iterator[None]:
    """Print expected errors without a traceback, and exit with 1."""
    try:
        yield
    except (ConfigError, DataError, KitError, OSError) as error:
        print_error(error, where)
        raise typer.Exit(1) from None


def counting_progress() -> Progress:
    """Return a progress bar on standard error: a description, a count and the elapsed time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=error_console)


def progress_callback(bar: Progress, description: str) -> Callable[[int, int], None]:
    """Return a callback that shows (done, total) as a row of the bar, from its first call."""
    task = bar.add_task(description, visible=False)

    def show(completed: int, total: int) -> None:
        bar.update(task, completed=completed, total=total, visible=True)

    return show


def print_metrics(metrics: dict[str, Any]) -> None:
    """Print the results of a run."""
    console.print(
        f"[bold]{escape_text(metrics['method'])}[/]: accuracy on each client's own test images (%)",
        highlight=False,
    )
    console.print(accuracy_table(metrics))
    # Without a global model there is one model for each client
    shown = metrics.get("figures", {}) if metrics.get("shown") else {}
    for name, figures in shown.items():
        # A log that is followed has the number alone
        senders = figures["senders"] if "senders" in figures else partial_senders(metrics, name)
        console.print(
            f"{escape_text(name)}, {senders_text(senders)} together: "
            f"{figure_text(figures['together'])}",
            highlight=False,
        )
    for name, row in metrics.get("test_only", {}).items():
        figures = [f"{model} {value:.1f}" for model, value in row["accuracy"].items()]
        text = escape_text(", ".join(figures) or "no result")
        console.print(f"{escape_text(name)} only tests: {text}; no average includes it")
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
        # Work units may run in parallel
        time_per_image = f", {server['seconds_per_image']:.2g} s of a worker's time each"
    sent = f"upload {human_bytes(upload)} per client"
    if source := metrics.get("payloads_from"):
        sent = f"upload none; {human_bytes(upload)} per client in job {escape_text(source)}"
    console.print(
        f"{sent}; {server['synthetic_images']} synthetic images{time_per_image}",
        highlight=False,
    )
