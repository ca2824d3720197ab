"""Processes and files that must not outlive `osfl run`, whichever way it ends.

`python guard.py FOLDER` reads its input until that ends, as it does when the process at its other
end is gone, even by `kill -9`. Then it ends all processes of the run whose folder this is, and
removes the folder.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import psutil

# Every process of a run has it in its environment: Flower's settings lie in the run's folder
MARK = "FLWR_HOME"
MOST_ROUNDS = 20  # of ending processes that start others meanwhile


def begin_guard(folder: str) -> subprocess.Popen:
    """Start the guard of a run's folder; it acts when its input is closed."""
    # Not as a module, and -P: nothing that lies where somebody works, or beside this file, is taken
    # for a library
    command = [sys.executable, "-P", __file__, folder]
    # Ctrl-C goes to a terminal's whole group, and who reads our output waits for its last owner
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_run_processes(folder: str) -> None:
    """End all processes of a run, also those whose parent has ended, as Ray's clients outlive it.

    Args:
        folder: the run's own; processes are known by it.
    """
    for _ in range(MOST_ROUNDS):
        if not (found := _processes_of(folder)):
            return
        _end(found)


def _processes_of(folder: str) -> list[psutil.Process]:
    found = set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            home = process.environ().get(MARK, "")
            if os.path.dirname(home) == folder:
                found |= {process, *process.children(recursive=True)}
    return list(found)


def end_process_tree(pid: int) -> None:
    """End a process and all its descendants: politely, and after five seconds for certain."""
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
    """Wait for the end of the input, end the run's processes, and remove its folder."""
    sys.stdin.read()
    end_run_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
