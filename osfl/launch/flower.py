"""Start a run: a local SuperLink, `flwr run`, and the run's actual outcome.

Everything that depends on the version of Flower's command line is in this file.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from osfl.config import Scalar, installed_defaults
from osfl.launch.guard import end_run_processes, start_guard
from osfl.settings import PACKAGES, shipped
from osfl.util.ray_folder import MAX_PATH_BYTES, ray_variables
from osfl.util.text import sanitize, sanitize_lines

# By default Flower installs an app's dependencies before every run (which fails offline), sends
# telemetry and checks for updates
_FLOWER_SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The default of 30 s is too short on a busy machine
    "RAY_raylet_start_wait_time_s": "300",
    # The libraries' progress bars would fill the log
    "TQDM_DISABLE": "1",
}

# A notebook's kernel sets these, with which Flower's JSON would have colors
_FORCED_COLORS = frozenset({"FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "PY_COLORS"})

# Every training step allocates and frees the same large tensors. By default glibc returns them to
# the kernel, which clears every page again: 7 % of a training step on a CPU. Only the first arena
# can retain them, and the ServerApp's thread would get another one.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_ARENA_MAX": "1",
}


# Commands such as `flwr list osfl` would mistake a folder `osfl` in the working directory for an
# app, so they run in a folder without one
WORKING_FOLDER = Path(__file__).parent
# Color codes of Flower's log levels
_COLOR = re.compile(rb"\x1b\[[0-9;]{0,9}m")
_INCOMPLETE_APP = re.compile(r"Cannot find pyproject\.toml in (\S+)")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Maximum characters of Flower's messages that are shown
MAX_MESSAGE_LENGTH = 2000
# Maximum characters of a line of the log
MAX_LINE_LENGTH = 10_000
# Bytes of Flower's bundles, and of Ray's logs and sockets
MIN_TEMPORARY_SPACE = 50_000_000


class LaunchError(RuntimeError):
    """A run that could not start or did not finish; the message gives the reason."""


def copy_app(folder: Path, method: str = "") -> Path:
    """Copy the files of Flower's app bundle to a new folder, and return it.

    In a checkout, Flower would spend many seconds matching every file in .venv and runs.

    Args:
        method: the run's. The keys of an installed package's method become part of the copy's
            pyproject.toml, because Flower refuses overrides of keys that are not in it.
    """
    for package in ("osfl", "client_app", "server_app"):
        shutil.copytree(
            PACKAGES / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(shipped(name), folder)
    if defaults := installed_defaults(method):
        section = {key.removeprefix(f"{method}."): value for key, value in defaults.items()}
        app = {"tool": {"flwr": {"app": {"config": {method: section}}}}}
        with open(folder / "pyproject.toml", "a", encoding="utf-8") as file:
            file.write("\n" + tomli_w.dumps(app))
    return folder


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or its closest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def check_disk(runs: Path, needed: int) -> str:
    """Check that a run's folder is writable and has enough space, and return a summary.

    Args:
        runs: parent folder of the run's folder.
        needed: bytes.

    Raises:
        LaunchError: the folder is not writable, or has too little space.
    """
    folder = nearest_folder(runs)
    if not os.access(folder, os.W_OK):
        raise LaunchError(
            f"{folder} is not writable. Change its owner or mode, or set --runs to another folder"
        )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaunchError(
            f"{folder} has {free / 1e6:,.0f} MB free; this run needs about {needed / 1e6:,.0f} MB. "
            "Free some space, or set --runs to another folder"
        )
    return f"{free / 1e9:,.1f} GB free in {folder}; a run needs at most {needed / 1e9:,.1f} GB"


def write_overrides(overrides: dict[str, Scalar], file: Path) -> None:
    """Write the overrides as a TOML file for `flwr run --run-config`."""
    file.write_text(tomli_w.dumps(overrides), encoding="utf-8")


def flower_environment() -> dict[str, str]:
    """Return the environment with Flower's switches set and its commands on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    inherited = {key: value for key, value in os.environ.items() if key not in _FORCED_COLORS}
    return {
        **MALLOC_SETTINGS,
        **inherited,
        **_FLOWER_SWITCHES,
        "PATH": path,
        "TOKENIZERS_PARALLELISM": "false",
    }


