"""`osfl predict` and `osfl evaluate`: a run's model on images from anywhere."""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.table import Table

from osfl.cli import display
from osfl.config import ConfigError
from osfl.data.partition import DataError
from osfl.inference.loading import load_model
from osfl.inference.prediction import (
    Prediction,
    Unreadable,
    accuracy_of,
    count_confusion,
    find_images,
    find_labeled,
    predict,
)
from osfl.metrics.figures import figures_of_raw
from osfl.metrics.text import figure_text, interval_text
from osfl.run_folder.report.page import MAX_TABLE_CLASSES, class_rows, scores
from osfl.util.devices import pick_device
from osfl.util.files import open_private
from osfl.util.text import sanitize

# Maximum number of unreadable files that are printed
MAX_PRINTED = 20

Write = Callable[[Prediction], None]


def show_predictions(
    file: Path,
    paths: Sequence[str],
    out: Path | None,
    output_format: str,
    device: str,
    batch_size: int,
) -> bool:
    """Write the predictions of images as CSV or JSON lines; return whether all were readable.

    Args:
        file: the model.
        out: None for standard output.
        output_format: csv or jsonl.

    Raises:
        ConfigError, DataError, OSError: the model, a path, an option or the output is unusable.
    """
    if output_format not in _WRITERS:
        raise ConfigError(f"--format = {output_format!r}: must be {' or '.join(_WRITERS)}")
    where = pick_device(device)
    images = find_images(paths)
    model = load_model(file)
    unreadable = []
    with _open_output(out) as stream, display.counting_progress() as bar:
        progress = display.progress_callback(bar, "predicting")
        write = _WRITERS[output_format](stream, model.classes)
        for result in predict(model, images, where, batch_size, progress):
            if isinstance(result, Unreadable):
                unreadable.append(result)
            else:
                write(result)
    return _report_unreadable(unreadable, len(images))


@contextmanager
def _open_output(out: Path | None) -> Iterator[IO[Any]]:
    if out is None:
        yield sys.stdout
        return
    with open_private(out, "w") as stream:
        yield stream


def _csv_writer(stream: IO[Any], classes: Sequence[str]) -> Write:
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(["path", "class", *(f"p({name})" for name in classes)])

    def write(prediction: Prediction) -> None:
        texts = [f"{value:.9g}" for value in prediction.probabilities]
        rows.writerow([_path_text(prediction.file), classes[prediction.label], *texts])

    return write


def _jsonl_writer(stream: IO[Any], classes: Sequence[str]) -> Write:
    def write(prediction: Prediction) -> None:
        rounded = [float(f"{value:.9g}") for value in prediction.probabilities]
        row = {
            "path": _path_text(prediction.file),
            "class": classes[prediction.label],
            "probabilities": dict(zip(classes, rounded, strict=True)),
        }
        stream.write(json.dumps(row) + "\n")

    return write


_WRITERS = {"csv": _csv_writer, "jsonl": _jsonl_writer}


def _path_text(file: Path) -> str:
    """Return a path as text; bytes that are not UTF-8, which cannot be written, become U+FFFD."""
    return os.fsencode(file).decode("utf-8", "replace")


def _report_unreadable(files: Sequence[Unreadable], count: int) -> bool:
    """Name the unreadable files on standard error; return whether there are none."""
    for unreadable in files[:MAX_PRINTED]:
        name = sanitize(unreadable.file, 1000)
        display.print_error(
            DataError(f"{name}: not a readable image ({unreadable.reason})"), display.error_console
        )
    if files:
        display.print_error(
            DataError(f"{len(files):,} of {count:,} files are not readable images"),
            display.error_console,
        )
    return not files


def show_evaluation(
    file: Path, folder: Path, device: str, batch_size: int, specificity: float
) -> bool:
    """Print the report's figures for a labeled folder; return whether all files were readable.

    Args:
        file: the model.
        folder: with images in FOLDER/<class>/.
        specificity: at which the sensitivity is printed.

    Raises:
        ConfigError, DataError, OSError: the model, the folder or the device is unusable.
    """
    where = pick_device(device)
    model = load_model(file)
    images = find_labeled(folder, model.classes)
    files = [image for image, _ in images]
    with display.counting_progress() as bar:
        progress = display.progress_callback(bar, "predicting")
        results = list(predict(model, files, where, batch_size, progress))
    predictions = [result for result in results if isinstance(result, Prediction)]
    labels = [
        label
        for (_, label), result in zip(images, results, strict=True)
        if isinstance(result, Prediction)
    ]
    unreadable = [result for result in results if isinstance(result, Unreadable)]
    if predictions:
        cells = count_confusion(labels, predictions, len(model.classes))
        logits = np.array([row.logits for row in predictions])
        figures = figures_of_raw(logits, np.array(labels), specificity)
        _print_figures(cells, figures, model.classes)
    return _report_unreadable(unreadable, len(files))


def _print_figures(cells: np.ndarray, figures: Mapping[str, Any], classes: Sequence[str]) -> None:
    accuracy = accuracy_of(cells)
    other = scores(cells)
    display.console.print(
        f"accuracy {accuracy.value:.1f} % (95 % interval {accuracy.low:.1f} to "
        f"{accuracy.high:.1f}), {int(cells.sum()):,} images; balanced accuracy "
        f"{other['balanced_accuracy']:.1f} %, macro-F1 {other['macro_f1']:.1f} %",
        highlight=False,
        soft_wrap=True,
    )
    display.console.print(figure_text(figures), highlight=False, soft_wrap=True)
    table = Table("class", "images", "accuracy", "precision", "F1", "most often mistaken for")
    for row in class_rows(cells, classes):
        mistaken = f"{row['mistaken_for']} ({row['mistaken']})" if row["mistaken"] else ""
        shares = (_percent(row[key]) for key in ("accuracy", "precision", "f1"))
        table.add_row(
            display.escape_text(row["name"]),
            f"{row['images']:,}",
            *shares,
            display.escape_text(mistaken),
        )
    display.console.print(table)
    _print_areas(figures, classes)
    if len(classes) <= MAX_TABLE_CLASSES:
        _print_confusion(cells, classes)


def _print_areas(figures: Mapping[str, Any], classes: Sequence[str]) -> None:
    specificity = f"sensitivity at {100 * figures['specificity']:g} %"
    table = Table("class", "AUROC", specificity, title="each class against the others")
    for name, row in zip(classes, figures["classes"], strict=True):
        area = interval_text(row["auroc"], 1, ".3f")
        share = interval_text(row["sensitivity"], 100, ".0f")
        table.add_row(display.escape_text(name), area, share)
    display.console.print(table)


def _print_confusion(cells: np.ndarray, classes: Iterable[str]) -> None:
    names = [display.escape_text(name) for name in classes]
    table = Table("true", *names, title="images by true and predicted class")
    for name, row in zip(names, cells.tolist(), strict=True):
        table.add_row(name, *map(str, row))
    display.console.print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
