"""A first word on poison: whose payload is far larger or smaller than the others', has one and
the same for all classes, or states far more images than the others.

A payload scaled by 1e6 passes every check of the wire format, and a run's accuracy falls without a
word. Norms show it, and spreads show who sends one class under every name; labels that were swapped
leave both as they are. What is found is reported and not refused: an honest client may be an
exception.

The rule, for each of a payload's tensors by itself: of a client's numbers the root mean square r
(a norm that does not grow with the classes or images that the client holds), of ln r the distance
to the other clients' median, in their median absolute deviations (MAD). The same for the spread of
a tensor with a row for each class: r of what is left of it without the rows' mean, as a share of r.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from osfl.payload.fields import fields_of
from osfl.payload.kinds import Classifier, FeatureStatistics, Payload
from osfl.run_folder.status import with_details
from server_app.defenses.image_counts import stated_counts

# Six honest clients of the digits, each a domain of its own, differ by up to 3 times in FedLMG's
# tensors (the first BatchNorm sees the colours) and by 1.4 in the other methods' payloads; four
# whose images and classes are very uneven by up to 3.7 (biases begin at zero and grow with the
# steps). Spreads differ by up to 2.3 (FedCGS, by label). Where others differ more than that, five
# of their MADs are farther.
FACTOR = 5.0
DEVIATIONS = 5.0  # a MAD of a normal distribution is 1 / 1.4826 of a standard deviation
FLOOR = 0.01  # a norm below it counts as this: between biases that are nearly zero nothing is far

Measures = dict[str, dict[str, float]]  # by tensor, then client


@dataclass(frozen=True)
class Outlier:
    """A client, its tensor that is farthest from the others', and how many are far."""

    client: str
    tensor: str
    times: float  # the others' median
    tensors: int
    what: str = "norm"

    def __str__(self) -> str:
        factor = f"{max(self.times, 1 / self.times):.3g} times"
        if self.what == "total":
            text = f"it states {factor} as many images as the others' median"
        elif self.what == "norm":
            than = "larger" if self.times > 1 else "smaller"
            text = f"part of its payload is {factor} {than} than the other clients' median"
        else:
            text = f"its classes are {factor} more alike than the other clients' median"
        details = f"{self.tensor} has a {self.what} of {self.times:.3g} times the median"
        if self.tensors > 1:
            details += f", and {self.tensors - 1} more of its tensors stand out"
        return with_details(f"{self.client}: {text}", details)


def find_outliers(payloads: Mapping[str, Payload]) -> list[Outlier]:
    """The clients whose norms, spreads or image counts are far from the other clients', by name.

    A client is named for its counts first, and for its norms before its spreads.
    """
    norms = _far_of_each(_measured(payloads, _tensors, _norm))
    # A large one may be a class with few images, whose numbers scatter
    spreads = _far_of_each(_measured(payloads, _class_rows, _spread), large=False)
    counts = {client: stated_counts(payload) for client, payload in payloads.items()}
    images = find_large_counts({client: sum(own.values()) for client, own in counts.items() if own})
    found = []
    for client in sorted(norms.keys() | spreads.keys() | images.keys()):
        named = (
            ("total", images.get(client)),
            ("norm", norms.get(client)),
            ("spread over its classes", spreads.get(client)),
        )
        what, tensors = next((what, tensors) for what, tensors in named if tensors)
        worst = max(tensors, key=lambda tensor: abs(math.log(tensors[tensor])))
        found.append(Outlier(client, worst, tensors[worst], len(tensors), what))
    return found


def find_large_counts(images: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The clients that state far more images than the others, as `_far_of_each` gives them.

    Args:
        images: all that a client states, at least 1.
    """
    return _far_of_each([{"counts": dict(images)}], small=False)


def _far_of_each(
    measured: Iterable[Measures], large: bool = True, small: bool = True
) -> dict[str, dict[str, float]]:
    """Of each client with tensors that are far: how many times the others' median these have.

    Args:
        large: also those that have more than the others.
        small: also those that have less.
    """
    far = defaultdict[str, dict[str, float]](dict)
    for measures in measured:
        for tensor, by_client in measures.items():
            for client, times in _far(by_client).items():
                if (large and times > 1) or (small and times < 1):
                    far[client][tensor] = times
    return far


def _far(norms: Mapping[str, float]) -> dict[str, float]:
    """How many times the others' median a norm or a spread is, of the clients where that is far."""
    far = {}
    for client, norm in norms.items():
        others = np.log([other for name, other in norms.items() if name != client])
        if not len(others):
            continue
        median = np.median(others)
        deviation = 1.4826 * np.median(np.abs(others - median))
        distance = math.log(norm) - median
        if abs(distance) > max(math.log(FACTOR), DEVIATIONS * deviation):
            far[client] = math.exp(distance)
    return far


def _measured(
    payloads: Mapping[str, Payload],
    parts: Callable[[Payload], Iterator[tuple[str, torch.Tensor]]],
    measure: Callable[[torch.Tensor], float],
) -> Iterable[Measures]:
    """Of some parts of payloads, by what can be compared.

    Classifiers of one architecture.
    """
    found = defaultdict[str, Measures](lambda: defaultdict(dict))
    for client, payload in payloads.items():
        kind = payload.architecture if isinstance(payload, Classifier) else ""
        for tensor, value in parts(payload):
            found[kind][tensor][client] = max(measure(value), FLOOR)
    return found.values()


def _norm(value: torch.Tensor) -> float:
    return torch.linalg.vector_norm(value).item() / math.sqrt(value.numel())


def _spread(rows: torch.Tensor) -> float:
    return _norm(rows - rows.mean(dim=0)) / _norm(rows)


def _tensors(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of real numbers; sums over images as means, for clients have unlike numbers of them."""
    values: Mapping[str, object]
    if isinstance(payload, Classifier):
        values = payload.state
    elif isinstance(payload, FeatureStatistics):
        means = payload.sums / payload.counts[:, None]
        values = {"sums": means, "moments": payload.moments / payload.counts.sum()}
    else:
        values = {item.name: getattr(payload, item.name) for item in fields(payload)}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            yield name, value


def _class_rows(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    """What has a row for each class, of more than one, and is not nearly zero."""
    if len(payload.classes) > 1:
        for name, rows in _by_class(payload):
            if _norm(rows) > FLOOR:
                yield name, rows


def _by_class(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    """Of what has a row for each class that without more rules for its values (shares may all be
    equal); of a classifier the last matrix, which is most architectures' head.
    """
    if isinstance(payload, Classifier):
        matrices = [item for item in _tensors(payload) if item[1].ndim == 2]
        yield from matrices[-1:]
        return
    kind: type = type(payload)
    for name, value in _tensors(payload):
        field = fields_of(kind)[name]
        by_class = any(shape.dimensions[0] == "classes" for shape in field.shapes)
        if by_class and not field.values:
            yield name, value
