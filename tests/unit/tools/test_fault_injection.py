"""Fault injection: schedules, faults, checks, and the tool that runs many of them."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.common.config import parse_config_args
from safetensors.numpy import save_file

import osfl
from benchmarks import harness
from benchmarks.tools import fault_injection as tool
from client_app.paths import allowed_folders
from osfl.config import parse_node_config
from tests.helpers import fault_injection
from tests.helpers.fault_injection import (
    BUSY,
    DISK,
    FARTHEST,
    KINDS,
    LATER,
    LONGEST,
    MACHINES,
    OLDER,
    PATIENCE,
    RETURN_SECONDS,
    SITES,
    SLOW,
    SPAN,
    Command,
    Fault,
    Testbed,
    Trial,
    all_faults_of,
    changes_of,
    continued_schedule_of,
    first_difference,
    outcome,
    schedule_of,
)
from tests.helpers.fork_server import workers_of
from tests.helpers.system_tools import (
    CLOCK_MODULES,
    Clock,
    Federation,
    Line,
    mount_disk,
    wait_for,
)

# ---- Schedules ----


def test_schedules_have_every_kind_and_one_fault_of_a_process_at_a_time() -> None:
    assert schedule_of(7) == schedule_of(7)
    schedules = [schedule_of(seed) for seed in range(400)]
    faults = [fault for schedule in schedules for fault in schedule]
    for kind, targets in KINDS.items():
        assert {fault.target for fault in faults if fault.kind == kind} == set(targets)
    clocks = [fault.ahead for fault in faults if fault.kind == "clock"]
    assert -FARTHEST <= min(clocks) < -FARTHEST / 2 < FARTHEST / 2 < max(clocks) <= FARTHEST
    assert not any(fault.ahead for fault in faults if fault.kind != "clock")
    assert all(0 <= fault.begin <= SPAN and 0 <= fault.seconds <= LONGEST for fault in faults)
    assert {len(schedule) for schedule in schedules} == {1, 2, 3, 4}
    for schedule in schedules:
        assert schedule == sorted(schedule, key=lambda fault: fault.begin)
        for target in {fault.target for fault in schedule}:
            of_target = [fault for fault in schedule if fault.target == target]
            for first, second in itertools.pairwise(of_target):
                assert first.begin + first.seconds < second.begin


def test_faults_begin_within_a_fault_free_run() -> None:
    """Faults begin later in a longer run, and last as long."""
    usual, slow = schedule_of(3), schedule_of(3, 4 * SPAN)
    assert [fault.begin for fault in slow] == [4 * fault.begin for fault in usual]
    assert [fault.seconds for fault in slow] == [fault.seconds for fault in usual]


# ---- Faults ----


@pytest.fixture
def proxy() -> Line:
    """A proxy to a server that echoes."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        while data := connection.recv(100):
            connection.sendall(data)
        connection.close()

    def echo() -> None:
        while True:
            threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    threading.Thread(target=echo, daemon=True).start()
    return Line(server.getsockname()[1])


def test_a_proxy_is_cut_and_mended(proxy: Line) -> None:
    def answer() -> bytes:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            client.sendall(b"hello")
            return client.recv(100)

    assert answer() == b"hello"
    connected = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    connected.sendall(b"hello")
    assert connected.recv(100) == b"hello"
    proxy.cut()
    assert connected.recv(100) == b""
    with contextlib.suppress(ConnectionError):
        assert answer() == b""
    proxy.mend()
    assert answer() == b"hello"


def test_a_slow_proxy_limits_both_directions(proxy: Line) -> None:
    """4,000 bytes there and back at 20,000 a second take two fifths of a second."""

    def seconds() -> float:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            start = time.monotonic()
            client.sendall(bytes(4000))
            missing = 4000
            while missing:
                data = client.recv(missing)
                assert data
                missing -= len(data)
            return time.monotonic() - start

    proxy.pace(SLOW, SLOW)
    assert seconds() >= 2 * 4000 / SLOW
    proxy.pace(0.0, 0.0)
    assert seconds() < 2 * 4000 / SLOW


@pytest.fixture
def testbed(tmp_path: Path) -> Testbed:
    """A testbed of a federation without processes."""
    result = Testbed(Federation(tmp_path), tmp_path / "kit")
    for name in MACHINES:
        result.clocks[name] = Clock(tmp_path / "clocks" / name)
    return result


