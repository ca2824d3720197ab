"""Payloads as integers that add up modulo 2^32 (fixed point), and payloads of their sums.

A secure sum adds the clients' integers (osfl/payload/masking.py). Its precision is public and the
same for all: a number x is sent as round(x / step), where the step is the smallest power of two for
which the sum over all members cannot overflow. Counts and votes are exact.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from osfl.config import RunConfig
from osfl.payload.kinds import (
    Descriptions,
    DomainVector,
    Embeddings,
    Encodings,
    FeatureStatistics,
    LatentStatistics,
    Payload,
    Votes,
)
from osfl.payload.masking import Numbers

# The client name of a sum's payload; methods synthesize its images
SUM_CLIENT = "all-clients"
# Integers modulo 2^32 stand for numbers in [-RANGE, RANGE)
RANGE = 2**31
# Tensors of whole numbers, which are not rounded
EXACT_TENSORS = ("counts", "votes")
# Tensors that sum products of two of an image's numbers
SQUARED_TENSORS = ("triangle", "squares")
# Tensors to which a client adds once, not once per image
CLIENT_TENSORS = ("votes",)
# Tensors to which an epsilon adds noise in whole numbers
NOISY_TENSORS = ("vectors", "domain")
Tensors = Mapping[str, torch.Tensor]


class SummandError(ValueError):
    """Numbers that do not fit into a secure sum's range; the message names the setting."""


