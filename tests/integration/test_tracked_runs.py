"""Runs in TensorBoard and MLflow, read back by their own libraries."""

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from mlflow.tracking import MlflowClient
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import osfl
from osfl.cli.main import app
from osfl.launch.flower import free_ports
from osfl.launch.guard import end_process_tree
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import verify_run
from osfl.tracking import live
from osfl.tracking.contents import read_contents
from osfl.tracking.track import track
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start, start_once

pytestmark = pytest.mark.slow

SECRET = "hunter2"
STEPS = 3


@pytest.fixture
def job(home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run whose MLflow server is away, and which has a password for it."""
    (port,) = free_ports(1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:{SECRET}@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    settings = quick(
        kit=str(tiny_kit), tracking="tensorboard,mlflow", global_model__steps=STEPS, seed=4
    )
    return start_once(home, settings)


def accuracy_of(folder: Path, client: str) -> float:
    matrix = np.array(json.loads((folder / "tests" / "FT.json").read_text())[client])
    return float(100 * matrix.diagonal().sum() / matrix.sum())


def test_a_run_is_in_tensorboard_and_warns_of_an_mlflow_that_is_away(job: Path) -> None:
    events = EventAccumulator(str(RunFolder(job).tensorboard_folder)).Reload()
    (accuracy,) = events.Scalars("accuracy/FT/client-1")
    assert accuracy.value == pytest.approx(accuracy_of(job, "client-1"), rel=1e-6)
    losses = {event.step: event.value for event in events.Scalars("loss/FT")}
    assert list(losses) == [1, 2, 3]
    assert losses == pytest.approx(dict(RunFolder(job).training_curves()["FT"]))
    assert events.Scalars("seconds/synthesis")[0].value > 0
    # Ten classes of one image of 32 pixels
    image = events.Images("pictures/client-0")[0]
    assert (image.width, image.height) == (32, 320)
    assert "tensorflow" not in sys.modules
    (file,) = RunFolder(job).tensorboard_folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    run = osfl.open_run(job)
    (warning,) = [text for text in run.metrics["warnings"] if "mlflow" in text]
    assert warning.startswith("mlflow at http://***@127.0.0.1:")
    assert "has not accepted this run" in warning
    assert "has not accepted this run" in run.report.read_text()
    assert run.summary.state == "finished"
    assert not any(finding.problems for finding in verify_run(job))
    for file in job.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_a_run_is_in_tensorboard_before_its_end(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.05)
    folder = RunFolder(home / "runs" / "job").tensorboard_folder
    tag_names: list[str] = []

    def look(node: int, kind: str, reply: Message) -> Message:
        end = time.monotonic() + 30
        while kind == "evaluate" and "loss/FT" not in tag_names and time.monotonic() < end:
            tags = EventAccumulator(str(folder)).Reload().Tags()
            tag_names.extend([*tags["scalars"], *tags["tensors"]])
        return reply

    settings = quick(kit=str(tiny_kit), tracking="tensorboard", global_model__steps=STEPS)
    start(settings, tamper=look)
    assert {"loss/FT", "seconds/joining", "phase/text_summary", "configuration/text_summary"} <= {
        *tag_names
    }
    assert "accuracy/FT/client-0" not in tag_names
    assert EventAccumulator(str(folder)).Reload().Scalars("accuracy/FT/client-0")


def test_a_grid_has_a_row_of_images_for_each_class(job: Path) -> None:
    rows = [json.loads(line) for line in (job / "manifest.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if (row["client"], row["class"]) == ("client-1", "two")]
    grid = read_contents(job).grids["client-1"]
    with Image.open(job / row["file"]) as image:
        expected = np.asarray(image.convert("RGB"))
    assert (np.asarray(grid)[64:96] == expected).all()
    # An image that is gone stays black
    (job / row["file"]).unlink()
    assert not np.asarray(read_contents(job).grids["client-1"])[64:96].any()


def test_a_tracker_never_ends_a_run(job: Path) -> None:
    """Whatever is wrong, it is a warning, also with the credentials of its URI."""
    (warning,) = track(job, ["mlflow"], f"http://{SECRET}@127.0.0.1:1/?token={SECRET}")
    assert "MlflowException" in warning
    assert SECRET not in warning
    (warning,) = track(job, ["mlflow"], "nothing://there")
    assert warning.startswith("mlflow at nothing://there")
    events = RunFolder(job).tensorboard_folder
    for file in events.iterdir():
        file.unlink()
    events.rmdir()
    os.symlink(job.parent, events)
    (warning,) = track(job, ["tensorboard"], "")
    assert "is a link to another folder" in warning
    (job / "metrics.json").write_text("{")
    (warning,) = track(job, ["tensorboard", "mlflow"], "")
    assert warning.startswith("this run is in no tracker; details: CorruptFileError")


def test_a_run_that_fails_is_logged_too(home: Path) -> None:
    with pytest.raises(Exception, match="no-such-kit"):
        start(quick(kit=str(home / "no-such-kit"), tracking="tensorboard"))
    assert read_contents(home / "runs" / "job").status == "FAILED"
    events = EventAccumulator(str(home / "runs" / "job" / "tensorboard")).Reload()
    assert events.Tags()["tensors"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A real MLflow server on loopback."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    with open(tmp_path / "mlflow.log", "wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_process_tree(process.pid)
        process.wait()


@pytest.mark.slow
def test_mlflow_shows_the_run_once_however_often_it_is_logged(
    job: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    for _ in range(2):
        arguments = ["track", str(job), "--tracking", "mlflow", "--mlflow-uri", server]
        printed = CliRunner().invoke(app, arguments)
        assert printed.exit_code == 0, printed.output
        assert f"logged to mlflow at {server}" in printed.output
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("osfl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("job", "FINISHED")
    assert (run.data.params["method"], run.data.params["seed"]) == ("feddeo", "4")
    assert "mlflow-uri" not in run.data.params
    accuracy = run.data.metrics["accuracy/FT/client-0"]
    assert accuracy == pytest.approx(accuracy_of(job, "client-0"))
    history = client.get_metric_history(run.info.run_id, "loss/FT")
    curve = [(metric.step, metric.value) for metric in history]
    assert curve == RunFolder(job).training_curves()["FT"]
    # A guarantee's epsilon of 0 would be perfect privacy
    assert not [name for name in run.data.metrics if name.endswith("epsilon")]
    pages = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "metrics.json", "images", "models"} <= pages
    name = "models/FT.safetensors"
    copy = Path(client.download_artifacts(run.info.run_id, name, str(tmp_path)))
    assert (
        hashlib.sha256(copy.read_bytes()).digest()
        == hashlib.sha256((job / name).read_bytes()).digest()
    )
    assert "images/client-0.png" in {
        file.path for file in client.list_artifacts(run.info.run_id, "images")
    }
