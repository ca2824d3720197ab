"""Random histories of faults in a real federation, and what must be true after each.

python tests/helpers/fault_injection.py 0 1000               # the histories of a thousand seeds
python tests/helpers/fault_injection.py 0 1000 --at-once 4   # in four federations side by side
python tests/helpers/fault_injection.py 17 1 --again         # one of them again, with the same span

What each gave is kept in runs/histories, and not played again with the same code: an interrupted
command goes on.

A SuperLink, what runs ServerApps, and two sites, with TLS and node keys, as processes of their own.
For each seed a job begins, and when and how long the seed says

- kill, stop: a process, with all that it started, is killed, or stopped and continued;
- crash: a ServerApp or ClientApp alone is killed, as where memory runs out;
- cut, slow: a site's network is cut, or lets few bytes through;
- clock: a machine's clock, as Python and Flower ask it, is set minutes ahead or back;
- full: a disk has no room for a byte (as root, to mount one);
- older: a site comes back with an older release installed;
- again: the same job is begun a second time;
- term: a process is asked to end, by SIGTERM, and comes back;
- interrupt: Ctrl-C ends the command, and the run goes on at the server;
- damage: a bit of a payload that waits in a site's cache flips;
- restore: the SuperLink comes back with its database of some seconds before;
- twin: a second node with a site's name and client id is there, with a key of its own.

Without root no disk is full. What was killed comes back, as a restart policy has it; a job that
ended is begun again by the same command. Then:

- a payload whose client was told that it arrived is on the server's disk;
- each client has one payload there, and it never changes;
- images, and what every client's test said of the model, are those of a run in peace;
- nothing is written beside the run's folder, neither where runs are nor where processes work;
- the command ends with 0 after its report, and else says an error last.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import psutil

from osfl.cli.guard import end_process_tree
from osfl.util.files import write_atomically
from tests.helpers.system_tools import (
    FILLER,
    TWO_CLASSES,
    Clock,
    Federation,
    Line,
    apps_of,
    fill_disk,
    kill,
    make_images,
    mount_disk,
    new_federation,
    quick_arguments,
)

SITES = ("site-0", "site-1")
# Seconds in which a run in peace is asked for, collects, draws, trains and tests
SPAN = 25.0
WORK = Path(__file__).resolve().parents[2] / "runs" / "histories"
TABLES = Path(__file__).resolve().parents[2] / "benchmarks" / "tools" / "tables"
LONGEST = 12.0  # seconds that something stays away
# Seconds for one command, beside those that a run in peace takes: a SuperLink whose clock was ahead
# may take a site that was killed for online for six minutes, and refuses it until then
PATIENCE = 450.0
MOST_COMMANDS = 5
ANEW = 12.0  # seconds after which a site that was refused is begun again
MACHINES = ("server", "superlink", *SITES)
# What happens to which
KINDS = {
    "kill": MACHINES,
    "stop": MACHINES,
    "crash": ("server", *SITES),
    "cut": SITES,
    "slow": SITES,
    "clock": MACHINES,
    "full": ("server", *SITES),
    "older": SITES,
    "again": ("",),
    "term": MACHINES,
    "interrupt": ("",),
    "damage": SITES,
    "restore": ("superlink",),
    "twin": SITES,
}
AT_ONCE = ("crash", "again", "interrupt", "damage")  # kinds that are over as they begin
FARTHEST = 600.0  # seconds that a clock is set ahead or back
SLOW = 20_000.0  # bytes per second in each direction
OLDER = "0.0.1"  # a release that no run is of
DISK = "320m"  # of the server, and of each site
SpanOf = Callable[[int], float | None]  # a seed's span, if it is known


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process, or to its network."""

    begin: float  # seconds after the job was begun
    kind: str
    target: str
    seconds: float  # until it is over
    ahead: float = 0.0  # seconds that the clock is set, of that kind

    def __str__(self) -> str:
        by = f" by {self.ahead:+.0f} s" if self.ahead else ""
        lasts = f" for {self.seconds:.1f} s" if self.kind not in AT_ONCE else ""
        return f"{self.begin:.1f} s: {self.kind} {self.target}{by}{lasts}"


