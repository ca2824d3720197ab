"""The guard: what it guards ends when its input does, and nothing else."""

import io
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from osfl.launch.guard import end_process_tree, end_run_processes, main, start_guard

# A process with a child, which says so, and ends or goes on
PARENT = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(100)"]
child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def begin(scratch: Path, seconds: float) -> subprocess.Popen:
    """Start a process of the run that has this folder."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(seconds)],
        stdout=subprocess.PIPE,
        env={**os.environ, "FLWR_HOME": str(scratch / "home")},
    )


@pytest.mark.slow
def test_a_process_its_children_and_a_folder_go_when_the_input_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the folder that somebody works in."""
    (tmp_path / "psutil.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    (scratch / "home").mkdir(parents=True)
    with begin(scratch, 100) as guarded, begin(tmp_path / "other", 100) as second_process:
        assert guarded.stdout is not None
        child = psutil.Process(int(guarded.stdout.readline()))
        guard = start_guard(str(scratch))
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(2)
        assert guarded.poll() is None
        assert guard.stdin is not None
        guard.stdin.close()
        # An ended process is there until its parent has waited for it
        assert guarded.wait(30) != 0
        assert guard.wait(30) == 0
        assert second_process.poll() is None
        end_process_tree(second_process.pid)
    child.wait(10)
    assert not scratch.exists()


@pytest.mark.slow
def test_a_process_whose_parent_has_ended_goes_too(tmp_path: Path) -> None:
    """Ray's clients outlive the simulation that started them."""
    with begin(tmp_path, 0) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.wait(10)
    assert child.is_running()
    end_run_processes(str(tmp_path))
    child.wait(10)


def test_a_guard_with_nothing_to_end_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    main(str(scratch))
    assert not scratch.exists()
