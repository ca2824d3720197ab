"""Plot a table: accuracy against communication."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from osfl.tables.records import group_by_row
from osfl.util.files import write_atomically


def plot(records: list[dict[str, Any]], file: Path) -> None:
    """Plot accuracy against bytes per client: uploaded (left), and in both directions (right).

    The x axes are logarithmic. Rows that upload nothing are dashed lines.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6))
    panels = figure.subplots(1, 2, sharey=True)
    groups = group_by_row(records)
    colors = {name: f"C{number % 10}" for number, name in enumerate(groups)}
    markers = {name: "osD^vP*X"[number // 10 % 8] for number, name in enumerate(groups)}
    for panel, keys, title in zip(
        panels,
        (("upload_bytes",), ("upload_bytes", "download_bytes")),
        ("uploaded", "uploaded and downloaded"),
        strict=True,
    ):
        for name, group in groups.items():
            averages = [record["average"] for record in group]
            size = 0.0
            for key in keys:
                size += float(np.mean([record[key] for record in group]))
            if any(record["upload_bytes"] for record in group):
                spread = np.std(averages, ddof=1) if len(averages) > 1 else 0
                panel.errorbar(
                    size,
                    np.mean(averages),
                    spread,
                    fmt=markers[name],
                    color=colors[name],
                    capsize=3,
                    markersize=8,
                    label=name,
                )
            else:
                panel.axhline(
                    float(np.mean(averages)),
                    color=colors[name],
                    linestyle="--",
                    linewidth=1.2,
                    label=name,
                )
        panel.set(xscale="log", xlabel=f"bytes per client, {title}")
        low, high = panel.get_xlim()
        # For rows of about the same size, the axis spans a decade instead of their last digits
        if high < 10 * low:
            panel.set_xlim((low * high / 10) ** 0.5, (low * high * 10) ** 0.5)
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
