"""A process that has imported what is slow to import, and forks a child for every run of pytest.

It is started as a script, so that it imports nothing of the project: a child imports all of that
itself, from its own tree, mutated or not. A request is a line of JSON on standard input, `run`'s
arguments; the answer is a line on standard output, what `run` returns.

    python server.py torch diffusers ...
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

PR_SET_CHILD_SUBREAPER = 36  # this process adopts and ends a run's orphans
LOOK_SECONDS = 0.02
MOST_BYTES = 8e9  # of memory for a run


def main() -> None:
    """Import the modules named by the arguments, then serve."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.pop(0)  # the folder of this script
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in sys.argv[1:]:
        with suppress(ImportError):
            importlib.import_module(name)
    with TemporaryDirectory() as empty, suppress(SystemExit):
        # imports pytest's plugins
        pytest.main(["--collect-only", "-qq", "--disable-warnings", "--rootdir", empty, empty])
    answers.write("{}\n")
    for line in sys.stdin:
        answer = run(**json.loads(line))
        try:
            answers.write(json.dumps(answer) + "\n")
        except BrokenPipeError:  # the client is gone
            os._exit(1)


def run(
    tree: str, arguments: list[str], timeout: float, measure: list[str] | None = None
) -> dict[str, Any]:
    """Run pytest in a child until its end or its first failure.

    Args:
        tree: the project's root, where the child works.
        arguments: pytest's, tests included.
        timeout: seconds after which it is killed.
        measure: files whose reached lines are recorded.

    Returns:
        `end`: "passed", "failed", or the reason of an early end: "timeout", "memory", "crash";
        `test`: the one that failed or ran last; `why`; `seconds`; and, where `measure` is given,
        the records of `Measure`.
    """
    notes = Path(tree).with_suffix(".notes")
    notes.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(Path(tree), arguments, notes, measure)
    end, code = _wait(child, began + timeout)
    _end_descendants()
    noted = json.loads(notes.read_text()) if notes.is_file() else {}
    if not end:
        end = "passed" if code == 0 else "failed" if code > 0 else "crash"
        noted.setdefault("why", f"exit code {code}")
    return {"test": "", "why": "", **noted, "end": end, "seconds": time.monotonic() - began}


def _wait(child: int, deadline: float) -> tuple[str, int]:
    """Return why the child had to be killed, if so, and its exit code."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "", os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return "timeout", -1
        if _memory(child) > MOST_BYTES:
            return "memory", -1
        time.sleep(LOOK_SECONDS)


def _memory(child: int) -> float:
    try:
        process = psutil.Process(child)
        return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def _end_descendants() -> None:
    """Kill the child and its descendants, and reap them."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(LOOK_SECONDS)


def _in_child(tree: Path, arguments: list[str], notes: Path, measure: list[str] | None) -> None:
    code = 70
    try:
        os.setsid()
        log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path.insert(0, str(tree))
        recorder = Measure(notes, measure) if measure is not None else Recorder(notes)
        code = int(pytest.main(arguments, plugins=[recorder]))
        recorder.finish()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Recorder:
    """A plugin that writes the running test at once, and the failed one and why."""

    def __init__(self, notes: Path):
        self.notes = notes
        self.said: dict[str, Any] = {}

    def note(self, **entries: Any) -> None:
        self.said.update(entries)
        self.notes.write_text(json.dumps(self.said))

    def finish(self) -> None:
        self.note()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if "failed" not in self.said:
            self.note(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and "failed" not in self.said:
            why = report.longreprtext.strip().splitlines()
            self.note(test=report.nodeid, failed=True, why=why[-1] if why else "")


class Measure(Recorder):
    """A plugin that records every passing test's seconds and reached lines.

    A shared fixture's lines count for every test that uses it, its seconds for none.
    """

    def __init__(self, notes: Path, files: list[str]):
        import coverage

        super().__init__(notes)
        self.coverage = coverage.Coverage(data_file=None, include=files or None, messages=False)
        self.coverage.start()
        self.tests: dict[str, dict[str, Any]] = {}
        self.context = ""
        self.shared = 0.0

    @contextmanager
    def _within(self, context: str) -> Iterator[None]:
        before = self.context
        self.context = context
        self.coverage.switch_context(context)
        try:
            yield
        finally:
            self.context = before
            self.coverage.switch_context(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.shared = 0.0
        began = time.monotonic()
        with self._within(item.nodeid):
            result = yield
        seconds = time.monotonic() - began - self.shared
        row = self.tests.setdefault(item.nodeid, {"passed": True})
        row |= {"seconds": round(seconds, 4), "fixtures": [*getattr(item, "fixturenames", ())]}
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        nested = self.context.startswith("fixture ")
        began = time.monotonic()
        with self._within(f"fixture {fixturedef.argname}"):
            result = yield
        if not nested:
            self.shared += time.monotonic() - began
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        if not report.passed:
            self.tests.setdefault(report.nodeid, {})["passed"] = False

    def finish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        root = Path.cwd()
        lines = {
            str(Path(file).relative_to(root)): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        self.note(tests=self.tests, lines=lines)


if __name__ == "__main__":
    main()
