"""Random faults in a real federation, and what must hold after each run.

A SuperLink, a process that runs ServerApps, and two sites, with TLS and node keys, are processes of
their own. A seed is a fault schedule: a job begins, and at the schedule's seconds

- kill, stop: a process with all its children is killed, or stopped and continued;
- crash: a ServerApp or ClientApp alone is killed, as where memory runs out;
- cut, slow: a site's network is cut, or lets few bytes through;
- clock: a machine's clock, as Python and Flower read it, is minutes ahead or back;
- full: a disk has no room for a byte (as root, which may mount one);
- older: a site returns with an older release installed;
- again: the same job is started a second time;
- term: a process ends by SIGTERM, and returns;
- interrupt: Ctrl-C ends the command, and the run continues at the server;
- damage: a bit of a payload in a site's cache flips;
- restore: the SuperLink returns with its database of some seconds before;
- twin: a second node has a site's name and client id, and a key of its own.

Afterwards, by the same seed, the federation may change:

- join: a third site comes, and a run continues the job (`continue-from`), with faults of its own;
- leave: `osfl forget` removes a client from the last run, is killed on the way, and is repeated.

Without root no disk is full. A killed process returns, as under a restart policy; a job that ended
is started again by the same command. Then:

- a payload whose client was told that it arrived is on the server's disk;
- each client has one payload there, and it never changes;
- images, and each client's test of the model, equal those of a fault-free run; those of a
  continued run equal those of a run of all three sites;
- after a client has left, the images of the others are there, nothing has its name, and the weights
  equal those of every other schedule that ended with the same clients;
- nothing is written beside the run's folder, neither among runs nor where processes work;
- the command ends with 0 after its report; otherwise its last message is an error.

`python -m benchmarks.tools.fault_injection` runs many schedules.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from osfl.launch.guard import end_process_tree
from osfl.run_folder.verify import verify_run
from tests.helpers.fork_server import workers_of
from tests.helpers.system_tools import (
    CLOCK_MODULES,
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
    quick_arguments,
)

SITES = ("site-0", "site-1")
LATER = "site-2"  # joins after the first run
SPAN = 25.0  # seconds of a fault-free run, from its command to its tests
LONGEST = 12.0  # seconds of a fault
# Seconds for one command beside those of a fault-free run: a SuperLink whose clock was ahead may
# take a killed site for online for six minutes, and refuses it until then
PATIENCE = 450.0
# Seconds that a run awaits a node that does not come back, such as an ended twin in the place of a
# client that failed: less than PATIENCE, and more than such a SuperLink's six minutes
AWAITED = 420.0
MOST_COMMANDS = 5
RETURN_SECONDS = 12.0  # until a refused site or command is started again
# A run that Ctrl-C or a lost SuperLink has left to the server goes on there
BUSY = "another server is at work on it; wait"
MACHINES = ("server", "superlink", *SITES)
# The targets of each kind of fault
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
MOMENTARY = ("crash", "again", "interrupt", "damage", "join")  # kinds without a duration
# How a federation changes after a run
CHANGES = ("join", "leave")
FARTHEST = 600.0  # seconds that a clock is set ahead or back
SLOW = 20_000.0  # bytes per second in each direction
OLDER = "0.0.1"  # a release that no run has
DISK = "320m"  # of the server, and of each site
Action = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """A fault of a process or of its network.

    Attributes:
        begin: seconds after the job's command.
        seconds: its duration.
        ahead: seconds that a clock is set.
    """

    begin: float
    kind: str
    target: str
    seconds: float
    ahead: float = 0.0

    def __str__(self) -> str:
        by = f" by {self.ahead:+.0f} s" if self.ahead else ""
        lasts = f" for {self.seconds:.1f} s" if self.kind not in MOMENTARY else ""
        return f"{self.begin:.1f} s: {self.kind} {self.target}{by}{lasts}"


def schedule_of(seed: int | str, span: float = SPAN) -> list[Fault]:
    """Draw one to four faults in the order of their begin; a process has one at a time.

    Args:
        span: seconds of a fault-free run, within which faults begin.
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
        if not any(
            earlier_fault.target == target and _overlap(earlier_fault, fault)
            for earlier_fault in faults
        ):
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.begin)


