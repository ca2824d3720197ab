"""Run folders with confusion matrices, or with images."""

import json
from pathlib import Path

import torch
from PIL import Image

from osfl.run_folder.layout import image_digest
from osfl.settings import default_config

TWO_NAMES = ("cat", "dog")


def run_folder(folder: Path, tests: dict[str, dict], **config: object) -> Path:
    (folder / "tests").mkdir(parents=True)
    settings = {**default_config(), "method": "fedlmg", **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "status.json").write_text(json.dumps({"phase": "finished", "clients": {}}))
    for name, matrices in tests.items():
        (folder / "tests" / f"{name}.json").write_text(json.dumps(matrices))
    return folder


def make_run_of_colors(folder: Path) -> Path:
    """Write ten images of two clients and classes, each of another color, and their manifest."""
    rows = []
    for number in range(10):
        picture = torch.full((3, 8, 8), 20 * number, dtype=torch.uint8)
        client = f"site-{number % 2}"
        label = number // 5
        file = f"images/{client}/{label:03d}-{TWO_NAMES[label]}/{number:05d}.png"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / file)
        row = {
            "file": file,
            "client": client,
            "class": TWO_NAMES[label],
            "seed": number,
            "sha256": image_digest(picture),
        }
        rows.append(json.dumps(row) + "\n")
    (folder / "manifest.jsonl").write_text("".join(rows))
    return folder
