"""Bounds and caps of the image counts that clients state, by which the server weights clients.

A malicious client can state any count, and none can be verified. Three rules limit its gain:

1. A count above `max-images`, or above what the client declared when it joined, is refused.
2. A client's weight is capped at `max-weight-ratio` (r) times a typical weight of the other
   clients. Its n_c images of class c count as s s_c n_c, with

       s_c = min(1, r M_c / n_c),    s = min(1, r M / sum_c s_c n_c)

   M is the median of the others' totals. M_c is the larger of two medians: that of n_c over the
   others that hold class c, and that of the others' largest class. Label skew alone can make n_c 60
   times the median of the clients that hold c; no client of a Dirichlet partition (alpha = 0.1) has
   more than 5 times M_c.
3. Capped clients are named in status.json and in the report.

A client within the cap is unchanged: its factors are exactly 1.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from osfl.payload.kinds import (
    FeatureMixtures,
    FeatureStatistics,
    Joint,
    LatentStatistics,
    Payload,
    Sent,
)

# Stands for all classes together
ALL = ""

Counts = Mapping[str, int]  # of one client, by class


@dataclass(frozen=True)
class Cap:
    """A client whose stated count exceeds the cap.

    Attributes:
        label: the class whose count exceeds it most; `ALL` for all images together.
        median: the other clients' median for this class, M_c or M.
        counts: the client's stated counts by class.
        weights: the factor of each class's images, 0 to 1.
        ratio: `max-weight-ratio`.
    """

    client: str
    label: str
    median: float
    counts: Counts
    weights: Mapping[str, float]
    ratio: float

    @property
    def stated(self) -> int:
        """The count that exceeds the cap."""
        return _count(self.counts, self.label)

    @property
    def counted(self) -> float:
        """The number of images that the client counts as."""
        return sum(self.weights[label] * count for label, count in self.counts.items())

    def __str__(self) -> str:
        of_class = f" of class {self.label!r}" if self.label else ""
        return (
            f"{self.client}: weight capped, because it states {self.stated:,} images{of_class}, "
            f"{self.stated / self.median:,.3g} times the other clients' median of "
            f"{self.median:,.6g}; it counts as {self.counted:,.0f} of the "
            f"{_count(self.counts, ALL):,} images that it states (max-weight-ratio = "
            f"{self.ratio:g})"
        )


def stated_counts(payload: Sent) -> dict[str, int]:
    """Return the image counts that a payload states, by class; {} if it states none."""
    if isinstance(payload, Joint):
        stated = map(stated_counts, payload.parts.values())
        return next(filter(None, stated), {})
    if not isinstance(payload, FeatureStatistics | FeatureMixtures | LatentStatistics):
        return {}
    return dict(zip(payload.classes, payload.counts.tolist(), strict=True))


def check_counts(stated: Counts, limit: int, declared: Counts | None = None) -> None:
    """Check that stated counts exceed neither `max-images` nor the client's declared counts.

    Args:
        limit: `max-images`.
        declared: by class, or of `ALL` alone; None if the client declared nothing.

    Raises:
        ValueError: a count exceeds one of them.
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
    """Return the cap of each client whose counts exceed it, sorted by client.

    Args:
        stated: by client.
        ratio: `max-weight-ratio`; 0 caps no client.
    """
    if not ratio:
        return {}
    caps = {}
    medians = _typical_counts(stated)
    for client in sorted(stated):
        of_others = {
            label: by_client[client] for label, by_client in medians.items() if client in by_client
        }
        cap = _cap_of(client, stated[client], of_others, ratio)
        if cap is not None:
            caps[client] = cap
    return caps


def _cap_of(client: str, counts: Counts, medians: Mapping[str, float], ratio: float) -> Cap | None:
    """Return the cap of a client, or None if its counts are within it.

    Args:
        medians: M as `ALL`, and M_c by class; empty without other clients.
    """
    if not medians:
        return None
    # s_c = min(1, r M_c / n_c)
    by_class = {label: min(1.0, ratio * medians[label] / count) for label, count in counts.items()}
    # s = min(1, r M / sum_c s_c n_c)
    total = sum(by_class[label] * count for label, count in counts.items())
    of_all = min(1.0, ratio * medians[ALL] / total)
    weights = {label: of_all * weight for label, weight in by_class.items()}
    if min(weights.values()) == 1.0:
        return None
    worst = min(by_class, key=by_class.__getitem__)
    label = worst if by_class[worst] < 1.0 else ALL
    return Cap(client, label, medians[label], counts, weights, ratio)


def class_weights(payloads: Mapping[str, Payload], ratio: float) -> dict[str, list[float]]:
    """Return the factors of each client's images in the order of its classes: below 1 if capped."""
    stated = {client: stated_counts(payload) for client, payload in payloads.items()}
    caps = find_caps(stated, ratio)
    return {
        client: list(caps[client].weights.values()) if client in caps else [1.0] * len(counts)
        for client, counts in stated.items()
    }


def _count(counts: Counts, label: str) -> int:
    return sum(counts.values()) if label == ALL else counts[label]


def _typical_counts(stated: Mapping[str, Counts]) -> dict[str, dict[str, float]]:
    """Return the other clients' M (as `ALL`) and M_c, by class and then client."""
    clients = [client for client, counts in stated.items() if counts]
    if len(clients) < 2:
        return {}
    largest = medians_of_others({client: max(stated[client].values()) for client in clients})
    typical = {ALL: medians_of_others({client: _count(stated[client], ALL) for client in clients})}
    holders = defaultdict[str, dict[str, int]](dict)
    for client in clients:
        for label, count in stated[client].items():
            holders[label][client] = count
    for label, counts in holders.items():
        if label == ALL:
            continue
        medians = medians_of_others(counts) if len(counts) > 1 else {}
        typical[label] = {
            client: max(medians.get(client, 0.0), largest[client]) for client in counts
        }
    return typical


def medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Return, by client, the median of all values except the client's own.

    Args:
        values: by client, of at least two clients.
    """
    numbers = np.array(list(values.values()), dtype=float)
    order = np.argsort(numbers, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    ascending = numbers[order]
    others = len(numbers) - 1
    # Removing the client's own value shifts the places after it by one
    middle = [
        np.where(place < rank, place, place + 1) for place in ((others - 1) // 2, others // 2)
    ]
    medians = (ascending[middle[0]] + ascending[middle[1]]) / 2
    return dict(zip(values, medians.tolist(), strict=True))
