"""The page of a run for people: `report.html`, one file that opens offline."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from osfl.run_folder.report.pictures import gallery_of, matrix_url
from osfl.run_folder.status import split_details
from osfl.util.text import plain

MOST_WORDS = 2000  # characters of a setting, or of any other text on the page
MOST_OPEN = 20  # rows of a table that is open from the start
MOST_COLUMNS = 12  # models beside each other; of more, their mean
MOST_TABLED = 30  # classes of a confusion matrix that is a table; of more, it is a picture
MOST_MISTAKES = 20
MOST_BARS = 120


def human_bytes(count: float) -> str:
    """1234567 to '1.23 MB' (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError


def human_flops(count: float) -> str:
    """3.2e12 to '3.2 TFLOP'."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return "0" if count == 0 else f"{count:.0f} FLOP"


def human_seconds(count: float) -> str:
    """3725 to '1 h 2 min', 75 to '1 min 15 s', 7.42 to '7.4 s'."""
    if count < 60:
        return f"{count:.1f} s"
    minutes, seconds = divmod(round(count), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def scores(cells: np.ndarray) -> dict[str, float]:
    """Balanced accuracy and macro-F1 in percent, as scikit-learn computes them.

    Args:
        cells: a confusion matrix, counts of [true class, predicted class]. Classes without a test
            image do not count in the balanced accuracy; those that nobody predicted either do not
            count in macro-F1.
    """
    from sklearn.metrics import balanced_accuracy_score, f1_score

    true, predicted = np.nonzero(cells)
    if not len(true):
        return {"balanced_accuracy": 0.0, "macro_f1": 0.0}
    images = cells[true, predicted]
    with warnings.catch_warnings():
        # scikit-learn warns of predicted classes that have no test image, and leaves them out
        warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
        balanced = balanced_accuracy_score(true, predicted, sample_weight=images)
    macro = f1_score(true, predicted, average="macro", sample_weight=images, zero_division=0)
    return {"balanced_accuracy": 100 * float(balanced), "macro_f1": 100 * float(macro)}


@cache
def _page() -> Any:
    from jinja2 import Environment

    from osfl.run_folder.report.template import TEMPLATE

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    page.filters.update(bytes=human_bytes, flops=human_flops, seconds=human_seconds)
    page.filters.update(split_details=split_details)
    return page.from_string(TEMPLATE)


def _shown(value: Any) -> Any:
    """What the page shows of a value: plain words, but for what is marked as safe (pictures)."""
    return plain(value, MOST_WORDS) if type(value) is str else value


def render(
    folder: Path, metrics: Mapping[str, Any], classes: Sequence[str], manifest: Sequence[str]
) -> str:
    """The page.

    Args:
        metrics: what `gather` gives.
        classes: the run's class names.
        manifest: the lines of `manifest.jsonl`.
    """
    phases = _timeline(metrics["phases"])
    return str(
        _page().render(
            m=metrics,
            classes=classes,
            most_open=MOST_OPEN,
            columns=_columns(metrics),
            clients=_clients(metrics),
            gallery=gallery_of(folder, manifest, classes),
            upload=sum(about.get("upload_bytes", 0) for about in metrics["clients"].values()),
            phases=phases,
            total_seconds=sum(phase["seconds"] for phase in phases),
            rounds=_rounds(metrics["round_seconds"]),
            **_by_class(metrics, classes),
        )
    )


def _columns(metrics: Mapping[str, Any]) -> list[str]:
    models = list(metrics["accuracy"])
    return models if len(models) <= MOST_COLUMNS else [f"mean of {len(models)} models"]


def _clients(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each client: its test images, and each model's accuracy on them."""
    rows = []
    for client in metrics["clients"]:
        found = [by_client.get(client) for by_client in metrics["accuracy"].values()]
        if len(found) > MOST_COLUMNS:
            known = [value for value in found if value is not None]
            found = [float(np.mean(known)) if known else None]
        matrices = [matrix[client] for matrix in metrics["confusion"].values() if client in matrix]
        row = {"name": client, "accuracy": found}
        row["images"] = int(np.sum(matrices[0])) if matrices else "–"
        shown = metrics["confusion"].get(metrics["shown"], {}).get(client)
        tested = scores(np.array(shown)) if shown is not None else {}
        row["balanced_accuracy"] = tested.get("balanced_accuracy")
        row["macro_f1"] = tested.get("macro_f1")
        rows.append(row)
    return rows


def _by_class(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """What the page says of classes, by the shown model; nothing where no model is shown."""
    if not metrics["shown"]:
        return {}
    matrices = metrics["confusion"][metrics["shown"]].values()
    cells = np.sum([np.array(matrix) for matrix in matrices], axis=0)
    shares = 100 * cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    found: dict[str, Any] = {"by_class": _class_rows(cells, classes)}
    if len(cells) > MOST_TABLED:
        found["confusion_map"] = matrix_url(shares)
        found["mistakes"] = _mistakes(cells, shares, classes)
    else:
        rounded = shares.round().astype(int).tolist()
        found["confusion"] = [
            list(zip(*rows, strict=True)) for rows in zip(cells.tolist(), rounded, strict=True)
        ]
    return found


def _class_rows(cells: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each class, the weakest first; those without a test image last."""
    right = np.diagonal(cells)
    images = cells.sum(axis=1)
    predicted = cells.sum(axis=0)
    wrong = cells - np.diag(right)
    rows = []
    for label, name in enumerate(classes[: len(cells)]):
        other = int(wrong[label].argmax())
        both = images[label] + predicted[label]
        row: dict[str, Any] = {"name": name, "images": int(images[label])}
        row["accuracy"] = 100 * right[label] / images[label] if images[label] else None
        row["precision"] = 100 * right[label] / predicted[label] if predicted[label] else None
        row["f1"] = 200 * right[label] / both if both else None
        row["taken"] = int(wrong[label, other])
        row["taken_for"] = classes[other] if row["taken"] and other < len(classes) else ""
        rows.append(row)
    rows.sort(key=lambda row: (row["accuracy"] is None, row["accuracy"] or 0.0))
    return rows


def _mistakes(
    cells: np.ndarray, shares: np.ndarray, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """The pairs of classes that are confused most often."""
    wrong = cells - np.diag(np.diagonal(cells))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_MISTAKES]
    return [
        {
            "true": classes[true],
            "predicted": classes[predicted],
            "images": int(wrong[true, predicted]),
            "share": float(shares[true, predicted]),
        }
        for true, predicted in zip(*np.unravel_index(order, wrong.shape), strict=True)
        if wrong[true, predicted]
    ]


def _timeline(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each phase lies, in percent of the whole time."""
    total = sum(phase["seconds"] for phase in phases) or 1.0
    rows = []
    left = 0.0
    for phase in phases:
        width = 100 * phase["seconds"] / total
        rows.append({**phase, "left": min(left, 99.5), "width": width})
        left += width
    return rows


def _rounds(seconds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A bar for each round, or for a few of them where they are many."""
    together = -(-len(seconds) // MOST_BARS)
    bars = []
    for first in range(0, len(seconds), together or 1):
        part = seconds[first : first + together]
        mean = float(np.mean([one["seconds"] for one in part]))
        bar = {"first": part[0]["round"], "last": part[-1]["round"], "seconds": mean}
        name = f"round {bar['first']}" if len(part) == 1 else f"rounds {bar['first']}-{bar['last']}"
        bars.append({**bar, "title": f"{name}: {human_seconds(mean)}"})
    longest = max((bar["seconds"] for bar in bars), default=0.0) or 1.0
    return [{**bar, "height": 100 * bar["seconds"] / longest} for bar in bars]
