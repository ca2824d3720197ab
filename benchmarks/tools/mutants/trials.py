"""Find the tests that reach a mutant's line, and run them against it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, count
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from benchmarks.tools.mutants.mutations import Mutant
from osfl.util.files import write_atomically

T = TypeVar("T")
NOT_COPIED = (".git", ".venv", ".tools", "runs", "__pycache__", ".*_cache", ".hypothesis")
ALONE = ("-n", "0", "-p", "no:cacheprovider", "-q", "--tb=short", "--disable-warnings")
HEAVY = ("torch", "torchvision", "diffusers", "transformers", "sklearn.mixture", "sklearn.cluster")
HEAVY += ("flwr.simulation", "flwr.serverapp", "datasets", "hypothesis", "ray", "matplotlib.pyplot")
SUITE_SECONDS = 1800.0  # for a test file
FIRST = 8  # tests of the first run; most mutants are killed before more are collected


@dataclass(frozen=True)
class Project:
    """The code to mutate and its tests.

    Attributes:
        root: of the project.
        targets: glob patterns of the files to mutate, relative to the root.
        options: of pytest, to select tests.
        preload: modules that the server imports.
        declared: test files for a target's lines that no test reaches in its own process, such as
            those that only Ray's actors run.
    """

    root: Path
    targets: tuple[str, ...]
    options: tuple[str, ...] = ()
    preload: tuple[str, ...] = HEAVY
    declared: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        files = [file for target in self.targets for file in self.root.glob(target)]
        return sorted({str(file.relative_to(self.root)) for file in files})


@dataclass(frozen=True)
class Verdict:
    """The verdict on a mutant.

    Attributes:
        tree: digest of the code and the killing test's file; for a survivor, of the code and all
            tests.
        end: killed, survived, or unreached: no test runs its line.
        test: the killing test.
        why: the test's error, or "timeout", "memory", "crash".
        tests: the number that ran against it, or could have.
    """

    name: str
    tree: str
    end: str
    test: str = ""
    why: str = ""
    tests: int = 0
    seconds: float = 0.0


class Server:
    """A fork server on a copy of the project; nothing is ever written to the project itself."""

    def __init__(self, project: Project, work: Path):
        self.tree = work / "tree"
        snapshot(project.root, self.tree)
        self._moments = count(1_000_000_000)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), *project.preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=self.tree,
            text=True,
        )
        self._answer()

    def run(self, tests: Sequence[str], timeout: float, **request: Any) -> dict[str, Any]:
        """Run pytest as `server.run` does."""
        arguments = [*ALONE, f"--basetemp={self.tree.with_suffix('.temp')}", *tests]
        request |= {"tree": str(self.tree), "arguments": arguments, "timeout": timeout}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def write(self, file: str, text: str) -> None:
        """Write a file of the tree with a new time, so that no stale bytecode is used."""
        path = self.tree / file
        moment = next(self._moments)
        path.write_text(text)
        os.utime(path, (moment, moment))

    def close(self) -> None:
        """Stop the server and its run."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended with code {self._process.wait()}")
        return json.loads(line)


def snapshot(root: Path, copy: Path) -> None:
    """Copy a project, so that it can be edited meanwhile."""
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(root, copy, ignore=ignored, symlinks=True)


