"""Predict the classes of image files, and evaluate predictions of labeled folders."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from osfl.data.columns import normalize_name
from osfl.data.partition import DataError
from osfl.data.parts import class_folders, files_below
from osfl.inference.loading import TrainedModel
from osfl.metrics.figures import wilson_interval
from osfl.util.text import sanitize


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for a file.

    Attributes:
        file: the image.
        label: index of the most probable class.
        probabilities: of every class, in the model's order; their sum is 1.
        logits: the model's outputs, which tell images apart whose probabilities are all 1.
    """

    file: Path
    label: int
    probabilities: tuple[float, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True)
class Unreadable:
    """A file that is not a readable image.

    Attributes:
        file: the file.
        reason: why it cannot be read.
    """

    file: Path
    reason: str


def find_images(paths: Sequence[str]) -> list[Path]:
    """List the files that paths name, each once: files, all files below folders, and globs.

    Raises:
        DataError: a path names no file.
    """
    files: dict[Path, None] = {}
    for path in paths:
        matches = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
        images = [file for match in matches for file in _files_of(Path(match))]
        if not images:
            problem = "has no files" if matches else "no such file or folder"
            raise DataError(f"{sanitize(path, 1000)}: {problem}; set PATHS to images or folders")
        files.update(dict.fromkeys(images))
    return list(files)


def _files_of(path: Path) -> list[Path]:
    return list(files_below(path)) if path.is_dir() else [path]


def find_labeled(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """List (file, label) of all files in FOLDER/<class>/ and its subfolders.

    Raises:
        DataError: there are none, or a folder is not one of the classes.
    """
    if not folder.is_dir():
        raise DataError(f"{sanitize(folder, 1000)}: no such folder; set FOLDER to one of classes")
    folders = class_folders(
        folder,
        classes,
        "the model's classes",
        "rename or remove it, or use a model that has this class",
    )
    images = []
    for label, name in enumerate(classes):
        if normalize_name(name) in folders:
            images += [(file, label) for file in files_below(folders[normalize_name(name)])]
    if not images:
        raise DataError(
            f"{sanitize(folder, 1000)}: no images; it must have folders named after the classes "
            f"({sanitize(', '.join(classes), 500)})"
        )
    return images


def predict(
    model: TrainedModel,
    files: Sequence[Path],
    device: torch.device,
    batch_size: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Prediction | Unreadable]:
    """Yield a prediction for every file, in order, or the reason why it cannot be read.

    Args:
        progress: called with (files finished, all files).
    """
    module = model.module.to(device).eval()
    progress(0, len(files))
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), batch_size):
            batch = files[start : start + batch_size]
            results = list(pool.map(lambda file: _decode(model, file), batch))
            pictures = [picture for picture in results if isinstance(picture, torch.Tensor)]
            rows = iter(_logits(model, module, pictures, device))
            for file, picture in zip(batch, results, strict=True):
                if isinstance(picture, str):
                    yield Unreadable(file, picture)
                else:
                    yield _prediction(file, next(rows))
            progress(start + len(batch), len(files))


def _prediction(file: Path, logits: torch.Tensor) -> Prediction:
    probabilities = F.softmax(logits, dim=0)
    label = int(logits.argmax())
    return Prediction(file, label, tuple(probabilities.tolist()), tuple(logits.tolist()))


def _decode(model: TrainedModel, file: Path) -> torch.Tensor | str:
    """Return an image's pixels, or why it cannot be read."""
    try:
        return model.transform.pixels(file)
    # For corrupt files Pillow raises many kinds of errors, such as struct.error or IndexError
    except Exception as error:
        return sanitize(error) or type(error).__name__


@torch.inference_mode()
def _logits(
    model: TrainedModel,
    module: torch.nn.Module,
    pictures: list[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the logits [B, C] of decoded images on the CPU."""
    if not pictures:
        return torch.zeros(0, len(model.classes))
    inputs = model.transform.normalize(torch.stack(pictures).to(device))
    logits: torch.Tensor = module(inputs)
    return logits.float().cpu()


@dataclass(frozen=True)
class Accuracy:
    """A share of images in percent, with its 95 % interval (Wilson)."""

    value: float
    low: float
    high: float


def count_confusion(
    labels: Sequence[int], predictions: Sequence[Prediction], num_classes: int
) -> np.ndarray:
    """Return the confusion matrix: counts of [true class, predicted class]."""
    cells = np.zeros((num_classes, num_classes), dtype=np.int64)
    for label, prediction in zip(labels, predictions, strict=True):
        cells[label, prediction.label] += 1
    return cells


def accuracy_of(cells: np.ndarray) -> Accuracy:
    """Compute the top-1 accuracy of a confusion matrix with at least one image (Wilson 1927)."""
    correct = int(np.trace(cells))
    images = int(cells.sum())
    low, high = wilson_interval(correct, images)
    return Accuracy(100 * correct / images, 100 * low, 100 * high)
