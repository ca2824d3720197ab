"""Data sets as folders of images."""

from dataclasses import replace

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
