"""Client contribution: leave-one-out data valuation (`client-contribution = true`).

The global model is trained once on all synthetic images and once without each client's. Every
synthetic image has an owner, so leaving a client out needs no new image. The difference in accuracy
is the leave-one-out value (Ghorbani and Zou, "Data Shapley", arXiv 1904.02868, section 2). All
these models are trained plainly (FT, without label-filter or teacher) and tested on images that
none of them was trained on: the last fifth of each client's images of a class.

Each client gets three figures: the share of its images that the model of all others classifies as
labeled, its contribution to images like its own, and its contribution to images like the others'.
For a label-flipping client the first figure may be below chance. So it may be for an honest client
whose domain is unique. Label flipping need not lower the accuracy on the others' images.

Known limitations: images are compared with each other, not with real ones. Two clients that flip
the same labels can hide each other, because leaving out one keeps the other. A backdoor patch or a
copy of another client's payload harms no test image.

Differences from the paper:

1. Theirs: a test set. Ours: held-out synthetic images of each client, because the server has no
   test set.
2. Theirs: no interval. Ours: the interval for matched proportions (Agresti and Min, "Simple
   improved confidence intervals for comparing matched proportions", 2005) around the raw
   difference.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist, mean

import torch

from osfl.config.problems import MIN_CONTRIBUTION_CLIENTS
from osfl.models.classifiers import ClassifierError, compute_logits
from osfl.payload.kinds import Sent
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import digest_of, train_model

ALL_CLIENTS = ""  # stands for "no client left out"
HOLD_OUT_EVERY = 5  # one image in five is held out
MIN_TEST_IMAGES = 20  # fewer images make an interval from standard errors unreliable


@dataclass(frozen=True)
class Gain:
    """A difference in percentage points, and the half-width of its interval."""

    points: float
    half: float


@dataclass(frozen=True)
class ClientContribution:
    """One client's contribution.

    Attributes:
        seen: share (%) of its images that the model of the others classifies as labeled, over the
            classes that another client holds too. None if there is no such class.
        own: its contribution to images like its own.
        others: its contribution to images like the other clients', each of which counts equally.
        images: number of the others' images that `others` is estimated from.
    """

    seen: float | None
    own: Gain
    others: Gain
    images: int

    @property
    def harms(self) -> bool:
        """True if the model of the others is better without the client, beyond the interval."""
        return self.images >= MIN_TEST_IMAGES and self.others.points + self.others.half < 0


def report_contributions(
    job: ServerJob, payloads: Mapping[str, Sent], images: SyntheticSet
) -> None:
    """Estimate each client's contribution if the run asks for it, and store it for the report.

    Images of public domains have no client: every model is trained on them, and none is tested on
    them. A training that fails costs the table, not the run.
    """
    if not job.config.client_contribution:
        return
    clients = sorted(set(images.clients) & set(payloads))
    contributions: dict[str, ClientContribution] = {}
    if len(clients) < MIN_CONTRIBUTION_CLIENTS:
        job.status.add_warning(
            f"client-contribution: requires images of at least {MIN_CONTRIBUTION_CLIENTS} clients; "
            f"the run has {len(clients)}"
        )
    else:
        try:
            contributions = estimate_contributions(job, clients, images)
        except ClassifierError as error:
            job.status.add_warning(
                f"client-contribution: a training without a client failed: {error}"
            )
    # Also when empty: the stored ones may be of other images
    rows = {client: asdict(contribution) for client, contribution in contributions.items()}
    job.folder.store_contributions(rows)
    for client, contribution in contributions.items():
        if contribution.harms:
            job.status.add_warning(
                f"client-contribution: without {client} the model is "
                f"{-contribution.others.points:.1f} points more accurate on images like the "
                "other clients', beyond the 95 % interval. Inspect its images"
            )


def estimate_contributions(
    job: ServerJob, clients: Sequence[str], images: SyntheticSet
) -> dict[str, ClientContribution]:
    """Estimate every client's contribution.

    Raises:
        ClassifierError: a training failed.
    """
    test_rows = held_out_rows(images, clients)
    hits = leave_one_out_hits(job, clients, images, test_rows)
    owners = [images.clients[row] for row in test_rows]
    return contributions_from_hits(hits, owners, images.labels[test_rows].tolist())


def held_out_rows(images: SyntheticSet, clients: Sequence[str]) -> list[int]:
    """Return the rows of the last fifth of each client's images of a class, at least one each."""
    test_rows: list[int] = []
    for rows in images.rows_by_class(clients).values():
        test_rows += rows[-max(1, len(rows) // HOLD_OUT_EVERY) :]
    return sorted(test_rows)


def leave_one_out_hits(
    job: ServerJob, clients: Sequence[str], images: SyntheticSet, tested: list[int]
) -> dict[str, torch.Tensor]:
    """Return which held-out images are classified as labeled, bool [M], by client left out.

    A restarted server continues with the first client whose result is missing.

    Args:
        tested: rows of the held-out images.
    """
    is_training = torch.ones(len(images.labels), dtype=torch.bool)
    is_training[tested] = False
    inputs = _digest(clients, images, tested)
    results = {
        client: hits
        for client, hits in job.folder.stored_hits(inputs).items()
        if len(hits) == len(tested) and all(isinstance(hit, bool) for hit in hits)
    }
    turns = (ALL_CLIENTS, *clients)
    job.status.phase("training without each client", len(turns))
    for turn, client in enumerate(turns):
        if client in results:
            continue

        def progress(done: int, total: int, turn: int = turn) -> None:
            job.status.advance(turn * total + done, len(turns) * total)

        is_other = torch.tensor([owner != client for owner in images.clients])
        rows = is_other & is_training
        model = train_model(job, images.pixels[rows], images.labels[rows], progress=progress)
        predictions = compute_logits(model, images.pixels[tested], job.device).argmax(dim=1)
        results[client] = (predictions == images.labels[tested]).tolist()
        job.folder.store_hits(inputs, results)
    return {client: torch.tensor(results[client]) for client in turns}


def _digest(clients: Sequence[str], images: SyntheticSet, test_rows: list[int]) -> str:
    """Return a digest of everything that hits depend on, except the run's settings."""
    owners = hashlib.sha256("\n".join((*images.clients, *clients)).encode()).hexdigest()
    return f"{digest_of(images.pixels, images.labels, torch.tensor(test_rows))} {owners}"


def contributions_from_hits(
    hits: Mapping[str, torch.Tensor], owners: Sequence[str], labels: Sequence[int]
) -> dict[str, ClientContribution]:
    """Compute each client's contribution from the result of `leave_one_out_hits`.

    Intervals cover the choice of images, at 95 % for the whole table (Bonferroni). Retraining would
    move the figures too.

    Args:
        hits: by client left out; `ALL_CLIENTS` for the model of all clients.
        owners: the client of each held-out image, [M].
        labels: the class of each held-out image, [M].
    """
    clients = [client for client in hits if client != ALL_CLIENTS]
    # Two intervals per client
    deviations = NormalDist().inv_cdf(1 - 0.05 / 2 / (2 * len(clients)))
    is_of = {client: torch.tensor([owner == client for owner in owners]) for client in clients}
    is_shared = _is_shared(clients, owners, labels)
    contributions = {}
    for client in clients:
        # Data Shapley, section 2: V(D) - V(D - {i}), for every held-out image
        gains = hits[ALL_CLIENTS].double() - hits[client].double()
        gains_of_others = [gains[is_of[other]] for other in clients if other != client]
        correct = hits[client][is_of[client] & is_shared].double()
        contributions[client] = ClientContribution(
            seen=100 * correct.mean().item() if len(correct) else None,
            own=_mean_gain([gains[is_of[client]]], deviations),
            others=_mean_gain(gains_of_others, deviations),
            images=sum(map(len, gains_of_others)),
        )
    return contributions


def _is_shared(
    clients: Sequence[str], owners: Sequence[str], labels: Sequence[int]
) -> torch.Tensor:
    """Return for each image whether another client holds its class, bool [M]."""
    classes = set(zip(owners, labels, strict=True))
    return torch.tensor(
        [
            any((other, label) in classes for other in clients if other != owner)
            for owner, label in zip(owners, labels, strict=True)
        ]
    )


def _mean_gain(parts: Sequence[torch.Tensor], deviations: float) -> Gain:
    """Return the mean of the parts' means in points, with its interval.

    Args:
        parts: differences between two models' answers, right or wrong, to the same question: -1, 0
            or 1.
        deviations: half-width of the interval in standard errors.
    """
    points = 100 * mean(part.mean().item() for part in parts)
    error = sqrt(sum(map(_variance_of_mean, parts))) / len(parts)
    return Gain(points, 100 * deviations * error)


def _variance_of_mean(differences: torch.Tensor) -> float:
    """Return the variance of the mean of n differences of matched answers, [n].

    It is above 0 even if all differences are equal, which may be chance: Agresti and Min (2005) add
    half an answer to each cell of the two-by-two table, so one that differs and one that does not.
    """
    count = len(differences) + 2
    share = (differences.square().sum().item() + 1) / count
    return (share - (differences.sum().item() / count) ** 2) / count
