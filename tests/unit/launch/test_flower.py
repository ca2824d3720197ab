"""Messages about a run that ended in Flower."""

import json
import os
from pathlib import Path

import pytest
from flwr.common.config import get_project_config

from osfl.launch.flower import outcome


def flwr_that_says(details: str, folder: Path) -> dict[str, str]:
    """The environment of a `flwr list` whose run failed with these details."""
    answer = {"runs": [{"status": "finished:failed", "status-details": details}]}
    (folder / "answer.json").write_text(json.dumps(answer))
    program = folder / "flwr"
    program.write_text(f"#!/bin/sh\ncat '{folder}/answer.json'\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_an_app_that_flower_unpacked_in_part_has_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The details are those of Flower itself, for a folder without its settings."""
    app = tmp_path / "apps" / "osfl.osfl.0.2.0.8a2c96e5"
    app.mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as caught:
        get_project_config(app)
    environment = flwr_that_says(str(caught.value), tmp_path)
    monkeypatch.setenv("PATH", environment["PATH"])
    status, details = outcome(1, "hospitals", environment)
    assert status == "finished:failed"
    assert details.splitlines() == [
        str(caught.value),
        "Flower's copy of the app is incomplete. Repeat the command; if it fails again, delete "
        f"{app} on the server",
    ]


def test_other_details_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = flwr_that_says("the run ran out of luck", tmp_path)
    monkeypatch.setenv("PATH", environment["PATH"])
    assert outcome(1, "hospitals", environment)[1] == "the run ran out of luck"
    # Flower's text for a run without any
    flwr_that_says("N/A", tmp_path)
    assert outcome(1, "hospitals", environment)[1] == ""
