"""Methods side by side.

A table file, the runs it asks for, and what they measured as Markdown, CSV and a plot.

A table file (configs/tables/*.toml) has

    title = "..."            # what the table is about
    seeds = [0, 1, 2]
    reference = "espresso C" # optional: every row against this one, paired by seed
    [common]                 # run-config of every run
    num-clients = 6
    [rows."espresso C"]      # one row each: its run-config
    method = "espresso"
    espresso.gmm = false
    [grid]                   # optional: every row is run with every combination
    "espresso.epochs" = [5, 15]

Where a paper has published such a table (configs/papers/*.toml), also

    source = "..."           # which paper, table and page
    preset = "pacs"          # in [common] or a row: configs/data/pacs.toml, below what is said here
    [published."espresso C"] # the figures, by the client's name, and `average`
    average = 71.3
    [lacks]                  # what the table has and we do not, and why
    "DENSE" = "a baseline that OSFL does not have"

Each cell, a row and a seed, is one `osfl run` of its own; runs that are done with the same settings
and kits are used again.
"""

import csv
import hashlib
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from osfl.cli.launch import (
    RECOMMENDED,
    UnseenDataError,
    find_config,
    flat_toml,
    laid_over,
    read_overrides,
    resolve_config,
)
from osfl.cli.paired import paired_difference
from osfl.cli.run import TRY_AGAIN
from osfl.config import NOT_IDENTITY, ConfigError, Scalar, flatten
from osfl.config.toml import read_toml
from osfl.kit.used_parts import used_digests
from osfl.run_folder.report.metrics import ADAPTED_SUFFIX, accuracy_over_images, read_metrics
from osfl.run_folder.report.page import human_bytes, human_flops
from osfl.run_folder.status import has_finished
from osfl.util.files import CorruptFileError, make_private_folder, write_atomically
from osfl.util.text import quote, sanitize

PARTS = ("title", "source", "seeds", "reference", "common", "rows", "grid", "published", "lacks")
SECTIONS = ("common", "rows", "grid", "published", "lacks")
TEXTS = ("title", "source", "reference")
MODELS = ("FT", "MD", "SD")  # the global models of FedCADO and FedLMG
RESERVED = ("job-id", "runs-dir", "seed")  # keys that a table sets itself, for every run
MOST_CLIENTS = 8  # that have a column of their own in the Markdown table
MOST_ERROR = 1000  # characters of a run's error
MOST_OUTPUT = 20_000  # characters at the end of a run's output, in which its error is looked for
# Of a record, what has a place of its own in the CSV, or none.
NOT_A_COST = (
    *("row", "seed", "average", "over_images", "accuracy", "versions", "error", "not_tested"),
    "branches",
)


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    row: str
    seed: int
    job_id: str
    settings: tuple[str, ...]  # key=value


@dataclass(frozen=True)
class TableFile:
    """A table file, read and checked."""

    name: str
    title: str
    seeds: tuple[int, ...]
    rows: dict[str, dict[str, Scalar]]  # with common settings and grid merged in
    source: str = ""
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    # Rows whose data set is not here, and why
    unseen: Mapping[str, str] = field(default_factory=dict)
    # A row; empty: none
    reference: str = ""

    def cells(self) -> list[Cell]:
        """Every row with every seed, seed by seed: with one seed done there is a whole table."""
        made = []
        for seed in self.seeds:
            for row, settings in self.rows.items():
                given = (*as_arguments(settings), f"seed={seed}")
                made.append(_cell(self.name, row, given, seed))
        return made


def _cell(table: str, row: str, settings: tuple[str, ...], seed: int) -> Cell:
    """A cell whose job id holds a digest of its whole configuration and its kits.

    A run is used again for the very same, and for nothing else.
    """
    config, _ = resolve_config(settings)
    identity = {
        key: value
        for key, value in flatten(config).items()
        # A run of one job id may be tested again; here each has its own
        if key not in NOT_IDENTITY or (config.adaptation.steps and key.startswith("adaptation."))
    }
    digest = hashlib.sha256(
        json.dumps([identity, used_digests(config)], sort_keys=True).encode()
    ).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", f"{table}-{row}").strip("-")[:45]
    return Cell(row, seed, f"{name}-s{seed}-{digest}", settings)


