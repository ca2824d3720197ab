"""A run's folder as an observer sees it: read-only, while the run is at work or afterwards.

The folder's content is untrusted: no link is followed, the size of every file is bounded, and
damaged files read as missing.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from osfl.run_folder.client_progress import CLIENT_CACHE, client_progress
from osfl.run_folder.image_store import MAX_IMAGE_BYTES, is_image_name, parse_rows, thumbnail
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.listing import MAX_TIME, RunSummary, is_locked, summarize
from osfl.run_folder.report.metrics import are_metrics
from osfl.run_folder.status import ASKED_STATE, is_status
from osfl.run_folder.verify import contains_run
from osfl.util.files import parse_json, read_below
from osfl.util.text import name_problem, sanitize, sanitize_lines

MAX_STATUS_BYTES = 2**24
MAX_METRICS_BYTES = 2**28
MAX_REPORT_BYTES = 2**26
MAX_UNIT_BYTES = 2**24
# Images of a class that a page shows
MAX_PER_CLASS = 4
MAX_WARNINGS = 100
MAX_CURVES = 6
# Steps of a phase; floats represent every count up to it exactly
MAX_STEPS = 10**12
# Characters of a warning or an error
MAX_TEXT = 2000


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: its name.
        began: its start in seconds since 1970.
        seconds: its duration; 0 for the last one, whose end is unknown.
    """

    name: str
    began: float
    seconds: float


@dataclass(frozen=True)
class Progress:
    """The content of `status.json`, with every value checked.

    Attributes:
        phase: the name of the current phase; "" before the first.
        completed, total: finished and all steps of the phase; 0 if unknown.
        phases: the last phases with their times.
        clients: the state of each client, or its progress on its payload.
        warnings: texts that readers should know before they use the result.
        error: why the run failed; "" otherwise.
    """

    phase: str = ""
    completed: int = 0
    total: int = 0
    phases: tuple[Phase, ...] = ()
    clients: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error: str = ""

    def seconds_left(self, now: float) -> float | None:
        """Estimate the rest of the phase from the time per step so far; None if unknown.

        Args:
            now: seconds since 1970.
        """
        if not self.phases or not 0 < self.completed <= self.total:
            return None
        seconds = max(0.0, now - self.phases[-1].began)
        return seconds * (self.total - self.completed) / self.completed


@dataclass(frozen=True)
class Picture:
    """A synthetic image of a run.

    Attributes:
        file: its path in the run's folder.
        version: the start of its SHA-256, which tells it from an image that replaces it.
    """

    file: str
    version: str


