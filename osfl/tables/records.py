"""Records of a table's results, one per row, global model and seed, and their CSV."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from osfl.advice import REFERENCE, kind_of
from osfl.methods import METHODS, Method
from osfl.run_folder.report.metrics import ADAPTED_SUFFIX, accuracy_over_images
from osfl.tables.runner import Outcome

# The package that declared a run's method may be gone when its results are read
_UNKNOWN = Method(client=None, server="", payload=None, sends="")
# A record's fields that are not cost columns of the CSV
NOT_A_COST = (
    *("row", "seed", "average", "over_images", "accuracy", "versions", "error", "not_tested"),
    *("branches", "model_bytes", "is_reference"),
)


def records_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Return a record for each global model of a cell, or one record with its error.

    The models of the local-only baseline are averaged into one record.
    """
    cell = outcome.cell
    metrics = outcome.metrics
    if not metrics:
        return [{"row": cell.row, "seed": cell.seed, "error": outcome.error}]
    accuracy = metrics["accuracy"]
    over_all_images = metrics["over_images"]
    method = METHODS.get(metrics["method"], _UNKNOWN)
    if not method.global_model:
        accuracy, over_all_images = _mean_of_models(accuracy, metrics["confusion"])
    costs = _run_costs(metrics)
    has_several_models = sum(not model.endswith(ADAPTED_SUFFIX) for model in accuracy) > 1
    records = []
    for model, accuracy_by_client in accuracy.items():
        client_accuracy = dict(accuracy_by_client)
        record = {
            "row": _row_name(cell.row, model, has_several_models),
            "seed": cell.seed,
            "average": client_accuracy.pop("average"),
            "over_images": over_all_images[model],
            "accuracy": client_accuracy,
            **costs,
            "versions": metrics["versions"],
            "kit_not_counted": metrics.get("kit_not_counted", False),
            "not_tested": metrics["not_tested"],
            "branches": method.table_note(metrics["config"]),
            "model_bytes": outcome.bytes_of(model),
            "is_reference": kind_of(method) == REFERENCE,
        }
        records.append(record)
    return records


def _run_costs(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the costs of a run; a client's are the largest of all clients."""
    clients = metrics["clients"].values()

    def largest(key: str) -> float | None:
        # Clients with a privacy guarantee do not send their costs
        if any(costs.get("epsilon") and key not in costs for costs in clients):
            return None
        highest: float | None = max(costs.get(key, 0) for costs in clients)
        return highest

    return {
        "rounds": metrics["rounds"],
        "upload_bytes": largest("upload_bytes"),
        "download_bytes": largest("download_bytes"),
        "client_flops": largest("flops"),
        "client_seconds": largest("seconds"),
        "client_memory_mb": largest("peak_memory_mb"),
        "server_seconds_per_image": metrics["server"]["seconds_per_image"],
    }


def describe_sharing(outcomes: Iterable[Outcome]) -> str:
    """Say how much of the clients' work shared payloads have saved; "" if none were shared."""
    shared = [outcome.metrics for outcome in outcomes if outcome.metrics.get("payloads_from")]
    if not shared:
        return ""
    clients = [costs for metrics in shared for costs in metrics["clients"].values()]
    hours = sum(costs.get("seconds", 0.0) for costs in clients) / 3600
    hidden = any(costs.get("epsilon") and "seconds" not in costs for costs in clients)
    unknown = ", without clients that do not send their time" if hidden else ""
    return (
        f"{len(shared)} of the runs use the payloads of another run with the same settings of the "
        f"clients, which saved {hours:.2g} client-hours{unknown}."
    )


def _row_name(row: str, model: str, has_several_models: bool) -> str:
    """Return the name of a model's row: with several models, the row's and the model's."""
    if has_several_models:
        return f"{row} {model}"
    return row + ADAPTED_SUFFIX if model.endswith(ADAPTED_SUFFIX) else row


def _mean_of_models(
    accuracy: dict[str, dict[str, float]], confusion: dict[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Average the local-only models: accuracy per client, and over all test images.

    Only clients that tested every model count.
    """
    tested = set.intersection(*map(set, accuracy.values())) - {"average"}
    means = {}
    for client in sorted(tested):
        means[client] = float(np.mean([row[client] for row in accuracy.values()]))
    shares = []
    for matrix in confusion.values():
        shares.append(accuracy_over_images({client: matrix[client] for client in means}))
    average = float(np.mean(list(means.values())))
    return {"": {**means, "average": average}}, {"": float(np.mean(shares))}


def as_csv(records: list[dict[str, Any]]) -> str:
    """Format the records as CSV, one line each, with unrounded figures."""
    clients = sorted({client for record in records for client in record.get("accuracy", {})})
    costs = [key for key in first_measured(records) if key not in NOT_A_COST]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "seed", "average", "over_images", *clients, *costs, "error"])
    for record in records:
        accuracy = record.get("accuracy", {})
        cells = [
            record.get("average", ""),
            record.get("over_images", ""),
            *(accuracy.get(c, "") for c in clients),
            *(record.get(key, "") for key in costs),
        ]
        writer.writerow([record["row"], record["seed"], *cells, record.get("error", "")])
    return text.getvalue()


def first_measured(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first record that has figures, or {}."""
    return next((record for record in records if "average" in record), {})


def group_by_row(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the records that have figures by row, in the file's order."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if "average" in record:
            groups[record["row"]].append(record)
    return groups
