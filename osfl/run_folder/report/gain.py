"""Gains of the clients: the global model's accuracy beside that of a model trained alone.

The two models are tested on the same images, so the results are paired, and a client's gain has a
narrower interval than two separate accuracies would give.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

CONFIDENCE = 0.95
Pairs = Sequence[int]  # both models correct, the global one alone, the local one alone, neither


@dataclass(frozen=True)
class Gain:
    """Differences of accuracies, global minus local, in percentage points.

    Attributes:
        points: the observed difference.
        low, high: its 95 % confidence interval.
    """

    points: float
    low: float
    high: float


def mean_gain(tables: Sequence[Pairs]) -> Gain:
    """Compute the mean gain of clients with equal weights, and its 95 % confidence interval.

    A client's interval is Wald's for paired proportions with Laplace's adjustment (Bonett & Price,
    "Adjusted Wald confidence interval for a difference of binomial proportions based on paired
    data", J. Educ. Behav. Stat. 37, 2012), which Fagerland, Lydersen & Laake (Stat. Med. 33, 2014)
    recommend: one image is added to each of the two kinds on which the models differ. Clients are
    independent, so variances add up. The mean of K clients adds 1/K of an image per client and
    kind, because the shift towards 0 would not average out as the variance does. The interval is
    over test images; it does not cover the variation between trainings.

    Args:
        tables: the counts of at least one client.
    """
    added = 1 / len(tables)
    points = fmean(_difference(table) for table in tables)
    center = fmean(_difference(table, added) for table in tables)
    variance = sum(_variance(table, added) for table in tables) / len(tables) ** 2
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(variance)
    low = min(points, max(-1.0, center - half))
    high = max(points, min(1.0, center + half))
    return Gain(100 * points, 100 * low, 100 * high)


def _difference(table: Pairs, added: float = 0.0) -> float:
    """Return p12 - p21, with a number of images added to both kinds."""
    _, global_only, local_only, _ = table
    return (global_only - local_only) / max(sum(table) + 2 * added, 1)


def _variance(table: Pairs, added: float) -> float:
    """Estimate the variance of a difference: p12 + p21 - (p12 - p21)^2, over the images."""
    total = sum(table) + 2 * added
    either = (table[1] + table[2] + 2 * added) / total
    return (either - _difference(table, added) ** 2) / total


def gains_of(
    local_tests: Mapping[str, Any], accuracy: Mapping[str, Mapping[str, float]], suffix: str
) -> dict[str, Any]:
    """Return the figures of every client with a local-only model; {} without any.

    Args:
        local_tests: the content of `local-baseline.json`.
        accuracy: in percent, by model and client.
        suffix: follows a global model's name, for the clients' personalized models.
    """
    clients = local_tests.get("clients", {})
    if not clients:
        return {}
    model = local_tests["model"]
    personalized = accuracy.get(f"{model}{suffix}", {})
    rows = {}
    for client, test in clients.items():
        pairs = test["pairs"]
        rows[client] = _row([pairs], [personalized[client]] if client in personalized else [])
    tables = [test["pairs"] for test in clients.values()]
    shared = [personalized[client] for client in clients if client in personalized]
    average = _row(tables, shared if len(shared) == len(clients) else [])
    return {"model": model, "clients": rows, "average": average}


def _row(tables: Sequence[Pairs], personalized: Sequence[float]) -> dict[str, Any]:
    totals = [max(sum(table), 1) for table in tables]
    alone = [(table[0] + table[2]) / total for table, total in zip(tables, totals, strict=True)]
    together = [(table[0] + table[1]) / total for table, total in zip(tables, totals, strict=True)]
    return {
        "images": sum(map(sum, tables)),
        "local": 100 * fmean(alone),
        "global": 100 * fmean(together),
        "personalized": fmean(personalized) if personalized else None,
        **asdict(mean_gain(tables)),
    }


def interval_text(row: Mapping[str, float]) -> str:
    """Format a gain as '+12.3 (8.1 to 16.2)'."""
    return f"{row['points']:+.1f} ({row['low']:.1f} to {row['high']:.1f})"


def gain_rows(gain: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of every client, and last their average; {} without any."""
    return {**gain["clients"], "average": gain["average"]} if gain else {}


def section_values(gain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `template_parts.GAIN`."""
    rows = gain_rows(gain)
    personalizes = any(row["personalized"] is not None for row in rows.values())
    return {"gain_rows": rows, "personalizes": personalizes}
