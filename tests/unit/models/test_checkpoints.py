"""A training that is interrupted ends as one that is not, bit by bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from osfl.models import training
from osfl.models.training import Checkpoints, fit
from osfl.run_folder.layout import RunFolder
from tests.helpers.settings import plain_classifier

CPU = torch.device("cpu")
STEPS = 9  # three passes over ten images in batches of four
RECIPES = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "cosine": {"schedule": "cosine", "warm_up": 0.3},
    "one-cycle": {"schedule": "one-cycle", "warm_up": 0.3},
    "average": {"ema": 0.9},
    "head": {"trained": "head", "momentum": 0.9},
    "full": {
        "schedule": "cosine",
        "warm_up": 0.2,
        "augmentation": "trivialaugment",
        "mixing": "cutmix",
        "ema": 0.9,
        "momentum": 0.9,
    },
}


class StoppedError(Exception):
    """End of a training."""


class Network(nn.Module):
    """A network with batch normalization and dropout, whose last layer is `fc`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3)
        )
        self.fc = nn.Linear(196, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(images))


def train(
    checkpoints: Checkpoints | None, stop: int = 0, **settings: object
) -> tuple[dict[str, torch.Tensor], list[float], list[int]]:
    """Return the weights, the losses and the steps that were reported.

    Args:
        stop: the number of steps after which the training is interrupted.
    """
    pixels = torch.randint(
        256, (10, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    config = plain_classifier(**{"epochs": 3, "batch_size": 4, "lr": 0.05, **settings})
    losses: list[float] = []
    steps: list[int] = []

    def progress(done: int, total: int) -> None:
        assert total == STEPS
        steps.append(done)

    def record(loss: float) -> None:
        if stop and len(losses) == stop:
            raise StoppedError
        losses.append(loss)

    model = fit(
        Network(),
        pixels,
        torch.arange(10) % 3,
        config,
        0,
        CPU,
        progress=progress,
        record=record,
        checkpoints=checkpoints,
    )
    return model.state_dict(), losses, steps


def checkpoints_in(folder: Path) -> Checkpoints:
    run = RunFolder(folder)
    return Checkpoints(
        lambda: run.stored_checkpoint("FT", "images"),
        lambda state: run.store_checkpoint("FT", "images", state),
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_interrupted_training_ends_as_another(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interruptions after every step; each is the step after a stored state."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    weights, losses, _ = train(None, **RECIPES[recipe])
    for stop in range(1, STEPS):
        checkpoints = checkpoints_in(tmp_path / str(stop))
        with pytest.raises(StoppedError):
            train(checkpoints, stop, **RECIPES[recipe])
        torch.manual_seed(5)
        continued, continued_losses, steps = train(checkpoints, **RECIPES[recipe])
        assert steps == list(range(stop, STEPS + 1))
        assert continued_losses == losses
        for name, tensor in weights.items():
            assert torch.equal(continued[name], tensor), (stop, name)


def test_a_state_is_stored_every_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 25 seconds: stored after every third."""
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr("osfl.models.training.time.monotonic", lambda: next(clock))
    stored: list[int] = []
    checkpoints = Checkpoints(lambda: None, lambda state: stored.append(len(state["losses"])))
    train(checkpoints)
    assert stored == [3, 6, 9]


def test_a_state_is_for_its_own_training_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.stored_checkpoint("FT", "images") is None
    run.store_checkpoint("FT", "images", {"model": {"w": torch.ones(2)}, "losses": [0.5]})
    state = run.stored_checkpoint("FT", "images")
    assert state is not None
    assert torch.equal(state["model"]["w"], torch.ones(2))
    assert state["losses"] == [0.5]
    assert run.stored_checkpoint("FT", "other images") is None
    assert run.stored_checkpoint("MT", "images") is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_state_is_not_used(tmp_path: Path, damage: str) -> None:
    run = RunFolder(tmp_path)
    run.store_checkpoint("FT", "images", {"model": {"w": torch.ones(2)}, "losses": [0.5]})
    (file,) = (tmp_path / "models").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"flip": content, "cut": content[:-9], "empty": b""}
    file.write_bytes(damaged[damage])
    assert run.stored_checkpoint("FT", "images") is None


def test_a_finished_model_needs_no_state(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.store_checkpoint("FT", "images", {"losses": [0.5]})
    run.store_checkpoint("MT", "images", {"losses": [0.5]})
    run.store_model("FT", {"w": torch.ones(2)}, {"inputs": "images", "seconds": 1.0})
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == [
        "FT.json",
        "FT.safetensors",
        "MT.checkpoint",
    ]
