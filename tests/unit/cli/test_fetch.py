"""`osfl fetch` of the weights that classifiers begin with."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from osfl.cli.main import app as cli

FOLDERS = ("data.name=folder", "data.classes=cat,dog", "kit=/models/mine")


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (("method=fedcgs", "classifier.init=imagenet"), {"classifier.init"}),
        (("method=local", "classifier.init=imagenet"), {"classifier.init"}),
        (("method=ceiling", "global-model.init=imagenet"), {"global-model.init"}),
        (("method=fedcgs", "classifier.init=none"), set()),
    ],
)
def test_imagenets_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], keys: set[str]
) -> None:
    """Weights that are here are not fetched again, and their folder is printed."""
    from torchvision.models import get_model_weights

    monkeypatch.setattr("osfl.cli.display.console._width", 300)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    url = get_model_weights("resnet18").DEFAULT.url
    (folder / url.rpartition("/")[2]).write_bytes(b"x" * 1500)
    result = CliRunner().invoke(cli, ["fetch", *FOLDERS, *settings])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "imagenet: resnet18" in line]
    assert len(rows) == len(keys)
    assert all(key in rows[0] and str(folder) in rows[0] for key in keys)
