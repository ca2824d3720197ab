"""The report page of a run: `report.html`, a single file that opens offline."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from osfl.run_folder.report import gain, timeline, versions
from osfl.run_folder.report.pictures import gallery_of, matrix_url
from osfl.run_folder.status import split_details
from osfl.util.text import sanitize

# Characters of a setting, or of any other text on the page
MAX_CHARACTERS = 2000
# Rows of a table that is initially open
MAX_OPEN_ROWS = 20
# Models with a column of their own; more are shown by their mean
MAX_COLUMNS = 12
# Classes of a confusion matrix that is shown as a table; a larger one is a picture
MAX_TABLE_CLASSES = 30
MAX_CONFUSIONS = 20
MAX_BARS = 120


def human_bytes(count: float) -> str:
    """Format 1234567 as '1.23 MB' (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError


def human_flops(count: float) -> str:
    """Format 3.2e12 as '3.2 TFLOP'."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return "0" if count == 0 else f"{count:.0f} FLOP"


def human_seconds(count: float) -> str:
    """Format 3725 as '1 h 2 min', 75 as '1 min 15 s', and 7.42 as '7.4 s'."""
    if count < 60:
        return f"{count:.1f} s"
    minutes, seconds = divmod(round(count), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def scores(cells: np.ndarray) -> dict[str, float]:
    """Compute balanced accuracy and macro-F1 in percent, as scikit-learn does.

    The balanced accuracy ignores classes without a test image. Macro-F1 ignores those of them that
    were never predicted.

    Args:
        cells: a confusion matrix, counts of [true class, predicted class].
    """
    correct = np.diag(cells)
    true = cells.sum(axis=1)
    either = true + cells.sum(axis=0)
    if not either.any():
        return {"balanced_accuracy": 0.0, "macro_f1": 0.0}
    recall = correct[true > 0] / true[true > 0]
    f1 = 2 * correct[either > 0] / either[either > 0]
    return {"balanced_accuracy": 100 * float(recall.mean()), "macro_f1": 100 * float(f1.mean())}


def compile_page(template: str) -> Any:
    """Compile a jinja2 template whose texts are sanitized and escaped."""
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    page.filters.update(bytes=human_bytes, flops=human_flops, seconds=human_seconds)
    page.filters.update(split_details=split_details, interval=gain.interval_text)
    return page.from_string(template)


@cache
def _page() -> Any:
    from osfl.run_folder.report.template import TEMPLATE

    return compile_page(TEMPLATE)


def _shown(value: Any) -> Any:
    """Sanitize a text for the page. Data URLs of pictures are not `str`, and stay as they are."""
    return sanitize(value, MAX_CHARACTERS) if type(value) is str else value


def render(
    folder: Path,
    metrics: Mapping[str, Any],
    classes: Sequence[str],
    manifest: Iterable[str],
    curves: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render the page.

    Args:
        folder: the run's folder.
        metrics: the result of `gather`.
        classes: the run's class names.
        manifest: the lines of `manifest.jsonl`.
        curves: the result of `curves_of`.
    """
    return str(
        _page().render(
            m=metrics,
            classes=classes,
            most_open=MAX_OPEN_ROWS,
            columns=_columns(metrics),
            clients=_clients(metrics),
            gallery=gallery_of(folder, manifest, classes),
            curves=curves,
            upload=sum(costs.get("upload_bytes", 0) for costs in metrics["clients"].values()),
            total_seconds=sum(phase["seconds"] for phase in metrics["phases"]),
            rounds=_rounds(metrics["round_seconds"]),
            **_by_class(metrics, classes),
            **gain.section_values(metrics["gain"]),
            **timeline.section_values(metrics["timeline"]),
            **versions.section_values(metrics),
        )
    )


def _columns(metrics: Mapping[str, Any]) -> list[str]:
    models = list(metrics["accuracy"])
    return models if len(models) <= MAX_COLUMNS else [f"mean of {len(models)} models"]


def _clients(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each client: its test images, and each model's accuracy on them."""
    rows = []
    for client in metrics["clients"]:
        accuracy = [by_client.get(client) for by_client in metrics["accuracy"].values()]
        if len(accuracy) > MAX_COLUMNS:
            tested = [value for value in accuracy if value is not None]
            accuracy = [float(np.mean(tested)) if tested else None]
        matrices = [matrix[client] for matrix in metrics["confusion"].values() if client in matrix]
        row = {"name": client, "accuracy": accuracy}
        row["images"] = int(np.sum(matrices[0])) if matrices else "–"
        matrix = metrics["confusion"].get(metrics["shown"], {}).get(client)
        client_scores = scores(np.array(matrix)) if matrix is not None else {}
        row["balanced_accuracy"] = client_scores.get("balanced_accuracy")
        row["macro_f1"] = client_scores.get("macro_f1")
        rows.append(row)
    return rows


def _by_class(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the template's values about classes, for the shown model; {} without one."""
    if not metrics["shown"]:
        return {}
    matrices = metrics["confusion"][metrics["shown"]].values()
    cells = np.sum([np.array(matrix) for matrix in matrices], axis=0)
    shares = 100 * cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    values: dict[str, Any] = {"by_class": class_rows(cells, classes)}
    if len(cells) > MAX_TABLE_CLASSES:
        values["confusion_map"] = matrix_url(shares)
        values["mistakes"] = _mistakes(cells, shares, classes)
    else:
        rounded = shares.round().astype(int).tolist()
        values["confusion"] = [
            list(zip(*rows, strict=True)) for rows in zip(cells.tolist(), rounded, strict=True)
        ]
    return values


def class_rows(cells: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each class, by increasing accuracy; those without a test image come last."""
    correct = np.diagonal(cells)
    images = cells.sum(axis=1)
    predicted = cells.sum(axis=0)
    errors = cells - np.diag(correct)
    rows = []
    for label, name in enumerate(classes[: len(cells)]):
        worst = int(errors[label].argmax())
        total = images[label] + predicted[label]
        row: dict[str, Any] = {"name": name, "images": int(images[label])}
        row["accuracy"] = 100 * correct[label] / images[label] if images[label] else None
        row["precision"] = 100 * correct[label] / predicted[label] if predicted[label] else None
        row["f1"] = 200 * correct[label] / total if total else None
        row["mistaken"] = int(errors[label, worst])
        row["mistaken_for"] = classes[worst] if row["mistaken"] and worst < len(classes) else ""
        rows.append(row)
    rows.sort(key=lambda row: (row["accuracy"] is None, row["accuracy"] or 0.0))
    return rows


def _mistakes(
    cells: np.ndarray, shares: np.ndarray, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the pairs of classes that are confused most often."""
    errors = cells - np.diag(np.diagonal(cells))
    order = np.argsort(-errors, axis=None, kind="stable")[:MAX_CONFUSIONS]
    return [
        {
            "true": classes[true],
            "predicted": classes[predicted],
            "images": int(errors[true, predicted]),
            "share": float(shares[true, predicted]),
        }
        for true, predicted in zip(*np.unravel_index(order, errors.shape), strict=True)
        if errors[true, predicted]
    ]


def _rounds(seconds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a bar for each round, or for several consecutive rounds if there are many."""
    rounds_per_bar = -(-len(seconds) // MAX_BARS)
    bars = []
    for start in range(0, len(seconds), rounds_per_bar or 1):
        rounds = seconds[start : start + rounds_per_bar]
        mean = float(np.mean([duration["seconds"] for duration in rounds]))
        first = rounds[0]["round"]
        last = rounds[-1]["round"]
        name = f"round {first}" if len(rounds) == 1 else f"rounds {first}-{last}"
        title = f"{name}: {human_seconds(mean)}"
        bars.append({"first": first, "last": last, "seconds": mean, "title": title})
    longest = max((bar["seconds"] for bar in bars), default=0.0) or 1.0
    return [{**bar, "height": 100 * bar["seconds"] / longest} for bar in bars]
