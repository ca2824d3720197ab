"""Run unit tests against mutants, in copies of the project.

The process has imported torch and other slow modules, and none of the project's. It forks for every
run of pytest, so that a child imports only the project, from its own copy, mutated or not. Each
test file runs alone: first to record the lines that it reaches, then against mutants of them.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil
import pytest

from benchmarks.tools.mutants.mutations import Mutant

Item = TypeVar("Item")
NOT_COPIED = (".git", ".venv", ".tools", "runs", "__pycache__", ".*_cache", ".hypothesis")
OPTIONS = ("-n", "0", "-x", "-p", "no:cacheprovider", "-q", "--tb=short", "--disable-warnings")
HEAVY = ("torch", "torchvision", "diffusers", "transformers", "sklearn.mixture", "sklearn.cluster")
HEAVY += ("flwr.simulation", "flwr.serverapp", "datasets", "hypothesis", "ray", "matplotlib.pyplot")
LIMIT_SECONDS = 1800.0  # of a test file
LIMIT_BYTES = 8e9  # memory of a run
POLL_SECONDS = 0.02
PR_SET_CHILD_SUBREAPER = 36  # a process adopts its descendants' orphans, and ends them
_moments = count(1_000_000_000)


@dataclass(frozen=True)
class Project:
    """The code to mutate and its tests.

    Attributes:
        root: of the project.
        targets: glob patterns of the files to mutate, relative to the root.
        tests: glob patterns of the test files.
        options: of pytest, to select tests.
        declared: test files for a target's lines that no test reaches in its own process, such as
            those that only Ray's actors run.
    """

    root: Path
    targets: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    declared: tuple[tuple[str, str], ...] = ()

    def files(self, patterns: Iterable[str]) -> list[str]:
        """Return the files of some patterns, relative to the root."""
        paths = {path for pattern in patterns for path in self.root.glob(pattern)}
        return sorted(str(path.relative_to(self.root)) for path in paths)


@dataclass(frozen=True)
class Reach:
    """The seconds of a test file, and the lines of each target that it reaches; None: it fails."""

    file: str
    seconds: float
    lines: dict[str, list[int]] | None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a mutant.

    Attributes:
        end: killed, survived, or unreached: no test runs its line.
        test: the killing test.
        why: the test's error, or "timeout", "memory", "crash".
    """

    name: str
    end: str
    test: str = ""
    why: str = ""
    seconds: float = 0.0


