"""Commands that are forks behave as Flower's own, and end as these do."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.fork_server import BIN, FORKS, start_fork_server
from tests.helpers.system_tools import Federation, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return Federation(tmp_path).environment


@pytest.fixture
def waiting(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen, psutil.Process]]:
    """A ClientApp whose SuperNode does not answer: the command, and its fork."""
    _, server = start_fork_server(TERM="dumb", COLUMNS="200")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = ["flwr-clientapp", "--insecure", "--token=x", f"--runtime-api-address={address}"]
        with subprocess.Popen(command, env=environment) as process:
            # Its handlers are set before it calls
            connection, _ = silent.accept()
            (fork,) = psutil.Process(server.pid).children()
            with connection:
                yield process, fork
            process.kill()


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("flwr-clientapp", ["--help"], 0),
        ("flwr-clientapp", ["--unknown"], 2),
        ("osfl", ["show", "nothing"], 1),
    ],
)
def test_output_and_exit_code_are_those_of_the_command(
    environment: dict[str, str], name: str, arguments: list[str], code: int, tmp_path: Path
) -> None:
    results = []
    for command in (name, str(BIN / name)):
        result = subprocess.run(
            [command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        results.append((result.returncode, result.stdout, result.stderr))
    assert results[0] == results[1]
    assert results[0][0] == code


def test_another_environment_at_import_is_served_by_flower(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    for settings, expected in (({}, False), ({"PYTHONPATH": str(tmp_path)}, True)):
        result = subprocess.run(
            ["flwr-clientapp", "--help"],
            env=environment | settings,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("customized" in result.stdout) == expected


def test_a_killed_command_takes_its_fork_with_it(
    waiting: tuple[subprocess.Popen, psutil.Process],
) -> None:
    process, fork = waiting
    process.kill()
    wait_for(lambda: not fork.is_running(), 30, lambda: "the fork goes on", every=0.05)


def test_a_killed_fork_kills_its_command(
    waiting: tuple[subprocess.Popen, psutil.Process],
) -> None:
    process, fork = waiting
    fork.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_signals_reach_the_fork(waiting: tuple[subprocess.Popen, psutil.Process]) -> None:
    process, fork = waiting
    process.send_signal(signal.SIGTERM)
    # Flower's handler exits by itself
    assert process.wait(timeout=30) >= 0
    wait_for(lambda: not fork.is_running(), 30, lambda: "the fork goes on", every=0.05)


def test_the_number_of_a_process_is_given_again(environment: dict[str, str]) -> None:
    """Two commands have the number of this process, and one ends before its request."""
    folder, server = start_fork_server(TERM="dumb", COLUMNS="200")
    address = str(folder.parent / "socket")
    request = {"argv": [str(folder / "osfl"), "--help"], "environment": environment, "folder": "/"}
    links = folder.parent / FORKS
    with open(os.devnull, "r+b") as nothing:
        for text in ("", json.dumps(request), json.dumps(request)):
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(address)
                socket.send_fds(line, [b"0"], [nothing.fileno()] * 3)
                file = line.makefile("rw")
                if text:
                    print(text, file=file, flush=True)
                    fork, code = int(file.readline()), int(file.readline())
                    assert (fork > 0, code) == (True, 0)
                    assert not (links / str(os.getpid())).is_symlink()
    assert server.poll() is None
