"""Jobs: check one, simulate it on this machine or submit it, and follow it to its end."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from osfl.config import IDENTIFIER_RULE, ConfigError, RunConfig, Scalar, flatten, is_identifier
from osfl.launch import flower
from osfl.launch.checks import check_run
from osfl.launch.views import Display, View
from osfl.run_folder.client_progress import CLIENT_CACHE
from osfl.run_folder.continuation import continued_folder, find_continuation
from osfl.run_folder.events import FollowedRun
from osfl.run_folder.layout import RunFolder, check_same_run
from osfl.run_folder.listing import FINAL_PHASES
from osfl.run_folder.payload_source import (
    check_source_name,
    find_path,
    find_source,
    source_folder,
)
from osfl.run_folder.report.metrics import read_metrics
from osfl.run_folder.status import read_status
from osfl.settings import Setting, resolve_config
from osfl.util.files import check_own_folder, make_private_folder, open_private
from osfl.util.text import sanitize

# A line in the traceback of Flower's backend if Ray did not start, as on a busy machine
RAY_START = ", in init_ray\n"
TRACEBACK = "Traceback (most recent call last):\n"
_CHAIN = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Timeout|Full|Empty)\b.*", re.M)


class RayStartError(flower.LaunchError):
    """A simulation whose clients did not run because Ray did not start; a retry may succeed."""


@dataclass(frozen=True)
class Resources:
    """Resources of each simulated client: CPU cores, and a fraction of a GPU."""

    client_cpus: int = 1
    client_gpus: float = 0.0


@dataclass(frozen=True)
class Job:
    """A job to start.

    Attributes:
        config: the checked run-config.
        overrides: its settings other than the defaults, with the job id.
        job_id: the job id.
        root: the folder of a simulation's runs.
    """

    config: RunConfig
    overrides: dict[str, Scalar]
    job_id: str
    root: Path

    @property
    def folder(self) -> RunFolder:
        """The run's folder; a real federation's is on the server."""
        return RunFolder(self.root / self.job_id)


def new_job(settings: Iterable[Setting], runs: Path | None, connection: str = "") -> Job:
    """Resolve a job's settings, and name it by method, seed and time unless `job-id` is set.

    Args:
        settings: TOML files, `key=value` arguments and mappings, merged from left to right.
        runs: folder for a simulation's runs; None for `runs`.
        connection: a SuperLink of the user's Flower configuration; "" for a simulation.

    Raises:
        ConfigError: a setting is invalid.
    """
    config, overrides = resolve_config(settings)
    if not config.job_id:
        overrides["job-id"] = f"{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    job_id = str(overrides.get("job-id", config.job_id))
    if not is_identifier(job_id):
        raise ConfigError(f"job-id = {job_id!r}: {IDENTIFIER_RULE}")
    root = runs_folder(config, runs, connection)
    if connection:
        check_source_name(config)
    else:
        config = with_source_path(config, root)
        sources = {"payloads-from": config.payloads_from, "continue-from": config.continue_from}
        overrides.update({key: name for key, name in sources.items() if name})
    return Job(config, overrides, job_id, root)


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


def with_source_path(config: RunConfig, root: Path) -> RunConfig:
    """Return a simulation's settings with absolute paths in `payloads-from` and `continue-from`.

    Args:
        root: the folder of all runs.
    """
    if config.payloads_from:
        config = replace(config, payloads_from=_absolute_path(config.payloads_from, root))
    if config.continue_from:
        config = replace(config, continue_from=_absolute_path(config.continue_from, root))
    return config


def _absolute_path(name: str, root: Path) -> str:
    return os.path.abspath(find_path(name, root))


def simulate(
    job: Job,
    resources: Resources,
    display: Display,
    read: Callable[[Path], dict[str, Any]] = read_metrics,
) -> dict[str, Any]:
    """Simulate a federation on this machine, and return its metrics.

    Args:
        read: reads the results in the run's folder.

    Raises:
        ConfigError, DataError, OSError: the run cannot work, or its folder is another run's.
        LaunchError: the run could not start or did not finish.
    """
    _check_simulation(job, display)
    folder = job.folder
    cache = job.root / CLIENT_CACHE
    log_file = job.root / f"{job.job_id}.log"
    federation: dict[str, Scalar] = {
        "num-supernodes": job.config.num_clients,
        "client-resources-num-cpus": resources.client_cpus,
        "client-resources-num-gpus": resources.client_gpus,
    }
    folder.remove_status()
    try:
        with flower.local_superlink(job.root, cache) as environment:
            run_id = flower.submit(job.overrides, "osfl", environment, federation)
            work = "advise" if job.config.advise else job.config.method
            display.print(f"{work}, {job.config.num_clients} clients, job {job.job_id}")
            with (
                display.view(cache / job.job_id) as view,
                _stream_log(run_id, environment, log_file) as log_stream,
            ):
                watch(log_stream, folder.path, view)
            status, details = flower.outcome(run_id, "osfl", environment)
    finally:
        if folder.path.is_dir():
            log_file = folder.move_log(log_file)
    state = read_status(folder.path)
    # A run with its report is over for Flower only when the clients that it gave up have ended
    has_failed = status.startswith("finished") and not status.startswith("finished:completed")
    if has_failed or state.get("phase") != "finished":
        raise _failure(state.get("error", ""), details or f"Flower says: {status}", log_file)
    return read(folder.path)


def _check_simulation(job: Job, display: Display) -> None:
    """Check a simulation before it starts, print notes on it, and create the folder of runs."""
    folder = job.folder
    if os.path.lexists(folder.path):
        check_own_folder(folder.path)
    check_same_run(folder, flatten(job.config))
    # A resumed run has the payloads already
    if job.config.payloads_from and folder.payload_source() is None:
        find_source(job.config, source_folder(job.config, job.root))
    if job.config.continue_from and folder.continuation() is None:
        find_continuation(job.config, continued_folder(job.config, job.root))
    flower.check_temporary_folder()
    display.print("checking settings, data and models")
    for note in check_run(job.overrides, job.root):
        display.print(note)
    make_private_folder(job.root)


@contextmanager
def _stream_log(
    run_id: int, environment: dict[str, str], log_file: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Write a simulation's log to a file while the context lasts; yield the process that does."""
    command = ["flwr", "log", str(run_id), "osfl", "--stream"]
    with open_private(log_file, "w") as sink:
        log_stream = subprocess.Popen(
            command, cwd=flower.WORKING_FOLDER, env=environment, stdout=sink, stderr=sink
        )
    with log_stream:
        try:
            yield log_stream
        finally:
            log_stream.terminate()


