"""Fault injection: what its seeds say, what its line does, what its checks find."""

import contextlib
import itertools
import json
import os
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

import pytest

import osfl
from tests.helpers import fault_injection as histories
from tests.helpers.fault_injection import (
    ANEW,
    DISK,
    FARTHEST,
    KINDS,
    LONGEST,
    MACHINES,
    OLDER,
    PATIENCE,
    SITES,
    SLOW,
    SPAN,
    Command,
    Fault,
    Play,
    World,
    history_of,
    outcome,
    unmount,
)
from tests.helpers.system_tools import Clock, Federation, Line, mount_disk, wait_for


def test_a_seed_is_a_history() -> None:
    """Over many seeds every kind comes, and nothing happens to one process twice at a time."""
    assert history_of(7) == history_of(7)
    histories = [history_of(seed) for seed in range(400)]
    faults = [fault for one in histories for fault in one]
    for kind, targets in KINDS.items():
        assert {fault.target for fault in faults if fault.kind == kind} == set(targets)
    clocks = [fault.ahead for fault in faults if fault.kind == "clock"]
    assert -FARTHEST <= min(clocks) < -FARTHEST / 2 < FARTHEST / 2 < max(clocks) <= FARTHEST
    assert not any(fault.ahead for fault in faults if fault.kind != "clock")
    assert all(0 <= fault.begin <= SPAN and 0 <= fault.seconds <= LONGEST for fault in faults)
    assert {len(one) for one in histories} == {1, 2, 3, 4}
    for one in histories:
        assert one == sorted(one, key=lambda fault: fault.begin)
        for target in {fault.target for fault in one}:
            of_target = [fault for fault in one if fault.target == target]
            for first, second in itertools.pairwise(of_target):
                assert first.begin + first.seconds < second.begin


@pytest.fixture
def line() -> Line:
    """To a server that says what it hears."""
    door = socket.create_server(("127.0.0.1", 0))

    def answer_all(end: socket.socket) -> None:
        while some := end.recv(100):
            end.sendall(some)
        end.close()

    def echo() -> None:
        while True:
            threading.Thread(target=answer_all, args=door.accept()[:1], daemon=True).start()

    threading.Thread(target=echo, daemon=True).start()
    return Line(door.getsockname()[1])


def test_a_line_is_cut_and_mended(line: Line) -> None:
    def answer() -> bytes:
        with socket.create_connection(("127.0.0.1", line.port), timeout=10) as mine:
            mine.sendall(b"hello")
            return mine.recv(100)

    assert answer() == b"hello"
    open_yet = socket.create_connection(("127.0.0.1", line.port), timeout=10)
    open_yet.sendall(b"hello")
    assert open_yet.recv(100) == b"hello"
    line.cut()
    assert open_yet.recv(100) == b""
    with contextlib.suppress(ConnectionError):
        assert answer() == b""
    line.mend()
    assert answer() == b"hello"


def test_a_slow_line_takes_its_time(line: Line) -> None:
    """Of 4,000 bytes to and fro at 20,000 a second: two fifths of one, and then less."""

    def seconds() -> float:
        with socket.create_connection(("127.0.0.1", line.port), timeout=10) as mine:
            since = time.monotonic()
            mine.sendall(bytes(4000))
            left = 4000
            while left:
                some = mine.recv(left)
                assert some
                left -= len(some)
            return time.monotonic() - since

    line.pace(SLOW, SLOW)
    assert seconds() >= 2 * 4000 / SLOW
    line.pace(0.0, 0.0)
    assert seconds() < 2 * 4000 / SLOW


# ---- What happens to a machine ----


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Of a federation that is not begun."""
    made = World(Federation(tmp_path), tmp_path / "kit")
    for name in MACHINES:
        made.clocks[name] = Clock(tmp_path / "clocks" / name)
    return made


@pytest.fixture
def disk(world: World) -> Iterator[Path]:
    """The server's, which may be filled."""
    folder = world.disk_of("server")
    folder.mkdir()
    if not mount_disk(folder, DISK):
        pytest.skip("needs root, to mount a disk")
    yield folder
    unmount(world)
    assert not folder.is_mount()


