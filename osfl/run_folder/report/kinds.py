"""The kinds of payload of a mixed run: who sent which, what it cost, and what it was worth."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from osfl.config.kinds import methods_of
from osfl.methods import METHODS


def kind_rows(
    kinds: Mapping[str, str], clients: Mapping[str, Mapping[str, float]], owners: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the figures of each kind of payload, in the order of the clients; [] in other runs.

    Args:
        kinds: the kind of each client's payload.
        clients: the costs of every client.
        owners: the client of each synthetic image.
    """
    images = Counter(owners)
    members: dict[str, list[str]] = {}
    for client, kind in sorted(kinds.items()):
        members.setdefault(kind, []).append(client)
    return [
        {
            "kind": kind,
            "sends": described(kind, "sends"),
            "reveals": described(kind, "reveals"),
            "clients": names,
            "upload_bytes": sum(clients[name].get("upload_bytes", 0) for name in names),
            "images": sum(images[name] for name in names),
        }
        for kind, names in members.items()
    ]


def described(kind: str, field: str) -> str:
    """Return what the methods of a kind say that it sends or reveals."""
    return "; and ".join(getattr(METHODS[method], field) for method in methods_of(kind))


def alternatives(rows: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return what clients of all kinds sent or revealed, as one text."""
    return "; or ".join(f"{row[field]} ({row['kind']})" for row in rows)


def with_worth(
    rows: Sequence[Mapping[str, Any]],
    accuracy: Mapping[str, float],
    contributions: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the rows with the accuracy on their clients, and the clients' mean contribution.

    Args:
        accuracy: of the shown model in percent, by client.
        contributions: by client; {} where they are not estimated.
    """
    return [
        {
            **row,
            "accuracy": _mean(accuracy.get(name) for name in row["clients"]),
            "others": _mean(
                contributions[name]["others"]["points"]
                for name in row["clients"]
                if name in contributions
            ),
        }
        for row in rows
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that exist; None without any."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
