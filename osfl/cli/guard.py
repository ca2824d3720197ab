"""Processes that must not outlive `osfl run`, whichever way it ends.

`python guard.py PID FOLDER` reads its input until that ends, as it does when the process
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
    # Not as a module, and -P: nothing that lies where somebody works, or beside this file, is taken
    # for a library
    command = [sys.executable, "-P", __file__, str(pid), folder]
    # Ctrl-C goes to a terminal's whole group, and who reads our output waits for its last owner
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_process_tree(pid: int) -> None:
    """End a process and all its descendants: politely, and after five seconds for certain."""
    with suppress(psutil.NoSuchProcess):
        _end(psutil.Process(pid))


def _end(root: psutil.Process) -> None:
    processes = [*root.children(recursive=True), root]
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=5)


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()


def main(pid: int, folder: str) -> None:
    """Wait, end it, and remove the folder."""
    with suppress(psutil.NoSuchProcess):
        # Known from here on: when it is gone, another process may get its number
        guarded = psutil.Process(pid)
        sys.stdin.read()
        _end(guarded)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
