"""OSFL from Python: start a run, open a run's folder, and read what it holds.

    import osfl

    run = osfl.run("demo", method="feddeo", synthesis__steps=10, seed=1)
    run.metrics["average"]
    run.images("client-2", "three")[0].show()
    run.model().module

`osfl run` and `osfl show` are thin layers on the same functions.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.config import ConfigError
from osfl.launch.jobs import Job, Resources, new_job, run_remotely, simulate
from osfl.launch.views import accuracy_table, as_html, pick_display
from osfl.run_folder.image_store import load_picture, read_rows
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.listing import RunSummary, find_run, summarize
from osfl.run_folder.model_store import main_model
from osfl.run_folder.report.metrics import read_metrics
from osfl.settings import RECOMMENDED, Setting, read_overrides
from osfl.util.files import CorruptFileError
from osfl.util.text import sanitize

if TYPE_CHECKING:
    # Take seconds to import, and few readers need them
    from PIL import Image

    from osfl.inference.loading import TrainedModel


@dataclass(frozen=True)
class Run:
    """A run's folder, and what can be read from it; a notebook shows its accuracies.

    Attributes:
        folder: `runs/<job id>`.
    """

    folder: Path

    @property
    def job(self) -> str:
        """The job id."""
        return self.folder.resolve().name

    @property
    def summary(self) -> RunSummary:
        """The state and main figures, also of a run that has not finished or is damaged."""
        return summarize(self.folder)

    @property
    def metrics(self) -> dict[str, Any]:
        """All figures, as in `metrics.json`: `average`, `accuracy` by model and client, ...

        Raises:
            ConfigError: the run has not finished.
            CorruptFileError: the file is corrupt.
        """
        self._check_finished(RunFolder(self.folder).metrics_file)
        return read_metrics(self.folder)

    @property
    def report(self) -> Path:
        """The path of the report, an HTML page.

        Raises:
            ConfigError: the run has not finished.
        """
        page = RunFolder(self.folder).report_file
        self._check_finished(page)
        return page

    def images(self, client: str = "", class_name: str = "") -> "list[Image.Image]":
        """Return the synthetic images, in full or of one client, one class, or both.

        Raises:
            ConfigError: the run has no images (yet), or none of this client or class.
            CorruptFileError: an image or the manifest is corrupt.
        """
        run = RunFolder(self.folder)
        if not os.path.lexists(run.manifest_file):
            raise ConfigError(
                f"{run.manifest_file} does not exist; the run has not finished its synthesis, or "
                "its method synthesizes no images"
            )
        rows = _select(read_rows(run.manifest_file), "client", client)
        files = [self.folder / row["file"] for row in _select(rows, "class", class_name)]
        return [_load(file) for file in files]

    def model(self, name: str = "") -> "TrainedModel":
        """Load a global model with its transform and classes.

        Args:
            name: the model's name; "" for the one that the report shows first.

        Raises:
            ConfigError: the run has no such model (yet).
            CorruptFileError: the model is corrupt.
        """
        from osfl.inference.loading import load_model

        files = {file.stem: file for file in RunFolder(self.folder).model_files()}
        chosen = name or (main_model(files) if files else "")
        if chosen not in files:
            names = ", ".join(files) or "none yet"
            raise ConfigError(f"{self.folder} has no model {sanitize(name)!r}; its models: {names}")
        return load_model(files[chosen])

    def _check_finished(self, file: Path) -> None:
        if not os.path.lexists(file):
            phase = self.summary.phase or "not started"
            raise ConfigError(f"{file} does not exist; this run has not finished ({phase})")

    def _repr_html_(self) -> str:
        summary = self.summary
        if summary.state != "finished":
            return as_html(f"{summary.job}: {summary.state} {summary.problem}")
        return as_html(accuracy_table(self.metrics))


def run(
    *settings: Setting,
    runs: Path | str | None = None,
    client_cpus: int = 1,
    client_gpus: float = 0.0,
    progress: bool = True,
    **keys: object,
) -> Run:
    """Simulate a federation on this machine, and return its run once it has finished.

    Settings are merged from left to right, and `keys` over them. Without a method, those of
    configs/recommended.toml come first. Use `job_id` to resume a run.

    Args:
        settings: TOML files (`"demo"` is short for configs/demo.toml), `"key=value"` texts, and
            mappings such as `{"domain-vector.guidance": 2}`.
        runs: folder for the run's folder; `runs` by default.
        client_cpus: CPU cores per client.
        client_gpus: fraction of a GPU per client.
        progress: whether to show progress: a live table on a terminal and in a notebook, or else
            a line for each phase.
        keys: keys of the run-config as Python spells them: `_` for its hyphens and `__` for its
            dots, as in `domain_vector__guidance=2`.

    Raises:
        ConfigError, DataError, OSError: the run cannot work; the message says what to change.
        LaunchError: it could not start or did not finish; the message gives the reason.
    """
    job = _job(settings, keys, runs)
    simulate(job, Resources(client_cpus, client_gpus), pick_display(progress))
    return Run(job.folder.path)


def submit(
    connection: str, *settings: Setting, progress: bool = True, **keys: object
) -> dict[str, Any]:
    """Run a job on a real federation, and return the figures in its log once it has finished.

    The run's folder stays on the server, where `open_run` opens it.

    Args:
        connection: a SuperLink of the user's Flower configuration.
        settings, progress, keys: as in `run`.

    Raises:
        ConfigError: the settings are invalid.
        LaunchError: the run could not start, did not finish, or the connection was lost.
    """
    return run_remotely(_job(settings, keys, None, connection), connection, pick_display(progress))


def open_run(folder: Path | str) -> Run:
    """Open a run's folder, such as `runs/JOB`, whatever its state.

    Raises:
        ConfigError: it is not the folder of a run.
    """
    return Run(find_run(Path(folder).expanduser()))


def _job(
    settings: tuple[Setting, ...],
    keys: Mapping[str, object],
    runs: Path | str | None,
    connection: str = "",
) -> Job:
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    layers = [*settings, named]
    if "method" not in read_overrides(layers):
        layers = [RECOMMENDED, *layers]
    return new_job(layers, None if runs is None else Path(runs).expanduser(), connection)


def _select(rows: list[dict[str, Any]], key: str, value: str) -> list[dict[str, Any]]:
    """Return the manifest's rows with a value of a key; all of them for "".

    Raises:
        ConfigError: there are none.
    """
    selected = [row for row in rows if value in ("", row[key])]
    if not selected:
        names = ", ".join(sorted({sanitize(row[key]) for row in rows}))
        raise ConfigError(f"no images of {key} {sanitize(value)!r}; set one of {names}")
    return selected


def _load(file: Path) -> "Image.Image":
    """Load an image.

    Raises:
        CorruptFileError: it is missing or corrupt.
    """
    image = load_picture(file)
    if image is None:
        raise CorruptFileError(f"{sanitize(file, 1000)} is missing or corrupt; {HINT_RECREATE}")
    return image