def changes_of(seed: int) -> list[Fault]:
    """Draw how the federation changes after a seed's run.

    The seconds of a departure are those until `osfl forget` is killed.
    """
    draw = random.Random(f"changes {seed}")
    joins, leaves = draw.choice(((True, False), (False, True), (True, True), (False, False)))
    target, seconds = draw.choice(SITES), draw.uniform(0, LONGEST)
    changes = [Fault(0.0, "join", LATER, 0.0)] if joins else []
    return changes + ([Fault(0.0, "leave", target, seconds)] if leaves else [])


def continued_schedule_of(seed: int, span: float = SPAN) -> list[Fault]:
    """Draw the faults of the run that a later site joins; they hit it in the place of another."""
    faults = schedule_of(f"continued {seed}", span)
    names = {SITES[1]: LATER}
    return [replace(fault, target=names.get(fault.target, fault.target)) for fault in faults]


def all_faults_of(seed: int, span: float = SPAN) -> list[Fault]:
    """Return a seed's faults and changes, in their order."""
    faults = schedule_of(seed, span)
    for change in changes_of(seed):
        faults.append(change)
        faults += continued_schedule_of(seed, span) if change.kind == "join" else []
    return faults


def _overlap(first: Fault, second: Fault) -> bool:
    return (
        first.begin <= second.begin + second.seconds and second.begin <= first.begin + first.seconds
    )


