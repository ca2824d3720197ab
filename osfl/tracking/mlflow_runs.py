"""A run in MLflow: parameters, metrics, tags and artifacts of one run in the experiment `osfl`."""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from osfl import __version__
from osfl.tracking.contents import TrackedRun

EXPERIMENT = "osfl"
# Marks a run as one of a run's folder, for its updates
DIGEST_TAG = "osfl.digest"
# The tag of a run's phase, and the prefix of the metrics that are curves
PHASE_TAG = "osfl.phase"
LOSS = "loss/"
# MLflow's limits on a request
MAX_METRICS = 1000
MAX_PARAMS = 100
# By default a server that is away is asked for minutes: 7 retries of 120 s
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # With its credentials
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
Entry = TypeVar("Entry")
# MLflow refuses these in the name of a metric
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowLog:
    """A run in MLflow, of which each call of `log` adds what is new.

    Args:
        uri: an MLflow server or store.
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._client: Any = None
        self._run_id = ""
        self._params: set[str] = set()
        # The last value by name, and the last step of each curve
        self._figures: dict[str, float] = {}
        self._steps: dict[str, int] = {}

    def log(self, run: TrackedRun) -> None:
        """Log a run, or update the MLflow run that an earlier call made, also of another process.

        Raises:
            Exception: whatever MLflow raises if the server is away or does not accept the run.
        """
        with _limited_requests():
            if not self._run_id:
                self._open(run)
            self._log_batches(run)
            self._client.set_tag(self._run_id, PHASE_TAG, run.phase)
            self._log_files(run)
            if run.status == "RUNNING":
                self._client.update_run(self._run_id, "RUNNING")
            else:
                self._client.set_terminated(self._run_id, run.status, _milliseconds(run.ended))

    def close(self) -> None:
        """Do nothing: MLflow keeps nothing open."""

    def _open(self, run: TrackedRun) -> None:
        """Open the run's MLflow run, made if need be, and read what it has."""
        from mlflow.tracking import MlflowClient

        client = self._client = MlflowClient(tracking_uri=self._uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = client.get_experiment_by_name(name)
        identifier = experiment.experiment_id if experiment else client.create_experiment(name)
        matches = client.search_runs([identifier], f"tags.`{DIGEST_TAG}` = '{run.digest}'")
        if not matches:
            tags = {DIGEST_TAG: run.digest, "osfl.version": __version__}
            created = client.create_run(
                identifier, start_time=_milliseconds(run.started), tags=tags, run_name=run.job
            )
            self._run_id = created.info.run_id
            return
        self._params = set(matches[0].data.params)
        self._figures = dict(matches[0].data.metrics)
        for name in self._figures:
            if name.startswith(LOSS):
                history = client.get_metric_history(matches[0].info.run_id, name)
                self._steps[name] = max(metric.step for metric in history)
        self._run_id = matches[0].info.run_id

    def _log_batches(self, run: TrackedRun) -> None:
        """Log the parameters, which never change, new figures, and new points of the curves."""
        from mlflow.entities import Metric, Param

        params = [(key, value) for key, value in run.config.items() if key not in self._params]
        for few in _batches(params, MAX_PARAMS):
            entries = [Param(key, str(value)) for key, value in few]
            self._client.log_batch(self._run_id, params=entries)
            self._params |= {key for key, _ in few}
        time = _milliseconds(run.ended)
        points = [(_name(key), value, 0) for key, value in run.figures.items()]
        points = [(key, value, 0) for key, value, _ in points if self._figures.get(key) != value]
        for model, curve in run.curves.items():
            name = _name(f"{LOSS}{model}")
            last = self._steps.get(name, -1)
            points += [(name, loss, step) for step, loss in curve if step > last]
        for batch in _batches(points, MAX_METRICS):
            metrics = [Metric(name, value, time, step) for name, value, step in batch]
            self._client.log_batch(self._run_id, metrics=metrics)
            self._figures |= {name: value for name, value, _ in batch}
            self._steps |= {name: step for name, _, step in batch}

    def _log_files(self, run: TrackedRun) -> None:
        with tempfile.TemporaryDirectory(prefix="osfl-") as scratch:
            for name, grid in run.grids.items():
                picture = Path(scratch) / f"{name}.png"
                grid.save(picture)
                self._client.log_artifact(self._run_id, str(picture), "images")
        for file in run.models:
            self._client.log_artifact(self._run_id, str(file), "models")
        for file in run.pages:
            self._client.log_artifact(self._run_id, str(file))


@contextmanager
def _limited_requests() -> Iterator[None]:
    """Set MLflow's limits on requests in the environment, unless the user has set them."""
    added = {name: value for name, value in _LIMITS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _batches(entries: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    """Yield the entries in parts of at most `size`."""
    for first in range(0, len(entries), size):
        yield entries[first : first + size]


def _name(text: str) -> str:
    return _NOT_IN_NAMES.sub("_", text)


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