def test_a_full_disk_has_no_room_for_a_byte_until_it_is_made(world: World, disk: Path) -> None:
    (disk / "kept").write_text("kept")
    world.fill("server")
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_text("more")
    world.make_room("server")
    (disk / "more").write_text("more")
    assert sorted(file.name for file in disk.iterdir()) == ["kept", "more"]
    world.make_room("server")


def test_no_disk_is_filled_but_a_small_one(world: World) -> None:
    world.disk_of("server").mkdir()
    with pytest.raises(AssertionError):
        world.fill("server")
    assert not list(world.disk_of("server").iterdir())


def test_a_clock_is_set_ahead_and_back(world: World) -> None:
    """Of a process that goes on running; its own measure of time does not jump."""
    code = (
        "import time\n"
        "from flwr.app.message.message import now as of_messages\n"
        "from flwr.supercore.date import now\n"
        "try:\n"
        "    while input():\n"
        "        said = (time.time(), now().timestamp(), of_messages().timestamp())\n"
        "        print(*said, time.monotonic(), flush=True)\n"
        "except EOFError:\n"
        "    pass\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **world.settings_of("server")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead in (0.0, 300.0, -500.0, 0.0):
            world.clocks["server"].set_ahead(ahead)
            process.stdin.write("time\n")
            *said, monotonic = map(float, process.stdout.readline().split())
            assert said == pytest.approx([time.time() + ahead] * 3, abs=1)
            assert monotonic == pytest.approx(time.monotonic(), abs=1)


@pytest.mark.slow
def test_a_site_has_an_older_release_for_a_while(world: World) -> None:
    """As its ClientApps would tell the server."""
    world.make_older_release()

    def release() -> str:
        code = "from client_app import app; print(app._installed_version())"
        environment = {**os.environ, **world.settings_of("site-0")}
        asked = [sys.executable, "-c", code]
        return subprocess.check_output(asked, env=environment, text=True).strip()

    assert release() == osfl.__version__
    world.older.add("site-0")
    assert release() == OLDER
    assert world.settings_of("site-1")["PYTHONPATH"] == str(world.folder / "clocks" / "site-1")


def test_a_fault_that_cannot_be_made_here_is_left_out(world: World) -> None:
    faults = [Fault(1.0, "again", "", 1.0), Fault(2.0, "clock", "server", 1.0, 60.0)]
    assert len(Play(world, "job", faults)._events) == 4
    world.kinds.discard("clock")
    assert [begin for begin, _ in Play(world, "job", faults)._events] == [1.0, 2.0]


def test_faults_begin_and_are_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older site's process is killed, and then that which came for it."""
    seen: list[str] = []
    monkeypatch.setattr(histories.psutil, "Process", lambda number: number)
    monkeypatch.setattr(histories, "kill", lambda number: seen.append(f"killed {number}"))
    world.lines["site-0"] = SimpleNamespace(  # type: ignore[assignment]
        pace=lambda *rates: seen.append(f"pace: {rates}")
    )
    for name in ("fill", "make_room"):
        monkeypatch.setattr(world, name, lambda target, name=name: seen.append(f"{name} {target}"))

    def begin_site(site: str) -> None:
        seen.append(f"{site}: {sorted(world.older)}")
        world.federation.processes[site] = SimpleNamespace(pid=2)  # type: ignore[assignment]

    monkeypatch.setattr(world, "begin_site", begin_site)
    world.federation.processes["site-0"] = SimpleNamespace(pid=1)  # type: ignore[assignment]
    monkeypatch.setattr(
        world.clocks["server"], "set_ahead", lambda ahead: seen.append(f"ahead: {ahead}")
    )

    def ends_of(kind: str, target: str, ahead: float = 0.0) -> list[str]:
        seen.clear()
        begin, end = Play(world, "job", [])._ends_of(Fault(0.0, kind, target, 1.0, ahead))
        begin()
        seen.append("then")
        end()
        return seen.copy()

    assert ends_of("slow", "site-0") == [
        f"pace: {(SLOW, SLOW)}",
        "then",
        "pace: (0.0, 0.0)",
    ]
    found = [True]

    def crash(name: str) -> bool:
        seen.append(f"crashed {name}")
        return found[0]

    monkeypatch.setattr(world, "crash", crash)
    assert ends_of("crash", "site-0") == ["crashed site-0", "then"]
    assert {fault.target for fault in world.met} == {"site-0"}
    # Where no app ran it is no fault
    world.met.clear()
    found[0] = False
    assert ends_of("crash", "site-0") == ["crashed site-0", "then"]
    assert world.met == set()
    world.federation.processes["superlink"] = SimpleNamespace(pid=3)  # type: ignore[assignment]
    for name in ("copy_database", "restore_database", "begin_superlink"):
        monkeypatch.setattr(world, name, lambda name=name: seen.append(name))
    assert ends_of("restore", "superlink") == [
        *("copy_database", "then", "killed 3", "restore_database", "begin_superlink")
    ]
    for name in ("begin_twin", "end_twin"):
        monkeypatch.setattr(world, name, lambda site, name=name: seen.append(f"{name} {site}"))
    assert ends_of("twin", "site-1") == ["begin_twin site-1", "then", "end_twin site-1"]
    # Which is away
    assert ends_of("crash", "site-1") == ["then"]
    assert ends_of("full", "server") == ["fill server", "then", "make_room server"]
    assert ends_of("older", "site-0") == [
        *("killed 1", "site-0: ['site-0']"),
        "then",
        *("killed 2", "site-0: []"),
    ]
    assert ends_of("clock", "server", -90.0) == ["ahead: -90.0", "then", "ahead: 0.0"]


def test_a_waiting_payload_of_the_job_is_damaged(world: World) -> None:
    """And then it may be made anew: that is no loss."""
    payload = world.folder / "cache" / "site-0" / "site-0-job" / "payload.pb"
    payload.parent.mkdir(parents=True)
    payload.write_bytes(bytes(5))
    run = Play(world, "job", [])
    run.damaged.add("site-0")
    assert not world.damage("site-0", "other")
    assert not world.damage("site-1", "job")
    assert payload.read_bytes() == bytes(5)
    assert world.damage("site-0", "job")
    assert payload.read_bytes() == bytes([0, 0, 1, 0, 0])
    run._look()
    payload.unlink()
    run._look()
    assert run.problems == []


def test_a_database_comes_back_as_it_was(world: World) -> None:
    with contextlib.closing(sqlite3.connect(world.database)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE kept (number)")
        database.commit()
        world.copy_database()
        database.execute("INSERT INTO kept VALUES (1)")
        database.commit()
    world.restore_database()
    with contextlib.closing(sqlite3.connect(world.database)) as database:
        assert database.execute("SELECT * FROM kept").fetchall() == []


def test_the_table_has_every_history_that_was_played(kept_in: Path, tmp_path: Path) -> None:
    for file in histories.WORK.glob("*.json"):
        found = json.loads(file.read_text())
        file.write_text(json.dumps({**found, "told": [f"1.0 s: {k}" for k in found["faults"]]}))
    histories.write_table(0, 10, tmp_path)
    page = (tmp_path / "histories.md").read_text()
    assert "| 2 | 1.0 s: kill; 1.0 s: cut | lost |" in page
    assert "| cut | 2 |" in page
    assert len(json.loads((tmp_path / "histories.json").read_text())) == 3


def test_a_crash_kills_the_app_and_not_what_began_it(world: World) -> None:
    """As Flower does it: a process of a site's begins another with the app's name."""
    app = world.folder / "flwr-clientapp"
    app.write_text("import time\ntime.sleep(60)\n")
    begun = f"import subprocess, sys; subprocess.run([sys.executable, {str(app)!r}])"
    site = subprocess.Popen([sys.executable, "-c", f"{begun}; import time; time.sleep(60)"])
    world.federation.processes["site-0"] = site
    try:
        wait_for(lambda: len(world.tree("site-0")) == 2, 20, lambda: "no app", every=0.1)
        child = world.tree("site-0")[1]
        wait_for(lambda: str(app) in child.cmdline(), 20, lambda: "no app", every=0.1)
        assert world.crash("site-0")
        wait_for(lambda: len(world.tree("site-0")) == 1, 20, lambda: "it lives", every=0.1)
        assert site.poll() is None
        # Where no app runs nothing happens
        assert not world.crash("site-0")
        assert site.poll() is None
    finally:
        site.kill()
        site.wait()


# ---- The checks ----


@pytest.fixture
def run(tmp_path: Path) -> Play:
    """A job with both payloads, and a command that ended well."""
    world = SimpleNamespace(folder=tmp_path, lines={}, federation=None, kinds=set(KINDS))
    made = Play(world, "job", [])  # type: ignore[arg-type]
    (made.run_folder / "payloads").mkdir(parents=True)
    for site in SITES:
        (made.run_folder / "payloads" / f"{site}.pb").write_text(site)
    made._look()
    made.ended = [(said(tmp_path, "INFO : report: here"), 0, True)]
    return made


def said(folder: Path, text: str) -> Command:
    log = folder / "job-0.log"
    log.write_text(text)
    return Command(None, log)  # type: ignore[arg-type]


def test_a_good_end_is_none(run: Play) -> None:
    run._look()
    assert run.problems == []
    assert run._at_the_end() == []
    assert run._beside(run._outside()) == []


def replaced(run: Play) -> None:
    (run.run_folder / "payloads" / "site-1.pb").write_text("another")


def lost(run: Play) -> None:
    """The client had it, was told, and the server has it no more."""
    cache = run.world.folder / "cache" / "site-0" / "job"
    # Of another job, which ended before it was told
    (cache.parent / "other").mkdir(parents=True)
    (cache.parent / "other" / "payload.pb").touch()
    cache.mkdir(parents=True)
    (cache / "payload.pb").touch()
    run._look()
    (cache / "payload.pb").unlink()
    (run.run_folder / "payloads" / "site-0.pb").unlink()


def kept(run: Play) -> None:
    """The client has it yet: nobody told it."""
    cache = run.world.folder / "cache" / "site-0" / "job"
    cache.mkdir(parents=True)
    (cache / "payload.pb").touch()
    (run.run_folder / "payloads" / "site-0.pb").unlink()


@pytest.mark.parametrize(
    ("harm", "problems"),
    [
        (replaced, ["the payload of site-1 was replaced"]),
        (lost, ["site-0 was told that its payload arrived; it is gone"]),
        (kept, []),
    ],
)
def test_what_may_never_be_is_seen(
    harm: Callable[[Play], None], problems: list[str], run: Play
) -> None:
    harm(run)
    run._look()
    run._look()
    assert sorted(set(run.problems)) == problems


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
def test_a_command_that_does_not_tell_the_truth_is_seen(
    code: int, report: bool, text: str, problem: str, run: Play
) -> None:
    run.ended = [(said(run.world.folder, text), code, report)]
    (found,) = [one for one in run._at_the_end() if "job-0.log" in one]
    assert problem in found


def test_refused_missing_and_unfinished_are_seen(run: Play) -> None:
    (run.run_folder / "payloads" / "site-0.pb.refused").touch()
    run.seen.pop("site-1")
    run.ended = [(said(run.world.folder, "error the run failed: Error"), 1, False)]
    found = " ".join(run._at_the_end())
    assert "payloads are of ['site-0']" in found
    assert "refused: ['site-0.pb.refused']" in found
    assert "no command ended with 0" in found


def test_files_beside_the_run_are_seen(run: Play) -> None:
    before = run._outside()
    (run.run_folder / "images").mkdir()
    assert run._beside(before) == []
    (run.run_folder.parent / "stray").touch()
    (found,) = run._beside(before)
    assert "stray" in found


def test_an_outcome_is_images_and_tests(tmp_path: Path) -> None:
    def row(file: str, sha256: str) -> str:
        return json.dumps({"file": file, "sha256": sha256, "seed": 1})

    def made(*rows: str, test: Any) -> dict[str, object]:
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "manifest.jsonl").write_text("\n".join(rows))
        (tmp_path / "tests" / "FT.json").write_text(json.dumps(test))
        return outcome(tmp_path)

    one = made(row("a", "1"), row("b", "2"), test={"site-0": [[1]]})
    assert made(row("b", "2"), row("a", "1"), test={"site-0": [[1]]}) == one
    assert made(row("a", "1"), row("b", "3"), test={"site-0": [[1]]}) != one
    assert made(row("a", "1"), test={"site-0": [[1]]}) != one
    assert made(row("a", "1"), row("b", "2"), test={"site-0": [[2]]}) != one


def test_what_ended_begins_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, but a site after a while, for the SuperLink refuses it until then."""
    begun: list[str] = []
    now = 100.0
    monkeypatch.setattr(histories.time, "monotonic", lambda: now)
    monkeypatch.setattr(world, "back", begun.append)
    monkeypatch.setattr(world, "begin_site", begun.append)
    monkeypatch.setattr(Federation, "end", lambda self, name: self.processes.pop(name))
    monkeypatch.setattr(Federation, "log", lambda self, name: "")
    for name, code in (("superlink", 1), ("server", 0), ("site-0", None), ("site-1", 0)):
        ended = SimpleNamespace(poll=lambda code=code: code)
        world.federation.processes[name] = ended  # type: ignore[assignment]
    world.tend()
    assert begun == ["superlink", "server"]
    assert list(world.federation.processes) == ["site-0"]
    now += ANEW + 1
    world.tend()
    assert begun == ["superlink", "server", "site-1"]


@pytest.mark.parametrize("span", [25.0, 1000.0])
def test_a_command_has_longer_where_a_run_in_peace_takes_longer(
    span: float, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that never ends; every look at the clock takes a second."""
    clock = itertools.count()
    monkeypatch.setattr(histories.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(histories.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(world, "tend", lambda: None)
    run = Play(world, "job", [], span)
    for name, value in (("_ask", None), ("_look", None), ("_going", True), ("_say", "waiting")):
        monkeypatch.setattr(run, name, lambda value=value: value)
    assert run.play() == ["no end: waiting"]
    assert next(clock) == pytest.approx(PATIENCE + span, abs=3)


@pytest.mark.parametrize(
    ("problems", "images", "good"), [([], {"a": 1}, True), ([], {"a": 2}, False), (["lost"], {}, 0)]
)
def test_a_good_run_is_taken_away(
    problems: list[str],
    images: dict[str, int],
    good: bool,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The small disk has room for few."""
    folder = world.folder / "server" / "history-1"
    (folder / "images").mkdir(parents=True)
    monkeypatch.setattr(Play, "play", lambda self: problems)
    monkeypatch.setattr(histories, "outcome", lambda place: images)
    assert (histories.play(world, 1, {"a": 1}) == []) == good
    assert folder.exists() != good


# ---- Many of them ----


def test_faults_begin_within_a_run_in_peace() -> None:
    """Where that takes four times as long, they begin later by that, and are as long."""
    usual, slow = history_of(3), history_of(3, 4 * SPAN)
    assert [fault.begin for fault in slow] == [4 * fault.begin for fault in usual]
    assert [fault.seconds for fault in slow] == [fault.seconds for fault in usual]


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where histories are kept: two that were good, and one that was not."""
    monkeypatch.setattr(histories, "WORK", tmp_path)
    for seed, problems, kinds in ((0, [], ["cut"]), (2, ["lost"], ["kill", "cut"]), (9, [], [])):
        found = {"seed": seed, "problems": problems, "seconds": 1800, "faults": kinds}
        histories.file_of(seed).write_text(json.dumps({**found, "span": 60.0}))
    return tmp_path


def test_a_summary_is_of_what_was_played(kept_in: Path) -> None:
    assert histories.summary(0, 9) == (
        "2 histories, 1 with a violation [2], 1.0 hours; faults: "
        "1 kill, 0 stop, 0 crash, 2 cut, 0 slow, 0 clock, 0 full, 0 older, 0 again, "
        "0 term, 0 interrupt, 0 damage, 0 restore, 0 twin",
        1,
    )
    assert histories.summary(3, 9)[1] == 0


def test_code_is_all_that_a_history_plays_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file, Flower's version, and whether disks can be filled; what is tested beside, not."""
    played_with = ["fault_injection.py", "settings.py", "system_tools.py", "tiny_kits.py"]
    files = [tmp_path / "tests" / "helpers" / name for name in [*played_with, "toy.py"]]
    files += [tmp_path / package / "a.py" for package in ("osfl", "client_app", "server_app")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    monkeypatch.setattr(histories, "__file__", str(files[0]))
    asked = histories.code.__wrapped__
    found = [asked()]
    for file in files:
        file.write_text("after")
        found.append(asked())
    monkeypatch.setattr(histories, "version", lambda name: "another")
    found.append(asked())
    monkeypatch.setattr(histories.os, "geteuid", lambda: 0 if os.getuid() else 1)
    found.append(asked())
    changed = [one != other for one, other in itertools.pairwise(found)]
    assert changed == [file.name != "toy.py" for file in files] + [True, True]


def test_no_second_signal_breaks_into_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    heeded: dict[int, object] = {}
    monkeypatch.setattr(histories.signal, "signal", heeded.__setitem__)
    with pytest.raises(SystemExit) as end:
        histories._leave(signal.SIGINT, None)
    assert end.value.code == 1
    assert heeded == {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}


def test_histories_of_other_code_do_not_count(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "code", lambda: "other")
    assert histories.summary(0, 9)[0].startswith("0 histories")
    # Which `--again` plays yet with the same span
    assert histories.kept_span(0) == 60.0
    assert histories.kept_span(1) is None


def test_a_span_is_the_last_ones(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, (name, span) in enumerate((("newest", 40.0), ("a", 50.0), ("z", 70.0))):
        file = kept_in / f"000001-{name}.json"
        file.write_text(json.dumps({"span": span}))
        os.utime(file, (1000 - age, 1000 - age))
    assert histories.kept_span(1) == 40.0


@pytest.mark.parametrize(
    ("count", "more", "asked", "code"),
    [
        ("1", [], (0, 1, 1, False, None), 0),
        ("3", ["--again", "--span", "90.5"], (0, 3, 1, True, 90.5), 1),
    ],
)
def test_the_command_plays_and_tells_of_violations(
    count: str,
    more: list[str],
    asked: tuple[Any, ...],
    code: int,
    kept_in: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first three seeds the last was violated."""
    played: list[tuple[Any, ...]] = []
    monkeypatch.setattr("sys.argv", ["histories.py", "0", count, *more])
    monkeypatch.setattr(histories, "played", lambda *given: played.append(given))
    monkeypatch.setattr(histories.signal, "signal", lambda *given: None)
    with pytest.raises(SystemExit) as end:
        histories.main()
    assert (played, int(end.value.code or 0)) == ([asked], code)


def test_one_of_several_plays_its_share_and_leaves_the_summary_to_the_command(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    played: list[tuple[Any, ...]] = []
    monkeypatch.setattr("sys.argv", ["histories.py", "1", "9", "--step", "3"])
    monkeypatch.setattr(histories, "played", lambda *given: played.append(given))
    monkeypatch.setattr(histories.signal, "signal", lambda *given: None)
    histories.main()
    assert played == [(1, 9, 3, False, None)]
    assert capsys.readouterr().out == ""


def test_one_that_fails_among_several_fails_the_command(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no history that is kept was violated."""
    asked: list[tuple[Any, ...]] = []

    def failing(*given: Any) -> list[int]:
        asked.append(given)
        return [0, 1]

    monkeypatch.setattr(
        "sys.argv", ["histories.py", "3", "9", "--at-once", "2", "--again", "--span=7"]
    )
    monkeypatch.setattr(histories, "side_by_side", failing)
    monkeypatch.setattr(histories.signal, "signal", lambda *given: None)
    with pytest.raises(SystemExit) as end:
        histories.main()
    assert (asked, end.value.code) == ([(3, 9, 2, ["--again", "--span=7.0"])], True)
    monkeypatch.setattr("sys.argv", ["histories.py", "3", "9", "--at-once", "0"])
    with pytest.raises(SystemExit) as end:
        histories.main()
    assert end.value.code == 2
    monkeypatch.setattr("sys.argv", ["histories.py", "3", "9", "--span", "0"])
    with pytest.raises(SystemExit) as end:
        histories.main()
    assert end.value.code == 2


VIOLATED = 20
BEGUN = (-1, 0.0)


@pytest.fixture
def told(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The seeds that are played, with their spans, in federations that are none, after each time
    that one of these is begun.
    """
    seen: list[tuple[int, float]] = []

    def play(world: object, seed: int, peace: object, span: float) -> list[str]:
        seen.append((seed, span))
        return ["lost"] if seed == VIOLATED else []

    @contextlib.contextmanager
    def no_federation(place: Path) -> Any:
        seen.append(BEGUN)
        yield SimpleNamespace()

    # The seeds below are histories of these kinds
    nine = {kind: KINDS[kind] for kind in list(KINDS)[:9]}
    monkeypatch.setattr(histories, "KINDS", nine)
    monkeypatch.setattr("tests.helpers.tiny_kits.make_tiny_kit", lambda place: None)
    monkeypatch.setattr(histories, "new_federation", no_federation)
    crashed = {fault for fault in history_of(11) if fault.kind == "crash"}
    made = SimpleNamespace(begin=lambda: None, kinds={"stop", "crash"}, met=crashed)
    monkeypatch.setattr(histories, "World", lambda *given: made)
    monkeypatch.setattr(histories, "unmount", lambda world: None)
    monkeypatch.setattr(histories, "quiet", lambda world: {})
    monkeypatch.setattr(histories, "play", play)
    return seen


def test_what_was_played_is_not_played_again(told: list[tuple[int, float]]) -> None:
    """Every second seed from 0 on; of 0 to 5, 0 and 2 are there."""
    histories.played(0, 6, 2, False)
    assert told == [BEGUN, (4, SPAN)]
    found = json.loads(histories.file_of(4).read_text())
    assert found["problems"] == []
    # Of its stop, and of its slow line, which could not be had here
    assert [fault.kind for fault in history_of(4)] == ["stop", "slow"]
    assert found["faults"] == ["stop"]


def test_a_crash_that_killed_nothing_is_no_fault(told: list[tuple[int, float]]) -> None:
    """Of 11 and 24 one each; 11's had an app to kill."""
    assert ["crash" in {fault.kind for fault in history_of(seed)} for seed in (11, 24)] == [
        True
    ] * 2
    histories.played(11, 1, 1, False)
    histories.played(24, 1, 1, False)
    kinds = [json.loads(histories.file_of(seed).read_text())["faults"] for seed in (11, 24)]
    assert kinds == [["crash"], ["stop", "stop"]]


def test_again_is_with_the_span_that_it_had(told: list[tuple[int, float]]) -> None:
    """So the same faults come at the same seconds."""
    histories.played(1, 3, 1, True)
    assert told == [BEGUN, (1, SPAN), (2, 60.0), (3, SPAN)]
    assert json.loads(histories.file_of(2).read_text())["span"] == 60.0
    told.clear()
    histories.played(2, 1, 1, True, 90.0)
    assert told == [BEGUN, (2, 90.0)]


def test_without_again_a_run_in_peace_says_the_span(
    told: list[tuple[int, float]], kept_in: Path
) -> None:
    """Whatever it was with other code, or on a machine that was less busy."""
    (kept_in / "000001-other.json").write_text(json.dumps({"span": 90.0}))
    histories.played(1, 1, 1, False)
    assert told == [BEGUN, (1, SPAN)]


def test_after_a_violation_the_others_are_played_in_another_federation(
    told: list[tuple[int, float]],
) -> None:
    """In the first the run that was violated might go on."""
    histories.played(VIOLATED - 1, 3, 1, False)
    seeds = [VIOLATED - 1, VIOLATED, VIOLATED + 1]
    before, violated, after = [(seed, SPAN) for seed in seeds]
    assert told == [BEGUN, before, violated, BEGUN, after]
    kept = [json.loads(histories.file_of(seed).read_text())["problems"] for seed in seeds]
    assert kept == [[], ["lost"], []]
    told.clear()
    histories.played(VIOLATED, 1, 1, True)
    assert told == [BEGUN, (VIOLATED, SPAN)]


def test_several_share_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them play 5 to 11: each every third. One that fails is told of."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "first, count, _, step, *again = sys.argv[1:]\n"
        "open(f'{__file__}-{first}', 'w').write(f'{count} {step} {again}')\n"
        "sys.exit(first == '6')\n"
    )
    monkeypatch.setattr(histories, "__file__", str(script))
    assert histories.side_by_side(5, 7, 3, ["--again"]) == [0, 1, 0]
    seeds = []
    for file in sorted(tmp_path.glob("script.py-*")):
        count, step, again = file.read_text().split()
        first = int(file.name.rpartition("-")[2])
        seeds.append([*range(first, first + int(count), int(step))])
        assert again == "['--again']"
    assert seeds == [[5, 8, 11], [6, 9], [7, 10]]


def test_a_superlink_has_ports_that_nobody_takes_meanwhile() -> None:
    """Outgoing connections have those from 32768 on, as Linux is set by default."""
    control, fleet = histories.quiet_ports()
    assert 1024 <= control < fleet < 32768
    for port in (control, fleet):
        socket.create_server(("127.0.0.1", port)).close()
