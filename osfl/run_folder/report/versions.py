"""The versions of a continued run's model in the report: a table, and plots over the versions."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.curves import (
    BOTTOM,
    LEFT,
    MAX_LINES,
    SIDE,
    color_of,
    line_of,
    x_of,
    y_of,
)
from osfl.util.files import CorruptFileError

# The last versions; the table has no more rows
MAX_VERSIONS = 100
# Labels below a plot
MAX_LABELS = 10
# Share of the distance between two versions that a bar has
BAR = 0.5
ReadMetrics = Callable[[Path], dict[str, Any]]


def earlier_versions(
    run: RunFolder, clients: Collection[str], read_metrics: ReadMetrics
) -> list[dict[str, Any]]:
    """Return a row for each version before a continued run's, the oldest first.

    A row has what that version's folder says today, so that a version which has forgotten a client
    shows nothing of it. Versions before one whose folder is missing are left out.

    Args:
        clients: whose accuracies the rows have; no other client is named.
        read_metrics: reads a run's metrics, or raises CorruptFileError.
    """
    rows = [
        _row_of(folder, job, number, clients, read_metrics) for folder, job, number in _chain(run)
    ]
    return rows[::-1]


def _chain(run: RunFolder) -> Iterator[tuple[RunFolder, str, int]]:
    """Yield folder, job and number of each version before a run's, the last first."""
    for _ in range(MAX_VERSIONS - 1):
        try:
            record = run.continuation()
        except CorruptFileError:
            return
        if record is None:
            return
        run = RunFolder(Path(record.run))
        yield run, record.job, record.version - 1


def _row_of(
    folder: RunFolder,
    job: str,
    number: int,
    clients: Collection[str],
    read_metrics: ReadMetrics,
) -> dict[str, Any]:
    try:
        return version_row(read_metrics(folder.path), job, number, clients)
    # The folder was removed, or its run has no results at present
    except CorruptFileError:
        return {"number": number, "job": job}


def version_row(
    metrics: Mapping[str, Any], job: str, number: int, clients: Collection[str]
) -> dict[str, Any]:
    """Return the figures of a version.

    Returns:
        `number`, `job`, `finished`; `carried` and `new`, numbers of payloads; `forgotten`, the
        number of clients that the version has forgotten; `from_model`; `shown`, the model;
        `average` and `accuracy` by client, in percent, None and {} without a test.
    """
    version = metrics.get("version") or {}
    senders = sum(bool(row.get("upload_bytes")) for row in metrics["clients"].values())
    new = len(version.get("new", ())) if version else senders
    tests = metrics["accuracy"].get(metrics.get("shown", ""), {})
    average = tests.get("average")
    return {
        "number": number,
        "job": job,
        "finished": str(metrics.get("finished", "")),
        "carried": senders - new,
        "new": new,
        "forgotten": int(metrics.get("forgotten", 0)),
        "from_model": bool(version.get("from_model")),
        "shown": str(metrics.get("shown", "")),
        # Not a number without a test
        "average": average if average == average else None,
        "accuracy": {name: tests[name] for name in sorted(clients)[:MAX_LINES] if name in tests},
    }


def section_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `template_parts.VERSIONS`; {} for a run that continues none."""
    version = metrics["version"]
    if not version.get("history"):
        return {}
    clients = sorted(metrics["clients"])
    last = version_row(metrics, metrics["job_id"], version["number"], clients)
    rows = [*version["history"], last]
    names = [name for name in clients[:MAX_LINES] if any(_accuracy(row, name) for row in rows)]
    colors = {name: color_of(number, len(names)) for number, name in enumerate(names)}
    return {
        "model_versions": rows,
        "versions_plot": _accuracy_plot(rows, colors),
        "payloads_plot": _payloads_plot(rows),
        "versions_legend": colors,
        "versions_unplotted": max(0, len(clients) - MAX_LINES),
    }


def _accuracy(row: Mapping[str, Any], client: str) -> Any:
    return row.get("accuracy", {}).get(client)


# ---- SVG ----


def _across(number: int, count: int) -> float:
    """Return the position of a version, from 0 to 1, with space for its bar at both ends."""
    return (number + 0.5) / count


def _accuracy_plot(rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> Markup:
    """Draw each client's accuracy, and the average, over the versions."""
    count = len(rows)
    lines = []
    for name, color in [*colors.items(), ("average", "")]:
        values = [_accuracy(row, name) if color else row.get("average") for row in rows]
        points = [
            (_across(number, count), value / 100)
            for number, value in enumerate(values)
            if value is not None
        ]
        lines.append(line_of(points, color, name, dots=True))
    marks = [(value / 100, f"{value}") for value in (0, 50, 100)]
    return _plot(Markup("").join(lines), rows, marks, "accuracy, %")


def _payloads_plot(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the number of payloads of each version: those that it carried, and new ones above."""
    most = max([row["carried"] + row["new"] for row in rows if "new" in row], default=0) or 1
    width = f"{BAR * SIDE / len(rows):.1f}"
    bars = []
    for number, row in enumerate(rows):
        base = 0.0
        left = f"{float(x_of(_across(number, len(rows)))) - BAR * SIDE / len(rows) / 2:.1f}"
        for kind in ("carried", "new"):
            share = row.get(kind, 0) / most
            title = f"version {row['number']}: {row.get(kind, 0)} {kind}"
            bars.append(
                Markup(
                    '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
                ).format(kind, left, y_of(base + share), width, f"{SIDE * share:.1f}", title)
            )
            base += share
    return _plot(Markup("").join(bars), rows, [(0.0, "0"), (1.0, f"{most}")], "payloads")


def _plot(
    content: Markup, rows: Sequence[Mapping[str, Any]], marks: Sequence[tuple[float, str]], up: str
) -> Markup:
    """Draw axes with the versions' numbers across, and content.

    Args:
        marks: place, from 0 to 1, and text of each label at the left.
        up: the name of the axis at the left.
    """
    label = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    step = -(-len(rows) // MAX_LABELS)
    texts = [
        label.format(x_of(_across(number, len(rows))), SIDE + 24, "middle", row["number"])
        for number, row in enumerate(rows)
        if number % step == 0
    ]
    texts += [
        label.format(LEFT - 6, f"{float(y_of(place)) + 4:.1f}", "end", text)
        for place, text in marks
    ]
    frame = Markup(
        '<rect x="{}" y="8" width="{}" height="{}"/>'
        '<text x="{}" y="{}" text-anchor="middle">version</text>'
        '<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(LEFT, SIDE, SIDE, x_of(0.5), SIDE + 40, y_of(0.5), up)
    size = f"0 0 {LEFT + SIDE + 10} {SIDE + 8 + BOTTOM}"
    head = Markup('<svg class="plot" viewBox="{}" role="img" aria-label="{} of each version">')
    return head.format(size, up) + frame + Markup("").join(texts) + content + Markup("</svg>")
