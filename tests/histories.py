"""Random histories of faults in a real federation, and what must be true after each.

python tests/histories.py 0 1000          # the histories of a thousand seeds, one after the other
python tests/histories.py 17 1            # one of them again

A SuperLink, what runs ServerApps, and two sites, with TLS and node keys, as processes of their own.
For each seed a job begins, and processes are killed, stopped and continued, a site's network is
cut, or the same job is begun a second time, when and how long the seed says. What was killed comes
back, as a restart policy has it; a job that ended is begun again by the same command. Then:

- a payload whose client was told that it arrived is on the server's disk;
- each client has one payload there, and it never changes;
- images, and what every client's test said of the model, are those of a run in peace;
- nothing is written beside the runs' folders;
- the command's exit code and its last line tell the truth.

What the kernel would have to be asked for (a full disk, another clock) is not in it; the first has
tests of its own.
"""

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from system_tools import TWO_CLASSES, Federation, kill, make_images, new_federation, quick_arguments

SITES = ("site-0", "site-1")
# Seconds in which a run in peace is asked for, collects, draws, trains and tests
SPAN = 25.0
LONGEST = 12.0  # seconds that something stays away
PATIENCE = 240.0  # seconds for one command
MOST_COMMANDS = 5
ANEW = 12.0  # seconds after which a site that was refused is begun again
KINDS = ("kill", "stop", "cut", "again")


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process, or to its network."""

    begin: float  # seconds after the job was begun
    kind: str
    target: str
    seconds: float  # until it is over

    def __str__(self) -> str:
        return f"{self.begin:.1f} s: {self.kind} {self.target} for {self.seconds:.1f} s"


def history_of(seed: int) -> list[Fault]:
    """One to four faults, in the order of their begin; never two of one process at a time."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(KINDS)
        target = draw.choice(SITES if kind == "cut" else ("server", "superlink", *SITES))
        begin = draw.uniform(0, SPAN)
        fault = Fault(begin, kind, "" if kind == "again" else target, draw.uniform(0, LONGEST))
        if not any(one.target == fault.target and _overlap(one, fault) for one in faults):
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.begin)


def _overlap(one: Fault, other: Fault) -> bool:
    return one.begin <= other.begin + other.seconds and other.begin <= one.begin + one.seconds


class Line:
    """A TCP proxy on loopback that can be cut."""

    def __init__(self, server: int):
        self._server = server
        self._whole = True
        self._ends: list[socket.socket] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        self._whole = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def mend(self) -> None:
        self._whole = True

    def _accept(self) -> None:
        while True:
            client, _ = self._door.accept()
            try:
                assert self._whole
                server = socket.create_connection(("127.0.0.1", self._server))
            except (AssertionError, OSError):
                client.close()
                continue
            self._ends += [client, server]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while some := source.recv(2**16):
                target.sendall(some)
        for end in (source, target):
            with suppress(OSError):
                end.close()


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

    @property
    def folder(self) -> Path:
        return self.federation.folder

    def begin(self) -> None:
        """Everything, once."""
        make_images(self.folder / "images")
        self.federation.begin_superlink("process")
        self.federation.begin_server()
        for site in SITES:
            self.lines[site] = Line(self.federation.fleet)
            self.federation.register(site)
            self.begin_site(site)

    def begin_site(self, site: str) -> None:
        config = (
            f"client-id='{site}' data-dir='{self.folder / 'images'}' "
            f"cache-dir='{self.folder / 'cache' / site}'"
        )
        trusting = self.federation.trusting(site)
        self.federation.begin_node(site, *trusting, config=config, fleet=self.lines[site].port)

    def back(self, name: str) -> None:
        """What was killed begins again."""
        if name == "superlink":
            self.federation.begin_superlink("process")
        elif name == "server":
            self.federation.begin_server()
        else:
            self.begin_site(name)

    def tend(self) -> None:
        """As a restart policy: a site that ended or was refused, being online yet, begins anew."""
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