@dataclass
class Command:
    """`osfl run` and its log."""

    process: subprocess.Popen
    log: Path

    def lines(self) -> list[str]:
        """Return the lines of the log without Flower's empty ones."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.partition(":")[2].strip() or "Error" in line]


@dataclass
class Testbed:
    """The federation, and the faults that it can have."""

    __test__ = False

    federation: Federation
    kit: Path
    proxies: dict[str, Line] = field(default_factory=dict)
    # When a site is started again
    due: dict[str, float] = field(default_factory=dict)
    # Sites with an older release
    older: set[str] = field(default_factory=set)
    clocks: dict[str, Clock] = field(default_factory=dict)
    # Faults that can be made here
    kinds: set[str] = field(default_factory=lambda: set(KINDS))
    # Momentary faults that hit an app, a payload or a command
    hits: set[Fault] = field(default_factory=set)
    # Sites whose nodes run or return
    sites: tuple[str, ...] = SITES
    # The outcome of a fault-free run of all sites, once there is one
    of_all: dict[str, object] | None = None
    # Digests of the models of runs that a client has left, by the remaining clients
    models: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.federation.folder

    def disk_of(self, name: str) -> Path:
        """Return the folder of the server's runs, or of a site's payloads."""
        return self.folder / "server" if name == "server" else self.folder / "cache" / name

    def begin(self) -> None:
        """Start all processes."""
        # With more threads, many processes on few cores would wait for each other
        self.federation.settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": CLOCK_MODULES}
        make_images(self.folder / "images")
        for name in (*KINDS["full"], LATER):
            self.disk_of(name).mkdir(parents=True)
            if not mount_disk(self.disk_of(name), DISK):
                self.kinds.discard("full")
        for name in (*MACHINES, LATER):
            self.clocks[name] = Clock(self.folder / "clocks" / name)
        self.make_older_release()
        self.begin_superlink()
        self.begin_server()
        for site in (*SITES, LATER):
            self.proxies[site] = Line(self.federation.fleet)
            self.federation.register(site)
            self.federation.register(site, self.twin_keys)
        for site in SITES:
            self.begin_site(site)

    def unmount(self) -> None:
        """Unmount the disks."""
        for name in (*KINDS["full"], LATER):
            if self.disk_of(name).is_mount():
                subprocess.run(["umount", "--lazy", str(self.disk_of(name))], check=False)

    def make_older_release(self) -> None:
        """Write the metadata of a release that Python finds before the installed one."""
        release = self.folder / "older" / f"osfl-{OLDER}.dist-info"
        release.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: osfl\nVersion: {OLDER}\n"
        (release / "METADATA").write_text(text)

    def node_config(self, site: str, cache: str) -> str:
        """Return the configuration of a node with a site's client id."""
        images, folder = self.folder / "images", self.folder / "cache" / cache
        return (
            f"client-id='{site}' data-dir='{images}' cache-dir='{folder}' allowed-dirs='{self.kit}'"
        )

    def begin_site(self, site: str) -> None:
        self.federation.begin_node(
            site,
            *self.federation.trusting(site),
            config=self.node_config(site, site),
            fleet=self.proxies[site].port,
            **self.settings_of(site),
        )

    @contextmanager
    def later_site(self) -> Iterator[None]:
        """Let the later site take part, as long as the context is open."""
        self.sites = (*SITES, LATER)
        self.begin_site(LATER)
        try:
            yield
        finally:
            self.sites = SITES
            self.due.pop(LATER, None)
            self.kill(LATER)

    def forget(self, run_folder: Path, client: str, seconds: float) -> str:
        """Remove a client from a run by `osfl forget`, which is killed once, and is repeated.

        Args:
            seconds: time until it is killed.

        Returns:
            the output of the last command, if it failed; "" if the client is removed.
        """
        command = [self.federation.osfl, "forget", str(run_folder), "--client", client]
        for timeout in (seconds, PATIENCE):
            # A command that runs too long is killed
            with suppress(subprocess.TimeoutExpired):
                result = subprocess.run(
                    command,
                    cwd=self.folder / "empty",
                    env=self.federation.environment,
                    capture_output=True,
                    text=True,
                    timeout=timeout,
                    check=False,
                )
                return result.stdout + result.stderr if result.returncode else ""
        return f"`osfl forget` did not end within {PATIENCE} s"

    @property
    def twin_keys(self) -> Path:
        return self.folder / "twin-keys"

    def begin_twin(self, site: str) -> None:
        """Start a second node with a site's client id and images, and a cache of its own."""
        name = f"twin-{site}"
        key = self.twin_keys / "nodes" / site
        trusting = ["--root-certificates", str(self.federation.keys / "ca.crt")]
        trusting += ["--auth-supernode-private-key", str(key)]
        config = self.node_config(site, name)
        self.federation.begin_node(name, *trusting, config=config, **self.settings_of(site))

    def end_twin(self, site: str) -> None:
        self.federation.end(f"twin-{site}")

    @property
    def database(self) -> Path:
        return self.folder / "state.db"

    @property
    def database_copy(self) -> Path:
        return self.folder / "copy.db"

    def copy_database(self) -> None:
        """Copy the SuperLink's database."""
        self.database_copy.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(self.database)) as source,
            closing(sqlite3.connect(self.database_copy)) as copy,
        ):
            source.backup(copy)

    def restore_database(self) -> None:
        """Put the copy in the database's place; the SuperLink must be down."""
        for file in self.folder.glob("state.db*"):
            file.unlink()
        shutil.copy(self.database_copy, self.database)

    def damage(self, site: str, job: str) -> bool:
        """Flip a bit of a job's payload in a site's cache; return whether there was one."""
        with suppress(FileNotFoundError):
            for file in (self.folder / "cache" / site).rglob("payload.pb"):
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
        """Return the environment of a machine's processes."""
        settings = dict(self.clocks[name].settings)
        if name in self.older:
            settings["PYTHONPATH"] += f"{os.pathsep}{self.folder / 'older'}"
        return settings

    def restart(self, name: str) -> None:
        """Start a machine that is down and not due."""
        if name in self.federation.processes or name in self.due:
            return
        if name == "superlink":
            self.begin_superlink()
        elif name == "server":
            self.begin_server()
        else:
            self.begin_site(name)

    def kill(self, name: str) -> None:
        """Kill a machine's process with all its children."""
        process = self.federation.processes.pop(name, None)
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                kill(psutil.Process(process.pid))

    def crash(self, name: str) -> bool:
        """Kill a machine's app alone; return whether one ran."""
        process = self.federation.processes.get(name)
        apps = apps_of(process) if process is not None else []
        for app in apps:
            with suppress(psutil.NoSuchProcess):
                app.kill()
        return bool(apps)

    def end(self, name: str) -> None:
        """End a machine's process by SIGTERM."""
        if name in self.federation.processes:
            self.federation.end(name)

    def fill(self, name: str) -> None:
        """Fill a machine's small disk."""
        fill_disk(self.disk_of(name))

    def make_room(self, name: str) -> None:
        """Delete what `fill` wrote."""
        (self.disk_of(name) / FILLER).unlink(missing_ok=True)

    def change_release(self, name: str, older: bool) -> None:
        """Restart a site with the older release or the installed one."""
        self.kill(name)
        (self.older.add if older else self.older.discard)(name)
        self.restart(name)

    def tend(self) -> None:
        """Restart what ended, and sites that were refused as being online yet."""
        for name in ("superlink", "server"):
            process = self.federation.processes.get(name)
            if process is not None and process.poll() is not None:
                self.federation.end(name)
                self.restart(name)
        for site in self.sites:
            process = self.federation.processes.get(site)
            refused = process is not None and "Exit Code: 305" in self.federation.log(site)
            if process is not None and (refused or process.poll() is not None):
                self.federation.end(site)
                self.due[site] = time.monotonic() + RETURN_SECONDS
            if site in self.due and time.monotonic() > self.due[site]:
                del self.due[site]
                self.begin_site(site)

    def command(self, job: str, number: int, **settings: object) -> Command:
        """Start `osfl run` of a job, with some settings of its own."""
        arguments = quick_arguments(
            self.kit,
            method="feddeo",
            job_id=job,
            join_timeout=AWAITED,
            deadline=AWAITED,
            **TWO_CLASSES,
            synthesis__images_per_class=4,
            synthesis__unit_size=2,
            synthesis__steps=4,
            **settings,
        )
        log = self.folder / f"{job}-{number}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [self.federation.osfl, "run", "--connection", "test", *arguments],
                cwd=self.folder / "empty",
                env=self.federation.environment,
                stdout=out,
                stderr=out,
            )
        return Command(process, log)

    def signal_all(self, name: str, number: int) -> None:
        """Send a signal to a machine's process and its children, if it runs."""
        if name not in self.federation.processes:
            return
        with suppress(psutil.NoSuchProcess):
            for process in workers_of(psutil.Process(self.federation.processes[name].pid)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


class Trial:
    """One schedule, from its job's first command to its last."""

    def __init__(
        self,
        testbed: Testbed,
        job: str,
        faults: list[Fault],
        span: float = SPAN,
        **settings: object,
    ):
        self.testbed = testbed
        # The job's own
        self.settings = settings
        self._patience = PATIENCE + span
        self.job = job
        self.run_folder = testbed.folder / "server" / job
        self.commands: list[Command] = []
        # With the exit code, and whether there was a report then
        self.ended: list[tuple[Command, int, bool]] = []
        # Digests of payloads on the server's disk by client
        self.payloads: dict[str, str] = {}
        # Clients whose cached payload was damaged
        self.damaged: set[str] = set()
        # Clients with a payload that is not acknowledged yet
        self.cached: set[str] = set()
        self.problems: list[str] = []
        self._repeats = 0
        # By time.monotonic(): when a command is repeated that another server's work refused
        self._refused_until = 0.0
        self._events: list[tuple[float, Action]] = []
        for fault in faults:
            if fault.kind in testbed.kinds:
                begin, end = self._actions(fault)
                self._events += [(fault.begin, begin), (fault.begin + fault.seconds, end)]
        self._events.sort(key=lambda event: event[0])

    def run(self) -> list[str]:
        """Return the violations. Afterwards all faults are over, and no command runs."""
        before = self._outside()
        start = time.monotonic()
        try:
            self._start_command()
            while self._events or self._is_running() or not self._is_complete():
                while self._events and time.monotonic() - start > self._events[0][0]:
                    self._events.pop(0)[1]()
                self.testbed.tend()
                self._check()
                if self._must_repeat() and time.monotonic() > self._refused_until:
                    if self._repeats >= MOST_COMMANDS:
                        return [*self.problems, f"not finished: {self._last_lines()}"]
                    self._repeats += 1
                    self._start_command()
                if time.monotonic() - start > self._patience * (1 + self._repeats):
                    return [*self.problems, f"no end: {self._last_lines()}"]
                time.sleep(0.2)
            self._check()
            return self.problems + self._check_end() + self._check_outside(before)
        finally:
            for command in self.commands:
                if command.process.poll() is None:
                    end_process_tree(command.process.pid)
            for _, action in self._events:
                if action != self._start_command:
                    action()

    def _actions(self, fault: Fault) -> tuple[Action, Action]:
        """Return what begins and what ends a fault."""
        testbed, name = self.testbed, fault.target
        proxy, clock = testbed.proxies.get(name), testbed.clocks.get(name)
        actions: dict[str, tuple[Action, Action]] = {
            "kill": (partial(testbed.kill, name), partial(testbed.restart, name)),
            "term": (partial(testbed.end, name), partial(testbed.restart, name)),
            "stop": (
                partial(testbed.signal_all, name, signal.SIGSTOP),
                partial(testbed.signal_all, name, signal.SIGCONT),
            ),
            "crash": (partial(self._crash, fault), _nothing),
            "full": (partial(testbed.fill, name), partial(testbed.make_room, name)),
            "older": (
                partial(testbed.change_release, name, True),
                partial(testbed.change_release, name, False),
            ),
            "again": (self._start_command, _nothing),
            "interrupt": (partial(self._interrupt, fault), _nothing),
            "damage": (partial(self._damage, fault), _nothing),
            "restore": (testbed.copy_database, self._restore),
            "twin": (partial(testbed.begin_twin, name), partial(testbed.end_twin, name)),
        }
        if proxy is not None:
            actions["cut"] = (proxy.cut, proxy.mend)
            actions["slow"] = (partial(proxy.pace, SLOW, SLOW), partial(proxy.pace, 0.0, 0.0))
        if clock is not None:
            actions["clock"] = (
                partial(clock.set_ahead, fault.ahead),
                partial(clock.set_ahead, 0.0),
            )
        return actions[fault.kind]

    def _crash(self, fault: Fault) -> None:
        if self.testbed.crash(fault.target):
            self.testbed.hits.add(fault)

    def _interrupt(self, fault: Fault) -> None:
        for command in self.commands:
            if command.process.poll() is None:
                self.testbed.hits.add(fault)
                command.process.send_signal(signal.SIGINT)

    def _damage(self, fault: Fault) -> None:
        if self.testbed.damage(fault.target, self.job):
            self.testbed.hits.add(fault)
            self.damaged.add(fault.target)

    def _restore(self) -> None:
        self.testbed.kill("superlink")
        self.testbed.restore_database()
        self.testbed.restart("superlink")

    def _start_command(self) -> None:
        self.commands.append(self.testbed.command(self.job, len(self.commands), **self.settings))

    def _is_running(self) -> bool:
        """Return whether a command runs; the exit codes of ended ones are recorded."""
        ended_commands = [command for command, *_ in self.ended]
        for command in self.commands:
            if command not in ended_commands and (code := command.process.poll()) is not None:
                self.ended.append((command, code, (self.run_folder / "report.html").is_file()))
                if BUSY in command.log.read_text(errors="replace"):
                    self._refused_until = time.monotonic() + RETURN_SECONDS
        return len(self.ended) < len(self.commands)

    def _must_repeat(self) -> bool:
        return not self._is_running() and not self._events and not self._is_complete()

    def _is_complete(self) -> bool:
        """Return whether the job is finished, and a command said so: an interrupted one did not."""
        return self._is_finished() and any(code == 0 for _, code, _ in self.ended)

    def _is_finished(self) -> bool:
        """Return whether the run's checksums exist: they are written last, and a second command of
        a finished job deletes them first.
        """
        return (self.run_folder / "SHA256SUMS").is_file()

    def _check(self) -> None:
        """Record what must not be at any moment."""
        for file in (self.run_folder / "payloads").glob("*.pb"):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if self.payloads.setdefault(file.stem, digest) != digest:
                self.problems.append(f"the payload of {file.stem} was replaced")
        for site in self.testbed.sites:
            cached = self._has_cached_payload(site)
            if cached is None:
                continue
            stored = (self.run_folder / "payloads" / f"{site}.pb").is_file()
            acknowledged = site in self.cached - self.damaged and not cached
            if acknowledged and not stored:
                self.problems.append(f"the acknowledged payload of {site} is lost")
            self.cached = self.cached | {site} if cached else self.cached - {site}

    def _has_cached_payload(self, site: str) -> bool | None:
        """Return whether a client has its payload of this job; None if it deletes folders now."""
        with suppress(FileNotFoundError):
            files = (self.testbed.folder / "cache" / site).rglob("payload.pb")
            return any(self.job in str(file.parent) for file in files)
        return None

    def _check_end(self) -> list[str]:
        problems = []
        if sorted(self.payloads) != list(self.testbed.sites):
            problems.append(f"payloads are of {sorted(self.payloads)}")
        if refused := list((self.run_folder / "payloads").glob("*.refused")):
            problems.append(f"refused: {[file.name for file in refused]}")
        for command, code, report in self.ended:
            lines = command.lines()
            # Clients and their reasons are below an error, indented
            messages = [line for line in lines if not line.startswith(" ")]
            last = messages[-1] if messages else ""
            if code == 0 and not (report and "report: " in last):
                problems.append(f"{command.log.name} ended with 0 without a report: {lines[-3:]}")
            interrupted = code == 130 and last.startswith("interrupted")
            if code != 0 and not last.startswith("error") and not interrupted:
                problems.append(f"{command.log.name} ended with {code}, and says last: {last}")
        if not any(code == 0 for _, code, _ in self.ended):
            problems.append("no command ended with 0")
        return problems

    def _outside(self) -> set[Path]:
        """Return the server's files but those of this job."""
        files: set[Path] = set()
        # The second is the working directory of all processes
        for place in ("server", "empty"):
            files |= set((self.testbed.folder / place).rglob("*"))
        return {file for file in files if self.run_folder not in (file, *file.parents)}

    def _check_outside(self, before: set[Path]) -> list[str]:
        extras = sorted(self._outside() - before)
        return [f"written beside the run's folder: {extras}"] if extras else []

    def _last_lines(self) -> str:
        return "; ".join(f"{command.log.name}: {command.lines()[-2:]}" for command in self.commands)


def _nothing() -> None:
    """End a fault that is momentary."""


def outcome(run_folder: Path) -> dict[str, object]:
    """Return a run's images and the clients' tests, which no fault may change."""
    rows = map(json.loads, (run_folder / "manifest.jsonl").read_text().splitlines())
    images = {row["file"]: row["sha256"] for row in rows}
    files = sorted((run_folder / "tests").glob("*.json"))
    tests = {file.name: json.loads(file.read_text()) for file in files}
    return {"images": images, "tests": tests}


def first_difference(result: object, reference: object, place: str = "") -> str:
    """Return the first place at which two outcomes differ, with both values; "" for equal ones."""
    if result == reference:
        return ""
    if isinstance(result, dict) and isinstance(reference, dict):
        for key in sorted({*result, *reference}):
            inner = (result.get(key), reference.get(key))
            if text := first_difference(*inner, f"{place}/{key}"):
                return text
    return f"{place[1:]} is {str(result)[:200]} and not {str(reference)[:200]}"


def run_schedule(
    testbed: Testbed,
    seed: int,
    fault_free: dict[str, object],
    span: float = SPAN,
    kinds: Collection[str] = CHANGES,
) -> list[str]:
    """Run a seed's schedule and changes, and return the violations.

    The folders of good runs are deleted, because the small disk has room for few.

    Args:
        fault_free: the outcome of a run without faults.
        kinds: of changes that are made.
    """
    trial = Trial(testbed, f"history-{seed}", schedule_of(seed, span), span)
    folders = [trial.run_folder]
    problems = trial.run()
    if not problems and (text := first_difference(outcome(trial.run_folder), fault_free)):
        problems = [f"its images or tests differ from a fault-free run's: {text}"]
    for change in () if problems else changes_of(seed):
        if change.kind not in kinds:
            continue
        if change.kind == "join":
            folders.append(folders[0].with_name(f"joined-{seed}"))
            problems = run_continued(testbed, seed, folders[0].name, span)
        else:
            problems = run_departure(testbed, folders[-1], change)
        if problems:
            break
    if not problems:
        for folder in folders:
            shutil.rmtree(folder)
    return problems


def run_continued(testbed: Testbed, seed: int, job: str, span: float) -> list[str]:
    """Continue a job with the later site, with faults, and return the violations."""
    settings = {"continue_from": job, "num_clients": len(SITES) + 1}
    with testbed.later_site():
        if testbed.of_all is None:
            fresh = Trial(testbed, "quiet-all", [], span, num_clients=len(SITES) + 1)
            if problems := fresh.run():
                return [f"without faults: {problem}" for problem in problems]
            testbed.of_all = outcome(fresh.run_folder)
            shutil.rmtree(fresh.run_folder)
        faults = continued_schedule_of(seed, span)
        trial = Trial(testbed, f"joined-{seed}", faults, span, **settings)
        problems = trial.run()
    if not problems and (text := first_difference(outcome(trial.run_folder), testbed.of_all)):
        problems = [f"a continued run's images or tests differ from those of a run of all: {text}"]
    return problems


def weights_digest(file: Path) -> str:
    """Return the SHA-256 of a model's weights. Its metadata name the run."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def run_departure(testbed: Testbed, run_folder: Path, change: Fault) -> list[str]:
    """Remove a client from a run, and return the violations."""
    rows = list(map(json.loads, (run_folder / "manifest.jsonl").read_text().splitlines()))
    if failure := testbed.forget(run_folder, change.target, change.seconds):
        return [f"osfl forget: {failure[-500:]}"]
    problems = [problem for finding in verify_run(run_folder) for problem in finding.problems]
    remaining_rows = list(map(json.loads, (run_folder / "manifest.jsonl").read_text().splitlines()))
    if remaining_rows != [row for row in rows if row["client"] != change.target]:
        problems.append("the images of the others differ after a client has left")
    problems += _traces(run_folder, change.target)
    clients = tuple(sorted(file.stem for file in (run_folder / "payloads").glob("*.pb")))
    files = (run_folder / "models").glob("*.safetensors")
    models = {file.name: weights_digest(file) for file in files}
    if not models or testbed.models.setdefault(clients, models) != models:
        problems.append(f"the models of {clients} differ from those of an earlier schedule")
    return problems


def _traces(run_folder: Path, client: str) -> list[str]:
    """Return the files of a run that have a client's name in their path or content."""
    files = [file for file in run_folder.rglob("*") if file.is_file()]
    name = client.encode()
    places = [
        str(file.relative_to(run_folder))
        for file in files
        if client in str(file.relative_to(run_folder)) or name in file.read_bytes()
    ]
    return [f"{client} has left, but is in {places}"] if places else []


def run_fault_free(testbed: Testbed) -> dict[str, object]:
    """Return the outcome of a run without faults."""
    trial = Trial(testbed, "quiet", [])
    problems = trial.run()
    assert not problems, problems
    result = outcome(trial.run_folder)
    assert all(result.values()), result
    return result
