"""Whole runs with a kit whose autoencoder is a tiny one (TAESD), which has no posterior."""

from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["prompts-only", "feddeo", "espresso", "fedbip", "domain-vector"]
)
def test_a_run_with_a_tiny_autoencoder_trains_a_model(
    home: Path, tiny_autoencoder_kit: Path, method: str
) -> None:
    start(quick(method=method, kit=str(tiny_autoencoder_kit), data__image_size=32))
    images = sorted((home / "runs" / "job" / "images").rglob("*.png"))
    assert len(images) == metrics(home)["server"]["synthetic_images"] == 20
    assert Image.open(images[0]).size == (32, 32)
