"""Log a run from its folder to the trackers that the key `tracking` names."""

import os
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.config import ConfigError
from osfl.run_folder.status import with_details
from osfl.tracking.contents import read_contents
from osfl.util.names import TRACKERS
from osfl.util.text import masked_uri, quote, sanitize, without_credentials

if TYPE_CHECKING:
    from osfl.tracking.event_files import EventFiles
    from osfl.tracking.mlflow_runs import MlflowLog

NOT_ACCEPTED = "has not accepted this run; `osfl track` logs it again"
# Characters of a library's message
MAX_REASON = 500


def check_trackers(trackers: Sequence[str], mlflow_uri: str) -> None:
    """Check that this machine can log to trackers; whether they answer is not asked.

    Raises:
        ConfigError: a tracker is unknown, its package is not installed, or MLflow's place is unset.
    """
    for name in trackers:
        if name not in TRACKERS:
            raise ConfigError(f"tracking = {quote(name)}: must be one of {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ConfigError(
                f"tracking = {name!r} requires the package {name}: pip install 'osfl[tracking]'"
            )
    if "mlflow" in trackers and not _mlflow_uri(mlflow_uri):
        raise ConfigError(
            "tracking = 'mlflow' requires a place: set mlflow-uri, or $MLFLOW_TRACKING_URI on the "
            "server"
        )


def describe_place(tracker: str, mlflow_uri: str) -> str:
    """Return a tracker's name and place for a message, without credentials."""
    if tracker != "mlflow":
        return tracker
    return f"mlflow at {sanitize(masked_uri(_mlflow_uri(mlflow_uri)))}"


def track(folder: Path, trackers: Sequence[str], mlflow_uri: str) -> list[str]:
    """Log a run, or update what is logged, and return a warning for each tracker that failed.

    Nothing is raised: what a tracker does must not end a run.

    Args:
        folder: the run's folder; the run need not have finished.
        trackers: names in `TRACKERS`.
        mlflow_uri: an MLflow server or store; "" for $MLFLOW_TRACKING_URI.
    """
    if not trackers:
        return []
    try:
        check_trackers(trackers, mlflow_uri)
        run = read_contents(folder)
    # A damaged folder gives errors of any kind
    except Exception as error:
        return [with_details("this run is in no tracker", reason_of(error))]
    warnings = []
    for name in trackers:
        try:
            with closing(open_log(name, mlflow_uri)) as log:
                log.log(run)
        # The libraries raise errors of any kind
        except Exception as error:
            place = describe_place(name, mlflow_uri)
            warnings.append(with_details(f"{place} {NOT_ACCEPTED}", reason_of(error)))
    return warnings


def open_log(tracker: str, mlflow_uri: str) -> "MlflowLog | EventFiles":
    """Open a tracker for one run, which `log` then logs."""
    # Their libraries take seconds to import, and belong to the extra `tracking`
    if tracker == "mlflow":
        from osfl.tracking.mlflow_runs import MlflowLog

        return MlflowLog(_mlflow_uri(mlflow_uri))
    from osfl.tracking.event_files import EventFiles

    return EventFiles()


def _mlflow_uri(mlflow_uri: str) -> str:
    return mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", "")


def reason_of(error: Exception) -> str:
    """Return an error's text for a warning, without credentials."""
    text = without_credentials(f"{type(error).__name__}: {error}")
    return sanitize(text, MAX_REASON)