class Play:
    """One history, from its job's first command to its last."""

    def __init__(self, world: World, job: str, faults: list[Fault]):
        self.world = world
        self.job = job
        self.run_folder = world.folder / "server" / job
        self.commands: list[Command] = []
        self.ended: list[tuple[Command, int, bool]] = []  # with the exit code, and a report then
        self.seen: dict[str, str] = {}  # payloads on the server's disk, by client
        self.cached: set[str] = set()  # clients that have their payload, still unacknowledged
        self.problems: list[str] = []
        self._events: list[tuple[float, Callable[[], None]]] = []
        for fault in faults:
            begin, end = self._ends_of(fault)
            self._events += [(fault.begin, begin), (fault.begin + fault.seconds, end)]
        self._events.sort(key=lambda event: event[0])

    def play(self) -> list[str]:
        """What was violated; nothing in a good history."""
        before = self._outside()
        began = time.monotonic()
        self._ask()
        while self._events or self._going() or not self._finished():
            while self._events and time.monotonic() - began > self._events[0][0]:
                self._events.pop(0)[1]()
            self.world.tend()
            self._look()
            if not self._going() and not self._events and not self._finished():
                if len(self.commands) >= MOST_COMMANDS:
                    return [*self.problems, f"{MOST_COMMANDS} commands did not finish the job"]
                self._ask()
            if time.monotonic() - began > PATIENCE * len(self.commands):
                return [*self.problems, f"no end after {PATIENCE:g} s: {self._say()}"]
            time.sleep(0.2)
        self._look()
        return self.problems + self._at_the_end() + self._beside(before)

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

        if fault.kind == "kill":
            return kill_it, begin_it
        if fault.kind == "stop":
            return stop_it, go_on
        if fault.kind == "cut":
            return world.lines[name].cut, world.lines[name].mend
        return self._ask, lambda: None

    def _ask(self) -> None:
        self.commands.append(self.world.command(self.job, len(self.commands)))

    def _going(self) -> bool:
        """Whether a command is; of one that has ended, the exit code is kept."""
        known = [command for command, *_ in self.ended]
        for command in self.commands:
            if command not in known and (code := command.process.poll()) is not None:
                self.ended.append((command, code, self._finished()))
        return len(self.ended) < len(self.commands)

    def _finished(self) -> bool:
        """A report is written last but for its sums."""
        return (self.run_folder / "SHA256SUMS").is_file()

    def _look(self) -> None:
        """What may never be, however short."""
        for file in (self.run_folder / "payloads").glob("*.pb"):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            if self.seen.setdefault(file.stem, content) != content:
                self.problems.append(f"the payload of {file.stem} was replaced")
        for site in SITES:
            there = bool(list((self.world.folder / "cache" / site).rglob("payload.pb")))
            acknowledged = site in self.cached and not there
            if acknowledged and not (self.run_folder / "payloads" / f"{site}.pb").is_file():
                self.problems.append(f"{site} was told that its payload arrived, and it is gone")
            self.cached = self.cached | {site} if there else self.cached - {site}

    def _at_the_end(self) -> list[str]:
        problems = []
        if sorted(self.seen) != list(SITES):
            problems.append(f"payloads are of {sorted(self.seen)}")
        if refused := list((self.run_folder / "payloads").glob("*.refused")):
            problems.append(f"refused: {[file.name for file in refused]}")
        for command, code, report in self.ended:
            said = command.said()
            told = any("report: " in line for line in said)
            if code == 0 and not (report and told):
                problems.append(f"{command.log.name} ended with 0 without a report: {said[-3:]}")
            if code != 0 and not said:
                problems.append(f"{command.log.name} ended with {code}, and says nothing")
        if not any(code == 0 for _, code, _ in self.ended):
            problems.append("no command ended with 0")
        return problems

    def _outside(self) -> set[Path]:
        """The server's files but those of this job."""
        files = (self.world.folder / "server").rglob("*")
        return {file for file in files if self.run_folder not in (file, *file.parents)}

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


def play(world: World, seed: int, peace: dict[str, object]) -> list[str]:
    """A seed's history; what was violated, also against the run in peace."""
    run = Play(world, f"history-{seed}", history_of(seed))
    problems = run.play()
    if not problems and outcome(run.run_folder) != peace:
        problems = ["its images or tests are others than a quiet run's"]
    return problems


def quiet(world: World) -> dict[str, object]:
    """A run to which nothing happens."""
    run = Play(world, "quiet", [])
    problems = run.play()
    assert not problems, problems
    return outcome(run.run_folder)


def main() -> None:
    """Play histories, and say of each what was violated."""
    from conftest import make_tiny_kit

    first, count = map(int, sys.argv[1:3])
    begun = time.monotonic()
    bad = []
    with tempfile.TemporaryDirectory() as place:
        kit = Path(place) / "kit"
        make_tiny_kit(kit)
        with new_federation(Path(place)) as federation:
            world = World(federation, kit)
            world.begin()
            peace = quiet(world)
            for seed in range(first, first + count):
                since = time.monotonic()
                problems = play(world, seed, peace)
                told = "; ".join(map(str, history_of(seed)))
                print(f"{seed}: {problems or 'good'} ({time.monotonic() - since:.0f} s) {told}")
                sys.stdout.flush()
                bad += [seed] if problems else []
    minutes = (time.monotonic() - begun) / 60
    print(f"{count} histories, {len(bad)} with a violation {bad}, {minutes:.0f} minutes")
    os._exit(bool(bad))


if __name__ == "__main__":
    main()
