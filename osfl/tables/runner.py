"""Run the cells of a table, each as an `osfl run` process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import ADAPTED_SUFFIX, read_metrics
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
    """The metrics of a cell, or its error.

    Attributes:
        model_bytes: of the files of its models, by name.
    """

    cell: Cell
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    model_bytes: dict[str, int] = field(default_factory=dict)

    def bytes_of(self, model: str) -> int | None:
        """Return the bytes of a model, personalized or not; "": of the largest; None: unknown."""
        name = model.removesuffix(ADAPTED_SUFFIX)
        largest = max(self.model_bytes.values(), default=None)
        return self.model_bytes.get(name) if name else largest


class Runner:
    """Run cells in parallel, each on its share of the CPU cores.

    Args:
        runs: folder of the runs.
        parallel_runs: number of parallel runs.
        note: called with a cell and its new state.
        options: further options of `osfl run`.

    Attributes:
        outcomes: of the cells that finished or failed, without those that an interrupt stopped.
    """

    def __init__(
        self,
        runs: Path,
        parallel_runs: int,
        note: Callable[[Cell, str], None] = lambda cell, state: None,
        options: Iterable[str] = (),
    ):
        self.runs = runs
        self.parallel_runs = parallel_runs
        self.note = note
        self.options = tuple(options)
        self._stopped = threading.Event()
        self._processes = set[subprocess.Popen[str]]()
        self._lock = threading.Lock()
        self._futures: dict[Cell, Future[Outcome]] = {}
        self._makers: dict[Cell, Cell] = {}
        self.outcomes: dict[Cell, Outcome] = {}

    def run_all(self, cells: list[Cell]) -> list[Outcome]:
        """Run all cells and return their outcomes; a failed cell does not stop the others.

        Cells with the same `payload_key` share the payloads of one of them.

        Raises:
            KeyboardInterrupt: after terminating the active runs, which the same call resumes.
                `outcomes` has those that ended before.
        """
        # Seed by seed, and the last row first: a table starts with its baselines, which are fast,
        # so no core is idle at the end
        self._makers = self._find_makers(cells)
        order = list[Cell]()
        for _, group in groupby(cells, key=lambda cell: cell.seed):
            # Makers first: a cell occupies a worker while it waits for its maker
            last_first = list(group)[::-1]
            order += sorted(last_first, key=lambda cell: cell in self._makers)
        with ThreadPoolExecutor(self.parallel_runs) as pool:
            for cell in order:
                self._futures[cell] = pool.submit(self._run_safely, cell)
            try:
                return [self._futures[cell].result() for cell in cells]
            except BaseException:
                self._stopped.set()
                with self._lock:
                    for process in self._processes:
                        process.send_signal(signal.SIGTERM)
                pool.shutdown(cancel_futures=True)
                raise

    def _find_makers(self, cells: list[Cell]) -> dict[Cell, Cell]:
        """Return the cell whose payloads a cell shares, for each cell that makes none itself."""
        makers = dict[str, Cell]()
        # A run that has its payloads makes them first
        for cell in sorted(cells, key=lambda cell: not self._has_own_payloads(cell)):
            if cell.payload_key:
                makers.setdefault(cell.payload_key, cell)
        return {
            cell: makers[cell.payload_key]
            for cell in cells
            if makers.get(cell.payload_key, cell) != cell and not self._has_own_payloads(cell)
        }

    def _has_own_payloads(self, cell: Cell) -> bool:
        folder = RunFolder(self.runs / cell.job_id)
        return folder.has_started("payloads") and not folder.payload_source_file.exists()

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
            *self._source(cell),
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

    def _source(self, cell: Cell) -> list[str]:
        """Return the setting that makes a cell share payloads, once they are there.

        A cell whose maker failed makes its own.
        """
        # An interrupted run resumes with the payloads that it is bound to
        if source := RunFolder(self.runs / cell.job_id).payload_source():
            return [f"payloads-from={source.run}"]
        maker = self._makers.get(cell)
        if maker is None:
            return []
        folder = RunFolder(self.runs / maker.job_id)
        try:
            is_made = not self._futures[maker].result().error and folder.has_started("payloads")
        except CancelledError:
            is_made = False
        return [f"payloads-from={folder.path}"] if is_made else []

    def _call(self, cell: Cell, command: list[str]) -> tuple[int, str]:
        """Return the exit code and output of `osfl run`, or (1, "") if the runner was stopped."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.parallel_runs)),
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
                files = RunFolder(folder).model_files()
                sizes = {file.stem: file.stat().st_size for file in files}
                return Outcome(cell, read_metrics(folder), model_bytes=sizes)
        # `osfl run` recreates a corrupt or missing file, or says why it cannot
        except CorruptFileError:
            pass
        return None