@dataclass
class Pictures:
    """The first images of every client and class, and how many there are.

    Attributes:
        labels: by class name, the name of its images' folder, which begins with the label.
        first: at most `MAX_PER_CLASS` images by client, then class.
        counts: the number of images of each client.
    """

    labels: dict[str, str] = field(default_factory=dict)
    first: dict[str, dict[str, list[Picture]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def classes(self) -> list[str]:
        """The class names in the run's order."""
        return sorted(self.labels, key=self.labels.__getitem__)

    @property
    def total(self) -> int:
        """The number of all images."""
        return sum(self.counts.values())

    def add(self, other: "Pictures") -> None:
        """Add the images of another work unit."""
        self.labels |= other.labels
        for client, count in other.counts.items():
            self.counts[client] = self.counts.get(client, 0) + count
        for client, by_class in other.first.items():
            for name, images in by_class.items():
                self.add_images(client, name, images)

    def add_images(self, client: str, name: str, images: Iterable[Picture]) -> None:
        """Add images of a client and class, and keep the first by their files' names."""
        by_class = self.first.setdefault(client, {})
        together = sorted([*by_class.get(name, []), *images], key=lambda picture: picture.file)
        by_class[name] = together[:MAX_PER_CLASS]


@dataclass(frozen=True)
class ObservedRun:
    """A run in a folder of runs.

    Attributes:
        root: the folder of all runs.
        name: the job id, which is the name of the run's folder.
    """

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.root / self.name

    def exists(self) -> bool:
        """Return whether there is a run of this name: a folder, not a link to one."""
        if name_problem(self.name) or self.path.is_symlink() or not self.path.is_dir():
            return False
        return contains_run(self.path)

    def summary(self) -> RunSummary:
        """Return the run's state and figures."""
        return _summary(self.path)

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes with the run's files; costs about ten system calls."""
        run = RunFolder(self.path)
        files = (run.status_file, run.metrics_file, run.report_file)
        folders = (run.units_folder, run.curves_folder)
        progress = tuple(client_progress(self._cache, client) for client in self._asked_clients())
        return (*map(_file_stamp, (*files, *folders)), is_locked(self.path), progress)

    def progress(self) -> Progress:
        """Read the status; an empty one if there is none."""
        state = self._json(RunFolder(self.path).status_file.name, MAX_STATUS_BYTES)
        if not is_status(state):
            return Progress()
        clients = {sanitize(name): sanitize(text) for name, text in state["clients"].items()}
        phases = tuple(_phases(state.get("phases")))
        return Progress(
            phase=sanitize(state["phase"]),
            completed=min(max(0, state["done"]), MAX_STEPS),
            total=min(max(0, state["total"]), MAX_STEPS),
            phases=phases,
            clients={name: self._client_text(name, clients[name]) for name in sorted(clients)},
            warnings=tuple(_texts(state.get("warnings"))),
            error=sanitize_lines(state.get("error", ""), MAX_TEXT),
        )

    def config(self) -> dict[str, Any]:
        """Read the resolved run-config, flat; {} if there is none."""
        config = self._json(RunFolder(self.path).config_file.name, MAX_STATUS_BYTES)
        return config if isinstance(config, dict) else {}

    def metrics(self) -> Mapping[str, Any]:
        """Read a finished run's metrics without the confusion matrices; {} if there are none."""
        file = RunFolder(self.path).metrics_file
        return _metrics(self.root, f"{self.name}/{file.name}", _file_stamp(file))

    def report(self) -> bytes | None:
        """Read the report page; None if there is none."""
        return self._bytes(RunFolder(self.path).report_file.name, MAX_REPORT_BYTES)

    def has_report(self) -> bool:
        """Return whether there is a report page."""
        file = RunFolder(self.path).report_file
        return file.is_file() and not file.is_symlink()

    def picture(self, file: str, side: int) -> bytes | None:
        """Read a synthetic image as a PNG of at most `side` pixels; None if it cannot be read.

        Args:
            file: its path in the run's folder.
        """
        if not is_image_name(file):
            return None
        content = self._bytes(file, MAX_IMAGE_BYTES)
        return None if content is None else thumbnail(content, side)

    def pictures(self) -> Pictures:
        """Return the images of all finished work units."""
        pictures = Pictures()
        for file in sorted(RunFolder(self.path).unit_files()):
            name = f"{self.name}/{file.relative_to(self.path)}"
            pictures.add(_unit_pictures(self.root, name, _file_stamp(file)))
        pictures.first = dict(sorted(pictures.first.items()))
        return pictures

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Read (step, loss) by model, of the first `MAX_CURVES` trainings."""
        curves = {}
        for file in sorted(RunFolder(self.path).curves_folder.glob("*.json"))[:MAX_CURVES]:
            content = self._json(str(file.relative_to(self.path)), MAX_STATUS_BYTES)
            if points := list(_points(content)):
                curves[sanitize(file.stem)] = points
        return curves

    @property
    def _cache(self) -> Path:
        return self.root / CLIENT_CACHE / self.name

    def _asked_clients(self) -> list[str]:
        state = self._json(RunFolder(self.path).status_file.name, MAX_STATUS_BYTES)
        clients = state["clients"] if is_status(state) else {}
        return [name for name, text in clients.items() if text == ASKED_STATE]

    def _client_text(self, client: str, state: str) -> str:
        return (client_progress(self._cache, client) if state == ASKED_STATE else "") or state

    def _bytes(self, name: str, most_bytes: int) -> bytes | None:
        try:
            return read_below(self.root, f"{self.name}/{name}", most_bytes)
        except (OSError, ValueError):
            return None

    def _json(self, name: str, most_bytes: int) -> Any:
        return _parse(self._bytes(name, most_bytes))


def observed_runs(root: Path) -> list[RunSummary]:
    """Summarize the runs in a folder, newest first; [] if it does not exist."""
    runs = [ObservedRun(root, name) for name in _names(root)]
    summaries = [run.summary() for run in runs if run.exists()]
    return sorted(summaries, key=lambda summary: summary.started or 0.0, reverse=True)


def runs_stamp(root: Path) -> tuple[object, ...]:
    """Return a value that changes with the list of runs and their states."""
    return tuple((name, _state_stamp(root / name)) for name in _names(root))


def _names(root: Path) -> list[str]:
    """List what is in a folder, in alphabetical order; [] if it does not exist."""
    return sorted(os.listdir(root)) if root.is_dir() else []


def _state_stamp(folder: Path) -> tuple[object, ...]:
    """Return a value that changes with a run's summary."""
    run = RunFolder(folder)
    files = (run.config_file, run.status_file, run.metrics_file)
    return (*map(_file_stamp, files), is_locked(folder))


def _summary(folder: Path) -> RunSummary:
    """Summarize a run, unless its files are links, which lead to others' files."""
    run = RunFolder(folder)
    files = (run.config_file, run.status_file, run.metrics_file)
    links = [file.name for file in files if file.is_symlink()]
    if links:
        problem = f"{sanitize(links[0])} is a link, which is not followed"
        return RunSummary(sanitize(folder.name), folder, "damaged", problem=problem)
    return _read_summary(folder, _state_stamp(folder))


@lru_cache(maxsize=1024)
def _read_summary(folder: Path, stamp: object) -> RunSummary:
    """Summarize a run; the stamp makes a changed run another key of the cache."""
    return summarize(folder)


def _file_stamp(file: Path) -> tuple[int, int] | None:
    """Return a file's modification time in nanoseconds and its size; None if unknown."""
    try:
        status = file.lstat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def _parse(content: bytes | None) -> Any:
    """Parse JSON; None for no content, or damaged content."""
    if content is None:
        return None
    try:
        return parse_json(content)
    except ValueError:
        return None


@lru_cache(maxsize=16)
def _metrics(root: Path, name: str, stamp: object) -> Mapping[str, Any]:
    """Read metrics; the stamp makes a changed file another key of the cache."""
    try:
        metrics = _parse(read_below(root, name, MAX_METRICS_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(metrics, dict) or not are_metrics(metrics):
        return {}
    return {key: value for key, value in metrics.items() if key != "confusion"}


# A run of 100,000 images has about 2,000 units
@lru_cache(maxsize=2**15)
def _unit_pictures(root: Path, name: str, stamp: object) -> Pictures:
    """Read a work unit's rows; the stamp makes a changed file another key of the cache."""
    pictures = Pictures()
    try:
        rows = parse_rows(read_below(root, name, MAX_UNIT_BYTES))
    except (OSError, ValueError):
        return pictures
    for row in rows:
        client = sanitize(row["client"])
        label = sanitize(row["class"])
        pictures.labels[label] = PurePosixPath(row["file"]).parent.name
        pictures.counts[client] = pictures.counts.get(client, 0) + 1
        picture = Picture(row["file"], sanitize(row["sha256"])[:16])
        pictures.add_images(client, label, [picture])
    return pictures


def _phases(values: object) -> Iterable[Phase]:
    """Yield the phases of a status without damaged ones; the last has no end yet."""
    phases = [_phase(value) for value in values] if isinstance(values, list) else []
    known = [phase for phase in phases if phase is not None]
    for phase, following in pairwise(known):
        yield replace(phase, seconds=max(0.0, following.began - phase.began))
    yield from known[-1:]


def _phase(value: object) -> Phase | None:
    if not isinstance(value, dict):
        return None
    began = value.get("began")
    if not isinstance(began, int | float) or not 0 <= began < MAX_TIME:
        return None
    return Phase(sanitize(value.get("phase", "")), float(began), 0.0)


def _points(curve: object) -> Iterable[tuple[float, float]]:
    """Yield a curve's points, without those that are not numbers."""
    if not isinstance(curve, dict):
        return
    columns = [curve.get("steps"), curve.get("loss")]
    for pair in zip(*(column for column in columns if isinstance(column, list)), strict=False):
        if len(pair) == 2 and all(map(_is_point, pair)):
            yield float(pair[0]), float(pair[1])


def _is_point(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # False for NaN, too
    return abs(value) <= MAX_STEPS


def _texts(values: object) -> Iterable[str]:
    for value in values[:MAX_WARNINGS] if isinstance(values, list) else ():
        yield sanitize(value, MAX_TEXT)
