"""Run the cells of a table, each as an `osfl run` process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from osfl.run_folder.report.metrics import read_metrics
from osfl.run_folder.status import has_finished
from osfl.tables.table_file import Cell
from osfl.util.exit_codes import TRY_AGAIN
from osfl.util.files import CorruptFileError
from osfl.util.text import sanitize

# Maximum characters of a run's error
MAX_ERROR_LENGTH = 1000
# Characters at the end of a run's output that are searched for its error
MAX_OUTPUT_LENGTH = 20_000


@dataclass
class Outcome:
    """The metrics of a cell, or its error."""

    cell: Cell
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Runner:
    """Run cells in parallel, each on its share of the CPU cores.

    Args:
        runs: folder of the runs.
        at_once: number of parallel runs.
        note: called with a cell and its new state.
        options: further options of `osfl run`.

    Attributes:
        outcomes: of the cells that finished or failed, without those that an interrupt stopped.
    """

    def __init__(
        self,
        runs: Path,
        at_once: int,
        note: Callable[[Cell, str], None] = lambda cell, state: None,
        options: Iterable[str] = (),
    ):
        self.runs = runs
        self.at_once = at_once
        self.note = note
        self.options = tuple(options)
        self._stopped = threading.Event()
        self._processes = set[subprocess.Popen]()
        self._lock = threading.Lock()
        self.outcomes: dict[Cell, Outcome] = {}

    def run_all(self, cells: list[Cell]) -> list[Outcome]:
        """Run all cells and return their outcomes; a failed cell does not stop the others.

        Raises:
            KeyboardInterrupt: after terminating the active runs, which the same call resumes.
                `outcomes` has those that ended before.
        """
        # Seed by seed, and the last row first: a table starts with its baselines, which are fast,
        # so no core is idle at the end
        order = [
            cell
            for _, group in groupby(cells, key=lambda cell: cell.seed)
            for cell in reversed(list(group))
        ]
        with ThreadPoolExecutor(self.at_once) as pool:
            futures = {cell: pool.submit(self._run_safely, cell) for cell in order}
            try:
                return [futures[cell].result() for cell in cells]
            except BaseException:
                self._stopped.set()
                with self._lock:
                    for process in self._processes:
                        process.send_signal(signal.SIGTERM)
                pool.shutdown(cancel_futures=True)
                raise

    def _run_safely(self, cell: Cell) -> Outcome:
        try:
            outcome = self.run(cell)
        # Any failure of one cell must leave the others running
        except Exception as error:
            self.note(cell, "failed")
            outcome = Outcome(
                cell, error=f"{type(error).__name__}: {sanitize(error, MAX_ERROR_LENGTH)}"
            )
        if not (outcome.error and self._stopped.is_set()):
            self.outcomes[cell] = outcome
        return outcome

    def run(self, cell: Cell) -> Outcome:
        """Return a cell's finished run, or run `osfl run`, which resumes an interrupted one."""
        if outcome := self._finished(cell):
            self.note(cell, "done before")
            return outcome
        command = [
            str(Path(sys.executable).parent / "osfl"),
            "run",
            *cell.settings,
            f"job-id={cell.job_id}",
            "--runs",
            str(self.runs),
            *self.options,
        ]
        code, output = self._call(cell, command)
        if code == TRY_AGAIN and not self._stopped.is_set():
            self.note(cell, "tried again")
            code, output = self._call(cell, command)
        if code == 0 and (outcome := self._finished(cell)):
            self.note(cell, "done")
            return outcome
        if self._stopped.is_set():
            return Outcome(cell, error="stopped")
        last_words = " ".join(output[-MAX_OUTPUT_LENGTH:].split()[-80:])
        message = last_words.rpartition("error ")[2]
        error = sanitize(message, MAX_ERROR_LENGTH) or f"osfl run exited with {code}"
        self.note(cell, "failed")
        return Outcome(cell, error=error)

    def _call(self, cell: Cell, command: list[str]) -> tuple[int, str]:
        """Return the exit code and output of `osfl run`, or (1, "") if the runner was stopped."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.at_once)),
        }
        with self._lock:
            if self._stopped.is_set():
                return 1, ""
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # This process forwards Ctrl-C, once
                start_new_session=True,
            )
            self._processes.add(process)
        self.note(cell, "running")
        output, _ = process.communicate()
        with self._lock:
            self._processes.discard(process)
        return process.returncode, output

    def _finished(self, cell: Cell) -> Outcome | None:
        folder = self.runs / cell.job_id
        try:
            if has_finished(folder):
                return Outcome(cell, read_metrics(folder))
        # `osfl run` recreates a corrupt or missing file, or says why it cannot
        except CorruptFileError:
            pass
        return None
