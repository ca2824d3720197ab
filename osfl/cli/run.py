"""`osfl run`: simulate a federation on this machine, or submit a job to a real one."""

import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import typer

from osfl.cli import display
from osfl.cli.output import OutputError, print_to_stderr
from osfl.cli.signing import signed_setting
from osfl.config import ConfigError
from osfl.data.partition import DataError
from osfl.launch.flower import LaunchError
from osfl.launch.jobs import Job, RayStartError, Resources, new_job, run_remotely, simulate
from osfl.launch.views import ConsoleDisplay
from osfl.settings import Setting
from osfl.util.exit_codes import TRY_AGAIN


def run(
    settings: Iterable[Setting],
    runs: Path | None,
    connection: str,
    resources: Resources,
    signed: Path | None = None,
) -> None:
    """Run a federation and show its progress and results.

    Args:
        settings: TOML files, `key=value` arguments and mappings.
        runs: folder for a simulation's runs; None for `runs`.
        connection: a SuperLink of the user's Flower configuration; "" to simulate here.
        resources: of each simulated client.
        signed: file of the run's signatures; None for an unsigned run.

    Raises:
        typer.Exit: the run is invalid, failed, or was interrupted.
    """
    handle_signals()
    job_id = ""
    try:
        job = new_job(settings, runs, connection)
        job_id = job.job_id
        if signed is not None:
            job = replace(job, overrides=signed_setting(signed, job.overrides))
        _run(job, connection, resources)
    except (ConfigError, DataError, LaunchError, OSError) as error:
        display.print_error(error)
        raise typer.Exit(TRY_AGAIN if isinstance(error, RayStartError) else 1) from None
    except KeyboardInterrupt:
        display.console.print(_resume_hint(connection, job_id), markup=False, highlight=False)
        raise typer.Exit(130) from None
    except OutputError:
        print_to_stderr(_resume_hint(connection, job_id))
        raise


def _run(job: Job, connection: str, resources: Resources) -> None:
    progress = ConsoleDisplay(display.console)
    if connection:
        metrics = run_remotely(job, connection, progress)
        report = f"on the server, report: {metrics.get('report', '')}"
    else:
        metrics = simulate(job, resources, progress)
        report = f"report: {job.folder.report_file}"
    # A log without results has none to print
    if metrics:
        display.print_metrics(metrics)
        progress.print(report)


def handle_signals() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, which also ends the SuperLink and its clients.

    A signal that is ignored, as by `nohup`, stays ignored.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt once: a closed terminal sends several signals."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _ignore)
    raise KeyboardInterrupt


def _ignore(*_: object) -> None:
    """Do nothing. With SIG_IGN Python would warn of a signal that has just arrived."""


def _resume_hint(connection: str, job_id: str) -> str:
    if connection:
        return (
            "interrupted; the run continues on the server: see `flwr list`, `flwr log`, `flwr stop`"
        )
    return f"interrupted; to resume, repeat the command with job-id={job_id}"
