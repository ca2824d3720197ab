"""`osfl compare`: the runs of a table side by side, with a bar, and the table at the end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from osfl.cli import compare as tables
from osfl.cli import display, launch
from osfl.cli.run import end_as_interrupted
from osfl.kit.kits import find_kit, is_hub_id
from osfl.kit.used_parts import used_parts
from osfl.run_folder.report.page import human_bytes
from osfl.util.files import make_private_folder
from osfl.util.text import sanitize


@dataclass(frozen=True)
class Side:
    """How the runs of a table share the machine.

    Attributes:
        at_once: runs side by side.
        client_cpus: cores of each client.
        client_gpus: share of a GPU of each client.
    """

    at_once: int
    client_cpus: int
    client_gpus: float


def run_table(
    file: Path,
    settings: Sequence[str],
    seeds: str,
    rows: str,
    side: Side,
    runs: Path,
    out: Path,
) -> None:
    """Run what is not done of a table, and write and show it.

    Args:
        file: the table file.
        settings: key=value for every run.
        seeds, rows: comma-separated; empty: the file's.
        runs: where the runs are.
        out: where the table is written.

    Raises:
        typer.Exit: it was refused or interrupted, or a run is missing.
    """
    end_as_interrupted()
    interrupted = False
    outcomes: list[tables.Outcome] = []
    try:
        with display.named_errors():
            content = tables.read_table(launch.find_config(str(file)), settings, seeds, rows)
            _fetch_kits(content)
            outcomes, interrupted = _run_cells(content, runs.resolve(), side)
            # A table without a figure would replace a better one
            if not interrupted or any(not outcome.error for outcome in outcomes):
                command = _command(file, settings, seeds, rows)
                records = tables.write_table(content, outcomes, out, command, side.at_once)
                _show(records, out / content.name)
    except KeyboardInterrupt:
        interrupted = True
        outcomes = []
    for outcome in outcomes:
        if outcome.error:
            _show_missing(outcome)
    if interrupted:
        display.console.print("interrupted; the same command goes on where it was")
        raise typer.Exit(130)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


def show_dry_run(file: Path, settings: Sequence[str], seeds: str, rows: str, tflops: float) -> None:
    """Print what the runs of a table would take.

    Args:
        tflops: what a GPU is taken to do in a second, in 10^12.

    Raises:
        typer.Exit: the file was refused.
    """
    from osfl.cli.plan import show_plan

    with display.named_errors():
        found = launch.find_config(str(file))
        show_plan(tables.read_table(found, settings, seeds, rows, without_data=True), tflops)


def _fetch_kits(content: tables.TableFile) -> None:
    """Fetch the hub's kits that the runs use: a run's name has their digests.

    Raises:
        KitError, FileNotFoundError: one cannot be had.
    """
    for settings in content.rows.values():
        config, _ = launch.resolve_config(tables.as_arguments(settings))
        for name, parts in used_parts(config).values():
            if is_hub_id(name):
                find_kit(name, parts)


def _run_cells(
    content: tables.TableFile, runs: Path, side: Side
) -> tuple[list[tables.Outcome], bool]:
    """What every cell gave, and whether it was interrupted."""
    cells = content.cells()
    make_private_folder(runs)
    with display.counting_bar() as progress:
        bar = progress.add_task(display.words(content.name), total=len(cells))

        def note(cell: tables.Cell, state: str) -> None:
            if state not in ("running", "tried again"):
                progress.advance(bar)
            progress.console.print(
                f"{time.strftime('%H:%M:%S')} {display.words(cell.row)}, seed {cell.seed}: {state}",
                highlight=False,
            )

        shares = ["--client-cpus", str(side.client_cpus), "--client-gpus", str(side.client_gpus)]
        runner = tables.Runner(runs, side.at_once, note, shares)
        try:
            return runner.run_all(cells), False
        except KeyboardInterrupt:
            missing = {cell: tables.Outcome(cell, error="not run yet") for cell in cells}
            return list((missing | runner.outcomes).values()), True


def _command(file: Path, settings: Sequence[str], seeds: str, rows: str) -> str:
    options = [f"--seeds {seeds}"] if seeds else []
    options += [f"--rows '{rows}'"] if rows else []
    return " ".join(["osfl compare", str(file), *settings, *options])


def _show(records: list[dict], stem: Path) -> None:
    shown = Table("", "average", "upload", "rounds")
    for name, group in tables.by_row(records).items():
        mean = sum(record["average"] for record in group) / len(group)
        upload = human_bytes(group[0]["upload_bytes"])
        shown.add_row(display.words(name), f"{mean:.1f}", upload, str(group[0]["rounds"]))
    display.console.print(shown)
    picture = ", .png" if Path(f"{stem}.png").is_file() else ""
    display.console.print(
        f"table: [bold]{stem}.md[/], .csv{picture}", highlight=False, soft_wrap=True
    )


def _show_missing(outcome: tables.Outcome) -> None:
    row = display.words(outcome.cell.row)
    reason = escape(sanitize(outcome.error, tables.MOST_ERROR))
    text = f"[bold red]missing[/] {row}, seed {outcome.cell.seed}: {reason}"
    display.console.print(text, soft_wrap=True)
