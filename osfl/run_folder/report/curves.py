"""Discrimination and calibration in the report: figures of the clients' histograms, and plots."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from osfl.metrics.figures import (
    SPECIFICITY,
    ConfidenceBin,
    figures_of,
    reliability,
    roc_curve,
)
from osfl.metrics.histograms import ScoreHistograms, pool
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.model_store import ADAPTED
from osfl.run_folder.report.senders import partial_senders, senders_text

# Lines in one plot
MAX_LINES = 12
# Images of a bin of a reliability diagram; the share of fewer is mostly chance
MIN_PLOTTED_IMAGES = 10
# Pixels of a plot: its side, and the space for the labels at the left and below
SIDE = 250
LEFT = 46
BOTTOM = 40
GRID = np.linspace(0, 1, 101)

Points = list[tuple[float, float]]


def read_figures(run: RunFolder, config: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """Compute the figures of all tests with histograms, by model.

    Args:
        config: the flat run-config; an older one has no `test-specificity`.
        suffix: follows a model's name, for the clients' personalized models.

    Returns:
        `clients`: figures by client (`osfl.metrics.figures`), without those of the classes.
        `together`: figures of all of them.
    """
    specificity = float(config.get("test-specificity", SPECIFICITY))
    figures = {}
    for file in run.test_files():
        if histograms := run.stored_histograms(file.stem):
            clients = {name: figures_of(each, specificity) for name, each in histograms.items()}
            for row in clients.values():
                del row["classes"]
            together = figures_of(pool([*histograms.values()]), specificity)
            name = file.stem.replace(ADAPTED, suffix)
            figures[name] = {"clients": clients, "together": together}
    return figures


def curves_of(
    run: RunFolder, metrics: Mapping[str, Any], classes: Sequence[str], suffix: str
) -> list[dict[str, Any]]:
    """Return the template's values for each global model with figures, the shown one first.

    Args:
        suffix: as for `read_figures`.
    """
    if not metrics["shown"]:
        return []
    curves = []
    for name, figures in metrics["figures"].items():
        histograms = run.stored_histograms(name.replace(suffix, ADAPTED))
        senders = senders_text(partial_senders(metrics, name))
        rows = [{"name": senders, **figures["together"]}]
        rows += [{"name": client, **row} for client, row in figures["clients"].items()]
        by_class = [
            {"name": label, **row}
            for label, row in zip(classes, figures["together"]["classes"], strict=False)
        ]
        curves.append(
            {
                "name": name,
                "senders": senders,
                "rows": rows,
                "classes": by_class,
                # Rounded up, as it is a bound
                "bound": np.ceil(1e4 * figures["together"]["binning_error"]) / 1e4,
                "positive": classes[1] if len(classes) == 2 else "",
                **_plots(histograms, senders),
            }
        )
    return sorted(curves, key=lambda curve: curve["name"] != metrics["shown"])


def _plots(histograms: Mapping[str, ScoreHistograms], senders: str) -> dict[str, Any]:
    """Return both plots and their legend: all senders together, then each of the first few."""
    together = pool([*histograms.values()])
    shown = dict(sorted(histograms.items())[:MAX_LINES])
    colors = {name: color_of(number, len(shown)) for number, name in enumerate(shown)}
    roc = [line_of(macro_roc(each), colors[name], name) for name, each in shown.items()]
    lines = [
        line_of(_reliability_points(each), colors[name], name, dots=True)
        for name, each in shown.items()
    ]
    roc.append(line_of(macro_roc(together), "", senders))
    lines += [_whiskers(together)]
    lines += [line_of(_reliability_points(together), "", senders, dots=True)]
    return {
        "roc": _plot(roc, "1 − specificity", "sensitivity", "ROC curves"),
        "reliability": _plot(lines, "confidence", "accuracy", "reliability diagram"),
        "legend": colors,
        "unplotted": len(histograms) - len(shown),
        "least": MIN_PLOTTED_IMAGES,
    }


def macro_roc(histograms: ScoreHistograms) -> Points:
    """Average the ROC curves of all classes vertically, which averages their areas.

    Of two classes, whose curves mirror each other, it is that of the second.
    """
    pairs = [pair for pair in histograms.pairs() if pair[0].any() and pair[1].any()]
    if len(histograms.positives) == 2:
        pairs = pairs[-1:]
    curves = []
    for pair in pairs:
        false, true = roc_curve(*pair)
        # The highest point above each rate
        rates, first = np.unique(false[::-1], return_index=True)
        curves.append(np.interp(GRID, rates, true[::-1][first]))
    if not curves:
        return []
    return [(0.0, 0.0), *zip(GRID.tolist(), np.mean(curves, axis=0).tolist(), strict=True)]


def _reliability_points(histograms: ScoreHistograms) -> Points:
    return [(row.confidence, row.accuracy.value) for row in _plotted_bins(histograms)]


def _plotted_bins(histograms: ScoreHistograms) -> list[ConfidenceBin]:
    bins = reliability(histograms.confidence)
    return [row for row in bins if row.images >= MIN_PLOTTED_IMAGES]


# ---- SVG ----


def color_of(number: int, count: int) -> str:
    """Return the color of a line, one of `count`."""
    return f"hsl({360 * number // count} 60% 55%)"


def x_of(value: float) -> str:
    """Return the coordinate of a value from 0 (left) to 1."""
    return f"{LEFT + SIDE * value:.1f}"


def y_of(value: float) -> str:
    """Return the coordinate of a value from 0 (below) to 1."""
    return f"{8 + SIDE * (1 - value):.1f}"


def line_of(points: Points, color: str, name: str, dots: bool = False) -> str:
    """Draw a line; that of all senders together has no color of its own."""
    style = Markup('style="stroke:{}"').format(color) if color else Markup('class="all"')
    where = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in points)
    line = Markup('<polyline {} points="{}"><title>{}</title></polyline>')
    marks = [
        Markup('<circle {} cx="{}" cy="{}" r="2"/>').format(style, x_of(x), y_of(y))
        for x, y in (points if dots else ())
    ]
    return line.format(style, where, name) + Markup("").join(marks)


def _whiskers(histograms: ScoreHistograms) -> str:
    """Draw the intervals of a reliability diagram's accuracies."""
    bars = [
        Markup('<path class="all" d="M{} {}V{}"/>').format(
            x_of(row.confidence), y_of(row.accuracy.low), y_of(row.accuracy.high)
        )
        for row in _plotted_bins(histograms)
    ]
    return Markup("").join(bars)


