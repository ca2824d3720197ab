"""Start Flower's commands by a fork, which saves each the CPU-seconds in which libraries load.

Flower starts a process for each message to a client, and a small federation spends most of its time
on their imports. System tests put commands of the same names before Flower's own and `osfl`. They
pass their arguments, environment, folder and open files to a server that has imported everything,
and wait for the server's fork: signals go to the fork, and its exit code comes back. The fork is
killed when the command is, so that a test may kill either.
"""

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

import psutil

from osfl.cli import preflight
from osfl.launch.flower import MALLOC_SETTINGS, flower_environment

COMMANDS = (
    *("flower-superexec", "flower-superlink", "flower-supernode"),
    *("flwr", "flwr-clientapp", "flwr-serverapp"),
    "osfl",
)
PYTHON = sys.executable
# The module that `osfl` runs in a Python of its own
PREFLIGHT = ("-P", "-m", "osfl.cli.preflight")
BIN = Path(PYTHON).parent
# Read when a process starts or imports a library; Flower's own command serves other values
IMPORT_SETTINGS = (
    *("PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TERM", "COLUMNS"),
    *MALLOC_SETTINGS,
)
# Imported once for all forks; no package that Flower ships with an app
LIBRARIES = (
    *("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "torchvision"),
    *("torch.utils.flop_counter", "transformers.models.clip.modeling_clip"),
    *("PIL.PngImagePlugin", "scipy.optimize", "scipy.stats", "sklearn.metrics"),
    *("cryptography.x509", "httptools", "uvicorn.protocols.http.httptools_impl", "uvloop"),
)
# In the server's folder, for each command that runs a file with its fork's process id
FORKS = "forks"
# Without site-packages and what else takes time to import
SCRIPT = """#!{python} -IS
import os, signal, socket, sys
settings = {settings!r}
current = {{key: os.environ.get(key) for key in settings}}
if current != settings or {arguments!r} not in (None, sys.argv[1:]):
    os.execv({original!r}, [{original!r}, *sys.argv[1:]])
import json
request = {{"argv": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}}
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
socket.send_fds(line, [b"0"], [0, 1, 2])
file = line.makefile("rw")
print(json.dumps(request), file=file, flush=True)
fork = int(file.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, _: os.kill(fork, number))
code = int(file.readline())
if code < 0:
    # End by the same signal
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def start_fork_server(**settings: str) -> tuple[Path, subprocess.Popen]:
    """Start a server; return the folder with its commands, and the server.

    It ends when this process does, which closes its standard input.

    Args:
        settings: what differs from `flower_environment`.
    """
    environment = flower_environment() | settings
    folder = Path(tempfile.mkdtemp(prefix="osfl-fork-"))
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [PYTHON, "-P", __file__, str(listener.fileno())],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    (folder / FORKS).mkdir()
    (folder / "bin").mkdir()
    for name in (*COMMANDS, "python"):
        script = SCRIPT.format(
            python=PYTHON,
            settings={key: environment.get(key) for key in IMPORT_SETTINGS},
            arguments=list(PREFLIGHT) if name == "python" else None,
            original=str(BIN / name),
            address=address,
        )
        command = folder / "bin" / name
        command.write_text(script)
        command.chmod(0o700)
    return folder / "bin", server


def worker_of(process: psutil.Process) -> psutil.Process:
    """Return a command's fork, or else the process itself."""
    folders = [Path(word).parent.parent / FORKS for word in process.cmdline()[2:3]]
    with suppress(OSError, IndexError):
        return psutil.Process(int(os.readlink(folders[0] / str(process.pid))))
    return process


def descendants(process: psutil.Process) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Yield the processes that a process has started, and the worker of each."""
    with suppress(psutil.NoSuchProcess):
        for child in worker_of(process).children():
            with suppress(psutil.NoSuchProcess):
                yield child, worker_of(child)
                yield from descendants(child)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, with forks in place of their commands."""
    with suppress(psutil.NoSuchProcess):
        return [worker_of(process), *(worker for _, worker in descendants(process))]
    return []


def serve(listener: socket.socket) -> None:
    """Fork for each command until the process that began the server has ended."""
    for module in LIBRARIES:
        import_module(module)
    mains = {name: entry_points(group="console_scripts")[name].load() for name in COMMANDS}
    mains["python"] = preflight.main
    # A collection in a fork would write to all of these objects, and so copy them
    gc.collect()
    gc.freeze()
    ended, wakeup = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lines: dict[int, tuple[socket.socket, Path]] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin, ended], [], [])
        if sys.stdin in ready:
            return
        if ended in ready:
            os.read(ended, 1024)
            _report_ends(lines)
        if listener in ready:
            line, _ = listener.accept()
            fork = os.fork()
            if not fork:
                listener.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                become_command(line, mains)
            peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            command, _, _ = struct.unpack("3i", peer)
            link = Path(FORKS) / str(command)
            # Linux gives a number again, at the latest after 32,768 processes
            link.unlink(missing_ok=True)
            # A link is never half written
            link.symlink_to(str(fork))
            _send(line, fork)
            lines[fork] = line, link


def _report_ends(lines: dict[int, tuple[socket.socket, Path]]) -> None:
    """Send the exit code of each fork that has ended to its command, and remove its link."""
    while lines:
        fork, status = os.waitpid(-1, os.WNOHANG)
        if not fork:
            return
        line, link = lines.pop(fork)
        with suppress(FileNotFoundError):
            # Another command may have the number by now
            if os.readlink(link) == str(fork):
                link.unlink()
        with line:
            _send(line, os.waitstatus_to_exitcode(status))


def _send(line: socket.socket, number: int) -> None:
    # The command may have been killed
    with suppress(BrokenPipeError):
        line.sendall(f"{number}\n".encode())


def become_command(line: socket.socket, mains: Mapping[str, Callable[[], None]]) -> NoReturn:
    """Take over a command's files, folder, environment and arguments, and run its entry point."""
    _, files, _, _ = socket.recv_fds(line, 1, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if not (text := line.makefile().readline()):
        # The command was killed before it had sent its request
        os._exit(1)
    request = json.loads(text)
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.argv = request["argv"]
    command = Path(sys.argv[0])
    if command.name == "osfl":
        # What it starts are forks, too, or else Flower's own
        sys.executable = str(command.with_name("python"))
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{BIN}"
    code = 1
    try:
        code = _exit_code(mains[command.name]())
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    # What the interpreter does at its end, but for freeing every object, which would copy them all
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_code(status: object) -> int:
    """Return the exit code of `sys.exit(status)`; a text is printed."""
    if status is None or isinstance(status, int):
        return int(status or 0) & 0xFF
    print(status, file=sys.stderr)
    return 1


def _end_with(line: socket.socket) -> None:
    """Kill this process once the command has ended, which closes its line."""
    line.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    shutil.rmtree(Path.cwd(), ignore_errors=True)
    # Triton complains of frozen objects that the interpreter does not free
    os._exit(0)
