"""`osfl serve`: a standing federation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from osfl.cli import display
from osfl.cli.run import handle_signals
from osfl.launch.jobs import new_job, run_remotely
from osfl.launch.serve import StandingMode, serve
from osfl.launch.views import ConsoleDisplay
from osfl.settings import Setting


def serve_versions(
    settings: Sequence[str], standing: StandingMode, connection: str, runs: Path
) -> None:
    """Make version after version on a SuperLink, until Ctrl-C or the last version.

    Args:
        settings: TOML files and `key=value` arguments.
        connection: a SuperLink of the user's Flower configuration.
        runs: the folder of NAME.json, which keeps the state.

    Raises:
        typer.Exit: a setting is invalid, or the command was interrupted.
    """
    handle_signals()
    progress = ConsoleDisplay(display.console)

    def run_version(version: list[Setting]) -> Mapping[str, Any]:
        return run_remotely(new_job(version, None, connection), connection, progress)

    try:
        with display.expected_errors():
            serve(settings, standing, runs / f"{standing.name}.json", run_version, progress.print)
    except KeyboardInterrupt:
        progress.print("interrupted; the version in progress continues on the server")
        raise typer.Exit(130) from None
