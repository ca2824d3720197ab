"""Changes to the files of a kit."""

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

UNET = "unet/diffusion_pytorch_model.safetensors"


def linked(kit: Path, folder: Path) -> Path:
    """A copy whose files are the same until they are written anew."""
    return shutil.copytree(kit, folder, copy_function=os.link)


def rewrite(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def change(kit: Path, file: str, **settings: object) -> None:
    """Other settings in a file of JSON."""
    content = json.loads((kit / file).read_text()) if (kit / file).is_file() else {}
    rewrite(kit / file, json.dumps({**content, **settings}).encode())


def index(kit: Path, missing: bool = False) -> None:
    """The UNet in two shards, by an index; one of them may be gone."""
    weights = load_file(kit / UNET)
    names = sorted(weights)
    first = "diffusion_pytorch_model-00001-of-00002.safetensors"
    second = first.replace("00001-of", "00002-of")
    half = len(names) // 2
    save_file({name: weights[name] for name in names[:half]}, kit / "unet" / first)
    save_file({name: weights[name] for name in names[half:]}, kit / "unet" / second)
    shards = {name: first if number < half else second for number, name in enumerate(names)}
    rewrite(kit / f"{UNET}.index.json", json.dumps({"metadata": {}, "weight_map": shards}).encode())
    (kit / UNET).unlink()
    if missing:
        (kit / "unet" / second).unlink()