@dataclass(frozen=True)
class Layout:
    """Order, range and precision of the integers of one client.

    Attributes:
        shapes: of each tensor, in order; all classes of the run have a row.
        members: clients whose integers are added.
        images: upper bound on a client's training images (`secure-sum-images`).
        bound: upper bound on the magnitude of an image's numbers (`secure-sum-bound`).
        guarantee: the settings of the noise that clients add to the integers, which all members
            must share; empty without noise.
    """

    shapes: Mapping[str, tuple[int, ...]]
    members: int
    images: int
    bound: float
    guarantee: tuple[float | str, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of integers."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def text(self) -> str:
        """Return the layout as text, which all members must share."""
        steps = {name: self.step(name) for name in self.shapes}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        agreed = [self.members, self.images, self.bound, self.guarantee]
        return json.dumps([shapes, steps, agreed])

    def place(self, name: str) -> slice:
        """Return where the integers of a tensor are."""
        names = list(self.shapes)
        before = names[: names.index(name)]
        start = sum(math.prod(self.shapes[other]) for other in before)
        return slice(start, start + math.prod(self.shapes[name]))

    def limit(self, name: str) -> float:
        """Return the largest magnitude of a client's numbers of a tensor."""
        images = 1 if name in CLIENT_TENSORS else self.images
        if name in EXACT_TENSORS:
            return images
        return images * self.bound ** (2 if name in SQUARED_TENSORS else 1)

    def step(self, name: str) -> float:
        """Return the smallest difference of two numbers that the integers can tell apart."""
        if name in EXACT_TENSORS:
            return 1.0
        # Half of the range is for the noise
        room = RANGE // 2 if self.guarantee else RANGE
        # Rounding may add half a step for each member
        smallest = self.limit(name) * self.members / (room - self.members)
        return float(2.0 ** math.ceil(math.log2(smallest)))

    def quantize(self, tensors: Tensors) -> Numbers:
        """Return a client's tensors as integers modulo 2^32.

        Raises:
            SummandError: a number exceeds the limit, or a tensor has another shape.
        """
        parts = []
        for name, shape in self.shapes.items():
            values = tensors[name].double().numpy().reshape(-1)
            if self.guarantee and name in NOISY_TENSORS:
                # A refusal would depend on images without noise; clipping adds no sensitivity
                values = np.clip(values, -self.limit(name), self.limit(name))
            if tuple(tensors[name].shape) != shape:
                raise SummandError(f"{name} has shape {list(tensors[name].shape)}; not {shape}")
            self._check_range(name, values)
            parts.append(np.rint(values / self.step(name)).astype(np.int64))
        return np.concatenate(parts).astype(np.uint32)

    def dequantize(self, numbers: Numbers) -> dict[str, torch.Tensor]:
        """Return the tensors of a sum of integers, in float64.

        Raises:
            SummandError: a number is larger than any sum of the members' numbers.
        """
        tensors = {}
        for name, shape in self.shapes.items():
            signed = numbers[self.place(name)].astype(np.int32)
            values = signed.astype(np.float64) * self.step(name)
            largest = self.members * (self.limit(name) + self.step(name))
            if self.guarantee and name in NOISY_TENSORS:
                largest = RANGE * self.step(name)
            if np.abs(values).max(initial=0.0) > largest:
                raise SummandError(f"the {name} of the secure sum are impossible")
            tensors[name] = torch.from_numpy(values).view(shape)
        return tensors

    def _check_range(self, name: str, values: np.ndarray) -> None:
        largest = float(np.abs(values).max(initial=0.0))
        # Also refuses NaN
        if largest <= self.limit(name):
            return
        if name in EXACT_TENSORS:
            raise SummandError(
                f"secure-sum-images = {self.images}: this client has more training images of a "
                "class; increase it"
            )
        raise SummandError(
            f"secure-sum-bound = {self.bound:g}: too low for the numbers of this client's "
            f"{name} with secure-sum-images = {self.images}; double it"
        )


def guarantee_of(config: RunConfig) -> tuple[float | str, ...]:
    """Return the settings on which the noise of a run depends; () without an epsilon."""
    if not config.epsilon:
        return ()
    return config.method, config.epsilon, config.delta, config.clip_norm


def run_layout(config: RunConfig, shapes: Mapping[str, tuple[int, ...]], members: int) -> Layout:
    """Return the layout of a run's integers.

    Args:
        shapes: as in `Layout`.
        members: clients whose integers are added.
    """
    return Layout(
        shapes, members, config.secure_sum_images, config.summand_bound, guarantee_of(config)
    )


# ---- How each kind of payload adds up ----


@dataclass(frozen=True)
class Share:
    """A client's part in a sum.

    Attributes:
        rows: the place of each of its classes among the run's, [c].
        counts: its number of images of each of them, [c].
        classes: the number of the run's classes, C.
        candidates: the number of the run's candidate domains, of votes.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    classes: int
    candidates: int

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Give all C classes a row of values [c, ...]; those that it does not hold are 0."""
        full = torch.zeros(self.classes, *values.shape[1:], dtype=values.dtype)
        full[self.rows] = values
        return full


@dataclass(frozen=True)
class Total:
    """A sum of all clients' tensors.

    Attributes:
        tensors: of all classes.
        classes: all classes of the run, C.
        members: clients whose tensors were added.
        layout: of the integers; its rounding may make a sum slightly impossible.
    """

    tensors: Tensors
    classes: Sequence[str]
    members: int
    layout: Layout

    @cached_property
    def is_held(self) -> torch.Tensor:
        """Mask of the classes with images, [C].

        Raises:
            SummandError: a count is negative, or all are 0.
        """
        counts = self.tensors["counts"]
        if bool((counts < 0).any()) or not bool((counts > 0).any()):
            raise SummandError("the secure sum has impossible counts")
        return counts > 0

    @property
    def names(self) -> tuple[str, ...]:
        """The classes with images."""
        held = zip(self.classes, self.is_held.tolist(), strict=True)
        return tuple(name for name, is_held in held if is_held)

    @property
    def counts(self) -> torch.Tensor:
        """The number of images of each of these classes, [c]."""
        return self.rows("counts").long()

    def rows(self, name: str) -> torch.Tensor:
        """Return a tensor's rows of these classes."""
        return self.tensors[name][self.is_held]


@dataclass(frozen=True)
class Summand:
    """The way in which payloads of one kind add up.

    Attributes:
        names: of the tensors that clients add, in order.
        tensors: returns a client's tensors; None if its payload does not add up.
        payloads: returns the payloads of a sum, by the name of a client.
    """

    names: tuple[str, ...]
    tensors: Callable[[Any, Share], dict[str, torch.Tensor] | None]
    payloads: Callable[[Total], dict[str, Payload]]


def _statistics(payload: FeatureStatistics, share: Share) -> dict[str, torch.Tensor] | None:
    if payload.triangle is None:
        return None
    counts, sums = share.spread(payload.counts), share.spread(payload.sums)
    return {"counts": counts, "sums": sums, "triangle": payload.triangle}


def _latents(payload: LatentStatistics, share: Share) -> dict[str, torch.Tensor]:
    names = ("counts", "sums", "squares")
    return {name: share.spread(getattr(payload, name)) for name in names}


def _weighted_rows(
    payload: Descriptions | Embeddings | Encodings, share: Share
) -> dict[str, torch.Tensor]:
    """Return the counts, and each class's vectors times its number of images."""
    scale = share.counts.double().view(-1, *[1] * (payload.vectors.ndim - 1))
    return {
        "counts": share.spread(share.counts),
        "vectors": share.spread(payload.vectors * scale),
    }


def _weighted_domain(payload: DomainVector, share: Share) -> dict[str, torch.Tensor] | None:
    if payload.offsets is not None:
        return None
    return {
        "counts": share.spread(share.counts),
        "domain": payload.domain * int(share.counts.sum()),
    }


def _ballots(payload: Votes, share: Share) -> dict[str, torch.Tensor]:
    winners = payload.winners.long()
    return {"votes": share.spread(torch.nn.functional.one_hot(winners, share.candidates))}


def _sum_of_statistics(total: Total) -> dict[str, Payload]:
    """Return statistics whose scatter within the classes is positive semidefinite.

    Rounding may have lowered some of its eigenvalues below 0, which are raised to 0.

    Raises:
        SummandError: one is lower than rounding can explain.
    """
    sums, counts, layout = total.rows("sums"), total.counts, total.layout
    width = sums.shape[1]
    triangle = tuple(torch.triu_indices(width, width))
    moments = torch.zeros(width, width, dtype=torch.float64)
    moments[triangle] = total.tensors["triangle"]
    moments = moments + moments.T - torch.diag(moments.diagonal())
    between = sums.T @ (sums / counts.double()[:, None])
    values, vectors = torch.linalg.eigh(moments - between)
    # Weyl's inequality: no eigenvalue moves further than the norm of what rounding adds
    error = layout.members * layout.step("sums") / 2
    rounding = layout.members * layout.step("triangle") / 2 * width
    rounding += float((2 * sums.abs().sum(dim=1) * error / counts).sum()) + width * error**2
    if float(values.min()) < -rounding - 1e-6 * float(values.abs().max()):
        raise SummandError("the moments of the secure sum are impossible")
    if float(values.min()) < 0:
        moments = between + vectors @ (values.clamp_min(0)[:, None] * vectors.T)
    payload = FeatureStatistics(total.names, counts, sums.float(), moments[triangle].float())
    return {SUM_CLIENT: payload}


def _sum_of_latents(total: Total) -> dict[str, Payload]:
    sums = total.rows("sums")
    squares = _possible_squares(sums, total.rows("squares"), total.counts, total.layout)
    return {SUM_CLIENT: LatentStatistics(total.names, total.counts, sums.float(), squares.float())}


def _possible_squares(
    sums: torch.Tensor, squares: torch.Tensor, counts: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Return sums of squares [C, ...] that are at least (sum z)^2 / n.

    Rounding may have lowered some of them further, which are raised to that.

    Raises:
        SummandError: one is lower than rounding can explain.
    """
    n = counts.double().view(-1, *[1] * (sums.ndim - 1))
    # Cauchy-Schwarz inequality: n sum z^2 is at least (sum z)^2
    lowest = sums.square() / n
    error = layout.members * layout.step("sums")
    rounding = (2 * sums.abs() * error + error**2) / n + layout.members * layout.step("squares")
    if bool((squares < lowest - rounding).any()):
        raise SummandError("the squares of the secure sum are impossible")
    return torch.maximum(squares, lowest)


def _mean_vectors(
    kind: type[Descriptions | Embeddings | Encodings],
) -> Callable[[Total], dict[str, Payload]]:
    """Return the function from a sum to a payload of each class's mean vectors."""

    def payloads(total: Total) -> dict[str, Payload]:
        sums = total.rows("vectors")
        counts = total.counts.view(-1, *[1] * (sums.ndim - 1))
        return {SUM_CLIENT: kind(total.names, (sums / counts).float())}

    return payloads


def _mean_domain(total: Total) -> dict[str, Payload]:
    mean = total.tensors["domain"] / total.counts.sum()
    return {SUM_CLIENT: DomainVector(total.names, mean.float())}


def _separate_votes(total: Total) -> dict[str, Payload]:
    """Return one payload per member, with at most one vote per class, in the candidates' order.

    Which votes came from the same client is lost.

    Raises:
        SummandError: a count of votes is negative, a class has more votes than members, or there
            are none.
    """
    votes = total.tensors["votes"].long()
    most = int(votes.sum(dim=1).max())
    if bool((votes < 0).any()) or not 0 < most <= total.members:
        raise SummandError("the secure sum has impossible votes")
    ballots = [torch.repeat_interleave(torch.arange(votes.shape[1]), row) for row in votes]
    payloads: dict[str, Payload] = {}
    for member in range(total.members):
        held = [label for label, ballot in enumerate(ballots) if member < len(ballot)]
        if held:
            winners = torch.tensor([int(ballots[label][member]) for label in held])
            names = tuple(total.classes[label] for label in held)
            payloads[f"{SUM_CLIENT}-{member + 1}"] = Votes(names, winners.to(torch.uint8))
    return payloads


MEANS = ("counts", "vectors")
SUMMANDS = {
    "FeatureStatistics": Summand(("counts", "sums", "triangle"), _statistics, _sum_of_statistics),
    "LatentStatistics": Summand(("counts", "sums", "squares"), _latents, _sum_of_latents),
    "Descriptions": Summand(MEANS, _weighted_rows, _mean_vectors(Descriptions)),
    "Embeddings": Summand(MEANS, _weighted_rows, _mean_vectors(Embeddings)),
    "Encodings": Summand(MEANS, _weighted_rows, _mean_vectors(Encodings)),
    "DomainVector": Summand(("counts", "domain"), _weighted_domain, _mean_domain),
    "Votes": Summand(("votes",), _ballots, _separate_votes),
}


# ---- Payloads and sums ----


def summand_shapes(
    kind: str, tensors: Mapping[str, Sequence[int]], classes: int, candidates: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a payload kind's tensors in a sum.

    Args:
        tensors: the shapes that the payload has for all classes, by field.
        classes: C.
        candidates: the number of the run's candidate domains, of votes.

    Raises:
        TypeError: payloads of this kind do not add up.
    """
    shapes = {**tensors, "counts": (classes,), "votes": (classes, candidates)}
    return {name: tuple(shapes[name]) for name in _summand_of(kind).names}


def _summand_of(kind: str) -> Summand:
    if kind not in SUMMANDS:
        raise TypeError(f"payloads of kind {kind} do not add up; those of {', '.join(SUMMANDS)} do")
    return SUMMANDS[kind]


def to_summands(
    payload: Payload, classes: Sequence[str], images: Sequence[int], candidates: int
) -> dict[str, torch.Tensor]:
    """Return the tensors that a client adds to the sum.

    Args:
        payload: of a kind that adds up.
        classes: all classes of the run, C.
        images: the number of images of each class of the payload, its weight in a mean.
        candidates: the number of the run's candidate domains, of votes.

    Raises:
        TypeError: payloads of this kind do not add up.
    """
    kind = type(payload).__name__
    rows = torch.tensor([list(classes).index(name) for name in payload.classes])
    share = Share(rows, torch.tensor(images), len(classes), candidates)
    tensors = _summand_of(kind).tensors(payload, share)
    if tensors is None:
        raise TypeError(f"payloads of kind {kind} do not add up")
    return tensors


def from_sums(
    kind: str, sums: Tensors, classes: Sequence[str], members: int, layout: Layout
) -> dict[str, Payload]:
    """Return the payload of the sum, under the name of a client.

    The sum of votes becomes one payload per member, each with one vote per class.

    Args:
        members: clients whose payloads were added.
        layout: of the integers; its rounding may make a sum slightly impossible.

    Raises:
        SummandError: no payloads of this kind have this sum.
        TypeError: payloads of this kind do not add up.
    """
    return _summand_of(kind).payloads(Total(sums, classes, members, layout))
