"""Standing mode: versions of a model, as clients come."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from osfl.config import ConfigError, parse_run_config
from osfl.launch.flower import LaunchError
from osfl.launch.serve import StandingMode, serve
from osfl.settings import Setting, merge_settings, read_overrides
from osfl.util.files import CorruptFileError
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import app, metrics, nodes


@pytest.mark.slow
def test_clients_that_come_make_versions(home: Path, tiny_kit: Path) -> None:
    """Two at first; two more at once; none, so it listens again; one, by then the others left."""
    config = quick(method="prompts-domain", kit=str(tiny_kit))
    sites = [{**node, "domain": "sketch"} for node in nodes(5)]
    waves = iter([sites[:2], sites[:4], sites[2:4], sites[3:]])
    asked: list[tuple[str, set[int]]] = []
    lines: list[str] = []

    def run_version(settings: list[Setting]) -> Mapping[str, Any]:
        values = merge_settings(config, read_overrides(settings))
        grid = LoopGrid(app, dict(values), next(waves))
        job = str(values["job-id"])
        try:
            run_job(grid, parse_run_config(values), job)
        except RoundError as error:
            raise LaunchError(str(error)) from None
        asked.append((job, {index for index, kind in grid.sent if kind == "train"}))
        return metrics(home, job)

    standing = StandingMode("study", new_clients=2, interval=1.0, versions=3)
    state = home / "study.json"
    serve([], standing, state, run_version, lines.append)
    assert asked == [("study-v1", {0, 1}), ("study-v2", {2, 3}), ("study-v3", {1})]
    assert [metrics(home, job)["version"].get("number") for job, _ in asked] == [None, 2, 3]
    assert set(metrics(home, "study-v3")["clients"]) == {f"client-{k}" for k in range(5)}
    assert lines[4] == "version 3: job study-v3 listens"
    assert "4 of 6 clients joined within 1 s" in lines[5]
    assert lines[-1] == "version 3: 5 payloads"
    # Started again, it knows its last version
    serve([], standing, state, run_version, lines.append)
    assert len(asked) == 3


def test_a_failed_run_is_tried_again_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as where a run of an earlier `osfl serve` is at work on the version."""
    pauses: list[float] = []
    monkeypatch.setattr("osfl.launch.serve.time.sleep", pauses.append)
    failures = iter([LaunchError("busy"), LaunchError("busy"), None])
    row: dict[str, Any] = {"clients": {"a": {"upload_bytes": 1}, "b": {"upload_bytes": 0}}}
    version_settings: list[dict[str, Any]] = []

    def run_version(settings: list[Setting]) -> Mapping[str, Any]:
        version_settings.append(dict(read_overrides(settings)))
        if failure := next(failures):
            raise failure
        return row

    state = tmp_path / "state.json"
    state.write_text('{"version": 1, "payloads": 2}')
    lines: list[str] = []
    serve([], StandingMode("s", 2, 86_400.0, versions=2), state, run_version, lines.append)
    assert [round(pause) for pause in pauses] == [60, 60]
    assert lines[-1] == "version 2: 1 payloads"
    assert json.loads(state.read_text()) == {"version": 2}
    assert (
        version_settings[0]
        == version_settings[2]
        == {
            "job-id": "s-v2",
            "continue-from": "s-v1",
            "new-clients": 2,
            "join-timeout": 86_400.0,
        }
    )


@pytest.mark.parametrize("text", ['{"version": "2"}', '{"version": -1}', "{}", "no JSON"])
def test_a_corrupt_state_is_refused(tmp_path: Path, text: str) -> None:
    state = tmp_path / "state.json"
    state.write_text(text)
    with pytest.raises(CorruptFileError, match="is corrupt .*; remove it, and the standing mode"):
        serve([], StandingMode("s", 1, 1.0), state, lambda settings: {}, print)


def test_its_name_is_part_of_job_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name 'a/b': must be 1 to 64 letters"):
        serve([], StandingMode("a/b", 1, 1.0), tmp_path / "state", lambda settings: {}, print)
