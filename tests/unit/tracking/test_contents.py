"""Contents of a run for trackers, and checks of trackers before a run."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.run_folder.report.metrics import gather
from osfl.tracking.contents import read_contents
from osfl.tracking.track import check_trackers
from osfl.util.files import CorruptFileError
from tests.helpers.run_folders import run_folder

PHASES = [("joining", 100.0), ("training", 110.0), ("joining", 130.0), ("tracking", 137.0)]


def _run(folder: Path, phase: str, finished: bool = True, **config: object) -> Path:
    run_folder(folder, {"FT": {"site-a": [[3, 1], [0, 4]]}}, **config)
    phases = [{"phase": name, "began": began} for name, began in PHASES]
    state = {"phase": phase, "clients": {}, "done": 0, "total": 0, "phases": phases}
    (folder / "status.json").write_text(json.dumps(state))
    if finished:
        (folder / "metrics.json").write_text(json.dumps(gather(folder)))
    return folder


@pytest.mark.parametrize(
    ("phase", "finished", "status"),
    [
        ("finished", True, "FINISHED"),
        ("tracking", True, "FINISHED"),
        ("failed", False, "FAILED"),
        ("failed", True, "FAILED"),
        ("training", False, "RUNNING"),
        # A run that resumes, with the metrics of its last time
        ("training", True, "RUNNING"),
    ],
)
def test_the_status_is_that_of_the_run(
    tmp_path: Path, phase: str, finished: bool, status: str
) -> None:
    """A run that resumes or fails has no results, although those of its last end remain."""
    contents = read_contents(_run(tmp_path / "job", phase, finished))
    assert contents.status == status
    assert ("accuracy/FT/site-a" in contents.figures) == (status == "FINISHED")
    assert bool(contents.pages) == (status == "FINISHED")
    # Of the phases that have ended, as the status says
    assert status == "FINISHED" or contents.figures["seconds/joining"] == 17.0


@pytest.mark.parametrize("client", ["/tmp/x/evil", "../evil", "a/b", "public.../evil"])
def test_a_client_whose_name_leads_elsewhere_is_refused(tmp_path: Path, client: str) -> None:
    """The names of public domains have a dot, and are no clients'."""
    folder = _run(tmp_path / "job", "training", finished=False)
    row = {"file": "images/x.png", "class": "x", "seed": 0, "sha256": "0"}
    rows = [{**row, "client": name} for name in ("site-a", "public.oil_painting")]
    manifest = "".join(f"{json.dumps(each)}\n" for each in rows)
    (folder / "manifest.jsonl").write_text(manifest)
    assert list(read_contents(folder).grids) == ["public.oil_painting", "site-a"]
    evil = json.dumps({**row, "client": client})
    (folder / "manifest.jsonl").write_text(f"{manifest}{evil}\n")
    with pytest.raises(CorruptFileError, match=r"manifest\.jsonl is corrupt \(an image of client"):
        read_contents(folder)


def test_figures_are_all_numbers_but_settings_and_missing_guarantees(tmp_path: Path) -> None:
    folder = _run(tmp_path / "job", "finished")
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["clients"] = {"site-a": {"epsilon": 0.0, "delta": 1e-5, "upload_bytes": 7, "resent": 0}}
    metrics["auroc"] = {"FT": {"macro": 0.75, "interval": [0.7, 0.8], "missing": float("nan")}}
    metrics["phases"] = [{"phase": "joining", "seconds": 2.0}, {"phase": "joining", "seconds": 3.0}]
    metrics["timeline"] = {"clients": {"site-a": {"joined": 3.0}}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    figures = read_contents(folder).figures
    assert figures["accuracy/FT/site-a"] == 100 * 7 / 8
    assert figures["clients/site-a/upload_bytes"] == 7
    assert figures["clients/site-a/delta"] == 1e-5
    assert figures["clients/site-a/resent"] == 0
    assert "clients/site-a/epsilon" not in figures
    assert figures["auroc/FT/macro"] == 0.75
    assert not {"auroc/FT/missing", "auroc/FT/interval", "seed", "kit_not_counted"} & set(figures)
    assert figures["seconds/joining"] == 5.0
    assert not [name for name in figures if name.startswith("timeline")]


def test_phases_of_an_unfinished_run_are_those_that_have_ended(tmp_path: Path) -> None:
    contents = read_contents(_run(tmp_path / "job", "training", finished=False))
    assert contents.figures == {"seconds/joining": 10.0 + 7.0, "seconds/training": 20.0}
    assert contents.started == 100.0


def test_a_runs_digest_is_its_own_and_stays_at_a_resumption(tmp_path: Path) -> None:
    digests = []
    for number, (job, settings) in enumerate(
        [("job", {}), ("job", {"deadline": 7.0}), ("job", {"seed": 1}), ("other", {})]
    ):
        folder = _run(tmp_path / str(number) / job, "training", finished=False, **settings)
        digests.append(read_contents(folder).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_where_a_run_is_tracked_is_not_logged(tmp_path: Path) -> None:
    settings = {"mlflow-uri": "http://host", "tracking": "mlflow", "seed": 5}
    config = read_contents(_run(tmp_path / "job", "training", finished=False, **settings)).config
    assert config["seed"] == 5
    assert not {"mlflow-uri", "tracking"} & set(config)


def test_a_foreign_run_says_not_where_to_send_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own mlflow-uri is used only if it is this user's, and is printed first."""
    folder = _run(tmp_path / "job", "finished", **{"mlflow-uri": "http://127.0.0.1:1"})
    command = ["track", str(folder), "--tracking", "mlflow"]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for tracking_uri in ("", "http://me:word@127.0.0.1:2"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 1
        assert "set --mlflow-uri to the place" in refused.output
        assert "logging to" not in refused.output
        assert "word" not in refused.output
    for options, tracking_uri in (
        ([], "http://127.0.0.1:1"),
        (["--mlflow-uri", "http://127.0.0.1:1"], ""),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        printed = CliRunner().invoke(app, [*command, *options]).output
        assert printed.startswith("logging to mlflow at http://127.0.0.1:1\nwarning: mlflow at")


def test_what_a_tracker_requires_is_checked_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    check_trackers(["tensorboard", "mlflow"], "http://nowhere")
    with pytest.raises(ConfigError, match=r"set mlflow-uri, or \$MLFLOW_TRACKING_URI"):
        check_trackers(["mlflow"], "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere")
    check_trackers(["mlflow"], "")
    with pytest.raises(ConfigError, match="must be one of tensorboard, mlflow"):
        check_trackers(["wandb"], "")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'osfl\[tracking\]'"):
        check_trackers(["tensorboard"], "")
