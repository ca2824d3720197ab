"""End the processes and delete the files of `osfl run` after it exits for any reason.

`python guard.py FOLDER` reads its input until the other end closes it, which also happens if that
process dies by `kill -9`. Then it ends all processes of the run that owns this folder, and deletes
the folder.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import psutil

# In the environment of every process of a run: Flower's settings are in the run's folder
FOLDER_VARIABLE = "FLWR_HOME"
# Maximum attempts to end processes that keep starting others
MAX_ATTEMPTS = 20


def start_guard(folder: str) -> subprocess.Popen[bytes]:
    """Start the guard of a run's folder, which acts when its input is closed."""
    # Not as a module, and with -P: no file in the working directory or beside this one can shadow
    # a library
    command = [sys.executable, "-P", __file__, folder]
    # A new session, because Ctrl-C reaches a terminal's whole group; no inherited output, because
    # a reader of a pipe waits for its last owner
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_run_processes(folder: str) -> None:
    """End all processes of a run, including orphans such as Ray's clients.

    Args:
        folder: the run's temporary folder, by which its processes are identified.
    """
    for _ in range(MAX_ATTEMPTS):
        processes = _run_processes(folder)
        if not processes:
            return
        _end(processes)


def _run_processes(folder: str) -> list[psutil.Process]:
    processes = set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            home = process.environ().get(FOLDER_VARIABLE, "")
            if os.path.dirname(home) == folder:
                processes |= {process, *process.children(recursive=True)}
    return list(processes)


def end_process_tree(pid: int) -> None:
    """Terminate a process and all its descendants, and kill them after five seconds."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        _end([*root.children(recursive=True), root])


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=5)


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()


def main(folder: str) -> None:
    """Wait for the end of the input, end the run's processes, and delete its folder."""
    sys.stdin.read()
    end_run_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
