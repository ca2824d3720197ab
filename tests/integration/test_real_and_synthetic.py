"""real-and-synthetic: the clients' own images and those of another run, in equally many steps."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

import osfl
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.data.load import load_images
from osfl.util.files import CorruptFileError
from osfl.util.prompts import DIGITS
from server_app.methods import real_and_synthetic
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start

SIZE = 16


def settings(**more: Any) -> dict[str, Any]:
    """60 real images and 20 synthetic ones are four batches, or five together."""
    defaults = {"method": "real-and-synthetic", "real_and_synthetic__images_from": "drawn"}
    return quick(**{**defaults, "global_model__batch_size": SIZE, "kit": "digits", **more})


@pytest.fixture
def drawn(home: Path, tiny_kit: Path) -> Path:
    start(quick(method="prompts-only", kit=str(tiny_kit), data__image_size=SIZE), "drawn")
    return home / "runs" / "drawn"


@pytest.mark.slow
def test_both_kinds_of_images_train_one_model_in_the_bounds_steps(
    drawn: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[Any] = []
    train = real_and_synthetic.train_global

    def keep(job: Any, name: str, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        trainings.append((job.config.global_model, pixels, labels))
        return train(job, name, pixels, labels)

    monkeypatch.setattr(real_and_synthetic, "train_global", keep)
    config = settings(global_model__epochs=3)
    start(config, "both")
    ((recipe, pixels, labels),) = trainings
    assert recipe.steps == 3 * math.ceil(60 / SIZE)
    data = parse_run_config(config).data
    real = [load_images(data, NodeConfig(k, 2), "train", 0) for k in range(2)]
    assert torch.equal(pixels[:60], torch.cat([part.pixels[torch.arange(30)] for part in real]))
    assert torch.equal(labels[:60], torch.cat([part.labels for part in real]))
    files = sorted((drawn / "images").rglob("*.png"))
    assert len(files) == len(pixels) - 60 == 20
    drawn_labels = [DIGITS.index(file.parent.name.partition("-")[2]) for file in files]
    # The manifest's order is the plan's, which is that of the paths
    assert labels[60:].tolist() == drawn_labels
    half = Image.open(files[7]).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    assert (pixels[67].int() - pil_to_tensor(half).int()).abs().float().mean() < 8
    assert metrics(home, "both")["accuracy"].keys() == {"real-and-synthetic"}
    model = osfl.load_model(home / "runs" / "both" / "models" / "real-and-synthetic.safetensors")
    assert model.description.trained_on.endswith("synthetic images of another run")


@pytest.mark.slow
def test_another_runs_images_must_be_whole_and_of_the_same_data(drawn: Path, home: Path) -> None:
    wrong = (
        ({"seed": 1}, "that run has seed = 0, and this one 1"),
        ({"data__partition": "iid"}, "has data.partition = 'domain', and this one 'iid'"),
        ({"real_and_synthetic__images_from": ""}, "must be the job id or the absolute folder"),
        ({"real_and_synthetic__images_from": "other"}, "must be the job id or the absolute"),
        ({"real_and_synthetic__images_from": "./drawn"}, "must be the job id or the absolute"),
    )
    for number, (changes, message) in enumerate(wrong):
        with pytest.raises(ConfigError, match=message):
            start(settings(**changes), f"refused-{number}")
    file = next((drawn / "images").rglob("*.png"))
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(CorruptFileError, match="is missing or corrupt; repeat that run"):
        start(settings(real_and_synthetic__images_from=str(drawn)), "corrupt")