@dataclass
class Outcome:
    """What a cell gave: metrics, or an error."""

    cell: Cell
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def read_table(
    file: Path,
    overrides: Iterable[str] = (),
    seeds: str = "",
    rows: str = "",
    without_data: bool = False,
) -> TableFile:
    """Read a table file.

    Args:
        overrides: key=value for every run, after the file's.
        seeds, rows: comma-separated; empty: the file's.
        without_data: a row whose data set cannot be asked for its classes is named in `unseen`, and
            has two.

    Raises:
        ConfigError: not such a file, no such row, or a run-config that is wrong; every row is
            checked before any is run.
    """
    content = read_toml(file)
    if unknown := set(content) - set(PARTS):
        raise ConfigError(
            f"{file}: {quote(sorted(unknown)[0])} is unknown; a table file has {', '.join(PARTS)}"
        )
    _check_kinds(file, content)
    if not content.get("rows"):
        raise ConfigError(f"{file}: has no [rows.NAME]")
    common = content.get("common", {})
    axes = content.get("grid", {})
    if wrong := [key for key, values in axes.items() if not isinstance(values, list) or not values]:
        raise ConfigError(f"{file}: [grid] {sanitize(wrong[0])}: must be a list of values")
    if wrong := [name for name in content["rows"] if "," in name]:
        raise ConfigError(
            f"{file}: [rows.{quote(wrong[0])}]: a row's name may have no comma, which "
            "separates those of --rows"
        )
    made: dict[str, dict[str, Scalar]] = {}
    for name, row in content["rows"].items():
        for values in product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            title = " ".join(
                [
                    name,
                    *(f"{key.rpartition('.')[2]}={_text(value)}" for key, value in point.items()),
                ]
            )
            made[title] = laid_over(_with_preset(file, common, row), point)
    reference = str(content.get("reference", ""))
    if reference and reference not in made:
        raise ConfigError(
            f"{file}: reference = {quote(reference)}: there is no such row; it has "
            f"{sanitize(', '.join(made), 1000)}"
        )
    if asked := [name.strip() for name in rows.split(",") if name.strip()]:
        if missing := [name for name in asked if name not in made]:
            raise ConfigError(
                f"--rows {quote(missing[0])}: {file} has no such row; it has "
                f"{sanitize(', '.join(made), 1000)}"
            )
        made = {name: made[name] for name in asked}
    try:
        numbers = tuple(
            int(seed) for seed in (seeds.split(",") if seeds else content.get("seeds", [0]))
        )
    except (TypeError, ValueError):
        raise ConfigError(
            f"seeds = {quote(seeds or content.get('seeds'))}: must be whole numbers"
        ) from None
    return TableFile(
        file.stem,
        str(content.get("title", file.stem)),
        numbers,
        made,
        str(content.get("source", "")),
        _published(file, content),
        {str(what): str(why) for what, why in content.get("lacks", {}).items()},
        _check_rows(file, made, tuple(overrides), without_data),
        reference,
    )


def _check_kinds(file: Path, content: dict[str, Any]) -> None:
    """Check that sections are sections and texts are texts.

    Raises:
        ConfigError: one is something else.
    """
    sections = {part: content[part] for part in SECTIONS if part in content}
    for part in ("rows", "published"):
        if isinstance(held := sections.get(part), dict):
            sections |= {f"{part}.{name}": row for name, row in held.items()}
    for name, value in sections.items():
        if not isinstance(value, dict):
            name = sanitize(name)
            raise ConfigError(f"{file}: {name} = {quote(value)}: must be a section, [{name}]")
    for name in TEXTS:
        if not isinstance(content.get(name, ""), str):
            raise ConfigError(f"{file}: {name} = {quote(content[name])}: must be a text")
    if not isinstance(content.get("seeds", []), list):
        raise ConfigError(f"{file}: seeds = {quote(content['seeds'])}: must be whole numbers, [0]")


def _check_rows(
    file: Path,
    rows: Mapping[str, dict[str, Scalar]],
    overrides: Iterable[str],
    without_data: bool,
) -> dict[str, str]:
    """Give every row what goes over the file's settings, and check it.

    Returns:
        with `without_data`, why the classes of rows are not known; those are given two.

    Raises:
        ConfigError: a run-config that is wrong.
    """
    unseen: dict[str, str] = {}
    # By data set: a hub that is not reached takes half a minute
    reasons: dict[Scalar, str] = {}
    for name, settings in rows.items():
        try:
            settings.update(read_overrides(overrides))
            if "method" not in settings:
                settings.update(laid_over(read_overrides([RECOMMENDED]), settings))
            for key in RESERVED:
                if key not in settings:
                    continue
                raise ConfigError(
                    f"{key} = {settings[key]!r}: is the table's to set; see its seeds, and --seeds "
                    "and --runs"
                )
            data = settings.get("data.name", "")
            if data not in reasons:
                try:
                    resolve_config(as_arguments(settings))
                    continue
                except UnseenDataError as error:
                    if not without_data:
                        raise
                    reasons[data] = str(error)
            unseen[name] = reasons[data]
            settings["data.classes"] = "one,two"
            resolve_config(as_arguments(settings))
        except ConfigError as error:
            raise ConfigError(f"{file}, row {quote(name)}: {error}") from None
    return unseen


