"""The harness of every table: rows, seeds, cached cells, the caption and its command.

A program declares an `Experiment`. Its command takes some of the rows, and seeds where it has any;
rows that are not asked for stay in the table while the caption is the same. Results are kept below
runs/, so that an interrupted command resumes.
"""

import argparse
import io
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeVar

from osfl.tables.markdown import describe_machine
from osfl.tables.paired import paired_difference
from osfl.util.files import PUBLIC, make_private_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"
BENCHMARKS = ROOT / "benchmarks"
PAIRED = (
    "Differences are paired by seed, with a 95 % interval by Student's t, and a star where that "
    "excludes 0."
)
Name = TypeVar("Name")
Line = dict[str, str]


# ---- Command lines ----


def command_line(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def listed(names: Iterable[object]) -> str:
    """Join names, which may contain commas, in one line."""
    return "; ".join(map(str, names))


def some_of(
    names: Sequence[Name], known: Collection[Name], parser: argparse.ArgumentParser
) -> list[Name]:
    """Return the names, or all known ones if there are none; exit if one is unknown."""
    for name in names:
        if name not in known:
            parser.error(f"{name!r}: must be some of {listed(known)}")
    return list(names or known)


def parsed_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of an option such as `0,1,2`."""
    return tuple(map(int, text.split(",")))


# ---- Experiments ----


def row_before_colon(line: Line) -> str:
    """Return the row of a line such as "OSCAR: noise, 1 of 6"."""
    return line[""].partition(": ")[0]


@dataclass(frozen=True)
class Experiment:
    """A table, and how its command makes it.

    Attributes:
        file: the program's `__file__`.
        rows: names of all rows, in the table's order.
        caption: what the table shows; `{seeds}` stands for the seeds.
        seeds: the default of `--seeds`; none: the command has no such option.
        options: of the command, after the program's name.
        table: the table's name; by default the program's.
    """

    file: str
    rows: Collection[str] = ()
    caption: str = ""
    seeds: tuple[int, ...] = ()
    options: str = ""
    table: str = ""

    @property
    def name(self) -> str:
        """The program's name with hyphens, which its table and its folder in runs/ have too."""
        return Path(self.file).stem.replace("_", "-")

    @property
    def work(self) -> Path:
        """The folder of results."""
        return RUNS / self.name

    def table_file(self, seeds: Sequence[int] = ()) -> Path:
        """Return the table's path without a suffix; other seeds make a table of their own."""
        custom_table = tuple(seeds) != self.seeds and bool(seeds)
        suffix = f"-seeds-{'-'.join(map(str, seeds))}" if custom_table else ""
        folder = BENCHMARKS / Path(self.file).resolve().parent.name / "tables"
        return folder / f"{self.table or self.name}{suffix}"

    def about(self, seeds: Sequence[int] = ()) -> str:
        """Return the caption, which ends with the command."""
        program = Path(self.file).resolve()
        words = [f"python -m benchmarks.{program.parent.name}.{program.stem}"]
        words += [self.options] if self.options else []
        text = ",".join(map(str, seeds or self.seeds))
        words += [f"--seeds {text}"] if self.seeds else []
        return f"{self.caption.replace('{seeds}', text)} Command: `{' '.join(words)}`.".lstrip()

    def cell(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON result of a name, computed unless it is kept."""
        file = self.work / f"{name}.json"
        if not file.is_file():
            make_private_folder(file.parent)
            result = compute()
            write_atomically(file, json.dumps(result).encode())
            print(name, result, flush=True)
        return json.loads(file.read_text())

    def tensors(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return tensors of a name, computed unless they are kept."""
        import torch

        file = self.work / f"{name}.pt"
        if not file.is_file():
            make_private_folder(file.parent)
            buffer = io.BytesIO()
            torch.save(compute(), buffer)
            write_atomically(file, buffer.getvalue())
        return torch.load(file, weights_only=True)

    def parser(self, text: str | None) -> argparse.ArgumentParser:
        """Return a parser of rows, and of seeds where the experiment has them."""
        parser = command_line(text)
        parser.add_argument("rows", nargs="*", help=f"some of {listed(self.rows)}; none: all")
        if self.seeds:
            default = ",".join(map(str, self.seeds))
            parser.add_argument("--seeds", default=default, help=f"default {default}")
        return parser

    def main(
        self,
        text: str | None,
        lines_of: Callable[[str, Sequence[int]], Any],
        row_of: Callable[[Line], str] = row_before_colon,
    ) -> list[Line]:
        """Parse the command line, and make the table as `write` does."""
        parser = self.parser(text)
        arguments = parser.parse_args()
        rows = some_of(arguments.rows, self.rows, parser)
        seeds = parsed_seeds(arguments.seeds) if self.seeds else ()
        return self.write(rows, lines_of, seeds, row_of)

    def write(
        self,
        rows: Sequence[str],
        lines_of: Callable[[str, Sequence[int]], Any],
        seeds: Sequence[int] = (),
        row_of: Callable[[Line], str] = row_before_colon,
    ) -> list[Line]:
        """Make rows one after another; the table is written after each line.

        Args:
            lines_of: returns the line, or yields the lines, of a row and seeds.
            row_of: the row that a line of the table belongs to.
        """
        make_private_folder(self.work)
        file = self.table_file(seeds)
        caption = self.about(seeds)
        by_row: dict[str, list[Line]] = {row: [] for row in self.rows}
        for line in lines_in(file, caption):
            if row_of(line) in by_row:
                by_row[row_of(line)].append(line)
        for number, row in enumerate(rows, start=1):
            print(f"row {number} of {len(rows)}: {row}", flush=True)
            row_lines: list[Line] = []
            earlier = by_row[row]
            result = lines_of(row, seeds)
            for line in [result] if isinstance(result, dict) else result:
                row_lines.append(line)
                names = {entry[""] for entry in row_lines}
                by_row[row] = row_lines + [entry for entry in earlier if entry[""] not in names]
                write_table(file, _flat(by_row), caption)
            by_row[row] = row_lines
        write_table(file, _flat(by_row), caption)
        return _flat(by_row)

    def write_all(self, lines: Iterable[Mapping[str, object]], seeds: Sequence[int] = ()) -> None:
        """Write a table whose rows are made together."""
        write_table(self.table_file(seeds), list(lines), self.about(seeds))


def _flat(by_row: Mapping[str, Sequence[Line]]) -> list[Line]:
    """Return the lines of all rows."""
    return [line for lines in by_row.values() for line in lines]


# ---- Tables and figures ----


def lines_in(table: Path, caption: str) -> list[Line]:
    """Return the lines of a table, unless it has another caption."""
    file = table.with_suffix(".json")
    if not file.is_file():
        return []
    content = json.loads(file.read_text())
    return list(content["rows"]) if content["about"].startswith(caption) else []


def write_table(file: Path, rows: Sequence[Mapping[str, object]], caption: str) -> None:
    """Write rows as `<file>.md` and `<file>.json`, with caption, machine and versions."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [head, ["---:"] * len(head), *([str(row.get(key, "")) for key in head] for row in rows)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr", "diffusers"))
    caption = f"{caption} Written on {describe_machine()}, {versions}."
    page = "\n".join([*(f"| {' | '.join(line)} |" for line in cells), "", caption, ""])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file.with_suffix(".md"), page.encode(), PUBLIC)
    content = json.dumps({"rows": rows, "about": caption}, indent=1) + "\n"
    write_atomically(file.with_suffix(".json"), content.encode(), PUBLIC)
    print(page)


def new_panel() -> tuple["Figure", "Axes"]:
    """Return a figure of one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    return figure, figure.subplots()


def write_figure(file: Path, figure: "Figure") -> None:
    """Write a plot as PNG."""
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_atomically(file.with_suffix(".png"), buffer.getvalue(), PUBLIC)


# ---- Figures of a row ----


def difference(values: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Return the mean paired difference with its interval, and a star where that excludes 0."""
    paired = paired_difference(values, reference)
    star = " *" if paired.is_significant else ""
    return f"{paired.mean:+.1f} [{paired.low:+.1f}, {paired.high:+.1f}]{star}"


def standard_error(values: Iterable[float]) -> str:
    """Return the standard error of the mean."""
    from scipy import stats

    return f"{stats.sem(list(values)):.2f}"


def average(values: Iterable[float]) -> str:
    """Return the mean with one decimal."""
    return f"{mean(values):.1f}"


# ---- Processes ----


def in_parallel(
    act: Callable[..., object], arguments: Sequence[tuple[Any, ...]], jobs: int
) -> None:
    """Call a function with each tuple of arguments, `jobs` at a time in processes of their own.

    All calls finish before the error of one is raised.
    """
    if jobs == 1:
        for values in arguments:
            act(*values)
        return
    import torch

    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        wait_for_all(pool.submit(act, *values) for values in arguments)


def wait_for_all(futures: Iterable[Future[Any]]) -> None:
    """Wait for all futures, then raise the error of the first that failed."""
    pending = list(futures)
    wait(pending)
    for future in pending:
        future.result()


def last_line_of(module: str, *arguments: str, **environment: str) -> str:
    """Run a step of a program in a process of its own, and return the last line that it prints."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return result.stdout.strip().split("\n")[-1]
