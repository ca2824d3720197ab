"""What does each client give the global model? It is trained again without that client's images.

Every synthetic image has an owner, so that leaving a client out is exact: the leave-one-out value
(Ghorbani and Zou, "Data Shapley", arXiv 1904.02868, section 2), by a whole training for each client
(`influence = true`). All these models learn four fifths of the images, and are tested on the fifth
that none of them learned: the last ones of each client's class.

Three figures come of it. How many of a client's images the model of all others sees as the client
says: few, if it lies about its classes, or if its domain is nobody else's. What the client gives
images like its own, and what it gives images like the others'. A liar's lies serve images like its
own, and harm the others'; a client of a domain of its own harms nobody.

What it does not see: the truth. Images are compared with each other, and not with real ones. If
most clients tell the same lie, the honest ones look like liars.

Difference from the paper: theirs has a test set. Ours, which the server has not, is a fifth of the
synthetic images, client by client.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist, mean

import torch

from osfl.models.classifiers import logits_of
from osfl.payloads import Payload
from server_app.job import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import digest_of, trained

EVERYBODY = ""  # in the place of who is left out
HELD_OUT = 5  # one image of so many


@dataclass(frozen=True)
class Gain:
    """A difference in points, and half of its interval."""

    points: float
    half: float


@dataclass(frozen=True)
class Influence:
    """Of a client.

    Attributes:
        seen: how many of its images (%) the model of the others takes for what the client says.
        own: what it gives images like its own.
        others: what it gives images like the other clients'; each of these counts once.
    """

    seen: float
    own: Gain
    others: Gain

    @property
    def harms(self) -> bool:
        """Whether the others are better off without it, beyond the interval."""
        return self.others.points + self.others.half < 0


def report_influences(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> None:
    """Measure each client's influence, where the run asks for it, and keep it for the report.

    Public domains' images, which are no client's, are learned by every model and test none.
    """
    clients = sorted(set(images.clients) & set(payloads))
    if not job.config.influence:
        return
    if len(clients) < 2:
        job.status.warn_of("influence = true: of one client alone there is nothing to compare")
        return
    tested = held_out(images, clients)
    hits = hits_without(job, clients, images, tested)
    found = influences(hits, [images.clients[row] for row in tested])
    job.folder.store_influences({client: asdict(one) for client, one in found.items()})
    for client, one in found.items():
        if one.harms:
            job.status.warn_of(
                f"influence: without {client} the model sees {-one.others.points:.1f} points more "
                "of the images like the other clients'. Look at its images"
            )


def held_out(images: SyntheticSet, clients: Sequence[str]) -> list[int]:
    """The places of the last fifth of each client's images of a class, and at least one of them."""
    groups: dict[tuple[str, int], list[int]] = {}
    for row, owner in enumerate(zip(images.clients, images.labels.tolist(), strict=True)):
        if owner[0] in clients:
            groups.setdefault(owner, []).append(row)
    return sorted(row for rows in groups.values() for row in rows[-max(1, len(rows) // HELD_OUT) :])


def hits_without(
    job: ServerJob, clients: Sequence[str], images: SyntheticSet, tested: list[int]
) -> dict[str, torch.Tensor]:
    """Which of the images at the places `tested` are seen as what they are labelled, bool [M].

    By who is left out. A server that was killed goes on with the first client that lacks.
    """
    learned = torch.ones(len(images.labels), dtype=torch.bool)
    learned[tested] = False
    owners = hashlib.sha256("\n".join((*images.clients, *clients)).encode()).hexdigest()
    inputs = f"{digest_of(images.pixels, images.labels)} {owners}"
    found = job.folder.stored_hits(inputs)
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


def influences(hits: Mapping[str, torch.Tensor], owners: Sequence[str]) -> dict[str, Influence]:
    """Of each client, from what `hits_without` gives.

    Intervals are of these images, 95 % for all clients together (Bonferroni). Another training
    would move the figures, too.

    Args:
        owners: whose each held-out image is, [M].
    """
    clients = [client for client in hits if client != EVERYBODY]
    deviations = NormalDist().inv_cdf(1 - 0.05 / 2 / len(clients))
    own = {client: torch.tensor([owner == client for owner in owners]) for client in clients}
    found = {}
    for client in clients:
        # Data Shapley, section 2: V(D) - V(D - {i}), for every held-out image
        gained = hits[EVERYBODY].double() - hits[client].double()
        others = [gained[own[other]] for other in clients if other != client]
        found[client] = Influence(
            seen=100 * hits[client][own[client]].double().mean().item(),
            own=_mean_gain([gained[own[client]]], deviations),
            others=_mean_gain(others, deviations),
        )
    return found


def _mean_gain(parts: Sequence[torch.Tensor], deviations: float) -> Gain:
    """The mean of the parts' means, in points, and so many of its standard errors."""
    variances = [part.var(correction=0).item() / max(1, len(part) - 1) for part in parts]
    points = 100 * mean(part.mean().item() for part in parts)
    return Gain(points, 100 * deviations * sqrt(sum(variances)) / len(parts))
