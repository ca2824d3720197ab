"""A described model of three classes, whose order is not alphabetical."""

from pathlib import Path

import pytest
import torch

from osfl.config import RunConfig, parse_run_config
from osfl.inference.description import ModelDescription, describe
from osfl.models.classifiers import build_classifier
from osfl.run_folder.layout import RunFolder, open_run_folder
from tests.helpers.settings import quick

CLASSES = ("zebra", "ant", "cat")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    settings: dict = {"data.name": "folder", "data.root": str(tmp_path), "method": "ceiling"}
    settings["data.classes"] = ",".join(CLASSES)
    settings |= {"runs-dir": str(tmp_path / "runs"), "global-model.init": "none"}
    settings |= {"data.image-size": 16, "global-model.small-stem": True}
    return parse_run_config({**quick(), **settings})


@pytest.fixture
def description(config: RunConfig) -> ModelDescription:
    return describe(config, "job", "FT", config.global_model)


@pytest.fixture
def run(config: RunConfig) -> RunFolder:
    return open_run_folder(config, "job", 0)


@pytest.fixture
def state(config: RunConfig) -> dict[str, torch.Tensor]:
    """Weights whose outputs differ between images and classes, by about 0.5."""
    torch.manual_seed(1)
    model = build_classifier(config.global_model.architecture, 3, True).eval()
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            value.fill_(0.3)
    colors = 2 * torch.randn(32, 3, 1, 1) + torch.randn(32, 3, 16, 16) / 5
    with torch.no_grad():
        logits = model(colors)
        model.fc.bias -= logits.mean(dim=0)
        model.fc.weight /= 2 * logits.std()
        model.fc.bias /= 2 * logits.std()
    return model.state_dict()


@pytest.fixture
def model_file(run: RunFolder, state: dict, description: ModelDescription) -> Path:
    run.store_model("FT", state, {"inputs": "0", "seconds": 1.0}, description.metadata())
    (file,) = run.model_files()
    return file