def history_of(seed: int, span: float = SPAN) -> list[Fault]:
    """One to four faults, in the order of their begin; never two of one process at a time.

    Args:
        span: seconds that a run in peace takes; faults begin within them.
    """
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(list(KINDS))
        target = draw.choice(KINDS[kind])
        begin = draw.uniform(0, span)
        seconds = draw.uniform(0, LONGEST)
        ahead = draw.uniform(-FARTHEST, FARTHEST) if kind == "clock" else 0.0
        fault = Fault(begin, kind, target, seconds, ahead)
        if not any(one.target == fault.target and _overlap(one, fault) for one in faults):
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.begin)


def _overlap(one: Fault, other: Fault) -> bool:
    return one.begin <= other.begin + other.seconds and other.begin <= one.begin + one.seconds


@dataclass
class Command:
    """`osfl run`, and what it says."""

    process: subprocess.Popen
    log: Path

    def said(self) -> list[str]:
        """Its lines that say anything; Flower's log has empty ones."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.partition(":")[2].strip() or "Error" in line]


@dataclass
class World:
    """The federation, and what happens to it."""

    federation: Federation
    kit: Path
    lines: dict[str, Line] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)  # when a site is begun again
    older: set[str] = field(default_factory=set)  # sites with an older release
    clocks: dict[str, Clock] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=lambda: set(KINDS))  # faults that can be made here
    # At-once faults that met something: an app to kill, a payload to damage, a command to end
    met: set[Fault] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.federation.folder

    def disk_of(self, name: str) -> Path:
        """Where the server has its runs, or a site its payloads."""
        return self.folder / "server" if name == "server" else self.folder / "cache" / name

    def begin(self) -> None:
        """Everything, once."""
        make_images(self.folder / "images")
        for name in KINDS["full"]:
            self.disk_of(name).mkdir(parents=True)
            if not mount_disk(self.disk_of(name), DISK):
                self.kinds.discard("full")
        for name in MACHINES:
            self.clocks[name] = Clock(self.folder / "clocks" / name)
        self.make_older_release()
        self.begin_superlink()
        self.begin_server()
        for site in SITES:
            self.lines[site] = Line(self.federation.fleet)
            self.federation.register(site)
            self.federation.register(site, self.twin_keys)
            self.begin_site(site)

    def make_older_release(self) -> None:
        """What Python finds of one, before what is installed."""
        release = self.folder / "older" / f"osfl-{OLDER}.dist-info"
        release.mkdir(parents=True)
        told = f"Metadata-Version: 2.1\nName: osfl\nVersion: {OLDER}\n"
        (release / "METADATA").write_text(told)

    def begin_site(self, site: str) -> None:
        config = (
            f"client-id='{site}' data-dir='{self.folder / 'images'}' "
            f"cache-dir='{self.folder / 'cache' / site}'"
        )
        trusting = self.federation.trusting(site)
        port = self.lines[site].port
        settings = self.settings_of(site)
        self.federation.begin_node(site, *trusting, config=config, fleet=port, **settings)

    @property
    def twin_keys(self) -> Path:
        return self.folder / "twin-keys"

    def begin_twin(self, site: str) -> None:
        """A second node with a site's client id and images, in a cache of its own."""
        name = f"twin-{site}"
        config = (
            f"client-id='{site}' data-dir='{self.folder / 'images'}' "
            f"cache-dir='{self.folder / 'cache' / name}'"
        )
        key = self.twin_keys / "nodes" / site
        trusting = ["--root-certificates", str(self.federation.keys / "ca.crt")]
        trusting += ["--auth-supernode-private-key", str(key)]
        self.federation.begin_node(name, *trusting, config=config, **self.settings_of(site))

    def end_twin(self, site: str) -> None:
        self.federation.end(f"twin-{site}")

    @property
    def database(self) -> Path:
        return self.folder / "state.db"

    def copy_database(self) -> None:
        """Keep the SuperLink's database as it is now."""
        kept = self.folder / "kept.db"
        kept.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(self.database)) as source,
            closing(sqlite3.connect(kept)) as copy,
        ):
            source.backup(copy)

    def restore_database(self) -> None:
        """Put the kept one in place; the SuperLink must be down."""
        for file in self.folder.glob("state.db*"):
            file.unlink()
        shutil.copy(self.folder / "kept.db", self.database)

    def damage(self, site: str, job: str) -> bool:
        """Flip a bit of a site's payload of a job, where it has one; returns whether it had."""
        cache = self.folder / "cache" / site
        with suppress(FileNotFoundError):
            for file in cache.rglob("payload.pb"):
                if job in str(file.parent):
                    content = bytearray(file.read_bytes())
                    content[len(content) // 2] ^= 1
                    file.write_bytes(content)
                    return True
        return False

    def begin_superlink(self) -> None:
        self.federation.begin_superlink("process", **self.settings_of("superlink"))

    def begin_server(self) -> None:
        self.federation.begin_server(**self.settings_of("server"))

    def settings_of(self, name: str) -> dict[str, str]:
        """What a machine's processes have in their environment."""
        # As in the tests: so many processes on few cores would wait for each other's threads
        settings = {"OMP_NUM_THREADS": "1", **self.clocks[name].settings}
        if name in self.older:
            settings["PYTHONPATH"] += f"{os.pathsep}{self.folder / 'older'}"
        return settings

    def back(self, name: str) -> None:
        """What was killed begins again."""
        if name == "superlink":
            self.begin_superlink()
        elif name == "server":
            self.begin_server()
        else:
            self.begin_site(name)

    def crash(self, name: str) -> bool:
        """Kill its app and nothing else; returns whether one ran."""
        apps = apps_of(self.federation.processes[name])
        for app in apps:
            with suppress(psutil.NoSuchProcess):
                app.kill()
        return bool(apps)

    def fill(self, name: str) -> None:
        """Leave no room on its disk, which must be a small one."""
        fill_disk(self.disk_of(name))

    def make_room(self, name: str) -> None:
        """Of what `fill` took."""
        (self.disk_of(name) / FILLER).unlink(missing_ok=True)

    def tend(self) -> None:
        """As a restart policy: what ended begins anew, and a site that was refused, being online
        yet.
        """
        for name in ("superlink", "server"):
            process = self.federation.processes.get(name)
            if process is not None and process.poll() is not None:
                self.federation.end(name)
                self.back(name)
        for site in SITES:
            process = self.federation.processes.get(site)
            refused = process is not None and "Exit Code: 305" in self.federation.log(site)
            if process is not None and (refused or process.poll() is not None):
                self.federation.end(site)
                self.due[site] = time.monotonic() + ANEW
            if site in self.due and time.monotonic() > self.due[site]:
                del self.due[site]
                self.begin_site(site)

    def command(self, job: str, number: int) -> Command:
        """`osfl run` of a job."""
        arguments = quick_arguments(
            self.kit,
            method="feddeo",
            job_id=job,
            **TWO_CLASSES,
            synthesis__images_per_class=4,
            synthesis__unit_size=2,
            synthesis__steps=4,
        )
        log = self.folder / f"{job}-{number}.log"
        osfl = str(Path(sys.executable).parent / "osfl")
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [osfl, "run", "--connection", "test", *arguments],
                cwd=self.folder / "empty",
                env=self.federation.environment,
                stdout=out,
                stderr=out,
            )
        return Command(process, log)

    def tree(self, name: str) -> list[psutil.Process]:
        process = psutil.Process(self.federation.processes[name].pid)
        return [process, *process.children(recursive=True)]

    def signal_all(self, name: str, number: int) -> None:
        for process in self.tree(name):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def unmount(world: World) -> None:
    """Its disks, those that are."""
    for name in KINDS["full"]:
        if world.disk_of(name).is_mount():
            subprocess.run(["umount", "--lazy", str(world.disk_of(name))], check=False)