def _plot(lines: Iterable[str], across: str, up: str, title: str) -> Markup:
    """Draw axes from 0 to 1 with their diagonal, and lines."""
    ticks = []
    for value in (0.0, 0.5, 1.0):
        ticks += [
            Markup('<text x="{}" y="{}" text-anchor="middle">{:g}</text>').format(
                x_of(value), SIDE + 24, value
            ),
            Markup('<text x="{}" y="{}" text-anchor="end">{:g}</text>').format(
                LEFT - 6, f"{8 + SIDE * (1 - value) + 4:.1f}", value
            ),
        ]
    frame = Markup(
        '<rect x="{}" y="8" width="{}" height="{}"/><path class="even" d="M{} {}L{} {}"/>'
        '<text x="{}" y="{}" text-anchor="middle">{}</text>'
        '<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(
        *(LEFT, SIDE, SIDE, x_of(0), y_of(0), x_of(1), y_of(1)),
        *(x_of(0.5), SIDE + 40, across, y_of(0.5), up),
    )
    size = f"0 0 {LEFT + SIDE + 10} {SIDE + 8 + BOTTOM}"
    head = Markup('<svg class="plot" viewBox="{}" role="img" aria-label="{}">')
    body = Markup("").join([frame, *ticks, *map(escape, lines)])
    return head.format(size, title) + body + Markup("</svg>")
