"""Data sets as folders of images."""

from dataclasses import replace
from pathlib import Path

from PIL import Image

from osfl.config import NodeConfig, parse_run_config
from tests.helpers.settings import defaults

DIGITS = parse_run_config(defaults()).data
FOLDER = replace(DIGITS, name="folder", classes="cat,dog", image_size=16)


def make_folder(root, **classes: list[Image.Image]):  # type: ignore[no-untyped-def]
    for name, images in classes.items():
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for index, image in enumerate(images):
            image.save(folder / f"{index}.png")
    return NodeConfig(client_id="site", data_dir=str(root))


def grey(file: Path, level: int) -> None:
    """Write a small image of one grey level."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level, level, level)).save(file)