def test_sites_allow_the_kit(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool runs without the tests' environment, in which every folder is allowed."""
    monkeypatch.delenv("OSFL_ALLOWED_DIRS")
    node = parse_node_config(parse_config_args([testbed.node_config("site-0", "site-0")]))
    assert testbed.kit in allowed_folders(node)


@pytest.fixture
def disk(testbed: Testbed) -> Iterator[Path]:
    """The server's small disk."""
    folder = testbed.disk_of("server")
    folder.mkdir()
    if not mount_disk(folder, DISK):
        pytest.skip("needs root, to mount a disk")
    yield folder
    testbed.unmount()
    assert not folder.is_mount()


def test_a_full_disk_has_no_room_for_a_byte(testbed: Testbed, disk: Path) -> None:
    (disk / "before").write_text("before")
    testbed.fill("server")
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_text("more")
    testbed.make_room("server")
    (disk / "more").write_text("more")
    assert sorted(file.name for file in disk.iterdir()) == ["before", "more"]
    testbed.make_room("server")


def test_only_a_small_disk_is_filled(testbed: Testbed) -> None:
    testbed.disk_of("server").mkdir()
    with pytest.raises(AssertionError):
        testbed.fill("server")
    assert not list(testbed.disk_of("server").iterdir())


def test_a_clock_is_set_ahead_and_back_in_a_running_process(testbed: Testbed) -> None:
    """The monotonic clock does not jump."""
    code = (
        "import time\n"
        "from flwr.app.message.message import now as of_messages\n"
        "from flwr.supercore.date import now\n"
        "while input():\n"
        "    times = (time.time(), now().timestamp(), of_messages().timestamp())\n"
        "    print(*times, time.monotonic(), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **testbed.settings_of("server")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead in (0.0, 300.0, -500.0, 0.0):
            testbed.clocks["server"].set_ahead(ahead)
            process.stdin.write("time\n")
            *times, monotonic = map(float, process.stdout.readline().split())
            assert times == pytest.approx([time.time() + ahead] * 3, abs=1)
            assert monotonic == pytest.approx(time.monotonic(), abs=1)
        process.stdin.write("\n")


@pytest.mark.slow
def test_a_site_has_an_older_release(testbed: Testbed) -> None:
    testbed.make_older_release()

    def release() -> str:
        code = "from client_app import app; print(app._installed_version())"
        environment = {**os.environ, **testbed.settings_of("site-0")}
        command = [sys.executable, "-c", code]
        return subprocess.check_output(command, env=environment, text=True).strip()

    assert release() == osfl.__version__
    testbed.older.add("site-0")
    assert release() == OLDER
    assert testbed.settings_of("site-1")["PYTHONPATH"] == CLOCK_MODULES


def test_a_fault_that_this_machine_cannot_have_is_left_out(testbed: Testbed) -> None:
    faults = [Fault(1.0, "again", "", 1.0), Fault(2.0, "clock", "server", 1.0, 60.0)]
    assert len(Trial(testbed, "job", faults)._events) == 4
    testbed.kinds.discard("clock")
    assert [begin for begin, _ in Trial(testbed, "job", faults)._events] == [1.0, 2.0]


@pytest.fixture
def calls(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that a fault makes on machines that only record them."""
    record: list[str] = []

    def watch(owner: object, name: str, result: Any = None) -> None:
        def act(*arguments: object) -> Any:
            record.append(" ".join([name, *map(str, arguments)]))
            return result

        monkeypatch.setattr(owner, name, act)

    for name in ("fill", "make_room", "kill", "restart", "end", "begin_twin", "end_twin"):
        watch(testbed, name)
    for name in ("copy_database", "restore_database", "signal_all"):
        watch(testbed, name)
    watch(testbed, "crash", result=True)
    watch(testbed.clocks["server"], "set_ahead")
    proxy: Any = SimpleNamespace(pace=None, cut=None, mend=None)
    testbed.proxies["site-0"] = proxy
    for name in ("pace", "cut", "mend"):
        watch(proxy, name)
    return record


@pytest.mark.parametrize(
    ("kind", "target", "begin", "end"),
    [
        ("kill", "site-0", ["kill site-0"], ["restart site-0"]),
        ("term", "server", ["end server"], ["restart server"]),
        ("stop", "site-0", [f"signal_all site-0 {signal.SIGSTOP}"], ["signal_all site-0 18"]),
        ("crash", "site-0", ["crash site-0"], []),
        ("cut", "site-0", ["cut"], ["mend"]),
        ("slow", "site-0", [f"pace {SLOW} {SLOW}"], ["pace 0.0 0.0"]),
        ("clock", "server", ["set_ahead -90.0"], ["set_ahead 0.0"]),
        ("full", "server", ["fill server"], ["make_room server"]),
        ("older", "site-0", ["kill site-0", "restart site-0"], ["kill site-0", "restart site-0"]),
        (
            "restore",
            "superlink",
            ["copy_database"],
            ["kill superlink", "restore_database", "restart superlink"],
        ),
        ("twin", "site-1", ["begin_twin site-1"], ["end_twin site-1"]),
    ],
)
def test_a_fault_begins_and_ends(
    kind: str, target: str, begin: list[str], end: list[str], testbed: Testbed, calls: list[str]
) -> None:
    fault = Fault(0.0, kind, target, 1.0, -90.0 if kind == "clock" else 0.0)
    first, last = Trial(testbed, "job", [])._actions(fault)
    first()
    assert calls == begin
    assert testbed.older == ({"site-0"} if kind == "older" else set())
    assert testbed.hits == ({fault} if kind == "crash" else set())
    calls.clear()
    last()
    assert calls == [call.replace("18", str(int(signal.SIGCONT))) for call in end]
    assert not testbed.older


def test_a_cached_payload_is_damaged_and_may_be_made_again(testbed: Testbed) -> None:
    payload = testbed.folder / "cache" / "site-0" / "site-0-job" / "payload.pb"
    payload.parent.mkdir(parents=True)
    payload.write_bytes(bytes(5))
    trial = Trial(testbed, "job", [])
    assert not testbed.damage("site-0", "other")
    trial._damage(Fault(0.0, "damage", "site-1", 0.0))
    assert payload.read_bytes() == bytes(5)
    assert not testbed.hits
    trial._damage(Fault(0.0, "damage", "site-0", 0.0))
    assert payload.read_bytes() == bytes([0, 0, 1, 0, 0])
    assert len(testbed.hits) == 1
    trial._check()
    payload.unlink()
    trial._check()
    assert trial.problems == []


def test_a_database_is_restored(testbed: Testbed) -> None:
    with contextlib.closing(sqlite3.connect(testbed.database)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE numbers (number)")
        database.commit()
        testbed.copy_database()
        database.execute("INSERT INTO numbers VALUES (1)")
        database.commit()
    testbed.restore_database()
    with contextlib.closing(sqlite3.connect(testbed.database)) as database:
        assert database.execute("SELECT * FROM numbers").fetchall() == []


def test_a_crash_kills_the_app_alone(testbed: Testbed) -> None:
    """A site's process starts another with the app's name, like in Flower."""
    app = testbed.folder / "flwr-clientapp"
    app.write_text("import time\ntime.sleep(60)\n")
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(app)!r}])"
    site = subprocess.Popen([sys.executable, "-c", f"{code}; import time; time.sleep(60)"])
    testbed.federation.processes["site-0"] = site
    try:
        process = psutil.Process(site.pid)
        wait_for(lambda: len(workers_of(process)) == 2, 20, lambda: "no app", every=0.1)
        child = workers_of(process)[1]
        wait_for(lambda: str(app) in child.cmdline(), 20, lambda: "no app", every=0.1)
        assert testbed.crash("site-0")
        wait_for(lambda: len(workers_of(process)) == 1, 20, lambda: "it lives", every=0.1)
        assert site.poll() is None
        # No app runs
        assert not testbed.crash("site-0")
        assert not testbed.crash("site-1")
        assert site.poll() is None
    finally:
        site.kill()
        site.wait()
    assert not testbed.crash("site-0")


def test_ended_processes_are_restarted(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site returns after a while, because the SuperLink refuses it until then."""
    started: list[str] = []
    now = 100.0
    monkeypatch.setattr(fault_injection.time, "monotonic", lambda: now)
    monkeypatch.setattr(testbed, "restart", started.append)
    monkeypatch.setattr(testbed, "begin_site", started.append)
    monkeypatch.setattr(Federation, "end", lambda self, name: self.processes.pop(name))
    monkeypatch.setattr(Federation, "log", lambda self, name: "")
    for name, code in (("superlink", 1), ("server", 0), ("site-0", None), ("site-1", 0)):
        process: Any = SimpleNamespace(poll=lambda code=code: code)
        testbed.federation.processes[name] = process
    testbed.tend()
    assert started == ["superlink", "server"]
    assert list(testbed.federation.processes) == ["site-0"]
    now += RETURN_SECONDS + 1
    testbed.tend()
    assert started == ["superlink", "server", "site-1"]


# ---- Checks ----


@pytest.fixture
def trial(testbed: Testbed) -> Trial:
    """A job with both payloads, and a command that ended well."""
    result = Trial(testbed, "job", [])
    (result.run_folder / "payloads").mkdir(parents=True)
    for site in SITES:
        (result.run_folder / "payloads" / f"{site}.pb").write_text(site)
    result._check()
    result.ended = [(command(testbed.folder, "INFO : report: here"), 0, True)]
    return result


def command(folder: Path, text: str) -> Command:
    log = folder / "job-0.log"
    log.write_text(text)
    process: Any = None
    return Command(process, log)


def test_a_good_run_has_no_violation(trial: Trial) -> None:
    trial._check()
    assert trial.problems == []
    assert trial._check_end() == []
    assert trial._check_outside(trial._outside()) == []


def replace_payload(trial: Trial) -> None:
    (trial.run_folder / "payloads" / "site-1.pb").write_text("another")


def lose_payload(trial: Trial) -> None:
    """Delete an acknowledged payload of the server."""
    cache = trial.testbed.folder / "cache" / "site-0" / "job"
    # Of another job, which ended before it was acknowledged
    (cache.parent / "other").mkdir(parents=True)
    (cache.parent / "other" / "payload.pb").touch()
    cache.mkdir(parents=True)
    (cache / "payload.pb").touch()
    trial._check()
    (cache / "payload.pb").unlink()
    (trial.run_folder / "payloads" / "site-0.pb").unlink()


def delete_unacknowledged_payload(trial: Trial) -> None:
    cache = trial.testbed.folder / "cache" / "site-0" / "job"
    cache.mkdir(parents=True)
    (cache / "payload.pb").touch()
    (trial.run_folder / "payloads" / "site-0.pb").unlink()


@pytest.mark.parametrize(
    ("harm", "problems"),
    [
        (replace_payload, ["the payload of site-1 was replaced"]),
        (lose_payload, ["the acknowledged payload of site-0 is lost"]),
        (delete_unacknowledged_payload, []),
    ],
)
def test_replaced_and_lost_payloads_are_violations(
    harm: Callable[[Trial], None], problems: list[str], trial: Trial
) -> None:
    harm(trial)
    trial._check()
    trial._check()
    assert sorted(set(trial.problems)) == problems


@pytest.mark.parametrize(
    ("code", "report", "text", "problem"),
    [
        (0, False, "INFO : report: here", "ended with 0 without a report"),
        (0, True, "INFO : going on", "ended with 0 without a report"),
        (0, True, "INFO : report: here\nINFO : and more", "ended with 0 without a report"),
        (1, False, "INFO :\n \n", "ended with 1, and says last: "),
        (1, False, "error : no\nINFO : report: here", "ended with 1, and says last: INFO"),
    ],
)
def test_a_command_must_end_with_its_report_or_an_error(
    code: int, report: bool, text: str, problem: str, trial: Trial
) -> None:
    trial.ended = [(command(trial.testbed.folder, text), code, report)]
    (violation,) = [line for line in trial._check_end() if "job-0.log" in line]
    assert problem in violation


def test_reasons_may_follow_an_error(trial: Trial) -> None:
    failed = command(trial.testbed.folder, "error the run failed: too few\n  site-1: No space left")
    trial.ended = [(failed, 1, False)]
    assert trial._check_end() == ["no command ended with 0"]


def test_refused_missing_and_unfinished_are_violations(trial: Trial) -> None:
    (trial.run_folder / "payloads" / "site-0.pb.refused").touch()
    trial.payloads.pop("site-1")
    trial.ended = [(command(trial.testbed.folder, "error the run failed: Error"), 1, False)]
    violations = " ".join(trial._check_end())
    assert "payloads are of ['site-0']" in violations
    assert "refused: ['site-0.pb.refused']" in violations
    assert "no command ended with 0" in violations


def test_files_beside_the_run_are_violations(trial: Trial) -> None:
    before = trial._outside()
    (trial.run_folder / "images").mkdir()
    assert trial._check_outside(before) == []
    (trial.run_folder.parent / "stray").touch()
    (violation,) = trial._check_outside(before)
    assert "stray" in violation


def test_an_outcome_is_images_and_tests(tmp_path: Path) -> None:
    def outcome_of(images: dict[str, str], test: Any) -> dict[str, object]:
        rows = [{"file": file, "sha256": digest, "seed": 1} for file, digest in images.items()]
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "tests" / "FT.json").write_text(json.dumps(test))
        return outcome(tmp_path)

    first = outcome_of({"a": "1", "b": "2"}, [1])
    assert outcome_of({"b": "2", "a": "1"}, [1]) == first
    assert outcome_of({"a": "1", "b": "3"}, [1]) != first
    assert outcome_of({"a": "1"}, [1]) != first
    assert outcome_of({"a": "1", "b": "2"}, [2]) != first


@pytest.mark.parametrize("span", [25.0, 1000.0])
def test_a_command_has_longer_where_a_fault_free_run_takes_longer(
    span: float, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command never ends; every look at the clock takes a second."""
    clock = itertools.count()
    monkeypatch.setattr(fault_injection.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(fault_injection.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(testbed, "tend", lambda: None)
    trial = Trial(testbed, "job", [], span)
    results = {"_start_command": None, "_check": None, "_is_running": True, "_last_lines": "wait"}
    for name, value in results.items():
        monkeypatch.setattr(trial, name, lambda value=value: value)
    assert trial.run() == ["no end: wait"]
    assert next(clock) == pytest.approx(PATIENCE + span, abs=3)


def test_a_command_that_was_interrupted_is_repeated_until_one_ends_well(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job finishes without a command, and then a second one says so."""
    monkeypatch.setattr(fault_injection.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(trial.testbed, "tend", lambda: None)
    monkeypatch.setattr(trial, "_is_finished", lambda: True)
    codes = iter([130, 0])
    monkeypatch.setattr(trial, "_check_end", list)

    def begin() -> None:
        trial.ended.append((command(trial.testbed.folder, ""), next(codes), True))

    monkeypatch.setattr(trial, "_start_command", begin)
    monkeypatch.setattr(trial, "_is_running", lambda: False)
    trial.ended = []
    assert trial.run() == []
    assert [code for _, code, _ in trial.ended] == [130, 0]


@pytest.mark.parametrize(
    ("text", "waits"), [(f"error the run failed: {BUSY}, stop it", True), ("error no", False)]
)
def test_a_command_waits_for_another_servers_work(trial: Trial, text: str, waits: bool) -> None:
    ended = command(trial.testbed.folder, text)
    ended.process = SimpleNamespace(poll=lambda: 1)  # type: ignore[assignment]
    trial.commands = [ended]
    trial.ended = []
    assert not trial._is_running()
    assert (trial._refused_until > time.monotonic() + 10) == waits


@pytest.mark.parametrize(
    ("problems", "images", "good"),
    [([], {"a": 1}, True), ([], {"a": 2}, False), (["lost"], {}, False)],
)
def test_a_good_runs_folder_is_deleted(
    problems: list[str],
    images: dict[str, int],
    good: bool,
    testbed: Testbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = testbed.folder / "server" / "history-1"
    (folder / "images").mkdir(parents=True)
    monkeypatch.setattr(Trial, "run", lambda self: problems)
    monkeypatch.setattr(fault_injection, "outcome", lambda place: images)
    assert (fault_injection.run_schedule(testbed, 1, {"a": 1}, kinds=()) == []) == good
    assert folder.exists() != good


def test_the_first_difference_is_named() -> None:
    reference = {"images": {"a": "1", "b": "2"}, "tests": {"FT.json": {"site-0": [[1]]}}}
    result = {"images": {"a": "1", "b": "3"}, "tests": {"FT.json": {}}}
    assert first_difference(result, result) == ""
    assert first_difference(result, reference) == "images/b is 3 and not 2"
    result["images"]["b"] = "2"
    expected = "tests/FT.json/site-0 is None and not [[1]]"
    assert first_difference(result, reference) == expected


# ---- Changes of the federation ----


def test_seeds_change_the_federation_in_every_way() -> None:
    changes = [changes_of(seed) for seed in range(100)]
    kinds = {tuple(change.kind for change in each) for each in changes}
    assert kinds == {(), ("join",), ("leave",), ("join", "leave")}
    leavers = {change.target for each in changes for change in each if change.kind == "leave"}
    assert leavers == set(SITES)
    targets = {fault.target for seed in range(100) for fault in continued_schedule_of(seed)}
    assert targets >= {LATER, SITES[0]}
    assert SITES[1] not in targets
    six = [fault.kind for fault in all_faults_of(6)]
    assert six[0] == schedule_of(6)[0].kind
    assert (six[1], six[-1]) == ("join", "leave")


def test_a_seed_goes_on_until_a_violation(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 6 has a run, a run that continues it, and a departure from that one."""
    calls: list[tuple[str, str]] = []
    bad: dict[str, list[str]] = {}

    def run_continued(testbed: Testbed, seed: int, job: str, span: float) -> list[str]:
        calls.append(("join", job))
        return bad.get("join", [])

    def run_departure(testbed: Testbed, folder: Path, change: Fault) -> list[str]:
        calls.append(("leave", folder.name))
        return bad.get("leave", [])

    monkeypatch.setattr(Trial, "run", lambda self: [])
    monkeypatch.setattr(fault_injection, "outcome", lambda place: {"a": 1})
    monkeypatch.setattr(fault_injection, "run_continued", run_continued)
    monkeypatch.setattr(fault_injection, "run_departure", run_departure)
    folders = [testbed.folder / "server" / name for name in ("history-6", "joined-6")]
    for problem, call_count in (("leave", 2), ("join", 1), ("", 2)):
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        bad = {problem: ["lost"]}
        calls.clear()
        problems = fault_injection.run_schedule(testbed, 6, {"a": 1})
        assert problems == (["lost"] if problem else [])
        assert calls == [("join", "history-6"), ("leave", "joined-6")][:call_count]
        assert [folder.exists() for folder in folders] == [bool(problem)] * 2


def write_model(run_folder: Path, weight: float) -> Path:
    file = run_folder / "models" / "FT.safetensors"
    weights = {"head.weight": np.full((2, 3), weight, np.float32)}
    save_file(weights, file, metadata={"run": run_folder.name})
    return file


@pytest.fixture
def left(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three clients; the command that removes one is replaced."""
    folder = testbed.folder / "server" / "job"
    for place in ("payloads", "models", "units"):
        (folder / place).mkdir(parents=True)
    rows = [{"client": site, "file": f"{site}.png"} for site in (*SITES, LATER)]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(folder, 3.0)
    for site in (*SITES, LATER):
        (folder / "payloads" / f"{site}.pb").write_text("payload")
    monkeypatch.setattr(fault_injection, "verify_run", lambda place: [])

    def forget(run_folder: Path, client: str, seconds: float) -> str:
        (run_folder / "payloads" / f"{client}.pb").unlink()
        remaining_rows = [row for row in rows if row["client"] != client]
        text = "".join(json.dumps(row) + "\n" for row in remaining_rows)
        (run_folder / "manifest.jsonl").write_text(text)
        write_model(run_folder, 2.0)
        return ""

    monkeypatch.setattr(testbed, "forget", forget)
    return folder


def earlier_models(left: Path) -> dict[str, str]:
    """Return the models of an earlier schedule, whose metadata name another run."""
    folder = left.with_name("earlier")
    (folder / "models").mkdir(parents=True)
    model = write_model(folder, 2.0)
    return {model.name: fault_injection.weights_digest(model)}


LEAVE = Fault(0.0, "leave", SITES[0], 1.0)


def test_a_complete_departure_is_no_violation(testbed: Testbed, left: Path) -> None:
    testbed.models[SITES[1], LATER] = earlier_models(left)
    assert fault_injection.run_departure(testbed, left, LEAVE) == []
    assert list(testbed.models) == [(SITES[1], LATER)]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "old.txt").write_text("of site-0"), "has left, but is in"),
        (lambda folder: (folder / "units" / "site-0.jsonl").touch(), "has left, but is in"),
        (lambda folder: (folder / "manifest.jsonl").write_text(""), "images of the others differ"),
        (
            lambda folder: write_model(folder, 4.0),
            "the models of .* differ from those of an earlier schedule",
        ),
        (lambda folder: (folder / "models" / "FT.safetensors").unlink(), "the models of .* differ"),
    ],
)
def test_what_a_departure_leaves_is_a_violation(
    damage: Callable[[Path], object],
    problem: str,
    testbed: Testbed,
    left: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget = testbed.forget
    testbed.models[SITES[1], LATER] = earlier_models(left)

    def forget_badly(*arguments: Any) -> str:
        text = forget(*arguments)
        damage(left)
        return text

    monkeypatch.setattr(testbed, "forget", forget_badly)
    (violation,) = fault_injection.run_departure(testbed, left, LEAVE)
    assert re.search(problem, violation)


@pytest.mark.slow
def test_a_removal_is_killed_and_repeated(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command runs too long, and is killed."""
    (testbed.folder / "empty").mkdir()
    program = testbed.folder / "bin" / "osfl"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys, time\nfrom pathlib import Path\n"
        f"file = Path({str(testbed.folder / 'commands')!r})\n"
        "count = len(file.read_text()) if file.exists() else 0\n"
        "file.write_text('x' * (count + 1))\n"
        "time.sleep(0 if count else 60)\n"
        "print(sys.argv[1:])\nsys.exit(int(count > 1))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(Federation, "osfl", str(program))
    assert testbed.forget(testbed.folder / "job", "site-0", 2.0) == ""
    assert (testbed.folder / "commands").read_text() == "xx"
    output = testbed.forget(testbed.folder / "job", "site-0", 30.0)
    assert output == f"{['forget', str(testbed.folder / 'job'), '--client', 'site-0']}\n"


# ---- Many schedules ----

VIOLATED = 20
FEDERATION = (-1, 0.0)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of three seeds, one of them with a violation."""
    monkeypatch.setattr(tool, "WORK", tmp_path)
    for seed, problems, kinds in ((0, [], ["cut"]), (2, ["lost"], ["kill", "cut"]), (9, [], [])):
        record = {"seed": seed, "problems": problems, "seconds": 1800, "faults": kinds}
        record |= {"span": 60.0, "told": [f"1.0 s: {kind}" for kind in kinds]}
        tool.file_of(seed).write_text(json.dumps(record))
    return tmp_path


@pytest.fixture
def runs(stored: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The seeds that run with their spans, after each start of a federation."""
    record: list[tuple[int, float]] = []

    def run_schedule(testbed: object, seed: int, fault_free: object, span: float) -> list[str]:
        record.append((seed, span))
        return ["lost"] if seed == VIOLATED else []

    @contextlib.contextmanager
    def no_federation(place: Path) -> Any:
        record.append(FEDERATION)
        yield SimpleNamespace()

    # The seeds below are schedules of these kinds
    nine = {kind: KINDS[kind] for kind in list(KINDS)[:9]}
    monkeypatch.setattr(fault_injection, "KINDS", nine)
    changes = [Fault(0.0, "join", LATER, 0.0)]
    monkeypatch.setattr(fault_injection, "changes_of", lambda seed: changes[: seed == 4])
    monkeypatch.setattr(fault_injection, "continued_schedule_of", lambda seed, span: [])
    monkeypatch.setattr(tool, "make_tiny_kit", lambda place: None)
    monkeypatch.setattr(tool, "new_federation", no_federation)
    crashes = {fault for fault in schedule_of(11) if fault.kind == "crash"}
    folder = stored / "testbed"
    (folder / "server" / "job").mkdir(parents=True)
    (folder / "job-0.log").write_text("the log")
    testbed = SimpleNamespace(kinds={"stop", "crash"}, hits=crashes, folder=folder)
    testbed.begin = testbed.unmount = lambda: None
    monkeypatch.setattr(tool, "Testbed", lambda *_: testbed)
    monkeypatch.setattr(fault_injection, "run_fault_free", lambda testbed: {})
    monkeypatch.setattr(fault_injection, "run_schedule", run_schedule)
    return record


def test_stored_seeds_do_not_run_again(runs: list[tuple[int, float]], stored: Path) -> None:
    """Every second seed from 0 to 5: 0 and 2 are stored; a fault-free run gives the span."""
    (stored / "000004-other.json").write_text(json.dumps({"span": 90.0}))
    tool.run_seeds(0, 6, 2)
    assert runs == [FEDERATION, (4, SPAN)]
    record = json.loads(tool.file_of(4).read_text())
    assert record["problems"] == []
    # This machine has no slow network
    assert [fault.kind for fault in schedule_of(4)] == ["stop", "slow"]
    assert record["faults"] == ["stop", "join"]


def test_a_crash_without_an_app_is_no_fault(runs: list[tuple[int, float]]) -> None:
    """Seeds 11 and 24 have a crash each; that of 11 hit an app."""
    for seed, kinds in ((11, ["crash"]), (24, ["stop", "stop"])):
        assert "crash" in {fault.kind for fault in schedule_of(seed)}
        tool.run_seeds(seed, 1, 1)
        assert json.loads(tool.file_of(seed).read_text())["faults"] == kinds


def test_again_has_the_last_span(runs: list[tuple[int, float]], stored: Path) -> None:
    for age, (name, span) in enumerate((("newest", 40.0), ("a", 50.0), ("z", 70.0))):
        file = stored / f"000003-{name}.json"
        file.write_text(json.dumps({"span": span}))
        os.utime(file, (1000 - age, 1000 - age))
    tool.run_seeds(1, 3, 1, again=True)
    assert runs == [FEDERATION, (1, SPAN), (2, 60.0), (3, 40.0)]
    assert json.loads(tool.file_of(2).read_text())["span"] == 60.0
    runs.clear()
    tool.run_seeds(2, 1, 1, again=True, span=90.0)
    assert runs == [FEDERATION, (2, 90.0)]


def test_a_violation_ends_the_federation(runs: list[tuple[int, float]]) -> None:
    """The violated run might continue in it."""
    tool.run_seeds(VIOLATED - 1, 3, 1)
    before, violated, after = [(VIOLATED + number, SPAN) for number in (-1, 0, 1)]
    assert runs == [FEDERATION, before, violated, FEDERATION, after]
    problems = [record["problems"] for record in tool.results(VIOLATED - 1, 3)]
    assert problems == [[], ["lost"], []]


def test_folders_and_logs_of_a_violation_are_kept(
    runs: list[tuple[int, float]], stored: Path
) -> None:
    tool.run_seeds(VIOLATED - 1, 2, 1)
    (evidence,) = (
        place for place in stored.iterdir() if place.is_dir() and place.name != "testbed"
    )
    assert evidence == tool.file_of(VIOLATED).with_suffix("")
    assert (evidence / "server" / "job").is_dir()
    assert (evidence / "job-0.log").read_text() == "the log"


def test_a_summary_counts_results_of_this_code(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tool.summary(tool.results(0, 9)) == (
        "2 schedules, 1 with a violation [2], 1.0 hours; faults: "
        "1 kill, 0 stop, 0 crash, 2 cut, 0 slow, 0 clock, 0 full, 0 older, 0 again, "
        "0 term, 0 interrupt, 0 damage, 0 restore, 0 twin, 0 join, 0 leave"
    )
    monkeypatch.setattr(tool, "code_digest", lambda: "other")
    assert tool.results(0, 9) == []


def test_the_table_has_every_result(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "BENCHMARKS", stored)
    tool.write_table(0, 10)
    page = (stored / "tools" / "tables" / "histories.md").read_text()
    assert "| 2 | 1.0 s: kill; 1.0 s: cut | lost | 1800 |" in page
    assert "Command: `python -m benchmarks.tools.fault_injection 0 10 --table`" in page
    content = json.loads((stored / "tools" / "tables" / "histories.json").read_text())
    assert len(content["rows"]) == 3
    assert content["about"] in page


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], int]]:
    """Returns what a command runs in this process, and its exit code."""
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)

    def run(*words: str) -> tuple[list[Any], int]:
        asked: list[Any] = []
        monkeypatch.setattr("sys.argv", ["fault_injection", *words])
        monkeypatch.setattr(tool, "run_seeds", lambda *given: asked.append(given))
        monkeypatch.setattr(tool, "run_in_parallel", lambda *given: asked.append(given) or [0, 1])
        try:
            tool.main()
        except SystemExit as end:
            return asked, int(end.code or 0)
        return asked, 0

    return run


@pytest.mark.parametrize(
    ("words", "asked", "code"),
    [
        (["0", "1"], [(0, 1, 1, False, None)], 0),
        # Seed 2 has a violation
        (["0", "3", "--again", "--span", "90.5"], [(0, 3, 1, True, 90.5)], 1),
        # One of several processes leaves violations to the command
        (["1", "9", "--step", "3"], [(1, 9, 3, False, None)], 0),
        # A process failed, though no stored result has a violation
        (["3", "9", "--parallel", "2", "--span=7"], [(3, 9, 2, ["--span=7.0"])], 1),
        (["3", "9", "--parallel", "0"], [], 2),
        (["3", "9", "--span", "0"], [], 2),
    ],
)
def test_the_command_ends_with_1_after_a_violation(
    words: list[str],
    asked: list[Any],
    code: int,
    stored: Path,
    run_command: Callable[..., tuple[list[Any], int]],
) -> None:
    assert run_command(*words) == (asked, code)


def test_several_processes_share_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them take every third seed from 5 to 11; one fails."""
    commands: list[list[str]] = []

    def popen(command: list[str], cwd: Path) -> Any:
        commands.append(command[3:])
        code = int(command[3] == "6")
        return SimpleNamespace(wait=lambda: code, terminate=lambda: None)

    monkeypatch.setattr(tool.subprocess, "Popen", popen)
    assert tool.run_in_parallel(5, 7, 3, ["--again"]) == [0, 1, 0]
    seeds = []
    for first, count, _, step, again in commands:
        seeds.append([*range(int(first), int(first) + int(count), int(step))])
        assert again == "--again"
    assert seeds == [[5, 8, 11], [6, 9], [7, 10]]


def test_the_superlinks_ports_are_below_those_of_outgoing_connections() -> None:
    """Linux's default begins the latter at 32768."""
    control, fleet = tool.free_ports()
    assert 1024 <= control < fleet < 32768
    for port in (control, fleet):
        socket.create_server(("127.0.0.1", port)).close()


def test_the_table_keeps_the_lines_of_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(tool, "WORK", tmp_path / "histories")
    (tmp_path / "histories").mkdir()

    def finish(seed: int, code: str, *problems: str) -> None:
        monkeypatch.setattr(tool, "code_digest", lambda: code)
        record = {"seed": seed, "problems": problems, "seconds": 3600, "told": ["1.0 s: again "]}
        tool.file_of(seed).write_text(json.dumps(record))
        tool.write_table(seed, 1)

    finish(5, "old")
    finish(2, "new", "a payload | was lost")
    finish(5, "new")
    table = json.loads((tmp_path / "tools" / "tables" / "histories.json").read_text())
    lines = [(line["seed"], line["code"], line["violations"]) for line in table["rows"]]
    assert lines == [(2, "new", "a payload / was lost"), (5, "new", "none")]
    assert "2 schedules, 1 with a violation [2], 2.0 hours." in table["about"]