def watch(log_stream: subprocess.Popen[bytes], folder: Path, view: View) -> None:
    """Show the clients and the server's phase until the log ends."""
    while log_stream.poll() is None:
        state = read_status(folder)
        view.show(state)
        if state.get("phase") in FINAL_PHASES:
            with suppress(subprocess.TimeoutExpired):
                log_stream.wait(timeout=20)
            break
        time.sleep(0.3)
    view.show(read_status(folder))


def _failure(error: str, details: str, logs: Path) -> flower.LaunchError:
    """Return the error of a failed simulation: its server's, else its log's, else Flower's.

    Args:
        error: the ServerApp's message, or "".
        details: Flower's message.
        logs: the log of the run.
    """
    text = logs.read_text(errors="replace") if logs.is_file() else ""
    reason = error or innermost_cause(text) or details
    if not error and RAY_START in text:
        return RayStartError(f"Ray, which runs the clients, did not start: {reason}\nlog: {logs}")
    return flower.LaunchError(f"the run failed: {reason}\nlog: {logs}")


def innermost_cause(log: str) -> str:
    """Return the first exception of the last chain of tracebacks in a log, or ""."""
    parts = _CHAIN.split(log)
    # Back through the links of the last chain, to the part with its first exception
    index = len(parts) - 1
    while index and parts[index].startswith(TRACEBACK) and parts[index].count(TRACEBACK) == 1:
        index -= 1
    exceptions = _EXCEPTION.findall(parts[index])
    return sanitize(exceptions[-1], flower.MAX_MESSAGE_LENGTH) if exceptions else ""


def run_remotely(job: Job, connection: str, display: Display) -> dict[str, Any]:
    """Submit a job to a real federation, and follow its log; its folder stays on the server.

    Returns:
        the results that the log has, and `report`, the report's path on the server; {} without
        them.

    Raises:
        ConfigError: the run cannot work.
        LaunchError: the run could not start, did not finish, or the connection was lost.
    """
    check_run(job.overrides, None)
    environment = flower.flower_environment()
    run_id = flower.submit(job.overrides, connection, environment)
    display.print(f"job {job.job_id}, Flower run {run_id}; results are in the server's runs-dir")
    status = ""
    details = ""
    followed = FollowedRun()
    with display.view() as view:
        follow = partial(_follow, followed, display, view)
        # The log may end before the run does
        while not status.startswith("finished"):
            flower.follow_log(run_id, connection, environment, follow)
            status, details = flower.outcome(run_id, connection, environment)
            if status == "unknown":
                raise flower.LaunchError(
                    f"lost the connection to run {run_id}, which may still be running (see "
                    f"`flwr list {connection}`): {details}"
                )
    if not status.startswith("finished:completed"):
        raise flower.LaunchError(f"the run failed: {details or status}")
    if not followed.metrics:
        # The SuperLink was away at the end of the log
        followed = FollowedRun()
        flower.follow_log(run_id, connection, environment, followed.read)
    return followed.metrics


def _follow(followed: FollowedRun, display: Display, view: View, line: str) -> None:
    """Show a line of the server's log; on a live display, only status, warnings and errors."""
    if followed.read(line):
        if display.is_live:
            view.show(followed.state)
    elif not display.is_live or line.startswith(("WARNING", "ERROR")):
        display.print(line)