class Play:
    """One history, from its job's first command to its last."""

    def __init__(self, world: World, job: str, faults: list[Fault], span: float = SPAN):
        self.world = world
        self._patience = PATIENCE + span
        self.job = job
        self.run_folder = world.folder / "server" / job
        self.commands: list[Command] = []
        self.ended: list[tuple[Command, int, bool]] = []  # with the exit code, and a report then
        self.seen: dict[str, str] = {}  # payloads on the server's disk, by client
        self.damaged: set[str] = set()  # clients whose waiting payload was damaged
        self.cached: set[str] = set()  # clients that have their payload, still unacknowledged
        self.problems: list[str] = []
        self._asked_again = 0
        self._events: list[tuple[float, Callable[[], None]]] = []
        for fault in faults:
            if fault.kind not in world.kinds:
                continue
            begin, end = self._ends_of(fault)
            self._events += [(fault.begin, begin), (fault.begin + fault.seconds, end)]
        self._events.sort(key=lambda event: event[0])

    def play(self) -> list[str]:
        """What was violated; nothing in a good history. Whatever comes, all faults are over then,
        and no command goes on.
        """
        before = self._outside()
        began = time.monotonic()
        try:
            self._ask()
            while self._events or self._going() or not self._finished():
                while self._events and time.monotonic() - began > self._events[0][0]:
                    self._events.pop(0)[1]()
                self.world.tend()
                self._look()
                if not self._going() and not self._events and not self._finished():
                    if self._asked_again >= MOST_COMMANDS:
                        return [*self.problems, f"not finished: {self._say()}"]
                    self._asked_again += 1
                    self._ask()
                if time.monotonic() - began > self._patience * (1 + self._asked_again):
                    return [*self.problems, f"no end: {self._say()}"]
                time.sleep(0.2)
            self._look()
            return self.problems + self._at_the_end() + self._beside(before)
        finally:
            for command in self.commands:
                if command.process.poll() is None:
                    end_process_tree(command.process.pid)
            for _, what in self._events:
                if what != self._ask:
                    what()

    def _ends_of(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None]]:
        world, name = self.world, fault.target

        def kill_it() -> None:
            process = world.federation.processes.pop(name, None)
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    kill(psutil.Process(process.pid))

        def begin_it() -> None:
            if name not in world.federation.processes and name not in world.due:
                world.back(name)

        def stop_it() -> None:
            if name in world.federation.processes:
                with suppress(psutil.NoSuchProcess):
                    world.signal_all(name, signal.SIGSTOP)

        def go_on() -> None:
            if name in world.federation.processes:
                with suppress(psutil.NoSuchProcess):
                    world.signal_all(name, signal.SIGCONT)

        def crash_it() -> None:
            if name in world.federation.processes and world.crash(name):
                world.met.add(fault)

        def end_it() -> None:
            if name in world.federation.processes:
                world.federation.end(name)

        def interrupt_it() -> None:
            for command in self.commands:
                if command.process.poll() is None:
                    world.met.add(fault)
                    command.process.send_signal(signal.SIGINT)

        def damage_it() -> None:
            if world.damage(name, self.job):
                world.met.add(fault)
                self.damaged.add(name)

        def restore_it() -> None:
            kill_it()
            world.restore_database()
            begin_it()

        if fault.kind == "term":
            return end_it, begin_it
        if fault.kind == "interrupt":
            return interrupt_it, lambda: None
        if fault.kind == "damage":
            return damage_it, lambda: None
        if fault.kind == "restore":
            return world.copy_database, restore_it
        if fault.kind == "twin":
            return partial(world.begin_twin, name), partial(world.end_twin, name)
        if fault.kind == "kill":
            return kill_it, begin_it
        if fault.kind == "crash":
            return crash_it, lambda: None
        if fault.kind == "stop":
            return stop_it, go_on
        if fault.kind == "cut":
            return world.lines[name].cut, world.lines[name].mend
        if fault.kind == "slow":
            pace = world.lines[name].pace
            return partial(pace, SLOW, SLOW), partial(pace, 0.0, 0.0)
        if fault.kind == "clock":
            clock = world.clocks[name]
            return partial(clock.set_ahead, fault.ahead), partial(clock.set_ahead, 0.0)
        if fault.kind == "full":
            return partial(world.fill, name), partial(world.make_room, name)
        if fault.kind == "older":

            def downgrade() -> None:
                kill_it()
                world.older.add(name)
                begin_it()

            def upgrade() -> None:
                kill_it()
                world.older.discard(name)
                begin_it()

            return downgrade, upgrade
        return self._ask, lambda: None

    def _ask(self) -> None:
        self.commands.append(self.world.command(self.job, len(self.commands)))

    def _going(self) -> bool:
        """Whether a command is; of one that has ended, the exit code is kept."""
        known = [command for command, *_ in self.ended]
        for command in self.commands:
            if command not in known and (code := command.process.poll()) is not None:
                self.ended.append((command, code, (self.run_folder / "report.html").is_file()))
        return len(self.ended) < len(self.commands)

    def _finished(self) -> bool:
        """Its sums are written last; a second command of a finished job takes them away first."""
        return (self.run_folder / "SHA256SUMS").is_file()

    def _look(self) -> None:
        """What may never be, however short."""
        for file in (self.run_folder / "payloads").glob("*.pb"):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            if self.seen.setdefault(file.stem, content) != content:
                self.problems.append(f"the payload of {file.stem} was replaced")
        for site in SITES:
            there = self._cached(site)
            if there is None:
                continue
            kept = (self.run_folder / "payloads" / f"{site}.pb").is_file()
            lost = site in self.cached - self.damaged
            if lost and not there and not kept:
                self.problems.append(f"{site} was told that its payload arrived; it is gone")
            self.cached = self.cached | {site} if there else self.cached - {site}

    def _cached(self, site: str) -> bool | None:
        """Whether a client has its payload of this job; None where that could not be seen, for it
        takes its folders away meanwhile.
        """
        cache = self.world.folder / "cache" / site
        with suppress(FileNotFoundError):
            return any(self.job in str(file.parent) for file in cache.rglob("payload.pb"))
        return None

    def _at_the_end(self) -> list[str]:
        problems = []
        if sorted(self.seen) != list(SITES):
            problems.append(f"payloads are of {sorted(self.seen)}")
        if refused := list((self.run_folder / "payloads").glob("*.refused")):
            problems.append(f"refused: {[file.name for file in refused]}")
        for command, code, report in self.ended:
            said = command.said()
            last = said[-1] if said else ""
            if code == 0 and not (report and "report: " in last):
                problems.append(f"{command.log.name} ended with 0 without a report: {said[-3:]}")
            interrupted = code == 130 and last.startswith("interrupted")
            if code != 0 and not last.startswith("error") and not interrupted:
                problems.append(f"{command.log.name} ended with {code}, and says last: {last}")
        if not any(code == 0 for _, code, _ in self.ended):
            problems.append("no command ended with 0")
        return problems

    def _outside(self) -> set[Path]:
        """The server's files but those of this job."""
        found = set()
        # In the second all processes have their working directory
        for place in ("server", "empty"):
            found |= set((self.world.folder / place).rglob("*"))
        return {file for file in found if self.run_folder not in (file, *file.parents)}

    def _beside(self, before: set[Path]) -> list[str]:
        more = sorted(self._outside() - before)
        return [f"written beside the run's folder: {more}"] if more else []

    def _say(self) -> str:
        return "; ".join(f"{one.log.name}: {one.said()[-2:]}" for one in self.commands)


