"""Plot a table: accuracy against communication."""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from osfl.tables.records import group_by_row
from osfl.util.files import write_atomically

MARKERS = "osD^vP*X"
COLORS = 10
# The records that the x axis of each panel sums
PANELS = {
    "uploaded": ("upload_bytes",),
    "uploaded and downloaded": ("upload_bytes", "download_bytes"),
}


# Diameter in points of a ResNet-18's marker, and its bytes: the area grows with a model's bytes
MARKER = 8.0
MARKER_BYTES = 44.7e6
MARKER_LIMITS = (4.0, 32.0)
# Share of the lowest decade that the axis needs for 0
ZERO_WIDTH = 0.6


def plot(records: list[dict[str, Any]], file: Path) -> None:
    """Plot accuracy against bytes per client: uploaded (left), and in both directions (right).

    The x axes are logarithmic, with 0 at their start where a row sends nothing. A marker's area is
    that of the final model's bytes. On the right, rows are missing whose clients need a kit of
    unknown size. A line joins the rows that no other row dominates. Rows that only stand for
    comparison (the centralized upper bound) are dashed lines if they upload nothing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6))
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (title, keys) in zip(panels, PANELS.items(), strict=True):
        points = []
        for number, (name, group) in enumerate(group_by_row(records).items()):
            point = _draw_row(panel, group, keys, name, number)
            points += [point] if point and not group[0].get("is_reference") else []
        _scale(panel, [size for size, _ in points])
        best = frontier(points)
        sizes = [size for size, _ in best]
        panel.plot(sizes, [mean for _, mean in best], drawstyle="steps-post", color="0.6", zorder=0)
        panel.set(xlabel=f"bytes per client, {title}")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("average top-1 accuracy (%)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False
    )
    figure.tight_layout()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120, bbox_inches="tight")
    write_atomically(file, png.getvalue())


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (bytes, accuracy) above all points of at most their bytes, by bytes."""
    best: list[tuple[float, float]] = []
    for size, mean in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or mean > best[-1][1]:
            best.append((size, mean))
    return best


def _scale(panel: Any, sizes: list[float]) -> None:
    """Set a logarithmic axis; with 0 at its start if a row sends nothing."""
    positive = [size for size in sizes if size > 0]
    if positive and 0 in sizes:
        lowest = 10 ** math.floor(math.log10(min(positive)))
        panel.set_xscale("symlog", linthresh=lowest, linscale=ZERO_WIDTH)
        panel.set_xlim(left=-0.1 * lowest)
        return
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    # For rows of about the same size, the axis spans a decade instead of their last digits
    if high < 10 * low:
        panel.set_xlim((low * high / 10) ** 0.5, (low * high * 10) ** 0.5)


def _draw_row(
    panel: Any, group: list[dict[str, Any]], keys: tuple[str, ...], name: str, number: int
) -> tuple[float, float] | None:
    """Draw one row of a table: a point with its standard deviation over seeds, or a line.

    Returns:
        the point's bytes and accuracy; None for a line, or for a row whose kit's bytes are unknown.
    """
    if "download_bytes" in keys and any(record.get("kit_not_counted") for record in group):
        return None
    averages = [record["average"] for record in group]
    mean = float(np.mean(averages))
    style = {"color": f"C{number % COLORS}", "label": name}
    if group[0].get("is_reference") and not any(record["upload_bytes"] for record in group):
        panel.axhline(mean, linestyle="--", linewidth=1.2, **style)
        return None
    size = sum(float(np.mean([record[key] for record in group])) for key in keys)
    deviation = np.std(averages, ddof=1) if len(averages) > 1 else 0
    marker = MARKERS[number // COLORS % len(MARKERS)]
    diameter = marker_size(group[0].get("model_bytes"))
    panel.errorbar(size, mean, deviation, fmt=marker, capsize=3, markersize=diameter, **style)
    return size, mean


def marker_size(model_bytes: float | None) -> float:
    """Return a marker's diameter in points, whose square grows with the model's bytes."""
    if not model_bytes:
        return MARKER
    low, high = MARKER_LIMITS
    return min(max(MARKER * math.sqrt(model_bytes / MARKER_BYTES), low), high)
