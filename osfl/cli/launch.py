"""Starting a run.

The configuration from files and arguments, a SuperLink of its own, `flwr run`, and the true
outcome.

All that depends on the version of Flower's command line is in this file.
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
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from flwr.common.config import flatten_dict

from osfl.cli.guard import begin_guard, end_run_processes
from osfl.config import ConfigError, RunConfig, Scalar, parse_run_config, schema
from osfl.config.toml import parse_toml, read_toml
from osfl.data.named import chosen_classes, is_named
from osfl.data.partition import DataError
from osfl.util.ray_folder import MAX_PATH_BYTES, ray_variables
from osfl.util.text import quote, sanitize, sanitize_lines

# Flower installs an app's dependencies before every run (and fails offline), phones home and looks
# for updates, unless told not to.
_FLOWER_SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",  # Ray gives up after 30 s, which a busy machine needs
    "TQDM_DISABLE": "1",  # the libraries' progress bars would fill the log; ours shows the run's
}

# Training makes and frees the same large tensors in every step. By default glibc hands them back to
# the kernel each time, and every page is cleared anew: 7 % of a training step on a CPU. Only the
# first arena can keep them, and the ServerApp runs
# in a thread, which would get another.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_ARENA_MAX": "1",
}


# Where the app's packages lie: a checkout, or site-packages.
PACKAGES = Path(__file__).resolve().parents[2]
# `flwr list osfl` and its kin take a folder `osfl` where they are called, a checkout's say, for an
# app of older days: they are called where there is none.
HERE = Path(__file__).parent
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,9}m")  # Flower's own, of its log's levels
RECOMMENDED = "configs/recommended.toml"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_SAID = 2000  # characters of what Flower says
MOST_LINE = 10_000  # characters of a line of the log
TEMPORARY_ROOM = 50_000_000  # bytes of Flower's bundles, and of Ray's logs and sockets


class UnseenDataError(ConfigError):
    """A data set whose classes must be asked for, and cannot be."""


class LaunchError(RuntimeError):
    """A run that could not be started or did not finish; the message says why."""


def shipped(name: str) -> Path:
    """What the Flower app has beside its packages: `pyproject.toml`, `LICENSE`, `configs`.

    They lie in the checkout's root, or where the wheel puts them: in `osfl_app`.

    Raises:
        LaunchError: this installation lacks it.
    """
    for folder in (PACKAGES, PACKAGES / "osfl_app"):
        if (folder / "pyproject.toml").is_file() and (folder / name).exists():
            return folder / name
    raise LaunchError(
        f"this installation lacks {name}: install osfl again, from a wheel, or from a checkout "
        "with `pip install -e '.[simulation]'`"
    )


def copy_app(folder: Path) -> Path:
    """What Flower's bundle is made of, in a new folder.

    Of a checkout, Flower would match every file in .venv and runs, for many seconds.
    """
    for package in ("osfl", "client_app", "server_app"):
        shutil.copytree(
            PACKAGES / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(shipped(name), folder)
    return folder


def default_config() -> dict[str, Scalar]:
    """Every run-config key with its default, from pyproject.toml."""
    project = tomllib.loads(shipped("pyproject.toml").read_text(encoding="utf-8"))
    return flatten_dict(project["tool"]["flwr"]["app"]["config"])


def resolve_config(arguments: Iterable[str]) -> tuple[RunConfig, dict[str, Scalar]]:
    """Merge TOML files and `key=value` arguments, from left to right, over the defaults.

    Values are TOML (`seed=1`, `classifier.small-stem=false`); what is not TOML is taken as text
    (`method=fedlmg`).

    Returns:
        the checked configuration and the overrides.

    Raises:
        ConfigError: a missing or broken file, an unknown key, a bad value.
    """
    known = default_config()
    overrides = read_overrides(arguments)
    config = parse_run_config({**known, **overrides})
    if is_named(config.data):
        # What a data set stores is asked once, here: nodes are told the names.
        overrides["data.classes"] = ",".join(_classes(config))
        config = parse_run_config({**known, **overrides})
    return config, overrides


def read_overrides(arguments: Iterable[str]) -> dict[str, Scalar]:
    """The settings of TOML files and `key=value` arguments, unchecked.

    A file that is there is read, even where its path has an equals sign.

    Raises:
        ConfigError: a missing or broken file, a value that no key can have.
    """
    overrides = dict[str, Scalar]()
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if equals and not _is_file(argument):
            layer = {key.strip(): _value(key.strip(), text.strip(" \t"))}
        else:
            layer = flat_toml(read_toml(find_config(argument), argument))
        overrides = laid_over(overrides, layer)
    return overrides


def laid_over(settings: Mapping[str, Scalar], later: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Later settings over earlier ones. Epochs that are set later end the steps of before, which
    would go first.
    """
    ended = {f"{key.removesuffix('epochs')}steps" for key in later if key.endswith(".epochs")}
    return {**settings, **dict.fromkeys(ended & set(settings), 0), **later}


