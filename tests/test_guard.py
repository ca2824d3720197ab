"""The guard: what it guards ends when its input does, and nothing else."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from osfl.cli.guard import begin_guard, main

# A process with a child, which says so
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_process_its_children_and_a_folder_go_when_the_input_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the folder that somebody works in."""
    (tmp_path / "psutil.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    (scratch / "home").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as guarded:
        assert guarded.stdout is not None
        child = psutil.Process(int(guarded.stdout.readline()))
        guard = begin_guard(guarded.pid, str(scratch))
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(2)
        assert guarded.poll() is None
        guard.communicate(timeout=30)
        assert guarded.wait(10) != 0
    child.wait(10)
    assert not scratch.exists()


def test_what_is_gone_already_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    main(gone.pid, str(scratch))
    assert not scratch.exists()