def preload(modules: Iterable[str] = HEAVY) -> None:
    """Import modules and pytest's plugins, which children then have."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    with TemporaryDirectory() as empty:
        pytest.main(["--collect-only", "-qq", "--disable-warnings", "--rootdir", empty, empty])


# ---- Copies of the project ----


def snapshot(root: Path, copy: Path) -> None:
    """Copy a project, so that it can be edited meanwhile."""
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(root, copy, ignore=ignored, symlinks=True)


def write_source(path: Path, text: str) -> None:
    """Write a source file with a new time, so that no stale bytecode is used."""
    moment = next(_moments)
    path.write_text(text)
    os.utime(path, (moment, moment))


def in_parallel(
    root: Path, work: Path, jobs: int, act: Callable[[Path, Item], None], items: Sequence[Item]
) -> None:
    """Process items in `jobs` processes, each with a copy of the project.

    Raises:
        RuntimeError: a process failed.
    """

    def share(number: int) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        tree = work / f"tree-{number}"
        snapshot(root, tree)
        for item in items[number::jobs]:
            act(tree, item)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=share, args=(number,)) for number in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process failed; its error is above")


# ---- Runs of pytest ----


class Recorder:
    """A pytest plugin that writes the running test, and the error of the one that failed."""

    def __init__(self, file: Path):
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write the test's name."""
        self._file.write_text(json.dumps({"test": nodeid}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the last line of a failed test's error."""
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            why = lines[-1][:200] if lines else ""
            self._file.write_text(json.dumps({"test": report.nodeid, "why": why}))


def run_pytest(
    tree: Path, arguments: Sequence[str], timeout: float, targets: Sequence[str] = ()
) -> dict[str, Any]:
    """Run pytest in a child until its end or its first failure.

    Args:
        targets: files of the tree whose reached lines are recorded.

    Returns:
        "end": passed, failed, crash, timeout or memory; "seconds"; and, where they are known,
        "test", "why" and "lines".
    """
    notes = tree.with_suffix(".notes")
    notes.write_text("{}")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(tree, arguments, notes, targets)
    end = _wait(child, start + timeout)
    _kill_children()
    record: dict[str, Any] = json.loads(notes.read_text() or "{}")
    return {**record, "end": end, "seconds": time.monotonic() - start}


def _in_child(tree: Path, arguments: Sequence[str], notes: Path, targets: Sequence[str]) -> None:
    code = 70
    try:
        log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path.insert(0, str(tree))
        code = _measured(arguments, notes, targets) if targets else _judged(arguments, notes)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _judged(arguments: Sequence[str], notes: Path) -> int:
    return int(pytest.main([*OPTIONS, *arguments], plugins=[Recorder(notes)]))


def _measured(arguments: Sequence[str], notes: Path, targets: Sequence[str]) -> int:
    import coverage

    measure = coverage.Coverage(data_file=None, include=list(targets), messages=False)
    measure.start()
    code = int(pytest.main([*OPTIONS, *arguments]))
    measure.stop()
    data = measure.get_data()
    lines = {name: data.lines(str(Path.cwd() / name)) or [] for name in targets}
    notes.write_text(json.dumps({"lines": lines}))
    return code


def _wait(child: int, deadline: float) -> str:
    """Return how the child ended; it may still have to be killed."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "passed" if code == 0 else "failed" if code > 0 else "crash"
        if time.monotonic() > deadline:
            return "timeout"
        if _memory(child) > LIMIT_BYTES:
            return "memory"
        time.sleep(POLL_SECONDS)


def _memory(child: int) -> float:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child)
        return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    return 0.0


def _kill_children() -> None:
    """Kill this process's descendants, and reap its children."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)


# ---- Test files that reach a line, and verdicts ----


def append(file: Path, record: Reach | Verdict) -> None:
    """Append a record as a line of JSON, so that an interrupted command resumes."""
    with file.open("a") as out:
        out.write(json.dumps(asdict(record)) + "\n")


def records_in(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a truncated line is ignored."""
    records = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def measure_reach(project: Project, work: Path, jobs: int, deadline: float) -> list[Reach]:
    """Return the reach of every test file, measured unless it is kept.

    Raises:
        TimeoutError: files remain at the deadline.
    """
    file = work / "reach.jsonl"
    targets = project.files(project.targets)

    def measure(tree: Path, test_file: str) -> None:
        if time.monotonic() > deadline:
            return
        run = run_pytest(tree, [test_file, *project.options], LIMIT_SECONDS, targets)
        # 5: no test of the file is selected
        lines = run.get("lines") if run["end"] == "passed" else None
        append(file, Reach(test_file, round(run["seconds"], 2), lines))
        print(f"{test_file}: {run['end']}, {run['seconds']:.0f} s", flush=True)

    tests = project.files(project.tests)
    test_files = {record["file"] for record in records_in(file)}
    in_parallel(
        project.root, work, jobs, measure, [name for name in tests if name not in test_files]
    )
    reaches = [Reach(**record) for record in records_in(file)]
    if len(reaches) < len(tests):
        raise TimeoutError(f"{len(tests) - len(reaches)} test files are not measured yet")
    return reaches


def tests_of(
    mutant: Mutant, project: Project, reaches: Sequence[Reach], patience: float
) -> list[Reach]:
    """Return the test files that reach a mutant's line, quickest first, up to a number of seconds
    but at least one.
    """
    first, last, begin, end = mutant.lines
    passing = [reach for reach in reaches if reach.lines is not None]
    reaching = _reaching(mutant.file, first, last, passing)
    reaching = reaching or _reaching(mutant.file, begin, end, passing)
    declared = {test for target, test in project.declared if target == mutant.file}
    reaching = reaching or [reach for reach in passing if reach.file in declared]
    ordered = sorted(reaching, key=lambda reach: (reach.seconds, reach.file))
    sums = accumulate(reach.seconds for reach in ordered)
    within = sum(total <= patience for total in sums)
    return ordered[: max(1, within)]


def _reaching(file: str, first: int, last: int, reaches: Sequence[Reach]) -> list[Reach]:
    lines = set(range(first, last + 1))
    return [reach for reach in reaches if lines & set((reach.lines or {}).get(file, ()))]


def time_limit(seconds: float) -> float:
    """Return the limit of a test file that takes some seconds; the machine may be busy."""
    return 60 + 10 * seconds


def try_mutant(
    mutant: Mutant, tests: Sequence[Reach], tree: Path, options: Sequence[str]
) -> Verdict:
    """Run test files against a mutant until one fails."""
    if not tests:
        return Verdict(mutant.name, "unreached")
    path = tree / mutant.file
    original = path.read_text()
    seconds = 0.0
    try:
        write_source(path, mutant.source())
        for test in tests:
            run = run_pytest(tree, [test.file, *options], time_limit(test.seconds))
            seconds += run["seconds"]
            if run["end"] != "passed":
                why = run.get("why", "") if run["end"] == "failed" else run["end"]
                name = run.get("test", test.file)
                return Verdict(mutant.name, "killed", name, why, round(seconds, 2))
    finally:
        write_source(path, original)
    return Verdict(mutant.name, "survived", seconds=round(seconds, 2))
