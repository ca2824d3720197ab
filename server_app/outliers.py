"""A first word on poison: whose payload is far larger, or far smaller, than the others'.

A payload scaled by 1e6 passes every check of the wire format, and a run's accuracy falls without a
word. Norms show it; labels that were swapped leave them as they are. What is found is reported and
not refused: an honest client may be an exception.

The rule, for each of a payload's tensors by itself: of a client's numbers the root mean square r
(a norm that does not grow with the classes or images that the client holds), of ln r the distance
to the other clients' median, in their median absolute deviations (MAD).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from osfl.payloads import Classifier, Payload

# Six honest clients of the digits, each a domain of its own, differ by up to 3 times in FedLMG's
# tensors (the first BatchNorm sees the colours) and by 1.4 in the other methods' payloads; four
# whose images and classes are very uneven by up to 3.7 (biases begin at zero and grow with the
# steps). Where others differ more than that, five of their MADs are farther.
FACTOR = 5.0
DEVIATIONS = 5.0  # a MAD of a normal distribution is 1 / 1.4826 of a standard deviation
FLOOR = 0.01  # a norm below it counts as this: between biases that are nearly zero nothing is far

Norms = dict[str, dict[str, float]]  # by tensor, then client


@dataclass(frozen=True)
class Outlier:
    """A client, its tensor that is farthest from the others', and how many are far."""

    client: str
    tensor: str
    times: float  # the others' median
    tensors: int

    def __str__(self) -> str:
        more = f" (so have {self.tensors - 1} more of its tensors)" if self.tensors > 1 else ""
        return (
            f"{self.client}: {self.tensor} has a norm of {self.times:.3g} times the others' "
            f"median{more}"
        )


def find_outliers(payloads: Mapping[str, Payload]) -> list[Outlier]:
    """The clients whose norms are far from the other clients', by name."""
    far = defaultdict[str, dict[str, float]](dict)
    for norms in _norms(payloads).values():
        for tensor, by_client in norms.items():
            for client, times in _far(by_client).items():
                far[client][tensor] = times
    found = []
    for client, tensors in sorted(far.items()):
        worst = max(tensors, key=lambda tensor: abs(math.log(tensors[tensor])))
        found.append(Outlier(client, worst, tensors[worst], len(tensors)))
    return found


def _far(norms: Mapping[str, float]) -> dict[str, float]:
    """How many times the others' median a norm is, of the clients where that is far."""
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


def _norms(payloads: Mapping[str, Payload]) -> dict[str, Norms]:
    """The root mean squares of all tensors, by what can be compared.

    Classifiers of one architecture.
    """
    found = defaultdict[str, Norms](lambda: defaultdict(dict))
    for client, payload in payloads.items():
        kind = payload.architecture if isinstance(payload, Classifier) else ""
        for tensor, value in _tensors(payload):
            if value.is_floating_point() and value.numel():
                norm = torch.linalg.vector_norm(value).item() / math.sqrt(value.numel())
                found[kind][tensor][client] = max(norm, FLOOR)
    return found


def _tensors(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(payload, Classifier):
        yield from payload.state.items()
        return
    for item in fields(payload):
        value = getattr(payload, item.name)
        if isinstance(value, torch.Tensor):
            yield item.name, value
