"""Runs that are logged to trackers while they are at work."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.tracking import live
from osfl.tracking.live import LiveTracking
from tests.helpers.run_folders import run_folder


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.05)
    return run_folder(tmp_path / "job", {"FT": {"site-a": [[3, 1], [0, 4]]}})


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def events(job: Path) -> EventAccumulator:
    folder = RunFolder(job).tensorboard_folder
    folder.mkdir(exist_ok=True)
    return EventAccumulator(str(folder)).Reload()


def losses(job: Path) -> list[tuple[int, float]]:
    reader = events(job)
    has_curve = "loss/FT" in reader.Tags()["scalars"]
    return [(each.step, each.value) for each in reader.Scalars("loss/FT")] if has_curve else []


def phases(job: Path) -> list[str]:
    reader = events(job)
    tag = "phase/text_summary"
    has_phases = tag in reader.Tags()["tensors"]
    shown = reader.Tensors(tag) if has_phases else []
    return [each.tensor_proto.string_val[0].decode() for each in shown]


def test_tensorboard_grows_with_the_run(job: Path) -> None:
    """Configuration and phase are there at once, and each point of a curve comes once."""
    status = Status(job)
    status.phase("joining")
    tracking = LiveTracking(job, ["tensorboard"], "")
    tracking.begin()
    wait_for(lambda: phases(job) == ["joining"])
    assert "configuration/text_summary" in events(job).Tags()["tensors"]
    status.phase("training FT")
    RunFolder(job).store_curve("FT", [3.0, 2.0])
    wait_for(lambda: losses(job) == [(1, 3.0), (2, 2.0)])
    RunFolder(job).store_curve("FT", [3.0, 2.0, 1.0])
    wait_for(lambda: losses(job) == [(1, 3.0), (2, 2.0), (3, 1.0)])
    assert phases(job) == ["joining", "training FT"]
    assert events(job).Scalars("seconds/joining")
    assert len(list(RunFolder(job).tensorboard_folder.iterdir())) == 1
    assert tracking.finish() == []
    assert losses(job) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert len(list(RunFolder(job).tensorboard_folder.iterdir())) == 1


def test_without_trackers_no_thread_starts(job: Path) -> None:
    tracking = LiveTracking(job, [], "")
    tracking.begin()
    assert not tracking._thread.is_alive()
    assert tracking.finish() == []


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_silent_tracker_costs_a_run_only_seconds(
    job: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "END_SECONDS", 0.5)
    Status(job).phase("joining")
    began = time.monotonic()
    tracking = LiveTracking(job, ["mlflow"], silent)
    tracking.begin()
    assert time.monotonic() - began < 10.0
    began = time.monotonic()
    (warning,) = tracking.finish()
    assert time.monotonic() - began < 10.0
    assert warning.startswith(f"mlflow at {silent}: not logged within 0.5 s")


def test_a_tracker_that_is_away_is_asked_again_but_warned_of_once(
    job: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Away:
        def log(self, run: object) -> None:
            asked.append("run")
            raise ConnectionError("away with token=secret")

        def close(self) -> None:
            pass

    monkeypatch.setattr(live, "open_log", lambda name, uri: Away())
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.0)
    status = Status(job)
    status.phase("joining")
    tracking = LiveTracking(job, ["mlflow"], "http://127.0.0.1:1")
    tracking.begin()
    wait_for(lambda: asked)
    status.phase("training FT")
    wait_for(lambda: len(asked) == 2)
    monkeypatch.setattr(live, "RETRY_SECONDS", 60.0)
    status.phase("testing on clients")
    wait_for(lambda: len(asked) == 3)
    status.phase("finished")
    time.sleep(0.3)
    assert len(asked) == 3
    tracking.stop()
    warnings = [each for each in caplog.messages if "does not answer, the run goes on" in each]
    assert len(warnings) == 1


@pytest.mark.slow
def test_mlflow_grows_with_the_run_and_has_each_point_once(job: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    status = Status(job)
    status.phase("training FT")
    RunFolder(job).store_curve("FT", [3.0, 2.0])
    tracking = LiveTracking(job, ["mlflow"], store)
    tracking.begin()
    client = MlflowClient(store)

    def history() -> list[tuple[int, float]]:
        experiment = client.get_experiment_by_name("osfl")
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        points = client.get_metric_history(runs[0].info.run_id, "loss/FT") if runs else []
        return [(metric.step, metric.value) for metric in points]

    wait_for(lambda: history() == [(1, 3.0), (2, 2.0)])
    RunFolder(job).store_curve("FT", [3.0, 2.0, 1.0])
    wait_for(lambda: len(history()) == 3)
    experiment = client.get_experiment_by_name("osfl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "RUNNING"
    assert run.data.tags["osfl.phase"] == "training FT"
    assert run.data.params["method"] == "fedlmg"
    status.phase("finished")
    tracking.finish()
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.tags["osfl.phase"]) == ("FINISHED", "finished")
    assert history() == [(1, 3.0), (2, 2.0), (3, 1.0)]