def outcome(run_folder: Path) -> dict[str, object]:
    """What a run gives, whatever happened: its images, and what the clients' tests said."""
    rows = map(json.loads, (run_folder / "manifest.jsonl").read_text().splitlines())
    images = {row["file"]: row["sha256"] for row in rows}
    tests = {
        file.name: json.loads(file.read_text())
        for file in sorted((run_folder / "tests").glob("*.json"))
    }
    return {"images": images, "tests": tests}


def play(world: World, seed: int, peace: dict[str, object], span: float = SPAN) -> list[str]:
    """A seed's history; what was violated, also against the run in peace.

    A good one's run is taken away, for the small disk has room for few.
    """
    run = Play(world, f"history-{seed}", history_of(seed, span), span)
    problems = run.play()
    if not problems and outcome(run.run_folder) != peace:
        problems = ["its images or tests are others than a quiet run's"]
    if not problems:
        shutil.rmtree(run.run_folder)
    return problems


def quiet(world: World) -> dict[str, object]:
    """A run to which nothing happens."""
    run = Play(world, "quiet", [])
    problems = run.play()
    assert not problems, problems
    found = outcome(run.run_folder)
    assert all(found.values()), found
    return found


def played(first: int, count: int, step: int, again: bool, span: float | None = None) -> None:
    """Every so many seeds' histories, each kept when it is over.

    Args:
        again: also those that were, each with the span that it had, with whatever code.
        span: of each, in seconds; None: what a run in peace takes.
    """
    wanted = range(first, first + count, step)
    seeds = [seed for seed in wanted if again or not file_of(seed).is_file()]

    def span_of(seed: int) -> float | None:
        return span or (kept_span(seed) if again else None)

    while seeds:
        seeds = _played_in_one(seeds, span_of)


