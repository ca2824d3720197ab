"""Folders of clients with images of random pixels, and the settings of a run on them."""

from pathlib import Path
from typing import Any

from PIL import Image

from tests.helpers.analytic import CLASSES, random_pixels


def save_images(folder: Path, count: int, seed: int) -> None:
    """Write images of 16 pixels, alternately of the four classes, below a folder."""
    for row, pixels in enumerate(random_pixels(count, 16, seed=seed)):
        file = folder / CLASSES[(row + seed) % 4] / f"{row:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)


def save_clients(root: Path, *counts: int) -> Path:
    """Write and return a folder of clients, with `counts` training images and 24 to test on."""
    for number, count in enumerate(counts):
        save_images(root / f"client-{number}" / "train", count, number)
        save_images(root / f"client-{number}" / "test", 24, number + 2)
    return root


def folder_settings(root: Path) -> dict[str, Any]:
    """Return the settings of an upper bound on folders, from random weights."""
    return {
        "method": "ceiling",
        "data__name": "folder",
        "data__root": str(root),
        "data__classes": ",".join(CLASSES),
        "global_model__init": "none",
    }
