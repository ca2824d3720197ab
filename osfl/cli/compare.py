"""`osfl compare`: run a table's cells in parallel with a progress bar, and write the table."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from osfl.cli import display
from osfl.cli.run import handle_signals
from osfl.kit.kits import find_kit, is_hub_id
from osfl.kit.used_parts import parts_by_step
from osfl.run_folder.report.page import human_bytes
from osfl.settings import find_config, resolve_config
from osfl.tables.files import write_table
from osfl.tables.records import describe_sharing, group_by_row
from osfl.tables.runner import MAX_ERROR_LENGTH, Outcome, Runner
from osfl.tables.table_file import Cell, TableFile, as_arguments, read_table
from osfl.util.files import make_private_folder
from osfl.util.text import sanitize


@dataclass(frozen=True)
class Resources:
    """The resources of parallel runs.

    Attributes:
        parallel_runs: number of parallel runs.
        client_cpus: CPU cores per client.
        client_gpus: fraction of a GPU per client.
    """

    parallel_runs: int
    client_cpus: int
    client_gpus: float


def run_table(
    file: Path,
    settings: Sequence[str],
    seeds: str,
    rows: str,
    side: Resources,
    runs: Path,
    out: Path,
) -> None:
    """Run the unfinished cells of a table, and write and print the table.

    Args:
        file: the table file.
        settings: `key=value` settings for every run.
        seeds, rows: comma-separated; "" for the file's.
        side: how the runs share the machine.
        runs: folder of the runs.
        out: folder for the table's files.

    Raises:
        typer.Exit: the table is invalid, the command was interrupted, or a run failed.
    """
    handle_signals()
    interrupted = False
    outcomes: list[Outcome] = []
    try:
        with display.expected_errors():
            table = read_table(find_config(str(file)), settings, seeds, rows)
            _fetch_kits(table)
            outcomes, interrupted = _run_cells(table, runs.resolve(), side)
            # An empty table must not replace an earlier one
            if not interrupted or any(not outcome.error for outcome in outcomes):
                command = _command_line(file, settings, seeds, rows)
                records = write_table(table, outcomes, out, command, side.parallel_runs)
                _show(records, out / table.name)
                if sharing := describe_sharing(outcomes):
                    display.console.print(sharing, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
        outcomes = []
    for outcome in outcomes:
        if outcome.error:
            _show_missing(outcome)
    if interrupted:
        display.console.print("interrupted; the same command resumes")
        raise typer.Exit(130)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


def show_dry_run(file: Path, settings: Sequence[str], seeds: str, rows: str, tflops: float) -> None:
    """Print the estimated costs of a table's runs.

    Args:
        tflops: the assumed throughput of a GPU, in TFLOP/s.

    Raises:
        typer.Exit: the table is invalid.
    """
    from osfl.cli.plan import show_plan

    with display.expected_errors():
        path = find_config(str(file))
        show_plan(read_table(path, settings, seeds, rows, without_data=True), tflops)


def _fetch_kits(table: TableFile) -> None:
    """Download the kits that the runs use, whose digests are part of the job ids.

    Raises:
        KitError, FileNotFoundError: a kit cannot be downloaded.
    """
    for settings in table.rows.values():
        config, _ = resolve_config(as_arguments(settings))
        for name, parts in parts_by_step(config).values():
            if is_hub_id(name):
                find_kit(name, parts)


def _run_cells(table: TableFile, runs: Path, side: Resources) -> tuple[list[Outcome], bool]:
    """Run all cells; return (outcomes, whether the user interrupted)."""
    cells = table.cells()
    make_private_folder(runs)
    with display.counting_progress() as progress:
        task = progress.add_task(display.escape_text(table.name), total=len(cells))

        def note(cell: Cell, state: str) -> None:
            if state not in ("running", "tried again"):
                progress.advance(task)
            progress.console.print(
                f"{time.strftime('%H:%M:%S')} {display.escape_text(cell.row)}, seed {cell.seed}: "
                f"{state}",
                highlight=False,
            )

        shares = ["--client-cpus", str(side.client_cpus), "--client-gpus", str(side.client_gpus)]
        runner = Runner(runs, side.parallel_runs, note, shares)
        try:
            return runner.run_all(cells), False
        except KeyboardInterrupt:
            missing = {cell: Outcome(cell, error="not run yet") for cell in cells}
            return list((missing | runner.outcomes).values()), True


def _command_line(file: Path, settings: Sequence[str], seeds: str, rows: str) -> str:
    options = [f"--seeds {seeds}"] if seeds else []
    options += [f"--rows '{rows}'"] if rows else []
    return " ".join(["osfl compare", str(file), *settings, *options])


def _show(records: list[dict[str, Any]], stem: Path) -> None:
    table = Table("", "average", "upload", "rounds")
    for name, group in group_by_row(records).items():
        mean = sum(record["average"] for record in group) / len(group)
        upload = human_bytes(group[0]["upload_bytes"])
        table.add_row(display.escape_text(name), f"{mean:.1f}", upload, str(group[0]["rounds"]))
    display.console.print(table)
    plot = ", .png" if Path(f"{stem}.png").is_file() else ""
    display.console.print(f"table: [bold]{stem}.md[/], .csv{plot}", highlight=False, soft_wrap=True)


def _show_missing(outcome: Outcome) -> None:
    row = display.escape_text(outcome.cell.row)
    reason = escape(sanitize(outcome.error, MAX_ERROR_LENGTH))
    text = f"[bold red]missing[/] {row}, seed {outcome.cell.seed}: {reason}"
    display.console.print(text, soft_wrap=True)
