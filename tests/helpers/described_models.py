"""Models of runs whose outputs differ between real digits, and files of these digits."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from osfl.config import parse_run_config
from osfl.data.digits import load_split
from osfl.inference.description import describe
from osfl.models.classifiers import apply_rule, build_classifier, input_rule, linear_head
from osfl.run_folder.layout import open_run_folder
from osfl.util.pixels import to_float
from tests.helpers.settings import quick


def digit_files(
    folder: Path, count: int = 12, side: int = 32, height: int | None = None
) -> list[Path]:
    """Write test digits of several classes and domains as PNG, square without a height."""
    split = load_split("test")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        image = Image.fromarray(split.images[number * len(split.images) // count])
        files.append(folder / f"{number:02d}.png")
        image.resize((side, height or side)).save(files[-1])
    return files


def stored_model(
    root: Path, architecture: str, small_stem: bool = False, side: int = 32, **settings: Any
) -> Path:
    """Store a classifier of digits in a run's folder; return its file.

    Its weights are random. BatchNorm has the statistics of test digits, and the logits vary by
    about 0.1 between digits and classes.
    """
    values = {"runs-dir": str(root / "runs"), "data.image-size": side, **settings}
    values |= {"global-model.architecture": architecture, "global-model.init": "none"}
    values |= {"global-model.small-stem": small_stem}
    config = parse_run_config({**quick(), **values})
    torch.manual_seed(0)
    model = build_classifier(architecture, 10, small_stem)
    split = load_split("test")
    pixels = torch.from_numpy(split.images[::60]).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(to_float(pixels), (side, side))
    images = apply_rule(resized, input_rule(model))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(images)
        head = linear_head(model)
        # ViT's head begins with zeros
        head.weight.normal_()
        head.weight *= 0.1 / model.eval()(images).std(dim=0).mean()
        head.bias.copy_(head.bias - model(images).mean(dim=0))
    run = open_run_folder(config, "job", 0)
    description = describe(config, "job", "FT", config.global_model, model)
    run.store_model("FT", model.state_dict(), {"seconds": 1.0}, description.metadata())
    return run.model_files()[0]
