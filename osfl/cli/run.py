"""`osfl run`: a simulation on this machine, or a job for a real federation."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.markup import escape

from osfl.cli import display, launch
from osfl.cli.preflight import check_run
from osfl.config import ConfigError, RunConfig, Scalar, flatten, is_identifier
from osfl.data.partition import DataError
from osfl.files import check_own_folder, open_private, private_folder
from osfl.run_folder.layout import RunFolder, check_same_run
from osfl.run_folder.report import read_metrics
from osfl.run_folder.status import read_status


def run(
    settings: Iterable[str],
    runs: Path | None,
    connection: str,
    client_cpus: int,
    client_gpus: float,
) -> None:
    """Run a federation and show it.

    Args:
        settings: TOML files and key=value.
        runs: where a simulation's runs are kept; None: in `runs`.
        connection: a SuperLink of the user's Flower configuration; empty: simulate here.
        client_cpus, client_gpus: what each simulated client has.

    Raises:
        typer.Exit: it was refused, failed, or was interrupted.
    """
    end_as_interrupted()
    job_id = ""
    try:
        config, overrides = launch.resolve_config(settings)
        if not config.job_id:
            overrides["job-id"] = f"{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        job_id = str(overrides.get("job-id", config.job_id))
        if not is_identifier(job_id):
            raise ConfigError(f"job-id = {job_id!r}: must be 1 to 64 letters, digits, '-' or '_'")
        root = runs_folder(config, runs, connection)
        if connection:
            check_run(overrides, None)
            _run_on(connection, overrides, job_id)
        else:
            if os.path.lexists(root / job_id):
                check_own_folder(root / job_id)
            check_same_run(RunFolder(root / job_id), flatten(config))
            for note in check_run(overrides, root):
                display.console.print(note, markup=False)
            private_folder(root)
            federation: dict[str, Scalar] = {
                "num-supernodes": config.num_clients,
                "client-resources-num-cpus": client_cpus,
                "client-resources-num-gpus": client_gpus,
            }
            _simulate(config, overrides, job_id, root, federation)
    except (ConfigError, DataError, launch.LaunchError, OSError) as error:
        display.print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _say_how_to_go_on(connection, job_id)
        raise typer.Exit(130) from None


def end_as_interrupted() -> None:
    """Take other ends of the terminal as Ctrl-C: they end the SuperLink and its clients too."""
    for ending in ("SIGTERM", "SIGHUP"):
        # Windows has no SIGHUP
        if hasattr(signal, ending):
            signal.signal(getattr(signal, ending), signal.default_int_handler)


def runs_folder(config: RunConfig, runs: Path | None, connection: str = "") -> Path:
    """Where a simulation's runs are kept.

    Raises:
        ConfigError: it is named for a real federation.
    """
    if connection and runs:
        raise ConfigError(
            "--runs is for simulations; where a server keeps its runs is the key runs-dir, "
            "or $OSFL_RUNS there"
        )
    if config.runs_dir:
        return Path(config.runs_dir).expanduser()
    return (runs or Path("runs")).resolve()


def _say_how_to_go_on(connection: str, job_id: str) -> None:
    if connection:
        display.console.print(
            "interrupted; the run goes on at the server: see `flwr list`, `flwr log`, `flwr stop`"
        )
        return
    display.console.print(
        "interrupted; the same command with this job id goes on where it was:",
        escape(f"job-id={job_id}"),
    )


def _simulate(
    config: RunConfig,
    overrides: dict[str, Scalar],
    job_id: str,
    root: Path,
    federation: dict[str, Scalar],
) -> None:
    folder = RunFolder(root / job_id)
    cache = root / ".client-cache"
    folder.forget_status()
    with launch.local_superlink(root, cache) as environment:
        run_id = launch.submit(overrides, "osfl", environment, federation)
        display.console.print(
            f"[bold]{config.method}[/], {config.num_clients} clients, job [bold]{job_id}[/]",
            highlight=False,
        )
        logs = root / f"{job_id}.log"
        with (
            open_private(logs, "w") as sink,
            subprocess.Popen(
                ["flwr", "log", str(run_id), "osfl", "--stream"],
                cwd=launch.HERE,
                env=environment,
                stdout=sink,
                stderr=sink,
            ) as streaming,
        ):
            try:
                display.watch(streaming, folder.path, cache / job_id)
            finally:
                streaming.terminate()
        status, details = launch.outcome(run_id, "osfl", environment)
    if folder.path.is_dir():
        logs = folder.take_log(logs)
    state = read_status(folder.path)
    if not status.startswith("finished:completed") or state.get("phase") != "finished":
        reason = state.get("error") or details or f"Flower says: {status}"
        raise launch.LaunchError(f"the run failed: {reason}\nlog: {logs}")
    display.print_metrics(read_metrics(folder.path))
    display.console.print(f"report: [bold]{folder.report_file}[/]", highlight=False, soft_wrap=True)


def _run_on(connection: str, overrides: dict[str, Scalar], job_id: str) -> None:
    """Submit to a real federation and follow its log; results are on the server's machine."""
    environment = launch.flower_environment()
    run_id = launch.submit(overrides, connection, environment)
    display.console.print(
        f"job [bold]{job_id}[/], Flower's run {run_id}; the server keeps it in its runs-dir",
        highlight=False,
    )
    status = ""
    details = ""
    while not status.startswith("finished"):  # the log may break off before the run does
        launch.follow_log(run_id, connection, environment, print)
        status, details = launch.outcome(run_id, connection, environment)
        if status == "unknown":
            raise launch.LaunchError(
                f"lost sight of run {run_id}, which may go on: {details}\nsee `flwr list "
                f"{connection}`"
            )
    if not status.startswith("finished:completed"):
        raise launch.LaunchError(f"the run failed: {details or status}")
