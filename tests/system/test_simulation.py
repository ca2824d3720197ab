"""`osfl run` on Flower's simulation engine.

Ray clients, a real SuperLink, the truth in the exit code.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from tests.helpers.system_tools import (
    BIN,
    ONE_AT_A_TIME,
    TWO_CLASSES,
    kill,
    make_images,
    quick_arguments,
)

pytestmark = pytest.mark.system


def leftovers(tmp_path: Path) -> list[str]:
    """Processes that still belong to a run of this test."""
    commands = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if str(tmp_path) in str((process.info["environ"] or {}).get("OSFL_RUNS", "")):
            commands.append(" ".join(process.info["cmdline"] or []))
    return commands


def what_stays(tmp_path: Path, seconds: float = 30) -> list[str]:
    """Return what is left when Ray's actors had time to notice that their node is gone."""
    end = time.monotonic() + seconds
    while (commands := leftovers(tmp_path)) and time.monotonic() < end:
        time.sleep(0.5)
    return commands


def begin(folder: Path, *arguments: str) -> psutil.Popen:
    """`osfl run` in the background."""
    environment = {**os.environ, "TERM": "dumb"}
    command = [str(BIN / "osfl"), "run", *ONE_AT_A_TIME, *arguments]
    return psutil.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def test_a_killed_run_resumes_from_the_store_and_reports(
    osfl, tmp_path: Path, tiny_kit: Path
) -> None:  # type: ignore[no-untyped-def]
    """kill -9 of everything in the middle of synthesis.

    The same command goes on without asking the clients again.
    """
    for name in ("a", "b", "c"):
        make_images(tmp_path / "sites" / name)
    # A checkout beside it, which Flower's commands would take for an app
    (tmp_path / "osfl").mkdir()
    (tmp_path / "osfl" / "pyproject.toml").write_text('[project]\nname = "osfl"\n')
    slow = quick_arguments(
        tiny_kit,
        method="feddeo",
        job_id="killed",
        num_clients=3,  # Flower's own default is 2
        **TWO_CLASSES,
        data__root=tmp_path / "sites",
        synthesis__images_per_class=5,
        synthesis__steps=30,
        synthesis__unit_size=6,
    )
    folder = tmp_path / "runs" / "killed"
    process = begin(tmp_path, *slow)
    end = time.monotonic() + 300
    while len(list((folder / "units").glob("*.jsonl"))) < 2:
        assert time.monotonic() < end, "synthesis did not begin"
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.1)
    kill(process)
    assert not (folder / "report.html").exists()
    assert folder.joinpath("status.json").read_text().count('"delivered ') == 3
    mtimes = {
        f: f.stat().st_mtime_ns
        for f in [*folder.glob("units/*.jsonl"), *folder.glob("payloads/*.pb")]
    }

    result = osfl("run", *ONE_AT_A_TIME, *slow)
    assert result.returncode == 0, result.stdout + result.stderr
    # Neither asked for nor made again
    assert all(f.stat().st_mtime_ns == at for f, at in mtimes.items())
    assert len((folder / "manifest.jsonl").read_text().splitlines()) == 3 * 10
    log = (folder / "server.log").read_text()
    assert "a: delivered" in log
    assert "a: asked" not in log
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["accuracy"]["FT"]) == {"a", "b", "c", "average"}
    assert metrics["clients"]["a"]["upload_bytes"] == (folder / "payloads" / "a.pb").stat().st_size
    assert (folder / "report.html").stat().st_size > 10_000
    assert "accuracy on each client's own test images" in result.stdout
    assert str(folder / "report.html") in result.stdout.replace("\n", "")
    assert what_stays(tmp_path) == []


def test_a_run_that_is_killed_alone_leaves_nothing_running(tmp_path: Path, tiny_kit: Path) -> None:
    """kill -9 of `osfl run`, while its SuperLink, its clients and its server work."""
    folder = tmp_path / "runs" / "orphan"
    process = begin(
        tmp_path,
        *quick_arguments(
            tiny_kit,
            method="feddeo",
            job_id="orphan",
            num_clients=2,
            synthesis__images_per_class=50,
            synthesis__steps=50,
            synthesis__unit_size=6,
        ),
    )
    end = time.monotonic() + 300
    while not list((folder / "units").glob("*.jsonl")):
        assert time.monotonic() < end, "synthesis did not begin"
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.1)
    # Of this run alone: its guard has its folder in its command
    (guard,) = [child for child in process.children() if "guard.py" in " ".join(child.cmdline())]
    scratch = Path(guard.cmdline()[-1])
    assert scratch.is_dir()
    assert len(leftovers(tmp_path)) > 2
    process.kill()
    process.wait()
    guard.wait(30)
    assert what_stays(tmp_path) == []
    assert not scratch.exists()


def test_a_failed_run_exits_with_one_and_its_reason(osfl, tmp_path: Path, tiny_kit: Path) -> None:  # type: ignore[no-untyped-def]
    """A client has an image that is cut after its header, which is seen when it works.

    Its own message comes back, and nothing looks complete.
    """
    for client in ("site-0", "site-1"):
        make_images(tmp_path / "sites" / client)
    broken = tmp_path / "sites" / "site-1" / "train" / "three" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with Image.open(broken) as image:
        assert image.size
    root = str(tmp_path / "sites")
    arguments = quick_arguments(
        tiny_kit, method="feddeo", job_id="bad", data__root=root, **TWO_CLASSES
    )
    result = osfl("run", *ONE_AT_A_TIME, *arguments)
    assert result.returncode == 1
    assert "three/0.png: not a readable image" in result.stdout
    folder = tmp_path / "runs" / "bad"
    assert not (folder / "report.html").exists()
    assert not (folder / "metrics.json").exists()
    assert json.loads((folder / "status.json").read_text())["phase"] == "failed"
    assert what_stays(tmp_path) == []


def test_bad_settings_are_refused_before_anything_starts(osfl, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = osfl("run", "method=magic", "seeed=1", "num-clients=0")
    assert result.returncode == 1
    assert "seeed: unknown key (did you mean seed?)" in result.stdout
    assert "num-clients = 0: must be between 1" in result.stdout
    assert not (tmp_path / "runs").exists()
