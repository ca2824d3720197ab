"""Processes that must not outlive `osfl run`, whichever way it ends.

`python -m osfl.cli.guard PID FOLDER` reads its input until that ends, as it does when the process
at its other end is gone, even by `kill -9`. Then it ends process PID, and all that this one
started, and removes FOLDER.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import psutil


def begin_guard(pid: int, folder: str) -> subprocess.Popen:
    """A guard of a process that this one started; it ends when its input is closed."""
    command = [sys.executable, "-m", "osfl.cli.guard", str(pid), folder]
    # Ctrl-C goes to a terminal's whole group
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end_process_tree(pid: int) -> None:
    """End a process and all its descendants: politely, and after five seconds for certain."""
    try:
        root = psutil.Process(pid)
        processes = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=5)


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()


if __name__ == "__main__":
    sys.stdin.read()
    end_process_tree(int(sys.argv[1]))
    shutil.rmtree(sys.argv[2], ignore_errors=True)
