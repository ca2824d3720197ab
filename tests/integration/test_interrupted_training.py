"""A server that is killed while it trains continues the training."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from osfl.models import training
from osfl.run_folder.layout import RunFolder
from server_app.training import LossCurve, TrainingCheckpoint
from tests.helpers.settings import quick
from tests.helpers.whole_runs import Killed, files, start, start_once


@pytest.mark.slow
def test_a_killed_training_goes_on_at_its_step(
    home: Path,
    tiny_kit: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Killed in its third step, and again in the step after it has continued."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    config = quick(method="feddeo", kit=str(tiny_kit), global_model__epochs=4)
    quiet = start_once(home, config)
    add = LossCurve.add
    steps: list[int] = []
    fatal = [0]

    def add_and_die(curve: LossCurve, loss: float) -> None:
        add(curve, loss)
        steps.append(len(curve._losses))
        if len(curve._losses) == fatal[0]:
            raise Killed

    monkeypatch.setattr(LossCurve, "add", add_and_die)
    for step in (3, 4):
        fatal[0] = step
        with pytest.raises(Killed):
            start(config, "rough")
    fatal[0] = 0
    caplog.clear()
    start(config, "rough")
    assert "training FT continues at step 3" in caplog.messages
    # Each process records the losses before it again
    assert steps[: 3 + 4] == [1, 2, 3, 1, 2, 3, 4]
    rough = home / "runs" / "rough"
    names = ("curves/FT.json", "tests/FT.json")
    assert files(rough, *names) == files(quiet, *names)
    # The file's metadata name the job
    weights = load_file(rough / "models" / "FT.safetensors")
    for name, tensor in load_file(quiet / "models" / "FT.safetensors").items():
        assert torch.equal(weights[name], tensor), name
    assert not list((rough / "models").glob("*.checkpoint"))


def test_another_release_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    TrainingCheckpoint(folder, "FT", "images").store({"losses": [0.5]})
    state = TrainingCheckpoint(folder, "FT", "images").load()
    assert state is not None
    assert state["losses"] == [0.5]
    for place in ("osfl.__version__", "torch.__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(place, "0.0.1")
            assert TrainingCheckpoint(folder, "FT", "images").load() is None


def test_the_seconds_before_an_interruption_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 100.0
    monkeypatch.setattr("osfl.util.costs.time.perf_counter", lambda: seconds)
    first = TrainingCheckpoint(RunFolder(tmp_path), "FT", "images")
    seconds = 130.0
    first.store({"losses": [0.5]})
    seconds = 1000.0
    second = TrainingCheckpoint(RunFolder(tmp_path), "FT", "images")
    second.load()
    seconds = 1012.0
    assert second.seconds == 30.0 + 12.0


def test_a_full_disk_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("osfl.run_folder.model_store.write_atomically", full)
    TrainingCheckpoint(RunFolder(tmp_path), "FT", "images").store({"w": torch.ones(2)})
    assert "the state of training FT is not stored: [Errno 28] No space left" in caplog.text