class Servers:
    """Several servers, each with one task at a time."""

    def __init__(self, project: Project, work: Path, count: int):
        work.mkdir(parents=True, exist_ok=True)
        self._all = [Server(project, work / str(number)) for number in range(count)]
        self._free: SimpleQueue[Server] = SimpleQueue()
        for server in self._all:
            self._free.put(server)

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._all:
            server.close()

    @contextmanager
    def one(self) -> Iterator[Server]:
        """Yield a free server."""
        server = self._free.get()
        try:
            yield server
        finally:
            self._free.put(server)

    def each(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Process every item, as many in parallel as there are servers."""
        with ThreadPoolExecutor(len(self._all)) as pool:
            for _ in pool.map(work, items):
                pass


# ---- Tests that reach a line ----


def digest(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of the files' names and contents."""
    result = hashlib.sha256()
    for file in sorted(files):
        result.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return result.hexdigest()[:16]


def sources(project: Project) -> tuple[str, dict[str, str]]:
    """Return digests of all Python files but tests, and of each test file."""
    left_out = {".venv", ".tools", "runs", "benchmarks"}
    everything = project.root.rglob("*.py")
    files = [p for p in everything if not left_out & {*p.relative_to(project.root).parts}]
    tests = sorted(p for p in files if p.name.startswith("test_"))
    code = [p for p in files if p not in tests]
    each = {str(p.relative_to(project.root)): digest(project.root, [p]) for p in tests}
    return digest(project.root, code), each


class Reach:
    """A map from lines to the tests that reach them, kept in a file.

    Only changed files are measured again.
    """

    def __init__(self, project: Project, servers: Servers, file: Path, deadline: float):
        self.project = project
        self._file = file
        self._lock = Lock()
        record = json.loads(file.read_text()) if file.is_file() else {}
        base, each = sources(project)
        if record.get("base") != base:
            record = {"base": base, "each": {}, "tests": {}, "lines": {}, "clean": {}}
        self.tree = f"{base} {hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16]}"
        self._base = base
        self._each = each
        self._record = record
        for deleted in {*record["each"]} - {*each}:
            self._forget(deleted)
        changed = [name for name in each if each[name] != record["each"].get(name)]
        for name in changed:
            self._forget(name)

        def measure(name: str) -> None:
            if time.monotonic() < deadline:
                self._measure(servers, name, each[name])

        servers.each(measure, changed)
        if missing := {*each} - {*record["each"]}:
            raise TimeoutError(f"{len(missing)} test files are not measured yet")

    def _forget(self, file: str) -> None:
        def belongs(test: str) -> bool:
            return test.partition("::")[0] == file

        self._record["each"].pop(file, None)
        for kind in ("tests", "clean"):
            self._record[kind] = {t: v for t, v in self._record[kind].items() if not belongs(t)}
        for by_line in self._record["lines"].values():
            for number, contexts in by_line.items():
                by_line[number] = [c for c in contexts if not belongs(c)]

    def _measure(self, servers: Servers, name: str, version: str) -> None:
        with servers.one() as server:
            measured = [str(server.tree / file) for file in self.project.files]
            answer = server.run([name, *self.project.options], SUITE_SECONDS, measure=measured)
        results = answer.get("tests")
        if results is None:
            raise RuntimeError(f"{name} did not finish: {answer}")
        passed = sum(row["passed"] for row in results.values())
        print(
            f"{name}: {passed} of {len(results)} tests pass, {answer['seconds']:.0f} s", flush=True
        )
        with self._lock:
            self._record["tests"] |= results
            self._record["each"][name] = version
            for file, by_line in answer["lines"].items():
                lines = self._record["lines"].setdefault(file, {})
                for number, contexts in by_line.items():
                    lines[number] = sorted({*lines.get(number, ()), *contexts} - {""})
            self._save()

    def _save(self) -> None:
        write_atomically(self._file, json.dumps(self._record).encode())

    def version(self, test: str) -> str:
        """Return the version of the code and a test's file."""
        return f"{self._base} {self._each.get(test.partition('::')[0])}"

    def seconds(self, test: str) -> float:
        return self._record["tests"][test]["seconds"]

    def tests(self, mutant: Mutant, patience: float) -> list[str]:
        """Return passing tests that reach the mutant's line, quickest first, up to a number of
        seconds but at least one.
        """
        tests = [test for test in self._reaching(mutant) if self._record["clean"].get(test, True)]
        sums = accumulate(self.seconds(test) for test in tests)
        return [
            test
            for n, (test, sum_) in enumerate(zip(tests, sums, strict=True))
            if not n or sum_ <= patience
        ]

    def _reaching(self, mutant: Mutant) -> list[str]:
        by_line = self._record["lines"].get(mutant.file, {})
        first, last, begin, end = mutant.lines
        contexts = _contexts(by_line, first, last) or _contexts(by_line, begin, end)
        # Its line runs when any test imports the module
        if not mutant.function:
            contexts = _contexts(by_line, 1, 10**6)
        fixtures = {c.removeprefix("fixture ") for c in contexts if c.startswith("fixture ")}
        declared = () if contexts else self.project.declared.get(mutant.file, ())
        names = [
            test
            for test, row in self._record["tests"].items()
            if row["passed"]
            and "seconds" in row
            and (
                test in contexts
                or fixtures & {*row["fixtures"]}
                or test.startswith(declared or "\0")
            )
        ]
        return sorted(names, key=lambda test: (self.seconds(test), test))

    def is_clean(self, test: str, server: Server) -> bool:
        """Return whether a test passes alone on the unchanged tree, tried once.

        Otherwise it cannot judge a mutant.
        """
        clean = self._record["clean"]
        if test not in clean:
            passed = server.run([test], _timeout([self.seconds(test)]))["end"] == "passed"
            with self._lock:
                clean[test] = passed
                self._save()
        return clean[test]


def _contexts(by_line: dict[str, list[str]], first: int, last: int) -> set[str]:
    return {c for n in range(first, last + 1) for c in by_line.get(str(n), ())}


# ---- Trials ----


def _timeout(seconds: Iterable[float]) -> float:
    """Return a generous limit: the machine is busy, and a child has imports and fixtures that no
    test's seconds include.
    """
    return 60 + 10 * sum(seconds)


def holds(earlier: Verdict | None, mutant: Mutant, reach: Reach, patience: float) -> bool:
    """Return whether an earlier verdict holds: its code and tests are unchanged, and there are no
    more tests to try.
    """
    if earlier is None or earlier.end == "killed":
        return earlier is not None and earlier.tree == reach.version(earlier.test)
    return earlier.tree == reach.tree and earlier.tests >= len(reach.tests(mutant, patience))


def try_mutant(
    mutant: Mutant, reach: Reach, server: Server, earlier: Verdict | None, patience: float
) -> Verdict:
    """Run a mutant against the tests that reach it until one fails.

    Args:
        earlier: an earlier verdict, whose killing test is tried first.
        patience: seconds of tests to run at most, quickest first.
    """
    verdict = Verdict(mutant.name, reach.tree, "unreached")
    tests = reach.tests(mutant, patience)
    if not tests:
        return verdict
    if earlier and earlier.test in tests:
        tests = [earlier.test, *(test for test in tests if test != earlier.test)]
    spent = 0.0
    try:
        server.write(mutant.file, mutant.source())
        for part in _parts(tests, 1 if earlier and earlier.test else FIRST):
            answer = server.run([*part, "-x"], _timeout(map(reach.seconds, part)))
            spent += answer["seconds"]
            if answer["end"] != "passed":
                break
    finally:
        server.write(mutant.file, (reach.project.root / mutant.file).read_text())
    verdict = replace(verdict, tests=len(tests), seconds=round(spent, 2))
    if answer["end"] == "passed":
        return replace(verdict, end="survived")
    # a module that cannot be imported has no test's name
    test = answer["test"] if answer["test"] in tests else part[0]
    if not reach.is_clean(test, server):
        return try_mutant(mutant, reach, server, None, patience)
    why = answer["why"] if answer["end"] == "failed" else answer["end"]
    return replace(verdict, tree=reach.version(test), end="killed", test=test, why=why[:200])


def _parts(tests: list[str], first: int) -> Iterator[list[str]]:
    """Return the first tests, then the others; pytest needs a file's tests together."""
    yield tests[:first]
    by_file = defaultdict(list)
    for test in tests[first:]:
        by_file[test.partition("::")[0]].append(test)
    if by_file:
        yield [test for group in by_file.values() for test in group]


def load_verdicts(file: Path) -> dict[str, Verdict]:
    """Return the last verdict on every mutant; a truncated line is ignored."""
    verdicts: dict[str, Verdict] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError):
            continue
        verdicts[verdict.name] = verdict
    return verdicts


def save_verdict(file: Path, verdict: Verdict) -> None:
    """Append a verdict, so that an interrupted run resumes."""
    with file.open("a") as out:
        out.write(json.dumps(asdict(verdict)) + "\n")
