"""Which images to make.

Pure: the same payloads and settings give the same plan on every machine.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from osfl.util.seeds import seed_of


@dataclass(frozen=True)
class ImageJob:
    """One image to make: its identity. Its noise depends on nothing else."""

    method: str
    seed: int  # of the run
    client: str
    label: int
    index: int  # 0 .. R-1

    @property
    def noise_seed(self) -> int:
        return seed_of(self.seed, self.method, self.client, self.label, self.index)


@dataclass(frozen=True)
class Unit:
    """A fixed set of images, sampled in one batch and committed together."""

    name: str  # a digest of everything that shapes its images
    jobs: tuple[ImageJob, ...]


def plan_images(
    method: str, seed: int, labels_of: Mapping[str, Iterable[int]], per_class: int
) -> list[ImageJob]:
    """R images for every client and every class that it holds.

    Args:
        labels_of: the labels each client holds.
        per_class: R.
    """
    counts = {(client, label): per_class for client in labels_of for label in labels_of[client]}
    return plan_counts(method, seed, counts)


def plan_counts(method: str, seed: int, counts: Mapping[tuple[str, int], int]) -> list[ImageJob]:
    """So many images for each (client, label)."""
    return [
        ImageJob(method, seed, client, label, index)
        for (client, label), count in sorted(counts.items())
        for index in range(count)
    ]


def balanced_counts(
    labels_of: Mapping[str, Iterable[int]], per_class: int
) -> dict[tuple[str, int], int]:
    """How many images of each (client, label) give every class as many in all.

    As many as R for each client make of the class that most clients hold. The clients that hold a
    class share its images; the first ones in the alphabet have one more where that does not divide.

    Args:
        labels_of: the labels each client holds.
        per_class: R.
    """
    holders = defaultdict(list)
    for client in sorted(labels_of):
        for label in labels_of[client]:
            holders[label].append(client)
    total = per_class * max(map(len, holders.values()), default=0)
    counts = {}
    for label, clients in holders.items():
        share, more = divmod(total, len(clients))
        for number, client in enumerate(clients):
            counts[client, label] = share + (number < more)
    return counts


def mix_classes(jobs: Iterable[ImageJob]) -> list[ImageJob]:
    """The same images, each client's classes in turn.

    The statistics of a unit are of all of them.
    """
    return sorted(jobs, key=lambda job: (job.client, job.index, job.label))


def cut_units(
    jobs: list[ImageJob], size: int, ingredients: Mapping[str, str], settings: Mapping[str, object]
) -> list[Unit]:
    """Cut a plan into units of at most `size` images of one client.

    A unit's name covers its jobs, its client's payload and the settings, and nothing of other
    clients: a client that comes later adds units and changes none, but where `class-balance` shares
    a class's images among those that hold it.

    Args:
        ingredients: for each client, the digest of its payload.
        settings: of the sampler, the kit's digest included.
    """
    units = []
    jobs_of = defaultdict(list)
    for job in jobs:
        jobs_of[job.client].append(job)
    for client, client_jobs in sorted(jobs_of.items()):
        for start in range(0, len(client_jobs), size):
            part = tuple(client_jobs[start : start + size])
            text = json.dumps(
                [[vars(job) for job in part], ingredients.get(client, ""), dict(settings)],
                sort_keys=True,
            )
            units.append(Unit(hashlib.sha256(text.encode()).hexdigest()[:24], part))
    return units


def initial_noise(
    jobs: Iterable[ImageJob], shape: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    """z_T [B, *shape] ~ N(0, I), each row from its own image's seed.

    Drawn on the CPU so that every device gets the same.
    """
    rows = [
        torch.randn(shape, generator=torch.Generator().manual_seed(job.noise_seed)) for job in jobs
    ]
    return torch.stack(rows).to(device)
