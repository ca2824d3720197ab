"""`osfl run`: simulate a federation on this machine, or submit a job to a real one."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import typer

from osfl.cli import display, launch
from osfl.cli.output import OutputError, print_to_stderr
from osfl.cli.preflight import check_run
from osfl.config import IDENTIFIER_RULE, ConfigError, RunConfig, Scalar, flatten, is_identifier
from osfl.data.partition import DataError
from osfl.run_folder.events import FollowedRun
from osfl.run_folder.layout import RunFolder, check_same_run
from osfl.run_folder.report.metrics import read_metrics
from osfl.run_folder.status import read_status
from osfl.settings import resolve_config
from osfl.util.exit_codes import TRY_AGAIN
from osfl.util.files import check_own_folder, make_private_folder, open_private
from osfl.util.text import sanitize

# In the traceback of Flower's backend if Ray did not start, as on a busy machine
RAY_START = ", in init_ray\n"
TRACEBACK = "Traceback (most recent call last):\n"
_CHAIN = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Timeout|Full|Empty)\b.*", re.M)


class RayStartError(launch.LaunchError):
    """A simulation whose clients never ran because Ray did not start; a retry may succeed."""


def run(
    settings: Iterable[str],
    runs: Path | None,
    connection: str,
    client_cpus: int,
    client_gpus: float,
) -> None:
    """Run a federation and show its progress and results.

    Args:
        settings: TOML files and `key=value` arguments.
        runs: folder for a simulation's runs; None for `runs`.
        connection: a SuperLink of the user's Flower configuration; "" to simulate here.
        client_cpus, client_gpus: resources per simulated client.

    Raises:
        typer.Exit: the run is invalid, failed, or was interrupted.
    """
    handle_signals()
    job_id = ""
    try:
        config, overrides = resolve_config(settings)
        if not config.job_id:
            overrides["job-id"] = f"{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        job_id = str(overrides.get("job-id", config.job_id))
        if not is_identifier(job_id):
            raise ConfigError(f"job-id = {job_id!r}: {IDENTIFIER_RULE}")
        root = runs_folder(config, runs, connection)
        if connection:
            check_run(overrides, None)
            _run_remotely(connection, overrides, job_id)
        else:
            if os.path.lexists(root / job_id):
                check_own_folder(root / job_id)
            check_same_run(RunFolder(root / job_id), flatten(config))
            launch.check_temporary_folder()
            display.console.print("checking settings, data and models")
            for note in check_run(overrides, root):
                display.console.print(note, markup=False)
            make_private_folder(root)
            federation: dict[str, Scalar] = {
                "num-supernodes": config.num_clients,
                "client-resources-num-cpus": client_cpus,
                "client-resources-num-gpus": client_gpus,
            }
            _simulate(config, overrides, job_id, root, federation)
    except (ConfigError, DataError, launch.LaunchError, OSError) as error:
        display.print_error(error)
        raise typer.Exit(TRY_AGAIN if isinstance(error, RayStartError) else 1) from None
    except KeyboardInterrupt:
        display.console.print(_resume_hint(connection, job_id), markup=False, highlight=False)
        raise typer.Exit(130) from None
    except OutputError:
        print_to_stderr(_resume_hint(connection, job_id))
        raise


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


def runs_folder(config: RunConfig, runs: Path | None, connection: str = "") -> Path:
    """Return the folder of a simulation's runs.

    Raises:
        ConfigError: `runs` is set for a real federation, or is not a folder.
    """
    if connection and runs:
        raise ConfigError(
            "--runs is for simulations; set the key runs-dir, or $OSFL_RUNS on the server, for "
            "a server's runs"
        )
    path = Path(config.runs_dir).expanduser() if config.runs_dir else runs or Path("runs")
    # Not `resolve`, which fails for a link to itself
    folder = Path(os.path.abspath(path))
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(
            f"{folder} must be a folder, but is a file or a broken link. Remove it, or set --runs "
            "to another folder"
        )
    return folder


def _resume_hint(connection: str, job_id: str) -> str:
    if connection:
        return (
            "interrupted; the run continues on the server: see `flwr list`, `flwr log`, `flwr stop`"
        )
    return f"interrupted; to resume, repeat the command with job-id={job_id}"


def _simulate(
    config: RunConfig,
    overrides: dict[str, Scalar],
    job_id: str,
    root: Path,
    federation: dict[str, Scalar],
) -> None:
    folder = RunFolder(root / job_id)
    cache = root / ".client-cache"
    logs = root / f"{job_id}.log"
    folder.remove_status()
    try:
        with launch.local_superlink(root, cache) as environment:
            run_id = launch.submit(overrides, "osfl", environment, federation)
            display.console.print(
                f"[bold]{config.method}[/], {config.num_clients} clients, job [bold]{job_id}[/]",
                highlight=False,
            )
            with open_private(logs, "w") as sink:
                command = ["flwr", "log", str(run_id), "osfl", "--stream"]
                streaming = subprocess.Popen(
                    command, cwd=launch.WORKING_FOLDER, env=environment, stdout=sink, stderr=sink
                )
            with streaming:
                try:
                    display.watch(streaming, folder.path, cache / job_id)
                finally:
                    streaming.terminate()
            status, details = launch.outcome(run_id, "osfl", environment)
    finally:
        if folder.path.is_dir():
            logs = folder.move_log(logs)
    state = read_status(folder.path)
    if not status.startswith("finished:completed") or state.get("phase") != "finished":
        raise _failure(state.get("error", ""), details or f"Flower says: {status}", logs)
    display.print_metrics(read_metrics(folder.path))
    display.console.print(f"report: [bold]{folder.report_file}[/]", highlight=False, soft_wrap=True)


def _failure(error: str, details: str, logs: Path) -> launch.LaunchError:
    """Return why a simulation failed, from its server, its log, or else Flower.

    Args:
        error: the ServerApp's message, or "".
        details: Flower's message.
        logs: the log of the run.
    """
    text = logs.read_text(errors="replace") if logs.is_file() else ""
    reason = error or innermost_cause(text) or details
    if not error and RAY_START in text:
        return RayStartError(f"Ray, which runs the clients, did not start: {reason}\nlog: {logs}")
    return launch.LaunchError(f"the run failed: {reason}\nlog: {logs}")


def innermost_cause(log: str) -> str:
    """Return the first exception of the last chain of tracebacks in a log, or ""."""
    parts = _CHAIN.split(log)
    # Back through the links of the last chain, to the part with its first exception
    index = len(parts) - 1
    while index and parts[index].startswith(TRACEBACK) and parts[index].count(TRACEBACK) == 1:
        index -= 1
    exceptions = _EXCEPTION.findall(parts[index])
    return sanitize(exceptions[-1], launch.MAX_MESSAGE_LENGTH) if exceptions else ""


def _run_remotely(connection: str, overrides: dict[str, Scalar], job_id: str) -> None:
    """Submit to a real federation and follow its log; results stay on the server."""
    environment = launch.flower_environment()
    run_id = launch.submit(overrides, connection, environment)
    display.console.print(
        f"job [bold]{job_id}[/], Flower run {run_id}; results are in the server's runs-dir",
        highlight=False,
    )
    status = ""
    details = ""
    followed = FollowedRun()
    with display.new_view() as view:
        follow = partial(_follow, followed, view)
        # The log may end before the run does
        while not status.startswith("finished"):
            launch.follow_log(run_id, connection, environment, follow)
            status, details = launch.outcome(run_id, connection, environment)
            if status == "unknown":
                raise launch.LaunchError(
                    f"lost the connection to run {run_id}, which may still be running (see "
                    f"`flwr list {connection}`): {details}"
                )
    if not status.startswith("finished:completed"):
        raise launch.LaunchError(f"the run failed: {details or status}")
    if followed.metrics:
        display.print_metrics(followed.metrics)
        display.console.print(
            f"on the server, report: [bold]{display.escape_text(followed.metrics['report'])}[/]",
            highlight=False,
            soft_wrap=True,
        )


def _follow(followed: FollowedRun, view: display.View, line: str) -> None:
    """Show a line of the server's log; on a terminal, only the status, warnings and errors."""
    if followed.read(line):
        if display.console.is_terminal:
            view.show(followed.state)
    elif not display.console.is_terminal or line.startswith(("WARNING", "ERROR")):
        display.console.print(line, markup=False, highlight=False, soft_wrap=True)