def _played_in_one(seeds: list[int], span_of: SpanOf) -> list[int]:
    """Histories in a federation of their own; those that are left after a violation, whose run
    might go on there.
    """
    from tests.helpers.tiny_kits import make_tiny_kit

    with tempfile.TemporaryDirectory() as place:
        kit = Path(place) / "kit"
        make_tiny_kit(kit)
        world = None
        try:
            with new_federation(Path(place)) as federation:
                federation.control, federation.fleet = quiet_ports()
                world = World(federation, kit)
                return _left_after(world, seeds, span_of)
        finally:
            # No process writes there any more
            if world is not None:
                unmount(world)


def _left_after(world: World, seeds: list[int], span_of: SpanOf) -> list[int]:
    """Seeds after the first whose history had a violation."""
    world.begin()
    begun = time.monotonic()
    peace = quiet(world)
    # Beside others it takes longer, and its last steps are to be hit as well
    span = round(max(SPAN, time.monotonic() - begun), 1)
    for number, seed in enumerate(seeds, 1):
        if not _is_good(world, seed, peace, span_of(seed) or span):
            return seeds[number:]
    return []


def _is_good(world: World, seed: int, peace: dict[str, object], span: float) -> bool:
    """Of a seed's history, which is kept when it is over."""
    since = time.monotonic()
    problems = play(world, seed, peace, span)
    seconds = time.monotonic() - since
    faults = [fault for fault in history_of(seed, span) if _came(world, fault)]
    found = {
        "seed": seed,
        "problems": problems,
        "seconds": round(seconds),
        "span": span,
        "faults": [fault.kind for fault in faults],
        "told": list(map(str, faults)),
    }
    write_atomically(file_of(seed), json.dumps(found).encode())
    told = "; ".join(map(str, faults))
    took = f"{seconds:.0f} s, span {span:.1f}"
    print(f"{seed}: {problems or 'good'} ({took}) {told}", flush=True)
    return not problems