def local_environment(scratch: Path) -> dict[str, str]:
    """Return `flower_environment` for processes that only communicate on this machine.

    Loopback addresses bypass proxies. Temporary files, such as Ray's sockets and logs, are in
    `scratch`, or in another folder if its path is too long for a socket.

    Args:
        scratch: the run's temporary folder.

    Raises:
        ConfigError: as `ray_variables`.
    """
    environment = flower_environment()
    # gRPC reads no_grpc_proxy before no_proxy, and lower-case names only
    for names in (("no_proxy", "NO_PROXY"), ("no_grpc_proxy",)):
        current = next((environment[name] for name in names if environment.get(name)), "")
        if current or len(names) > 1:
            hosts = ",".join(filter(None, (current, *LOOPBACK)))
            environment.update(dict.fromkeys(names, hosts))
    if len(os.fsencode(scratch)) <= MAX_PATH_BYTES:
        environment["TMPDIR"] = str(scratch)
    return environment | ray_variables(environment)


@contextmanager
def local_superlink(runs: Path, cache: Path) -> Iterator[dict[str, str]]:
    """Run a SuperLink on loopback for one simulation, and end it with all of its processes.

    Yields:
        the environment in which `flwr` knows it as the connection `osfl`.
    """
    check_temporary_folder()
    with _guarded_folder() as scratch:
        home = scratch / "home"
        # Simulated clients import from the SuperLink's folder
        empty = scratch / "empty"
        home.mkdir()
        empty.mkdir()
        port, fleet = free_ports(2)
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "osfl"\n\n[superlink.osfl]\naddress = '
            f'"127.0.0.1:{port}"\ninsecure = true\n'
        )
        environment = {
            **local_environment(scratch),
            "FLWR_HOME": str(home),
            "OSFL_RUNS": str(runs),
            "OSFL_CACHE": str(cache),
            "OSFL_STATE": str(runs / ".client-state"),
            # Simulated clients run as this user, and may read whatever the user may read
            "OSFL_ALLOWED_DIRS": "/",
        }
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--fleet-api-address", f"127.0.0.1:{fleet}"]
        command += ["--disable-runtime-dependency-installation"]
        with open(scratch / "superlink.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=empty, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        _wait_until_healthy(process, port, scratch / "superlink.log")
        yield environment


@contextmanager
def _guarded_folder() -> Iterator[Path]:
    """Yield a run's temporary folder, and end the run's processes and delete it in any case."""
    with tempfile.TemporaryDirectory(prefix="osfl-", ignore_cleanup_errors=True) as scratch:
        # Before the run's first process, because a signal may arrive at any time
        guard = start_guard(scratch)
        try:
            yield Path(scratch)
        finally:
            end_run_processes(scratch)
            guard.communicate()


def check_temporary_folder() -> None:
    """Check that the temporary folder has space for Flower's and Ray's files.

    Raises:
        LaunchError: it does not.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < MIN_TEMPORARY_SPACE:
        raise LaunchError(
            f"the temporary folder {folder} has {free / 1e6:,.1f} MB free; a run needs "
            f"{MIN_TEMPORARY_SPACE / 1e6:,.0f} MB. Free some space, or set TMPDIR to another folder"
        )


def free_ports(count: int) -> list[int]:
    """Return unused loopback ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait_until_healthy(
    process: subprocess.Popen[bytes], port: int, log: Path, seconds: float = 180
) -> None:
    end = time.monotonic() + seconds
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end and process.poll() is None:
        try:
            with direct.open(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise LaunchError(f"the local SuperLink did not start:\n{_tail(log.read_bytes())}")


def submit(
    overrides: dict[str, Scalar],
    connection: str,
    environment: dict[str, str],
    federation: dict[str, Scalar] | None = None,
) -> int:
    """Submit the run with `flwr run`, and return Flower's run id.

    Raises:
        LaunchError: Flower rejected the run.
    """
    parent = environment.get("TMPDIR")
    with tempfile.TemporaryDirectory(
        prefix="osfl-submit-", dir=parent, ignore_cleanup_errors=True
    ) as scratch:
        command = [
            "flwr",
            "run",
            str(copy_app(Path(scratch) / "app", str(overrides.get("method", "")))),
            connection,
            "--format",
            "json",
        ]
        if overrides:
            file = Path(scratch) / "overrides.toml"
            write_overrides(overrides, file)
            command += ["--run-config", str(file)]
        if federation:
            command += [
                "--federation-config",
                " ".join(f"{key}={json.dumps(value)}" for key, value in federation.items()),
            ]
        # An interrupted `flwr run` does not delete its bundle
        run_environment = {**environment, "TMPDIR": scratch}
        result = subprocess.run(
            command, cwd=WORKING_FOLDER, env=run_environment, capture_output=True
        )
    try:
        reply = json.loads(result.stdout[result.stdout.index(b"{") :])
        if reply["success"]:
            return int(reply["run-id"])
        reason = sanitize_lines(reply.get("error-message", reply), MAX_MESSAGE_LENGTH)
    except (ValueError, KeyError):
        reason = _tail(result.stdout + result.stderr)
    raise LaunchError(f"Flower did not start the run: {reason}")


def outcome(
    run_id: int, connection: str, environment: dict[str, str], seconds: float = 60
) -> tuple[str, str]:
    """Return the (status, details) of a run from the SuperLink.

    `flwr run` itself exits with 0 even if the run fails. A run whose log has ended may take some
    time to become finished, for which this waits up to `seconds`.
    """
    command = ["flwr", "list", connection, "--run-id", str(run_id), "--format", "json"]
    end = time.monotonic() + seconds
    while True:
        result = subprocess.run(command, cwd=WORKING_FOLDER, env=environment, capture_output=True)
        try:
            run = json.loads(result.stdout[result.stdout.index(b"{") :])["runs"][0]
            status = sanitize(run["status"])
            details = run.get("status-details") or run.get("details") or ""
            # As Flower says that there are none
            details = "" if details == "N/A" else details
            details = _with_hint(sanitize_lines(details, MAX_MESSAGE_LENGTH))
        except (ValueError, KeyError, IndexError):
            status = "unknown"
            details = _error_in(result.stdout) or _tail(result.stdout + result.stderr)
        if status.startswith("finished") or time.monotonic() > end:
            return status, details


def _with_hint(details: str) -> str:
    """Return the details of a run, and what to do if Flower's copy of the app is incomplete.

    Flower takes an app's folder for complete as soon as it exists, also if another run is still
    unpacking it, or was killed meanwhile (flwr 1.39 to 1.42, flwr/cli/install.py).
    """
    incomplete = _INCOMPLETE_APP.search(details)
    if incomplete is None:
        return details
    return (
        f"{details}\nFlower's copy of the app is incomplete. Repeat the command; if it fails "
        f"again, delete {incomplete[1]} on the server"
    )


def follow_log(
    run_id: int, connection: str, environment: dict[str, str], show: Callable[[str], object]
) -> None:
    """Show the lines of `flwr log --stream`, sanitized because clients wrote some of them."""
    command = ["flwr", "log", str(run_id), connection, "--stream"]
    unbuffered = {**environment, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=WORKING_FOLDER,
        env=unbuffered,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as streaming:
        assert streaming.stdout is not None
        try:
            while line := streaming.stdout.readline(MAX_LINE_LENGTH):
                show(sanitize(_COLOR.sub(b"", line).rstrip(b"\n"), MAX_LINE_LENGTH))
        finally:
            streaming.terminate()


def _error_in(output: bytes) -> str:
    """Return the last line of the error message in a Flower command's JSON output, or ""."""
    try:
        message = json.loads(output[output.index(b"{") :])["error-message"]
        return sanitize(message.strip().splitlines()[-1], MAX_MESSAGE_LENGTH)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""


def _tail(output: bytes) -> str:
    """Return the end of a program's output."""
    return sanitize_lines(output[-MAX_MESSAGE_LENGTH:].strip(), MAX_MESSAGE_LENGTH)