def _classes(config: RunConfig) -> tuple[str, ...]:
    try:
        return chosen_classes(config.data)
    except DataError as error:
        raise UnseenDataError(str(error)) from None


def _value(key: str, text: str) -> Scalar:
    """The value of a `key=value` argument.

    Raises:
        ConfigError: a value that no key can have.
    """
    kind = schema().get(key)
    if getattr(kind, "__origin__", kind) is str and not text.startswith("["):
        return text.strip("\"'")
    try:
        table = parse_toml(f"value = {text}", key)
    except ConfigError:
        return text
    if list(table) != ["value"]:
        return text
    return _scalar(key, table["value"])


def with_recommended(settings: Iterable[str] | None) -> list[str]:
    """The same settings, over configs/recommended.toml where none of them names a method.

    Raises:
        ConfigError: as `read_overrides`.
    """
    given = list(settings or [])
    return given if "method" in read_overrides(given) else [RECOMMENDED, *given]


def _is_file(name: str) -> bool:
    # A name may be longer than any file's
    with suppress(OSError):
        return Path(name).is_file()
    return False


def find_config(name: str) -> Path:
    """A file of settings: here, or of those that come with osfl, such as configs/demo.toml.

    Raises:
        ConfigError: neither is there.
    """
    file = Path(name)
    if _is_file(name):
        return file
    packaged = shipped("configs")
    found = packaged.parent / file
    if file.parts[:1] == (packaged.name,) and ".." not in file.parts and _is_file(str(found)):
        return found
    names = sorted(
        path.relative_to(packaged.parent).as_posix() for path in packaged.rglob("*.toml")
    )
    raise ConfigError(
        f"{quote(name)}: no such file, and not key=value. With osfl come: {', '.join(names)}"
    )


def flat_toml(table: dict[str, Any]) -> dict[str, Scalar]:
    """A TOML table with dotted keys.

    A list becomes the comma-separated text that the schema has for lists.

    Raises:
        ConfigError: a value that no run-config key can have.
    """
    return dict(_flat(table, ""))