def _came(world: World, fault: Fault) -> bool:
    must_meet = fault.kind in ("crash", "interrupt", "damage")
    return fault.kind in world.kinds and (not must_meet or fault in world.met)


def kept_span(seed: int) -> float | None:
    """With which span a seed was last played, with whatever code; None: it was not."""
    files = sorted(WORK.glob(f"{seed:06d}-*.json"), key=lambda file: file.stat().st_mtime)
    return float(json.loads(files[-1].read_text())["span"]) if files else None


def quiet_ports() -> tuple[int, int]:
    """Two that Linux, as it is set by default, gives to no outgoing connection while the SuperLink
    is away.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port, port + 1


@cache
def code() -> str:
    """Short for all that a history plays with, and for whether it may fill disks."""
    digest = hashlib.sha256(f"{version('flwr')} {os.geteuid() == 0}".encode())
    helpers = Path(__file__).resolve().parent
    for name in ("fault_injection.py", "settings.py", "system_tools.py", "tiny_kits.py"):
        digest.update((helpers / name).read_bytes())
    root = helpers.parents[1]
    for package in ("osfl", "client_app", "server_app"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def file_of(seed: int) -> Path:
    """What a seed's history gave, with this code."""
    return WORK / f"{seed:06d}-{code()}.json"


def summary(first: int, count: int) -> tuple[str, int]:
    """Of the histories that were played: what to say, and how many were violated."""
    files = [file_of(seed) for seed in range(first, first + count) if file_of(seed).is_file()]
    found = [json.loads(file.read_text()) for file in files]
    bad = [one["seed"] for one in found if one["problems"]]
    kinds = Counter(kind for one in found for kind in one["faults"])
    faults = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
    hours = sum(one["seconds"] for one in found) / 3600
    violated = f"{len(bad)} with a violation {bad}"
    return f"{len(found)} histories, {violated}, {hours:.1f} hours; faults: {faults}", len(bad)


