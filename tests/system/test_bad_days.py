"""`osfl run` where its output, its terminal or its temporary folder goes away."""

import json
import os
import pty
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.system_tools import BIN, ONE_AT_A_TIME, mount_disk

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
CHEAPEST = ("method=fedcgs", "num-clients=2", "job-id=job")
GOES_ON = "interrupted; to resume, repeat the command with job-id=job"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder with a short name: Ray has sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        yield Path(folder)


def begin(work: Path, scratch: Path, **streams: Any) -> subprocess.Popen:
    """Start the cheapest run, with a temporary folder of its own."""
    environment = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams}
    command = [str(BIN / "osfl"), "run", *ONE_AT_A_TIME, *CHEAPEST]
    return subprocess.Popen(command, cwd=work, env=environment, text=True, **options)


def phase(work: Path) -> str:
    """The run's phase, or "" before its first."""
    with suppress(OSError, ValueError):
        return str(json.loads((work / "runs" / "job" / "status.json").read_text())["phase"])
    return ""


def wait_for_phase(process: subprocess.Popen, work: Path, name: str) -> None:
    end = time.monotonic() + 600
    while phase(work) != name:
        assert time.monotonic() < end, phase(work)
        assert process.poll() is None
        time.sleep(0.05)


def processes_of(scratch: Path) -> list[str]:
    """Processes that were started with this temporary folder, or one within it."""
    commands = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(scratch)):
                commands.append(" ".join(process.cmdline()))
    return commands


def check_nothing_stays(scratch: Path) -> None:
    assert processes_of(scratch) == []
    assert list(scratch.iterdir()) == []


def test_a_reader_that_goes_away_stops_the_run(tmp_path: Path, scratch: Path) -> None:
    """Run as `osfl run | head -1` does."""
    process = begin(tmp_path, scratch, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "checking settings, data and models\n"
    process.stdout.close()
    assert process.stderr is not None
    messages = process.stderr.read().splitlines()
    assert process.wait(60) == 1
    assert messages == [GOES_ON, "error cannot write to standard output: Broken pipe"]
    check_nothing_stays(scratch)


def test_output_on_a_full_disk_stops_the_run(tmp_path: Path, scratch: Path) -> None:
    with open("/dev/full", "w") as full:
        process = begin(tmp_path, scratch, stdout=full)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 1
    assert messages.splitlines() == [
        GOES_ON,
        "error cannot write to standard output: No space left on device",
    ]
    check_nothing_stays(scratch)


def test_a_closed_terminal_stops_the_run(tmp_path: Path, scratch: Path) -> None:
    """The process group gets SIGHUP, and nothing can be written any more."""
    ours, theirs = pty.openpty()
    process = begin(tmp_path, scratch, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_for_phase(process, tmp_path, "joining")
    os.close(ours)
    for number in (signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    assert process.wait(60) == 1
    check_nothing_stays(scratch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["", "waiting for payloads"])
def test_a_signal_stops_the_run_at_any_phase(
    tmp_path: Path, scratch: Path, number: int, when: str
) -> None:
    if number == signal.SIGINT and when:
        pytest.skip("as SIGTERM: both end in one function")
    process = begin(tmp_path, scratch, stdout=subprocess.PIPE)
    if when:
        wait_for_phase(process, tmp_path, when)
    else:
        # Its SuperLink is being started
        while not any(scratch.glob("osfl-*/superlink.log")):
            assert process.poll() is None
            time.sleep(0.02)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert output.splitlines()[-1] == GOES_ON
    assert errors == ""
    check_nothing_stays(scratch)


def test_ignored_hangups_stay_ignored(tmp_path: Path, scratch: Path) -> None:
    """Run as `nohup osfl run` does."""
    process = begin(
        tmp_path, scratch, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    while not any(scratch.glob("osfl-*/superlink.log")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    check_nothing_stays(scratch)


def test_a_temporary_folder_without_room_is_named_first(tmp_path: Path, scratch: Path) -> None:
    if not mount_disk(scratch, "2m"):
        pytest.skip("only root may mount a small disk")
    try:
        process = begin(tmp_path, scratch, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"error the temporary folder {scratch} has" in output
        assert "set TMPDIR" in output
        check_nothing_stays(scratch)
    finally:
        subprocess.run(["umount", "--lazy", str(scratch)], check=True)


def test_runs_that_are_a_link_to_itself_are_refused(osfl: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("runs")
    result = osfl("run", *CHEAPEST)
    assert result.returncode == 1
    assert f"error {tmp_path / 'runs'} must be a folder" in result.stdout
    assert result.stderr == ""


def test_a_table_names_why_ray_did_not_start_after_a_second_try(osfl: Any, tmp_path: Path) -> None:
    """Ray cannot make its folder there; in the table stands what it said itself."""
    table = tmp_path / "table.toml"
    table.write_text('[common]\nnum-clients = 2\n[rows."FedCGS"]\nmethod = "fedcgs"\n')
    os.environ["RAY_TMPDIR"] = "/proc/none"
    try:
        result = osfl("compare", str(table), "--seeds", "0", "--out", "out", timeout=500)
    finally:
        del os.environ["RAY_TMPDIR"]
    assert result.returncode == 1
    assert result.stderr.count("tried again") == 1
    page = (tmp_path / "out" / "table.md").read_text()
    assert "Ray, which runs the clients, did not start: FileNotFoundError" in page
    assert "/proc/none" in page
    assert not (tmp_path / "out" / "table.png").exists()