def _flat(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        # An empty section is none; `seed = {}` is no section
        if isinstance(value, dict) and (value or prefix + key not in schema()):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _scalar(prefix + key, value)


def _scalar(key: str, value: Any) -> Scalar:
    """A TOML value as a run-config has it: lists are comma-separated texts.

    Raises:
        ConfigError: a table, a date, or a list with other things than texts and numbers.
    """
    if isinstance(value, list) and all(isinstance(each, int | float | str) for each in value):
        return ",".join(map(str, value))
    if isinstance(value, int | float | str):
        return value
    raise ConfigError(
        f"{sanitize(key)} = {sanitize(value)}: must be a text, a number, true or false, or a "
        "list of "
        "these"
    )


def nearest_folder(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def check_disk(runs: Path, needed: int) -> str:
    """Whether a run's folder can be written, and has room; says how much there is.

    Args:
        runs: where the run's folder will be.
        needed: bytes.

    Raises:
        LaunchError: it cannot, or it has not.
    """
    folder = nearest_folder(runs)
    if not os.access(folder, os.W_OK):
        raise LaunchError(f"{folder} cannot be written. Make it yours, or name another: --runs")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaunchError(
            f"{folder} has {free / 1e6:,.0f} MB free; this run takes about {needed / 1e6:,.0f} MB. "
            "Make room, or name another folder: --runs"
        )
    return f"{free / 1e9:,.1f} GB free in {folder}; a run takes at most {needed / 1e9:,.1f} GB"


def write_overrides(overrides: dict[str, Scalar], file: Path) -> None:
    """Write the overrides as a TOML file for `flwr run --run-config`."""
    file.write_text(tomli_w.dumps(overrides), encoding="utf-8")


def flower_environment() -> dict[str, str]:
    """This process's environment, with Flower's switches set and its commands on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        **KEEP_MEMORY,
        **os.environ,
        **_FLOWER_SWITCHES,
        "PATH": path,
        "TOKENIZERS_PARALLELISM": "false",
    }


def local_environment(scratch: Path) -> dict[str, str]:
    """`flower_environment` for processes that speak to each other on this machine alone.

    A proxy is not asked for loopback addresses. What the processes leave, such as Ray's sockets
    and logs, goes with `scratch`; where that path is too long for sockets, Ray has another folder.

    Args:
        scratch: the run's temporary folder.

    Raises:
        ConfigError: as `ray_variables`.
    """
    environment = flower_environment()
    # gRPC reads no_grpc_proxy before no_proxy, and lower-case names only
    for names in (("no_proxy", "NO_PROXY"), ("no_grpc_proxy",)):
        given = next((environment[name] for name in names if environment.get(name)), "")
        if given or len(names) > 1:
            listed = ",".join(filter(None, (given, *LOOPBACK)))
            environment.update(dict.fromkeys(names, listed))
    if len(os.fsencode(scratch)) <= MAX_PATH_BYTES:
        environment["TMPDIR"] = str(scratch)
    return environment | ray_variables(environment)


@contextmanager
def local_superlink(runs: Path, cache: Path) -> Iterator[dict[str, str]]:
    """A SuperLink of our own for one simulation, on loopback, ended with everything it started.

    Yields:
        the environment in which `flwr` finds it as the connection `osfl`.
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
            # Simulated clients are this user: settings may name whatever the user may read
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
    """Yield a run's temporary folder; its processes and itself go when the run ends in any way."""
    with tempfile.TemporaryDirectory(prefix="osfl-", ignore_cleanup_errors=True) as scratch:
        # Before the first process of the run: a signal may come between any two lines
        guard = begin_guard(scratch)
        try:
            yield Path(scratch)
        finally:
            end_run_processes(scratch)
            guard.communicate()


def check_temporary_folder() -> None:
    """Check that the temporary folder has room for Flower's and Ray's files.

    Raises:
        LaunchError: it has not.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < TEMPORARY_ROOM:
        raise LaunchError(
            f"the temporary folder {folder} has {free / 1e6:,.1f} MB free; a run needs "
            f"{TEMPORARY_ROOM / 1e6:,.0f} MB there. Make room, or set TMPDIR to another folder"
        )


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on, on loopback."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait_until_healthy(
    process: subprocess.Popen, port: int, log: Path, seconds: float = 180
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
    """`flwr run`; returns Flower's run id.

    Raises:
        LaunchError: the app was refused.
    """
    within = environment.get("TMPDIR")
    with tempfile.TemporaryDirectory(
        prefix="osfl-submit-", dir=within, ignore_cleanup_errors=True
    ) as scratch:
        command = [
            "flwr",
            "run",
            str(copy_app(Path(scratch) / "app")),
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
        # An interrupted `flwr run` leaves its bundle
        own = {**environment, "TMPDIR": scratch}
        done = subprocess.run(command, cwd=HERE, env=own, capture_output=True)
    try:
        answer = json.loads(done.stdout[done.stdout.index(b"{") :])
        if answer["success"]:
            return int(answer["run-id"])
        reason = sanitize_lines(answer.get("error-message", answer), MOST_SAID)
    except (ValueError, KeyError):
        reason = _tail(done.stdout + done.stderr)
    raise LaunchError(f"Flower did not start the run: {reason}")


def outcome(
    run_id: int, connection: str, environment: dict[str, str], seconds: float = 60
) -> tuple[str, str]:
    """(status, details) of a run, as the SuperLink has it.

    `flwr run` itself exits with 0 even when the run fails.

    Waits up to `seconds` for a run whose log has ended to be booked as finished.
    """
    command = ["flwr", "list", connection, "--run-id", str(run_id), "--format", "json"]
    end = time.monotonic() + seconds
    while True:
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True)
        try:
            run = json.loads(done.stdout[done.stdout.index(b"{") :])["runs"][0]
            status = sanitize(run["status"])
            details = run.get("status-details") or run.get("details") or ""
            details = sanitize_lines(details, MOST_SAID)
        except (ValueError, KeyError, IndexError):
            status = "unknown"
            details = _error_in(done.stdout) or _tail(done.stdout + done.stderr)
        if status.startswith("finished") or time.monotonic() > end:
            return status, details


def follow_log(
    run_id: int, connection: str, environment: dict[str, str], show: Callable[[str], None]
) -> None:
    """`flwr log --stream` until it ends, line by line: it has words of every client in it."""
    command = ["flwr", "log", str(run_id), connection, "--stream"]
    unbuffered = {**environment, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=HERE, env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as streaming:
        assert streaming.stdout is not None
        try:
            while line := streaming.stdout.readline(MOST_LINE):
                show(sanitize(_COLOUR.sub(b"", line).rstrip(b"\n"), MOST_LINE))
        finally:
            streaming.terminate()


def _error_in(output: bytes) -> str:
    """Return the last line of the error in what a command of Flower's printed as JSON, or ""."""
    try:
        words = json.loads(output[output.index(b"{") :])["error-message"]
        return sanitize(words.strip().splitlines()[-1], MOST_SAID)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""


def _tail(output: bytes) -> str:
    """The end of what a program said."""
    return sanitize_lines(output[-MOST_SAID:].strip(), MOST_SAID)