def _with_preset(file: Path, common: dict[str, Any], row: dict[str, Any]) -> dict[str, Scalar]:
    """A row's settings, over the common ones, over those of the data preset that either names.

    Raises:
        ConfigError: there is no such preset.
    """
    given = laid_over(flat_toml(common), flat_toml(row))
    preset = given.pop("preset", "")
    if not preset:
        return given
    try:
        known = read_toml(find_config(f"configs/data/{preset}.toml"))
    except ConfigError as error:
        raise ConfigError(f"{file}: preset = {quote(preset)}: {error}") from None
    return {**flat_toml(known), **given}


def _published(file: Path, content: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The published figures of each row.

    Raises:
        ConfigError: of a row that the file lacks, or no number.
    """
    published = content.get("published", {})
    for row, figures in published.items():
        # A run of several models has a line for each: `FedLMG MD`
        of_model = row.rpartition(" ")
        known = row in content["rows"] or (of_model[0] in content["rows"] and of_model[2] in MODELS)
        if not known:
            raise ConfigError(f"{file}: [published.{quote(row)}]: there is no such row")
        for column, figure in figures.items():
            if isinstance(figure, bool) or not isinstance(figure, int | float):
                raise ConfigError(
                    f"{file}: [published.{quote(row)}] {sanitize(column)} = {quote(figure)}: must "
                    "be a number"
                )
    return published


def as_arguments(settings: Mapping[str, Scalar]) -> list[str]:
    """A row's settings as arguments of `osfl run`."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Runner:
    """Runs cells, some side by side, each on its share of the cores; can be stopped."""

    def __init__(
        self,
        runs: Path,
        at_once: int,
        note: Callable[[Cell, str], None] = lambda cell, state: None,
        options: Iterable[str] = (),  # more options of `osfl run`
    ):
        self.runs = runs
        self.at_once = at_once
        self.note = note
        self.options = tuple(options)
        self._stopped = threading.Event()
        self._processes = set[subprocess.Popen]()
        self._lock = threading.Lock()
        self.outcomes: dict[Cell, Outcome] = {}  # of the cells that have ended, by themselves

    def run_all(self, cells: list[Cell]) -> list[Outcome]:
        """The outcome of every cell; one that fails does not stop the others.

        Raises:
            KeyboardInterrupt: after all runs under way were ended; the same call goes on where they
                were. `outcomes` has what is done.
        """
        # Seed by seed, and the last row first: a table begins with its references, which are quick,
        # and no core idles at the end.
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
        except Exception as error:  # this cell's; the others go on
            self.note(cell, "failed")
            outcome = Outcome(cell, error=f"{type(error).__name__}: {sanitize(error, MOST_ERROR)}")
        if not (outcome.error and self._stopped.is_set()):
            self.outcomes[cell] = outcome
        return outcome

    def run(self, cell: Cell) -> Outcome:
        """One cell.

        From its folder if it was run before, else by `osfl run`, which resumes what was
        interrupted.
        """
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
        last = " ".join(output[-MOST_OUTPUT:].split()[-80:]).rpartition("error ")[2]
        error = sanitize(last, MOST_ERROR) or f"osfl run ended with {code}"
        self.note(cell, "failed")
        return Outcome(cell, error=error)

    def _call(self, cell: Cell, command: list[str]) -> tuple[int, str]:
        """The exit code and the output of `osfl run`; nothing of either where all was stopped."""
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
                start_new_session=True,  # Ctrl-C is ours to pass on, once
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
        except CorruptFileError:  # or missing: `osfl run` makes it anew, or says what cannot be
            pass
        return None


# ---- From outcomes to tables ----


def records_of(outcome: Outcome) -> list[dict[str, Any]]:
    """One record for every global model of a cell, or one with its error.

    Local's models become their mean.
    """
    cell = outcome.cell
    metrics = outcome.metrics
    if not metrics:
        return [{"row": cell.row, "seed": cell.seed, "error": outcome.error}]
    accuracy = metrics["accuracy"]
    all_images = metrics["over_images"]
    if metrics["method"] == "local":
        accuracy, all_images = _mean_of_models(accuracy, metrics["confusion"])
    clients = metrics["clients"].values()
    server = metrics["server"]

    def most(key: str) -> float | None:
        # With a guarantee a client sends no costs
        if any(about.get("epsilon") and key not in about for about in clients):
            return None
        return max(about.get(key, 0) for about in clients)

    costs = {
        "rounds": metrics["rounds"],
        "upload_bytes": most("upload_bytes"),
        "download_bytes": most("download_bytes"),
        "client_flops": most("flops"),
        "client_seconds": most("seconds"),
        "client_memory_mb": most("peak_memory_mb"),
        "server_seconds_per_image": server["seconds_per_image"],
    }
    several = sum(not model.endswith(ADAPTED_SUFFIX) for model in accuracy) > 1
    records = []
    for model, by_client in accuracy.items():
        of_clients = dict(by_client)
        record = {
            "row": _row_of(cell.row, model, several),
            "seed": cell.seed,
            "average": of_clients.pop("average"),
            "over_images": all_images[model],
            "accuracy": of_clients,
            **costs,
            "versions": metrics["versions"],
            "kit_not_counted": metrics.get("kit_not_counted", False),
            "not_tested": metrics["not_tested"],
            "branches": _branches(metrics),
        }
        records.append(record)
    return records


def _row_of(row: str, model: str, several: bool) -> str:
    """The name of a model's row, whether the run has several or one, and what it became of it."""
    if several:
        return f"{row} {model}"
    return row + ADAPTED_SUFFIX if model.endswith(ADAPTED_SUFFIX) else row


def _mean_of_models(
    accuracy: dict[str, dict[str, float]], confusion: dict[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Local's models as one row: each client's accuracy, and that over all images, averaged."""
    tested = set.intersection(*map(set, accuracy.values())) - {"average"}
    means = {}
    for client in sorted(tested):
        means[client] = float(np.mean([row[client] for row in accuracy.values()]))
    shares = []
    for matrix in confusion.values():
        shares.append(accuracy_over_images({client: matrix[client] for client in means}))
    average = float(np.mean(list(means.values())))
    return {"": {**means, "average": average}}, {"": float(np.mean(shares))}


def _branches(metrics: dict[str, Any]) -> str:
    """What a table must say of a row that guides with fewer branches than its method is published
    with.
    """
    config = metrics["config"]
    if metrics["method"] == "feddeo" and config["feddeo.guidance-text"] == 0:
        return "the description alone (FedDEO's eq. 5 without its text branch)"
    if metrics["method"] == "feddeo" and config["feddeo.guidance-description"] == 0:
        return "the text alone (FedDEO's eq. 5 without its description)"
    return ""


def as_csv(records: list[dict[str, Any]]) -> str:
    """One line for every row and seed: all figures, not rounded."""
    clients = sorted({client for record in records for client in record.get("accuracy", {})})
    costs = [key for key in _first(records) if key not in NOT_A_COST]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "seed", "average", "over_images", *clients, *costs, "error"])
    for record in records:
        accuracy = record.get("accuracy", {})
        cells = [
            record.get("average", ""),
            record.get("over_images", ""),
            *(accuracy.get(c, "") for c in clients),
            *(record.get(key, "") for key in costs),
        ]
        writer.writerow([record["row"], record["seed"], *cells, record.get("error", "")])
    return text.getvalue()


def _first(records: list[dict[str, Any]]) -> dict[str, Any]:
    return next((record for record in records if "average" in record), {})


def by_row(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The records of every row that have figures, in the file's order."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if "average" in record:
            groups[record["row"]].append(record)
    return groups


def as_markdown(table: TableFile, records: list[dict[str, Any]], command: str, at_once: int) -> str:
    """Means over the seeds, with the standard deviation of the average; what failed is named."""
    groups = by_row(records)
    clients = sorted({client for record in records for client in record.get("accuracy", {})})
    shown = clients if len(clients) <= MOST_CLIENTS else []
    costs = [
        "upload",
        "download",
        "client compute",
        "client s",
        "client MB",
        "server s/image",
        "rounds",
    ]
    both = any(abs(r["over_images"] - r["average"]) >= 0.05 for g in groups.values() for r in g)
    head = [*map(_words, shown), "average", *(["all images"] if both else []), *costs]
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for name, group in groups.items():
        averages = [record["average"] for record in group]
        spread = f" ± {np.std(averages, ddof=1):.1f}" if len(averages) > 1 else ""
        cells = []
        for client in shown:
            figures = [record["accuracy"].get(client, np.nan) for record in group]
            cells.append(f"{np.mean(figures):.1f}")
        cells.append(f"**{np.mean(averages):.1f}**{spread}")
        if both:
            cells.append(f"{np.mean([record['over_images'] for record in group]):.1f}")
        lines.append(f"| {_words(name)} | " + " | ".join([*cells, *_costs(group)]) + " |")
    missing = [
        f"- {_words(r['row'])}, seed {r['seed']}: {', '.join(map(_words, r['not_tested']))}"
        for r in records
        if r.get("not_tested")
    ]
    failed = [
        f"- {_words(r['row'])}, seed {r['seed']}: {_words(r['error'])}"
        for r in records
        if "average" not in r
    ]
    seeds = list(map(str, sorted({record["seed"] for record in records})))
    over = (
        f"mean of seeds {', '.join(seeds)}, ± the standard deviation of the average"
        if len(seeds) > 1
        else f"seed {seeds[0]}"
    )
    versions = _first(records).get("versions", {})
    averages_are = (
        "average: of the clients; all images: over all clients' test images together"
        if both
        else "the average of the clients is also that over all test images"
    )
    adapted = any(name.endswith(ADAPTED_SUFFIX) for name in groups)
    own = "; adapted: what it made of it with its training images" if adapted else ""
    libraries = []
    for name in ("torch", "flwr", "diffusers"):
        if name in versions:
            libraries.append(f"{name} {versions[name]}")
    note = (
        f"Top-1 accuracy (%), each client testing the global model on its own test images{own}; "
        f"{over}; "
        f"{averages_are}. Costs are the largest client's; upload and "
        "download as serialised, the kit's parts included but where a model is named apart from "
        f"it (+ kit). Command: `{command}`, {at_once} "
        f"runs at a time. {machine()}, "
        f"{', '.join(libraries)}."
    )
    for name, group in groups.items():
        if branches := group[0]["branches"]:
            note += f"\n\n{name} is guided by {branches}."
    if missing:
        note += "\n\nNot tested everywhere; the averages are over the others:\n\n" + "\n".join(
            missing
        )
    parts = [
        f"**{sanitize(table.title)}**",
        "\n".join(lines),
        note,
        *([_against(table.reference, groups)] if table.reference in groups else []),
        *([_beside(table, groups)] if table.published else []),
        *(["Missing:\n\n" + "\n".join(failed)] if failed else []),
    ]
    return "\n\n".join(parts) + "\n"


def _against(reference: str, groups: dict[str, list[dict[str, Any]]]) -> str:
    """Every row's average against one row's, paired by seed."""
    lines = ["| | difference | 95 % interval | seeds |", "|---|---:|---:|---:|"]
    averages = {row: {r["seed"]: r["average"] for r in group} for row, group in groups.items()}
    for row, figures in averages.items():
        if row == reference or not figures.keys() & averages[reference].keys():
            continue
        found = paired_difference(figures, averages[reference])
        star = r" \*" if found.decided else ""
        interval = "" if np.isnan(found.low) else f"{found.low:+.1f} to {found.high:+.1f}"
        lines.append(f"| {_words(row)} | {found.mean:+.1f}{star} | {interval} | {found.seeds} |")
    return (
        f"Average against {_words(reference)}, in points, paired by seed; the interval of the mean "
        "by Student's t; \\* where it excludes 0.\n\n" + "\n".join(lines)
    )


def _beside(table: TableFile, groups: dict[str, list[dict[str, Any]]]) -> str:
    """The published figures beside ours: each row's, by client and on average."""
    lines = ["| | | published | ours | difference |", "|---|---|---:|---:|---:|"]
    for row, figures in table.published.items():
        group = groups.get(row, [])
        for column, figure in figures.items():
            found = [_figure(record, column) for record in group]
            ours = float(np.mean(found)) if found else float("nan")
            cells = [f"{figure:.2f}"]
            cells += ["", ""] if np.isnan(ours) else [f"{ours:.2f}", f"{ours - figure:+.2f}"]
            lines.append(f"| {_words(row)} | {_words(column)} | " + " | ".join(cells) + " |")
    text = f"Published: {_words(table.source or 'no source is named')}.\n\n" + "\n".join(lines)
    if table.lacks:
        lacking = [f"- {_words(what)}: {_words(why)}" for what, why in table.lacks.items()]
        text += "\n\nIn the published table, and not here:\n\n" + "\n".join(lacking)
    return text


def _figure(record: dict[str, Any], column: str) -> float:
    """A record's accuracy in a published table's column; nan where there is none."""
    if column == "average":
        return float(record["average"])
    return float(record["accuracy"].get(column, np.nan))


def _words(text: object) -> str:
    """Words in Markdown as they are: no cell, code, link, picture or HTML begins in them."""
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", sanitize(text, MOST_ERROR))


def _costs(group: list[dict[str, Any]]) -> list[str]:
    def mean(key: str, text: Callable[[float], str]) -> str:
        values = [record[key] for record in group]
        return "not sent" if None in values else text(float(np.mean(values)))

    kit = " + kit" if any(r["kit_not_counted"] for r in group) else ""
    seconds = [r["server_seconds_per_image"] for r in group if r["server_seconds_per_image"]]
    return [
        mean("upload_bytes", human_bytes),
        mean("download_bytes", human_bytes) + kit,
        mean("client_flops", human_flops),
        mean("client_seconds", "{:.0f}".format),
        mean("client_memory_mb", "{:,.0f}".format),
        f"{np.mean(seconds):.3f}" if seconds else "",
        mean("rounds", "{:.0f}".format),
    ]


def plot(records: list[dict[str, Any]], file: Path) -> None:
    """Accuracy against a client's bytes, uploaded (left) and both ways (right), on log axes.

    Rows that upload nothing are dashed lines.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6))
    panels = figure.subplots(1, 2, sharey=True)
    groups = by_row(records)
    colours = {name: f"C{number % 10}" for number, name in enumerate(groups)}
    marks = {name: "osD^vP*X"[number // 10 % 8] for number, name in enumerate(groups)}
    for panel, keys, title in zip(
        panels,
        (("upload_bytes",), ("upload_bytes", "download_bytes")),
        ("uploaded", "uploaded and downloaded"),
        strict=True,
    ):
        for name, group in groups.items():
            averages = [record["average"] for record in group]
            size = 0.0
            for key in keys:
                size += float(np.mean([record[key] for record in group]))
            if any(record["upload_bytes"] for record in group):
                spread = np.std(averages, ddof=1) if len(averages) > 1 else 0
                panel.errorbar(
                    size,
                    np.mean(averages),
                    spread,
                    fmt=marks[name],
                    color=colours[name],
                    capsize=3,
                    markersize=8,
                    label=name,
                )
            else:
                panel.axhline(
                    float(np.mean(averages)),
                    color=colours[name],
                    linestyle="--",
                    linewidth=1.2,
                    label=name,
                )
        panel.set(xscale="log", xlabel=f"bytes of a client, {title}")
        low, high = panel.get_xlim()
        # Rows of one size: a whole decade around them, or the axis shows their last digits
        if high < 10 * low:
            panel.set_xlim((low * high / 10) ** 0.5, (low * high * 10) ** 0.5)
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("average top-1 accuracy (%)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False
    )
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
    write_atomically(file, picture.getvalue())


def machine() -> str:
    """Hardware in a few words."""
    import torch

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return f"{os.cpu_count()} cores, {device}, Python {platform.python_version()}"


def write_table(
    table: TableFile, outcomes: list[Outcome], out: Path, command: str, at_once: int
) -> list[dict[str, Any]]:
    """Write `<name>.md`, `<name>.csv` and, where rows have points, `<name>.png` into `out`.

    Returns:
        the records.
    """
    ordered = sorted(outcomes, key=lambda outcome: list(table.rows).index(outcome.cell.row))
    records = [record for outcome in ordered for record in records_of(outcome)]
    make_private_folder(out)
    write_atomically(out / f"{table.name}.csv", as_csv(records).encode())
    write_atomically(
        out / f"{table.name}.md", as_markdown(table, records, command, at_once).encode()
    )
    picture = out / f"{table.name}.png"
    # One of an earlier table beside this one would mislead
    picture.unlink(missing_ok=True)
    if any(record.get("upload_bytes") and record["average"] >= 0 for record in records):
        plot(records, picture)
    return records
