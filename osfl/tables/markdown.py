"""Format a table as Markdown."""

import os
import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from osfl.run_folder.report.metrics import ADAPTED_SUFFIX
from osfl.run_folder.report.page import human_bytes, human_flops
from osfl.tables.paired import paired_difference
from osfl.tables.records import first_measured, group_by_row
from osfl.tables.runner import MAX_ERROR_LENGTH
from osfl.tables.table_file import TableFile
from osfl.util.text import sanitize

# Maximum number of clients with columns of their own
MAX_CLIENT_COLUMNS = 8
COST_COLUMNS = (
    "upload",
    "download",
    "client compute",
    "client s",
    "client MB",
    "server s/image",
    "rounds",
)
# Records by row
Groups = dict[str, list[dict[str, Any]]]


def as_markdown(
    table: TableFile, records: list[dict[str, Any]], command: str, parallel_runs: int
) -> str:
    """Format the means over the seeds, the published figures, and what is missing.

    Args:
        command: the command line that made the table.
        parallel_runs: number of runs in parallel, on which times depend.
    """
    groups = group_by_row(records)
    parts = [
        f"**{sanitize(table.title)}**",
        _main_table(groups, records),
        _caption(groups, records, command, parallel_runs),
    ]
    if table.reference in groups:
        parts.append(_compare_with_reference(table.reference, groups))
    if table.published:
        parts.append(_compare_with_published(table, groups))
    failures = [
        f"- {_escape(record['row'])}, seed {record['seed']}: {_escape(record['error'])}"
        for record in records
        if "average" not in record
    ]
    if failures:
        parts.append("Missing:\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def _main_table(groups: Groups, records: list[dict[str, Any]]) -> str:
    """Format the means over the seeds, with the standard deviation of the average."""
    clients = sorted({client for record in records for client in record.get("accuracy", {})})
    client_columns = clients if len(clients) <= MAX_CLIENT_COLUMNS else []
    has_over_images = _averages_differ(groups)
    header = [*map(_escape, client_columns), "average"]
    header += ["all images"] if has_over_images else []
    header += COST_COLUMNS
    lines = ["| | " + " | ".join(header) + " |", "|---|" + "---:|" * len(header)]
    for name, group in groups.items():
        averages = [record["average"] for record in group]
        deviation = f" ± {np.std(averages, ddof=1):.1f}" if len(averages) > 1 else ""
        cells = []
        for client in client_columns:
            figures = [record["accuracy"].get(client, np.nan) for record in group]
            cells.append(f"{np.mean(figures):.1f}")
        cells.append(f"**{np.mean(averages):.1f}**{deviation}")
        if has_over_images:
            cells.append(f"{np.mean([record['over_images'] for record in group]):.1f}")
        lines.append(f"| {_escape(name)} | " + " | ".join([*cells, *_costs(group)]) + " |")
    return "\n".join(lines)


def _averages_differ(groups: Groups) -> bool:
    """Check whether averages over clients and over all test images differ when rounded."""
    return any(
        abs(record["over_images"] - record["average"]) >= 0.05
        for group in groups.values()
        for record in group
    )


def _caption(
    groups: Groups, records: list[dict[str, Any]], command: str, parallel_runs: int
) -> str:
    """Explain the table's figures, and how they were measured."""
    seeds = list(map(str, sorted({record["seed"] for record in records})))
    over_seeds = f"seed {seeds[0]}"
    if len(seeds) > 1:
        over_seeds = f"mean of seeds {', '.join(seeds)}, ± the standard deviation of the average"
    averages = "the average over clients equals the average over all test images"
    if _averages_differ(groups):
        averages = "average: over clients; all images: over the test images of all clients"
    adapted = ""
    if any(name.endswith(ADAPTED_SUFFIX) for name in groups):
        adapted = "; adapted: after personalization on its own training images"
    versions = first_measured(records).get("versions", {})
    libraries = []
    for name in ("torch", "flwr", "diffusers"):
        if name in versions:
            libraries.append(f"{name} {versions[name]}")
    text = (
        "Top-1 accuracy (%) of the global model, which each client tests on its own test images"
        f"{adapted}; {over_seeds}; {averages}. Costs are those of the most expensive client. "
        "Uploads and downloads are serialized sizes; downloads include the parts of the kit, "
        "unless a size is unknown (+ kit). "
        f"Command: `{command}`, {parallel_runs} runs in parallel. {describe_machine()}, "
        f"{', '.join(libraries)}."
    )
    for name, group in groups.items():
        if branches := group[0]["branches"]:
            text += f"\n\n{name} is guided by {branches}."
    untested = [
        f"- {_escape(record['row'])}, seed {record['seed']}: "
        f"{', '.join(map(_escape, record['not_tested']))}"
        for record in records
        if record.get("not_tested")
    ]
    if untested:
        text += "\n\nSome clients did not test every model; averages are over the others:\n\n"
        text += "\n".join(untested)
    return text


def _compare_with_reference(reference: str, groups: Groups) -> str:
    """Format the difference of each row's average to the reference's, paired by seed."""
    lines = ["| | difference | 95 % interval | seeds |", "|---|---:|---:|---:|"]
    averages = {row: {r["seed"]: r["average"] for r in group} for row, group in groups.items()}
    for row, figures in averages.items():
        if row == reference or not figures.keys() & averages[reference].keys():
            continue
        difference = paired_difference(figures, averages[reference])
        star = r" \*" if difference.is_significant else ""
        interval = ""
        if not np.isnan(difference.low):
            interval = f"{difference.low:+.1f} to {difference.high:+.1f}"
        lines.append(
            f"| {_escape(row)} | {difference.mean:+.1f}{star} | {interval} | {difference.seeds} |"
        )
    return (
        f"Difference of the average to {_escape(reference)}, in percentage points, paired by seed, "
        "with Student's t interval of the mean; \\* where the interval excludes 0.\n\n"
        + "\n".join(lines)
    )


def _compare_with_published(table: TableFile, groups: Groups) -> str:
    """Format the published figures beside those measured here."""
    lines = ["| | | published | ours | difference |", "|---|---|---:|---:|---:|"]
    for row, figures in table.published.items():
        group = groups.get(row, [])
        for column, figure in figures.items():
            measured = [_figure(record, column) for record in group]
            mean = float(np.mean(measured)) if measured else float("nan")
            cells = [f"{figure:.2f}"]
            cells += ["", ""] if np.isnan(mean) else [f"{mean:.2f}", f"{mean - figure:+.2f}"]
            lines.append(f"| {_escape(row)} | {_escape(column)} | " + " | ".join(cells) + " |")
    text = f"Published: {_escape(table.source or 'source not named')}.\n\n" + "\n".join(lines)
    if table.lacks:
        text += "\n\nIn the published table, but not here:\n\n"
        text += "\n".join(
            f"- {_escape(row)}: {_escape(reason)}" for row, reason in table.lacks.items()
        )
    return text


def _figure(record: dict[str, Any], column: str) -> float:
    """Return a record's accuracy in a column of the published table, or NaN."""
    if column == "average":
        return float(record["average"])
    return float(record["accuracy"].get(column, np.nan))


def _escape(text: object) -> str:
    """Sanitize text and escape Markdown: cells, code, links, images and HTML."""
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", sanitize(text, MAX_ERROR_LENGTH))


def _costs(group: list[dict[str, Any]]) -> list[str]:
    """Format a row's costs, in the order of `COST_COLUMNS`."""

    def mean(key: str, text: Callable[[float], str]) -> str:
        values = [record[key] for record in group]
        return "not sent" if None in values else text(float(np.mean(values)))

    kit = " + kit" if any(record["kit_not_counted"] for record in group) else ""
    seconds = [r["server_seconds_per_image"] for r in group if r["server_seconds_per_image"]]
    return [
        mean("upload_bytes", human_bytes),
        mean("download_bytes", human_bytes) + kit,
        mean("client_flops", human_flops),
        mean("client_seconds", "{:.0f}".format),
        mean("client_memory_mb", "{:,.0f}".format),
        f"{np.mean(seconds):.3f}" if seconds else "",
        mean("rounds", "{:.0f}".format),
    ]


def describe_machine() -> str:
    """Describe this machine: cores, processor or GPU, and Python's version."""
    import torch

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return f"{os.cpu_count()} cores, {device}, Python {platform.python_version()}"
