"""Bound and cap the image counts that clients state, for the server weights clients by them.

A malicious client can state any count, and none can be verified. Three rules limit what it gains:

1. A count above `max-images`, or above what the client declared when it joined, is refused.
2. A client's weight is capped: at most `max-weight-ratio` (r) times what is typical of the other
   clients. A client with n images, n_c of class c, counts with the weight

       s = min(1, r M / n, min_c r M_c / n_c)

   M is the others' median of n. M_c is the larger of two medians: of n_c over the others that hold
   class c, and of the others' largest class. Label skew alone makes n_c 60 times the median of the
   clients that hold c; no client of a Dirichlet partition (alpha = 0.1) has more than 5 times M_c.
3. Clients that are capped are named in status.json and in the report.

One factor scales the whole contribution, because FedCGS' second moments cannot be split by class.
A client within the cap is not changed: its factor is exactly 1.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from osfl.payloads import FeatureMixtures, FeatureStatistics, Payload

# The class of a count that is of all classes together
ALL = ""

Counts = Mapping[str, int]  # of one client, by class


@dataclass(frozen=True)
class Cap:
    """A client whose stated count is above the cap.

    Attributes:
        label: the class whose count is farthest above it; `ALL` for all images together.
        stated: that count.
        median: what is typical of the other clients.
        weight: the factor of the client's whole contribution, below 1.
        ratio: `max-weight-ratio`.
    """

    client: str
    label: str
    stated: int
    median: float
    weight: float
    ratio: float

    def __str__(self) -> str:
        of_class = f" of class {self.label!r}" if self.label else ""
        return (
            f"{self.client}: capped, for it states {self.stated:,} images{of_class}, "
            f"{self.stated / self.median:,.3g} times the other clients' median of "
            f"{self.median:,.6g}; its contribution is scaled by {self.weight:.3g} "
            f"(max-weight-ratio = {self.ratio:g})"
        )


def stated_counts(payload: Payload) -> dict[str, int]:
    """The image count of every class that a payload states; {} for a payload without counts."""
    if not isinstance(payload, FeatureStatistics | FeatureMixtures):
        return {}
    return dict(zip(payload.classes, payload.counts.tolist(), strict=True))


def check_counts(stated: Counts, limit: int, declared: Counts | None = None) -> None:
    """Check that counts are within `max-images` and within what the client declared.

    Args:
        limit: `max-images`.
        declared: by class, or of `ALL` alone; None if the client declared nothing.

    Raises:
        ValueError: a count is above one of them.
    """
    total = sum(stated.values())
    if total > limit:
        raise ValueError(
            f"{total:,} images are more than max-images = {limit:,}; set max-images to at least "
            "the number of images of the largest client"
        )
    if declared is None:
        return
    if total > sum(declared.values()):
        raise ValueError(
            f"{total:,} images are more than the {sum(declared.values()):,} that the client "
            "declared when it joined; restart the run if its images have changed since"
        )
    for label, count in stated.items():
        if ALL not in declared and count > declared.get(label, 0):
            raise ValueError(
                f"{count:,} images of class {label!r} are more than the {declared.get(label, 0):,} "
                "that the client declared when it joined; restart the run if its images have "
                "changed since"
            )


def find_caps(stated: Mapping[str, Counts], ratio: float) -> dict[str, Cap]:
    """The clients whose counts are above the cap, by name.

    Args:
        stated: by client.
        ratio: `max-weight-ratio`; 0 caps no client.
    """
    caps: dict[str, Cap] = {}
    if not ratio:
        return caps
    for label, medians in _references(stated).items():
        for client, median in medians.items():
            count = _count(stated[client], label)
            weight = ratio * median / count
            if weight < min(1.0, caps[client].weight if client in caps else 1.0):
                caps[client] = Cap(client, label, count, median, weight, ratio)
    return dict(sorted(caps.items()))


def client_weights(payloads: Mapping[str, Payload], ratio: float) -> dict[str, float]:
    """The factor of every client's contribution: 1, or less if it is capped."""
    caps = find_caps(
        {client: stated_counts(payload) for client, payload in payloads.items()}, ratio
    )
    return {client: caps[client].weight if client in caps else 1.0 for client in payloads}


def _count(counts: Counts, label: str) -> int:
    return sum(counts.values()) if label == ALL else counts[label]


def _references(stated: Mapping[str, Counts]) -> dict[str, dict[str, float]]:
    """What is typical of the other clients: M as `ALL` and M_c, by class and then client."""
    clients = [client for client, counts in stated.items() if counts]
    if len(clients) < 2:
        return {}
    largest = medians_of_others({client: max(stated[client].values()) for client in clients})
    found = {ALL: medians_of_others({client: _count(stated[client], ALL) for client in clients})}
    holders = defaultdict[str, dict[str, int]](dict)
    for client in clients:
        for label, count in stated[client].items():
            holders[label][client] = count
    for label, counts in holders.items():
        if label == ALL:
            continue
        medians = medians_of_others(counts) if len(counts) > 1 else {}
        found[label] = {client: max(medians.get(client, 0.0), largest[client]) for client in counts}
    return found


def medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """The median of all clients' values but the client's own, by client.

    Args:
        values: of two clients or more.
    """
    numbers = np.array(list(values.values()), dtype=float)
    order = np.argsort(numbers, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    ascending = numbers[order]
    others = len(numbers) - 1
    # Without the client's own value, the places behind it move up by one
    middle = [
        np.where(place < rank, place, place + 1) for place in ((others - 1) // 2, others // 2)
    ]
    medians = (ascending[middle[0]] + ascending[middle[1]]) / 2
    return dict(zip(values, medians.tolist(), strict=True))
