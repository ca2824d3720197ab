"""`osfl runs`: a table of the runs in a folder."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from osfl.cli import display
from osfl.run_folder.listing import RunSummary, list_runs
from osfl.run_folder.report.page import human_seconds

# Minimum width in columns where the output is not a terminal
WIDTH = 160
STYLES = {"finished": "green", "running": "cyan", "failed": "red", "damaged": "red"}


def show_runs(folder: Path, is_json: bool) -> None:
    """Print the runs in a folder, newest first, as a table or as a JSON list.

    Raises:
        ConfigError: it is not a folder.
    """
    summaries = list_runs(folder)
    if is_json:
        print(json.dumps([_record(summary) for summary in summaries], indent=1))
        return
    if not summaries:
        display.console.print(f"no runs in {folder}", markup=False, highlight=False)
        return
    if not display.console.is_terminal:
        display.console.width = max(WIDTH, display.console.width)
    display.console.print(_table(summaries))
    for summary in summaries:
        if summary.problem:
            display.print_text(f"{summary.job}: {summary.problem}")


def _record(summary: RunSummary) -> dict[str, object]:
    return {**asdict(summary), "folder": str(summary.folder)}


def _table(summaries: list[RunSummary]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("job", "method"):
        table.add_column(name, overflow="fold")
    for name in ("state", "started"):
        table.add_column(name, no_wrap=True)
    for name in ("clients", "accuracy", "epsilon", "duration"):
        table.add_column(name, no_wrap=True, justify="right")
    for summary in summaries:
        style = STYLES.get(summary.state, "yellow")
        table.add_row(
            display.escape_text(summary.job),
            display.escape_text(summary.method),
            f"[{style}]{summary.state}[/]",
            _local_time(summary.started),
            str(summary.clients or ""),
            "" if summary.accuracy is None else f"{summary.accuracy:.1f} %",
            "" if summary.epsilon is None else f"{summary.epsilon:g}",
            "" if summary.seconds is None else human_seconds(summary.seconds),
        )
    return table


def _local_time(seconds: float | None) -> str:
    """Format seconds since 1970 as the local time; "" if unknown."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
