"""The list of runs: their states and figures, and damage that never ends it."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.run_folder.listing import RunSummary, is_locked, list_runs
from osfl.run_folder.report.metrics import gather
from tests.helpers.run_folders import run_folder

MATRICES = {"FT": {"site-a": [[3, 1], [0, 4]], "site-b": [[1, 1], [1, 1]]}}


def _run(folder: Path, began: float, phase: str = "finished", **status: object) -> Path:
    """Write a run whose phases began at `began` and 90 s later."""
    run_folder(folder, MATRICES, seed=3)
    phases = [{"phase": "waiting", "began": began}, {"phase": phase, "began": began + 90.0}]
    state = {"phase": phase, "clients": {"site-a": "delivered"}, "done": 0, "total": 0}
    (folder / "status.json").write_text(json.dumps({**state, "phases": phases, **status}))
    if phase == "finished":
        (folder / "metrics.json").write_text(json.dumps(gather(folder)))
    return folder


def _by_job(folder: Path) -> dict[str, RunSummary]:
    return {summary.job: summary for summary in list_runs(folder)}


def test_a_finished_run_has_the_figures_of_its_report(tmp_path):
    folder = _run(tmp_path / "good", began=1e9)
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps({**metrics, "epsilons": [0.0, 2.0, 8.0]}))
    plain = _run(tmp_path / "plain", began=0.9e9) / "metrics.json"
    plain.write_text(json.dumps({**metrics, "epsilons": [0.0]}))
    summary, without_guarantee = list_runs(tmp_path)
    assert without_guarantee.epsilon is None
    # site-a classifies 7 of 8 correctly, site-b 2 of 4
    assert summary.accuracy == pytest.approx((7 / 8 + 2 / 4) / 2 * 100)
    assert (summary.model, summary.epsilon, summary.clients) == ("FT", 8.0, 2)
    assert (summary.started, summary.seconds) == (1e9, 90.0)
    assert (summary.state, summary.method, summary.seed) == ("finished", "fedlmg", 3)


def test_runs_are_listed_newest_first_by_state(tmp_path):
    _run(tmp_path / "old", began=1e9)
    _run(tmp_path / "failed", began=2e9, phase="failed", error="no kit")
    _run(tmp_path / "stopped", began=3e9, phase="synthesizing")
    runs = list_runs(tmp_path)
    assert [(run.job, run.state, run.problem) for run in runs] == [
        ("stopped", "interrupted", ""),
        ("failed", "failed", "no kit"),
        ("old", "finished", ""),
    ]


def test_a_run_whose_server_is_at_work_is_running(tmp_path):
    folder = _run(tmp_path / "job", began=1e9, phase="synthesizing")
    lock = FileLock(folder / ".lock")
    with lock:
        assert list_runs(tmp_path)[0].state == "running"
    assert not is_locked(folder)
    assert list_runs(tmp_path)[0].state == "interrupted"


def test_a_lock_that_is_no_file_has_no_owner(tmp_path):
    """A named pipe would block the list for ever; a link may lead to a file that is locked."""
    pipe = _run(tmp_path / "pipe", began=1e9) / ".lock"
    os.mkfifo(pipe)
    link = _run(tmp_path / "link", began=1e9) / ".lock"
    os.symlink(tmp_path / "elsewhere", link)
    reading = threading.Thread(target=is_locked, args=[pipe.parent], daemon=True)
    reading.start()
    reading.join(5)
    assert not reading.is_alive()
    with FileLock(tmp_path / "elsewhere"), open(os.open(pipe, os.O_RDWR), "wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert not is_locked(pipe.parent)
        assert not is_locked(link.parent)


def test_damage_is_listed_and_never_ends_the_list(tmp_path):
    _run(tmp_path / "good", began=1e9)
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    os.symlink(tmp_path / "nowhere", tmp_path / "broken-link")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / ".lock").touch()
    (_run(tmp_path / "config", began=1e9) / "config.json").write_text('{"method": ')
    (_run(tmp_path / "gone", began=1e9) / "metrics.json").unlink()
    strange = _run(tmp_path / "strange", began=1e9) / "metrics.json"
    strange.write_text(json.dumps({**json.loads(strange.read_text()), "epsilons": [[]]}))
    _run(tmp_path / "clock", began=1e300, phase="synthesizing")
    _run(tmp_path / "phases", began=1e9, phase="synthesizing", phases=[7])
    looped = _run(tmp_path / "looped", began=1e9) / "metrics.json"
    looped.unlink()
    os.symlink(looped, looped)
    runs = _by_job(tmp_path)
    assert runs.pop("good").state == "finished"
    assert len(runs) == 9
    assert {run.state for run in runs.values()} == {"damaged"}
    assert all(run.problem for run in runs.values())
    # What can be read is still shown
    assert (runs["gone"].method, runs["gone"].started) == ("fedlmg", 1e9)


def test_files_and_folders_that_are_no_runs_are_left_out(tmp_path):
    (tmp_path / "job.log").touch()
    (tmp_path / "tables").mkdir()
    (tmp_path / ".client-cache" / "payloads").mkdir(parents=True)
    assert list_runs(tmp_path) == []
    with pytest.raises(ConfigError, match="must be a folder with runs"):
        list_runs(tmp_path / "job.log")


def test_the_command_prints_a_table_and_json(tmp_path):
    _run(tmp_path / "good", began=1e9)
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    printed = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": "120"})
    assert printed.exit_code == 0
    assert "68.8 %" in printed.stdout
    assert "is a broken link" in printed.stdout
    parsed = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert [run["job"] for run in parsed] == ["good", "loop"]
    assert parsed[0]["seconds"] == 90.0
