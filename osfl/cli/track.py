"""`osfl track`: log a run to trackers from its folder."""

import os
from pathlib import Path

import typer

from osfl.cli import display
from osfl.config import ConfigError, split_names
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.listing import find_run
from osfl.tracking.track import check_trackers, describe_place, track
from osfl.util.text import masked_uri, quote


def show_tracking(folder: Path, tracking: str, mlflow_uri: str) -> None:
    """Log a run, and print which trackers accepted it.

    Args:
        tracking: as the run-config's key; "" for the run's own value.
        mlflow_uri: as the run-config's key; "" for $MLFLOW_TRACKING_URI.

    Raises:
        ConfigError: no tracker is set, or one cannot work here; or the run's own `mlflow-uri` is
            another place than $MLFLOW_TRACKING_URI.
        typer.Exit: a tracker did not accept the run.
    """
    config = RunFolder(find_run(folder)).stored_config() or {}
    names = split_names(tracking or str(config.get("tracking", "")))
    if not names:
        raise ConfigError("this run has no tracking; set --tracking to tensorboard, mlflow or both")
    if "mlflow" in names and not mlflow_uri:
        _check_place(str(config.get("mlflow-uri", "")))
    check_trackers(names, mlflow_uri)
    places = ", ".join(describe_place(name, mlflow_uri) for name in names)
    display.print_text(f"logging to {places}")
    warnings = track(folder, names, mlflow_uri)
    for warning in warnings:
        display.print_text(f"warning: {warning}")
    if warnings:
        raise typer.Exit(1)
    display.print_text(f"logged to {places}")


def _check_place(run_uri: str) -> None:
    """Check that a run's MLflow server is the user's own, which gets the user's credentials.

    Raises:
        ConfigError: it is another one.
    """
    own_uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if run_uri and run_uri != own_uri:
        raise ConfigError(
            f"mlflow-uri = {quote(masked_uri(run_uri))}, of the run: must be $MLFLOW_TRACKING_URI, "
            f"which is {quote(masked_uri(own_uri)) if own_uri else 'unset'}; set --mlflow-uri to "
            "the place that may get this run and your credentials"
        )
