"""Payloads as integers that add up modulo 2^32 (fixed point), and payloads of their sums.

A secure sum adds the clients' integers (osfl/payload/masking.py). Its precision is public and the
same for all: a number x is sent as round(x / step), where the step is the smallest power of two for
which the sum over all members cannot overflow. Counts and votes are exact.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def summand_shapes(
    kind: str, tensors: Mapping[str, Sequence[int]], classes: int, candidates: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a payload kind's tensors in a sum.

    Args:
        tensors: the shapes that the payload has for all classes, by field.
        classes: C.
        candidates: the number of the run's candidate domains, of votes.
    """
    shapes = {name: tuple(shape) for name, shape in tensors.items()}
    match kind:
        case "Votes":
            return {"votes": (classes, candidates)}
        case "Descriptions" | "Encodings" | "Embeddings":
            return {"counts": (classes,), "vectors": shapes["vectors"]}
        case "DomainVector":
            return {"counts": (classes,), "domain": shapes["domain"]}
    return shapes


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
    labels = torch.tensor([list(classes).index(name) for name in payload.classes])

    def spread(rows: torch.Tensor) -> torch.Tensor:
        """Give all C classes a row; those that the client does not hold are 0."""
        full = torch.zeros(len(classes), *rows.shape[1:], dtype=rows.dtype)
        full[labels] = rows
        return full

    match payload:
        case FeatureStatistics(triangle=torch.Tensor() as triangle):
            sums = spread(payload.sums)
            return {"counts": spread(payload.counts), "sums": sums, "triangle": triangle}
        case LatentStatistics():
            sums, squares = spread(payload.sums), spread(payload.squares)
            return {"counts": spread(payload.counts), "sums": sums, "squares": squares}
        case Descriptions() | Encodings() | Embeddings():
            counts = torch.tensor(images)
            scale = counts.double().view(-1, *[1] * (payload.vectors.ndim - 1))
            return {"counts": spread(counts), "vectors": spread(payload.vectors * scale)}
        case DomainVector(offsets=None):
            counts = torch.tensor(images)
            return {"counts": spread(counts), "domain": payload.domain * sum(images)}
        case Votes():
            winners = payload.winners.long()
            return {"votes": spread(torch.nn.functional.one_hot(winners, candidates))}
    raise TypeError(f"payloads of kind {type(payload).__name__} do not add up")


def from_sums(
    kind: str, sums: Tensors, classes: Sequence[str], members: int, layout: Layout
) -> dict[str, Payload]:
    """Return the payload of the sum, under the name of a client.

    The sum of votes becomes one payload per member, each with one vote per class. Which votes came
    from the same client is lost.

    Args:
        members: clients whose payloads were added.
        layout: of the integers; its rounding may make a sum slightly impossible.

    Raises:
        SummandError: no payloads of this kind have this sum.
    """
    counts = sums["votes"].sum(dim=1) if kind == "Votes" else sums["counts"]
    if bool((counts < 0).any()) or not bool((counts > 0).any()):
        raise SummandError("the secure sum has impossible counts")
    if kind == "Votes":
        return _separate_votes(sums["votes"].long(), classes, members)
    is_held = counts > 0
    names = tuple(name for name, kept in zip(classes, is_held.tolist(), strict=True) if kept)
    held_counts = counts[is_held].long()

    def rows(name: str) -> torch.Tensor:
        return sums[name][is_held]

    payload: Payload
    match kind:
        case "FeatureStatistics":
            payload = _possible_statistics(names, held_counts, rows("sums"), sums, layout)
        case "LatentStatistics":
            squares = _possible_squares(rows("sums"), rows("squares"), held_counts, layout)
            payload = LatentStatistics(names, held_counts, rows("sums").float(), squares.float())
        case "Descriptions":
            payload = Descriptions(names, _means(rows("vectors"), held_counts))
        case "Embeddings":
            payload = Embeddings(names, _means(rows("vectors"), held_counts))
        case "Encodings":
            payload = Encodings(names, _means(rows("vectors"), held_counts))
        case "DomainVector":
            payload = DomainVector(names, (sums["domain"] / held_counts.sum()).float())
        case _:
            raise SummandError(f"payloads of kind {kind} do not add up")
    return {SUM_CLIENT: payload}


def _means(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return sums [C, ...] divided by each class's number of images [C]."""
    return (sums / counts.view(-1, *[1] * (sums.ndim - 1))).float()


def _possible_statistics(
    names: tuple[str, ...],
    counts: torch.Tensor,
    sums: torch.Tensor,
    tensors: Tensors,
    layout: Layout,
) -> FeatureStatistics:
    """Return statistics whose scatter within the classes is positive semidefinite.

    Rounding may have lowered some of its eigenvalues below 0, which are raised to 0.

    Raises:
        SummandError: one is lower than rounding can explain.
    """
    width = sums.shape[1]
    triangle = tuple(torch.triu_indices(width, width))
    moments = torch.zeros(width, width, dtype=torch.float64)
    moments[triangle] = tensors["triangle"]
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
    return FeatureStatistics(names, counts, sums.float(), moments[triangle].float())


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


def _separate_votes(
    votes: torch.Tensor, classes: Sequence[str], members: int
) -> dict[str, Payload]:
    """Return one payload per member, with at most one vote per class, in the candidates' order.

    Raises:
        SummandError: a count of votes is negative, or a class has more votes than members.
    """
    if bool((votes < 0).any()) or int(votes.sum(dim=1).max()) > members:
        raise SummandError("the secure sum has impossible votes")
    ballots = [torch.repeat_interleave(torch.arange(votes.shape[1]), row) for row in votes]
    payloads: dict[str, Payload] = {}
    for member in range(members):
        held = [label for label, ballot in enumerate(ballots) if member < len(ballot)]
        if held:
            winners = torch.tensor([int(ballots[label][member]) for label in held])
            names = tuple(classes[label] for label in held)
            payloads[f"{SUM_CLIENT}-{member + 1}"] = Votes(names, winners.to(torch.uint8))
    return payloads
