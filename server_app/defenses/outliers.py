"""Outlier payloads: a norm, a spread over the classes or an image count far from the others'.

A payload scaled by 1e6 passes every check of the wire format, and a run's accuracy falls silently.
Its norm reveals it. The spread reveals a client that sends the same row for every class. Label
flipping changes neither (see label_consistency.py). Outliers are reported, not refused, because an
honest client may be one.

The rule, for each tensor of a payload: r is the root mean square of a client's values, a norm that
does not grow with its number of classes or images. The tensor is an outlier if ln r is far from the
other clients' median, in units of their median absolute deviation (MAD). The same rule holds for
the spread of a tensor with one row per class: r of the rows minus their mean, divided by r.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from osfl.payload.fields import Values, fields_of
from osfl.payload.kinds import Classifier, FeatureStatistics, LatentStatistics, Payload
from osfl.run_folder.status import with_details
from server_app.defenses.image_counts import medians_of_others, stated_counts

# An outlier differs by more than this factor and by more than 5 MADs. Six honest clients of the
# digits, one domain each, differ by up to 3 times in FedLMG's tensors (the first BatchNorm depends
# on color) and 1.4 times in the other methods' payloads. Four clients with very uneven images and
# classes differ by up to 3.7 times (biases start at zero and grow with the steps). Spreads differ
# by up to 2.3 times (FedCGS, label skew).
FACTOR = 5.0
DEVIATIONS = 5.0  # the MAD of a normal distribution is 1 / 1.4826 standard deviations
FLOOR = 0.01  # smaller norms count as this, so that biases near zero are no outliers

Measures = dict[str, dict[str, float]]  # by tensor, then client


@dataclass(frozen=True)
class Outlier:
    """A client, and its tensor that is farthest from the others'.

    Attributes:
        times: ratio of the tensor's measure to the others' median.
        tensors: number of the client's outlier tensors.
        what: the measure: `norm`, `spread over its classes`, or `total` for image counts.
    """

    client: str
    tensor: str
    times: float
    tensors: int
    what: str = "norm"

    def __str__(self) -> str:
        factor = f"{max(self.times, 1 / self.times):.3g} times"
        if self.what == "total":
            text = f"it states {factor} as many images as the others' median"
        elif self.what == "norm":
            direction = "larger" if self.times > 1 else "smaller"
            text = f"part of its payload is {factor} {direction} than the other clients' median"
        else:
            text = f"its classes are {factor} more alike than the other clients' median"
        details = f"{self.tensor} has a {self.what} of {self.times:.3g} times the median"
        if self.tensors > 1:
            details += f", and {self.tensors - 1} more of its tensors are outliers"
        return with_details(f"{self.client}: {text}", details)


def find_outliers(payloads: Mapping[str, Payload]) -> list[Outlier]:
    """Return one outlier per client with a norm, spread or image count far from the others'.

    Sorted by client. A client's counts take precedence over its norms, and norms over spreads.
    """
    norms = _far_ratios(_measure(payloads, _tensors, _norm))
    # A large spread is harmless: the values of a class with few images scatter
    spreads = _far_ratios(_measure(payloads, _class_rows, _spread), large=False)
    counts = {client: stated_counts(payload) for client, payload in payloads.items()}
    images = find_large_counts(
        {client: sum(by_class.values()) for client, by_class in counts.items() if by_class}
    )
    outliers = []
    for client in sorted(norms.keys() | spreads.keys() | images.keys()):
        by_measure = (
            ("total", images.get(client)),
            ("norm", norms.get(client)),
            ("spread over its classes", spreads.get(client)),
        )
        measure, ratios = next((measure, ratios) for measure, ratios in by_measure if ratios)
        worst = max(ratios, key=lambda tensor: abs(math.log(ratios[tensor])))
        outliers.append(Outlier(client, worst, ratios[worst], len(ratios), measure))
    return outliers


def find_large_counts(images: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return {client: {"counts": ratio to the others' median}} of far larger image counts.

    Args:
        images: a client's total, at least 1.
    """
    return _far_ratios([{"counts": dict(images)}], small=False)


