"""Bound and cap the image counts that clients state, for the server weights clients by them.

A malicious client can state any count, and none can be verified. Three rules limit what it gains:

1. A count above `max-images`, or above what the client declared when it joined, is refused.
2. A client's weight is capped: at most `max-weight-ratio` (r) times what is typical of the other
   clients. Of n_c images of class c count s s_c n_c, with

       s_c = min(1, r M_c / n_c),    s = min(1, r M / sum_c s_c n_c)

   M is the others' median of all images. M_c is the larger of two medians: of n_c over the others
   that hold class c, and of the others' largest class. Label skew alone makes n_c 60 times the
   median of the clients that hold c; no client of a Dirichlet partition (alpha = 0.1) has more than
   5 times M_c.
3. Clients that are capped are named in status.json and in the report.

A client within the cap is not changed: its factors are exactly 1.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from osfl.payload.kinds import FeatureMixtures, FeatureStatistics, Payload

# The class of a count that is of all classes together
ALL = ""

Counts = Mapping[str, int]  # of one client, by class


@dataclass(frozen=True)
class Cap:
    """A client whose stated count is above the cap.

    Attributes:
        label: the class whose count is farthest above it; `ALL` for all images together.
        median: what is typical of the other clients there.
        counts: what the client states, by class.
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
        """The count that is above the cap."""
        return _count(self.counts, self.label)

    @property
    def counted(self) -> float:
        """The images that are left of all."""
        return sum(self.weights[label] * count for label, count in self.counts.items())

    def __str__(self) -> str:
        of_class = f" of class {self.label!r}" if self.label else ""
        return (
            f"{self.client}: capped, for it states {self.stated:,} images{of_class}, "
            f"{self.stated / self.median:,.3g} times the other clients' median of "
            f"{self.median:,.6g}; it counts as {self.counted:,.0f} of the "
            f"{_count(self.counts, ALL):,} images that it states (max-weight-ratio = "
            f"{self.ratio:g})"
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
    if not ratio:
        return {}
    caps = {}
    medians = _references(stated)
    for client in sorted(stated):
        own = {label: found[client] for label, found in medians.items() if client in found}
        cap = _cap_of(client, stated[client], own, ratio)
        if cap is not None:
            caps[client] = cap
    return caps


def _cap_of(client: str, counts: Counts, medians: Mapping[str, float], ratio: float) -> Cap | None:
    """The cap of a client, if its counts are above it."""
    if not medians:
        return None
    by_class = {label: min(1.0, ratio * medians[label] / count) for label, count in counts.items()}
    left = sum(by_class[label] * count for label, count in counts.items())
    of_all = min(1.0, ratio * medians[ALL] / left)
    weights = {label: of_all * weight for label, weight in by_class.items()}
    if min(weights.values()) == 1.0:
        return None
    worst = min(by_class, key=by_class.__getitem__)
    label = worst if by_class[worst] < 1.0 else ALL
    return Cap(client, label, medians[label], counts, weights, ratio)


def class_weights(payloads: Mapping[str, Payload], ratio: float) -> dict[str, list[float]]:
    """The factors of every client's images, in the order of its classes: 1, or less if capped."""
    stated = {client: stated_counts(payload) for client, payload in payloads.items()}
    caps = find_caps(stated, ratio)
    return {
        client: list(caps[client].weights.values()) if client in caps else [1.0] * len(counts)
        for client, counts in stated.items()
    }


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