def write_table(first: int, count: int, folder: Path) -> None:
    """Write the histories that were played with this code as histories.json and histories.md."""
    files = [file_of(seed) for seed in range(first, first + count) if file_of(seed).is_file()]
    found = [json.loads(file.read_text()) for file in files]
    kept = [{key: one[key] for key in ("seed", "told", "problems", "seconds")} for one in found]
    write_atomically(folder / "histories.json", (json.dumps(kept, indent=1) + "\n").encode(), 0o644)
    kinds = Counter(kind for one in found for kind in one["faults"])
    lines = ["| fault | times |", "|---|---:|"]
    lines += [f"| {kind} | {kinds[kind]} |" for kind in KINDS]
    lines += ["", "| seed | faults | violations |", "|---:|---|---|"]
    for one in kept:
        told = "; ".join(one["told"]) or "none"
        problems = "; ".join(one["problems"]).replace("|", "/") or "none"
        lines.append(f"| {one['seed']} | {told} | {problems} |")
    command = f"`python tests/helpers/fault_injection.py {first} {count} --table`"
    text = f"{summary(first, count)[0]}. Command: {command}.\n\n" + "\n".join(lines) + "\n"
    write_atomically(folder / "histories.md", text.encode(), 0o644)


def main() -> None:
    """Play histories, and say of each what was violated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--at-once", type=int, default=1, help="federations side by side")
    parser.add_argument("--again", action="store_true", help="also those that were played")
    parser.add_argument(
        "--table", action="store_true", help="write benchmarks/tools/tables/histories.*"
    )
    parser.add_argument("--span", type=float, help="seconds, as it was printed of a history")
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.span is not None and given.span <= 0:
        parser.error(f"--span {given.span:g}: must be more than 0 seconds")
    if given.at_once < 1:
        parser.error(f"--at-once {given.at_once}: must be 1 or more")
    # Ended by a signal, it ends what it started
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    WORK.mkdir(parents=True, exist_ok=True)
    if given.at_once == 1:
        played(given.first, given.count, given.step, given.again, given.span)
        ends = [0]
    else:
        more = ["--again"] if given.again else []
        if given.span:
            more.append(f"--span={given.span}")
        ends = side_by_side(given.first, given.count, given.at_once, more)
    if given.step == 1:
        told, bad = summary(given.first, given.count)
        if given.table:
            write_table(given.first, given.count, TABLES)
        print(told)
        sys.exit(bool(bad or any(ends)))


def _leave(*_: object) -> None:
    """End, and let no other signal break into that."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def side_by_side(first: int, count: int, at_once: int, more: Sequence[str]) -> list[int]:
    """Processes that each play every so many seeds, with more arguments; their exit codes."""
    processes = []
    try:
        for number in range(at_once):
            seeds = [str(first + number), str(count - number), "--step", str(at_once)]
            processes.append(subprocess.Popen([sys.executable, __file__, *seeds, *more]))
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