def _far_ratios(
    measures: Iterable[Measures], large: bool = True, small: bool = True
) -> dict[str, dict[str, float]]:
    """Return the ratios of outlier tensors to the others' median, by client and tensor.

    Args:
        large: include ratios above 1.
        small: include ratios below 1.
    """
    ratios = defaultdict[str, dict[str, float]](dict)
    for by_tensor in measures:
        for tensor, by_client in by_tensor.items():
            for client, ratio in _far(by_client).items():
                if (large and ratio > 1) or (small and ratio < 1):
                    ratios[client][tensor] = ratio
    return ratios


def _far(norms: Mapping[str, float]) -> dict[str, float]:
    """Return the ratio to the others' median, of the clients for which it is far from 1."""
    if len(norms) < 2:
        return {}
    logs = {client: math.log(norm) for client, norm in norms.items()}
    medians = medians_of_others(logs)
    # Without one of all clients, at most three different medians remain
    spreads = {median: _deviations_of_others(logs, median) for median in set(medians.values())}
    far = {}
    for client, median in medians.items():
        distance = logs[client] - median
        limit = DEVIATIONS * 1.4826 * spreads[median][client]
        if abs(distance) > max(math.log(FACTOR), limit):
            far[client] = math.exp(distance)
    return far


def _deviations_of_others(logs: Mapping[str, float], median: float) -> dict[str, float]:
    """Return, by client, the median absolute deviation of the others from a median."""
    return medians_of_others({client: abs(value - median) for client, value in logs.items()})


def _measure(
    payloads: Mapping[str, Payload],
    tensors_of: Callable[[Payload], Iterator[tuple[str, torch.Tensor]]],
    measure: Callable[[torch.Tensor], float],
) -> Iterable[Measures]:
    """Measure tensors of payloads, one result per group of comparable payloads.

    Classifiers are comparable if they have the same architecture.
    """
    by_kind = defaultdict[str, Measures](lambda: defaultdict(dict))
    for client, payload in payloads.items():
        kind = payload.architecture if isinstance(payload, Classifier) else ""
        for tensor, value in tensors_of(payload):
            by_kind[kind][tensor][client] = max(measure(value), FLOOR)
    return by_kind.values()


def _norm(value: torch.Tensor) -> float:
    norm: float = torch.linalg.vector_norm(value).item() / math.sqrt(value.numel())
    return norm


def _spread(rows: torch.Tensor) -> float:
    return _norm(rows - rows.mean(dim=0)) / _norm(rows)


def _tensors(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors; sums over images as means, to be comparable."""
    values: dict[str, object]
    if isinstance(payload, Classifier):
        values = dict(payload.state)
    elif isinstance(payload, FeatureStatistics):
        images = payload.counts.sum()
        values = {"sums": payload.sums / payload.counts[:, None]}
        if payload.triangle is not None:
            values["triangle"] = payload.triangle / images
        if payload.factor is not None:
            values["factor"] = payload.factor / images.sqrt()
    elif isinstance(payload, LatentStatistics):
        counts = payload.counts.view(-1, 1, 1, 1)
        values = {"sums": payload.sums / counts, "squares": payload.squares / counts}
    else:
        values = {item.name: getattr(payload, item.name) for item in fields(payload)}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            yield name, value


def _class_rows(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with one row per class that are not nearly zero, if there are two classes."""
    if len(payload.classes) > 1:
        for name, rows in _by_class(payload):
            if _norm(rows) > FLOOR:
                yield name, rows


def _by_class(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with one row per class; of a classifier the last matrix, usually its head.

    Tensors whose values are restricted, such as shares, are omitted: their rows may all be equal.
    """
    if isinstance(payload, Classifier):
        matrices = [item for item in _tensors(payload) if item[1].ndim == 2]
        yield from matrices[-1:]
        return
    kind: type = type(payload)
    for name, value in _tensors(payload):
        field = fields_of(kind)[name]
        by_class = any(shape.dimensions[0] == "classes" for shape in field.shapes)
        if by_class and not set(field.values) - {Values.SUMS}:
            yield name, value
