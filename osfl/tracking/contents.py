"""Contents of a run for trackers, read from its folder."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from osfl.config import NOT_IDENTITY, ConfigError, Scalar
from osfl.run_folder.image_store import load_picture, read_rows
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.listing import find_run, summarize
from osfl.run_folder.report.metrics import read_metrics
from osfl.run_folder.status import read_status
from osfl.util.files import CorruptFileError
from osfl.util.names import is_identifier
from osfl.util.text import quote, safe_name, sanitize

# Parts of the metrics that are no figures, or that the configuration has
_NOT_FIGURES = frozenset({"confusion", "config", "phases", "seed", "round_seconds", "timeline"})
# Keys that say where the run is tracked
_PLACES = frozenset({"tracking", "mlflow-uri"})
# Limits on a client's grid: classes, images of each, and the side of an image in pixels
MAX_CLASSES = 50
MAX_IMAGES = 8
MAX_SIDE = 128


@dataclass(frozen=True)
class TrackedRun:
    """The contents of a run for trackers.

    Attributes:
        job: the job id.
        digest: tells the run from others with the same job id; a resumed run keeps it.
        folder: the run's folder.
        status: `FINISHED`, `FAILED`, or `RUNNING` if it has not ended, as MLflow's.
        phase: what the run is doing.
        started: in seconds since 1970.
        ended: the same; the time of the last change so far.
        config: the run-config without where it is tracked.
        figures: by name, such as `accuracy/FT/client-0` and `seconds/synthesis`.
        curves: (step, loss) of each model's training.
        grids: a picture per client, with a row of synthetic images for each class.
        models: the files of the global models.
        pages: the files of the report and of the metrics, once the run has finished.
    """

    job: str
    digest: str
    folder: Path
    status: str
    phase: str
    started: float
    ended: float
    config: Mapping[str, Scalar]
    figures: Mapping[str, float]
    curves: Mapping[str, Sequence[tuple[int, float]]]
    grids: Mapping[str, Image.Image]
    models: Sequence[Path]
    pages: Sequence[Path]


def read_contents(folder: Path, with_files: bool = True) -> TrackedRun:
    """Read a run's contents, as far as the run has come.

    Args:
        with_files: whether to read images, models and pages, too, which a run has at its end.

    Raises:
        ConfigError: it is not the folder of a run, or has no configuration.
        CorruptFileError: its configuration, metrics or manifest are corrupt.
    """
    run = RunFolder(find_run(folder))
    config = run.stored_config()
    if not config:
        raise ConfigError(f"{run.config_file} is missing; a run without it cannot be tracked")
    phase = sanitize(read_status(folder).get("phase", ""))
    status = _status(phase)
    # A run that resumes has those of its earlier end until the next
    has_pages = with_files and status == "FINISHED"
    files = (run.report_file, run.metrics_file) if has_pages else ()
    pages = [file for file in files if file.is_file()]
    metrics = read_metrics(folder) if run.metrics_file in pages else {}
    summary = summarize(folder)
    job = folder.resolve().name
    started = summary.started or run.config_file.stat().st_mtime
    identity = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    return TrackedRun(
        job=job,
        digest=hashlib.sha256(json.dumps([job, identity], sort_keys=True).encode()).hexdigest(),
        folder=folder,
        status=status,
        phase=phase,
        started=started,
        ended=started + (summary.seconds or 0.0),
        config={key: value for key, value in config.items() if key not in _PLACES},
        figures={**dict(_figures(metrics, "")), **_phase_seconds(folder, metrics)},
        curves=run.training_curves(),
        grids=_grids(run) if with_files else {},
        models=run.model_files() if with_files else (),
        pages=pages,
    )


def _status(phase: str) -> str:
    if phase == "failed":
        return "FAILED"
    # The server's last phase before `finished` is that of this function
    return "FINISHED" if phase in ("tracking", "finished") else "RUNNING"


def _figures(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield every finite number in nested metrics by its path."""
    for key, value in metrics.items():
        if not prefix and key in _NOT_FIGURES:
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key}/")
        elif _is_figure(key, value):
            yield f"{prefix}{key}", float(value)


def _is_figure(key: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # An epsilon of 0 stands for no guarantee
    is_guarantee = key in ("epsilon", "delta")
    return math.isfinite(value) and not (is_guarantee and value == 0)


def _phase_seconds(folder: Path, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the duration of every phase that has ended; phases of one name are summed."""
    seconds: dict[str, float] = defaultdict(float)
    if metrics:
        for phase in metrics.get("phases", []):
            seconds[f"seconds/{phase['phase']}"] += phase["seconds"]
        return seconds
    phases = read_status(folder).get("phases", [])
    for phase, following in pairwise(phases):
        seconds[f"seconds/{phase['phase']}"] += max(0.0, following["began"] - phase["began"])
    return seconds


def _grids(run: RunFolder) -> dict[str, Image.Image]:
    if not run.manifest_file.is_file():
        return {}
    files: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(run.manifest_file):
        # Trackers name files after it
        if not _is_owner(row["client"]):
            raise CorruptFileError(
                f"{sanitize(run.manifest_file, 1000)} is corrupt (an image of client "
                f"{quote(row['client'])}); {HINT_RECREATE}"
            )
        of_class = files[row["client"]][row["class"]]
        if len(of_class) < MAX_IMAGES:
            of_class.append(run.path / row["file"])
    return {client: _grid(list(by_class.values())) for client, by_class in sorted(files.items())}


def _is_owner(name: str) -> bool:
    """Return whether a name is a client's or a public domain's, and so safe as a file name."""
    domain = name.removeprefix("public.")
    return is_identifier(name) or (domain != name and domain == safe_name(domain))


def _grid(rows: Sequence[Sequence[Path]]) -> Image.Image:
    """Paste images into one picture, a row for each sequence; an unreadable image stays black."""
    pictures = [[load_picture(file) for file in row] for row in rows[:MAX_CLASSES]]
    sides = [max(picture.size) for row in pictures for picture in row if picture]
    side = min(MAX_SIDE, max(sides, default=1))
    grid = Image.new("RGB", (side * max(map(len, pictures)), side * len(pictures)))
    for top, row in enumerate(pictures):
        for left, picture in enumerate(row):
            if picture is not None:
                picture.thumbnail((side, side))
                grid.paste(picture, (left * side, top * side))
    return grid
