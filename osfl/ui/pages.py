"""The pages: the list of runs, one run, and two runs side by side."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from osfl.run_folder.listing import FINAL_PHASES
from osfl.run_folder.observation import ObservedRun, observed_runs, runs_stamp
from osfl.ui.comparison import compare_runs
from osfl.ui.curves import draw_curve
from osfl.ui.figures import figures_of
from osfl.ui.rendering import render

# Clients and classes whose images a page shows
MAX_CLIENTS = 12
MAX_CLASSES = 12
LIST_SECTIONS = ("runs", "choice")
RUN_SECTIONS = ("phase", "state", "figures", "warnings", "clients", "curves", "pictures")


@dataclass(frozen=True)
class LiveRuns:
    """The list of runs, which changes while one is at work."""

    root: Path

    def stamp(self) -> object:
        """Return a value that changes with the list of runs and their states."""
        return runs_stamp(self.root)

    def sections(self) -> dict[str, str]:
        """Render the table, and the form for a comparison."""
        runs = observed_runs(self.root)
        return {name: render(f"sections/{name}.html", runs=runs) for name in LIST_SECTIONS}

    def is_over(self) -> bool:
        """Return False: a run may start at any time."""
        return False


@dataclass(frozen=True)
class LiveRun:
    """A run's page, which changes until the run has finished or failed."""

    run: ObservedRun

    def stamp(self) -> object:
        """Return a value that changes with the run's files."""
        return self.run.stamp()

    def sections(self) -> dict[str, str]:
        """Render all sections of the run's page."""
        values = run_values(self.run)
        return {name: render(f"sections/{name}.html", **values) for name in RUN_SECTIONS}

    def is_over(self) -> bool:
        """Return whether the run has finished or failed."""
        return self.run.summary().state in FINAL_PHASES


@dataclass(frozen=True)
class Pages:
    """The pages on the runs in a folder.

    Attributes:
        root: the folder of all runs.
    """

    root: Path

    def observed(self, name: str) -> ObservedRun:
        """Return a run.

        Raises:
            HTTPException: there is no such run.
        """
        run = ObservedRun(self.root, name)
        if not run.exists():
            raise HTTPException(404, "there is no such run")
        return run

    def live_runs(self) -> LiveRuns:
        """Return the list of runs."""
        return LiveRuns(self.root)

    def live_run(self, name: str) -> LiveRun:
        """Return a run's page."""
        return LiveRun(self.observed(name))

    def runs(self, request: Request) -> Response:
        """Show the list of runs."""
        runs = observed_runs(self.root)
        folder = str(self.root)
        return HTMLResponse(render("runs.html", sections=LIST_SECTIONS, runs=runs, folder=folder))

    def run(self, request: Request) -> Response:
        """Show one run."""
        values = run_values(self.observed(request.path_params["run"]))
        is_over = values["summary"].state in FINAL_PHASES
        return HTMLResponse(render("run.html", sections=RUN_SECTIONS, is_over=is_over, **values))

    def comparison(self, request: Request) -> Response:
        """Show two runs side by side, which the query names as `a` and `b`."""
        first, second = (request.query_params.get(key, "") for key in ("a", "b"))
        if not first or not second:
            raise HTTPException(400, "a comparison requires two runs")
        values = compare_runs(self.observed(first), self.observed(second), MAX_CLIENTS, MAX_CLASSES)
        return HTMLResponse(render("comparison.html", runs=observed_runs(self.root), **values))

    def problem(self, request: Request, error: Exception) -> Response:
        """Show why a page cannot be shown."""
        assert isinstance(error, HTTPException)
        page = render("problem.html", status=error.status_code, text=error.detail)
        return HTMLResponse(page, error.status_code, headers=error.headers)


def run_values(run: ObservedRun) -> Mapping[str, Any]:
    """Gather the values of a run's page."""
    summary = run.summary()
    progress = run.progress()
    is_running = summary.state == "running"
    return {
        "name": run.name,
        "summary": summary,
        "progress": progress,
        "left": progress.seconds_left(time.time()) if is_running else None,
        "figures": figures_of(run.metrics()),
        "pictures": run.pictures(),
        "curves": [draw_curve(name, points) for name, points in run.curves().items()],
        "config": sorted(run.config().items()),
        "has_report": run.has_report(),
        "most_clients": MAX_CLIENTS,
        "most_classes": MAX_CLASSES,
    }
