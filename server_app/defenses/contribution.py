"""What does each client give the global model? It is trained again without that client's images.

Every synthetic image has an owner, so to leave a client out takes no new image: the leave-one-out
value (Ghorbani and Zou, "Data Shapley", arXiv 1904.02868, section 2), by a whole training for each
client (`influence = true`). All these models learn by plain training (FT, with no label-check or
teacher), and are tested on images that none of them learned: the last fifth of each client's class.

Three figures come of it. How many of a client's images the model of all others sees as the client
says; what the client gives images like its own; and what it gives images like the others'. Of a
client that swaps all its classes fewer may be seen than chance would have; of one whose domain is
nobody else's few. A lie need not harm images like the others'.

What it does not see: the truth. Images are compared with each other, and not with real ones. Two
clients that tell the same lie can hide each other, for without the one there is the other yet. A
patch or another client's payload harms no image that tests.

Differences from the paper:

1. Theirs: a test set. Ours, which the server has not: some of the synthetic images, client by
   client.
2. Theirs: no interval. Ours: that of matched proportions (Agresti and Min, "Simple improved
   confidence intervals for comparing matched proportions", 2005), about the plain difference.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist, mean

import torch

from osfl.config.problems import FEWEST_WITH_INFLUENCE
from osfl.models.classifiers import ClassifierError, logits_of
from osfl.payload.kinds import Payload
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import digest_of, trained

EVERYBODY = ""  # in the place of who is left out
HELD_OUT = 5  # one image of so many
ENOUGH = 20  # images, below which an interval by standard errors says little


@dataclass(frozen=True)
class Gain:
    """A difference in points, and half of its interval."""

    points: float
    half: float


@dataclass(frozen=True)
class Influence:
    """Of a client.

    Attributes:
        seen: how many of its images (%) the model of the others takes for what the client says; of
            the classes that another client holds, too. None if there is no such class.
        own: what it gives images like its own.
        others: what it gives images like the other clients'; each of these counts once.
        images: how many of the others' that is of.
    """

    seen: float | None
    own: Gain
    others: Gain
    images: int

    @property
    def harms(self) -> bool:
        """Whether the others are better off without it, beyond the interval."""
        return self.images >= ENOUGH and self.others.points + self.others.half < 0


def report_influences(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> None:
    """Measure each client's influence, where the run asks for it, and keep it for the report.

    Public domains' images, which are no client's, are learned by every model and test none. A
    training that fails costs the table, and not the run.
    """
    if not job.config.influence:
        return
    clients = sorted(set(images.clients) & set(payloads))
    found: dict[str, Influence] = {}
    if len(clients) < FEWEST_WITH_INFLUENCE:
        job.status.warn_of(
            f"influence: needs images of {FEWEST_WITH_INFLUENCE} clients, and has {len(clients)}"
        )
    else:
        try:
            found = measured(job, clients, images)
        except ClassifierError as error:
            job.status.warn_of(f"influence: a training without a client failed: {error}")
    # What is there may be of other images
    job.folder.store_influences({client: asdict(one) for client, one in found.items()})
    for client, one in found.items():
        if one.harms:
            job.status.warn_of(
                f"influence: without {client} the model sees {-one.others.points:.1f} points more "
                "of the images like the other clients', which is more than chance in these images "
                "makes. Look at its images"
            )


def measured(job: ServerJob, clients: Sequence[str], images: SyntheticSet) -> dict[str, Influence]:
    """Every client's influence.

    Raises:
        ClassifierError: a training failed.
    """
    tested = held_out(images, clients)
    hits = hits_without(job, clients, images, tested)
    return influences(hits, [images.clients[row] for row in tested], images.labels[tested].tolist())


def held_out(images: SyntheticSet, clients: Sequence[str]) -> list[int]:
    """The places of the last fifth of each client's images of a class, and at least one of them."""
    tested: list[int] = []
    for rows in images.rows_by_class(clients).values():
        tested += rows[-max(1, len(rows) // HELD_OUT) :]
    return sorted(tested)


def hits_without(
    job: ServerJob, clients: Sequence[str], images: SyntheticSet, tested: list[int]
) -> dict[str, torch.Tensor]:
    """Which of the images at the places `tested` are seen as what they are labelled, bool [M].

    By who is left out. A server that was killed goes on with the first client that lacks.
    """
    learned = torch.ones(len(images.labels), dtype=torch.bool)
    learned[tested] = False
    inputs = _digest(clients, images, tested)
    found = {
        left: hits
        for left, hits in job.folder.stored_hits(inputs).items()
        if len(hits) == len(tested) and all(isinstance(hit, bool) for hit in hits)
    }
    turns = (EVERYBODY, *clients)
    job.status.phase("training without each client", len(turns))
    for turn, left in enumerate(turns):
        if left in found:
            continue

        def progress(done: int, total: int, turn: int = turn) -> None:
            job.status.advance(turn * total + done, len(turns) * total)

        others = torch.tensor([owner != left for owner in images.clients])
        rows = others & learned
        model = trained(job, images.pixels[rows], images.labels[rows], progress=progress)
        predicted = logits_of(model, images.pixels[tested], job.device).argmax(dim=1)
        found[left] = (predicted == images.labels[tested]).tolist()
        job.folder.store_hits(inputs, found)
    return {left: torch.tensor(found[left]) for left in turns}


def _digest(clients: Sequence[str], images: SyntheticSet, tested: list[int]) -> str:
    """Of all that hits depend on, but for the run's settings."""
    owners = hashlib.sha256("\n".join((*images.clients, *clients)).encode()).hexdigest()
    return f"{digest_of(images.pixels, images.labels, torch.tensor(tested))} {owners}"


def influences(
    hits: Mapping[str, torch.Tensor], owners: Sequence[str], labels: Sequence[int]
) -> dict[str, Influence]:
    """Of each client, from what `hits_without` gives.

    Intervals are of these images, 95 % for all that a table has (Bonferroni). Another training
    would move the figures, too.

    Args:
        owners, labels: whose each held-out image is, and of which class, [M].
    """
    clients = [client for client in hits if client != EVERYBODY]
    # Two intervals a client
    deviations = NormalDist().inv_cdf(1 - 0.05 / 2 / (2 * len(clients)))
    own = {client: torch.tensor([owner == client for owner in owners]) for client in clients}
    held = set(zip(owners, labels, strict=True))
    shared = torch.tensor(
        [
            any((other, label) in held for other in clients if other != owner)
            for owner, label in zip(owners, labels, strict=True)
        ]
    )
    found = {}
    for client in clients:
        # Data Shapley, section 2: V(D) - V(D - {i}), for every held-out image
        gained = hits[EVERYBODY].double() - hits[client].double()
        others = [gained[own[other]] for other in clients if other != client]
        known = hits[client][own[client] & shared].double()
        found[client] = Influence(
            seen=100 * known.mean().item() if len(known) else None,
            own=_mean_gain([gained[own[client]]], deviations),
            others=_mean_gain(others, deviations),
            images=sum(map(len, others)),
        )
    return found


def _mean_gain(parts: Sequence[torch.Tensor], deviations: float) -> Gain:
    """The mean of the parts' means, in points, and so many of its standard errors.

    Args:
        parts: differences between two answers, right or wrong, to the same question: -1, 0 or 1.
    """
    points = 100 * mean(part.mean().item() for part in parts)
    error = sqrt(sum(map(_variance_of_mean, parts))) / len(parts)
    return Gain(points, 100 * deviations * error)


def _variance_of_mean(differences: torch.Tensor) -> float:
    """Of [n] differences of matched answers; above 0 also where all are alike, which may be chance.

    Agresti and Min, 2005: half an answer more in each cell of the table of two by two, so one that
    differs, and one that does not.
    """
    count = len(differences) + 2
    share = (differences.square().sum().item() + 1) / count
    return (share - (differences.sum().item() / count) ** 2) / count
