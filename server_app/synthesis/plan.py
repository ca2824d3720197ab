"""Plan of the images to synthesize.

Pure functions: the same payloads and settings give the same plan on every machine.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from osfl.util.seeds import seed_of


# A plan has up to a million, and slots save a third of their memory
@dataclass(frozen=True, slots=True)
class ImageJob:
    """Identity of an image to synthesize. Its noise depends on nothing else."""

    method: str
    seed: int  # of the run
    client: str
    label: int
    index: int  # 0 .. R-1

    @property
    def noise_seed(self) -> int:
        return seed_of(self.seed, self.method, self.client, self.label, self.index)

    def identity(self) -> dict[str, object]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class Unit:
    """A work unit: a fixed set of images that is sampled and committed as a whole.

    Attributes:
        name: a digest of everything that determines its images.
    """

    name: str
    jobs: tuple[ImageJob, ...]


def plan_images(
    method: str, seed: int, labels_of: Mapping[str, Iterable[int]], per_class: int
) -> list[ImageJob]:
    """Plan R images for every client and every class that it holds.

    Args:
        labels_of: the labels that each client holds.
        per_class: R.
    """
    counts = {(client, label): per_class for client in labels_of for label in labels_of[client]}
    return plan_counts(method, seed, counts)


def plan_counts(method: str, seed: int, counts: Mapping[tuple[str, int], int]) -> list[ImageJob]:
    """Plan a given number of images for each (client, label)."""
    return [
        ImageJob(method, seed, client, label, index)
        for (client, label), count in sorted(counts.items())
        for index in range(count)
    ]


def balanced_counts(
    labels_of: Mapping[str, Iterable[int]], per_class: int
) -> dict[tuple[str, int], int]:
    """Return image counts by (client, label) such that every class has the same total.

    The total is that of R images per client for the class that most clients hold. The holders of a
    class share its images equally; a remainder goes to the alphabetically first.

    Args:
        labels_of: the labels that each client holds.
        per_class: R.
    """
    holders = defaultdict(list)
    for client in sorted(labels_of):
        for label in labels_of[client]:
            holders[label].append(client)
    total = per_class * max(map(len, holders.values()), default=0)
    counts = {}
    for label, clients in holders.items():
        share, remainder = divmod(total, len(clients))
        for number, client in enumerate(clients):
            counts[client, label] = share + (number < remainder)
    return counts


def mix_classes(jobs: Iterable[ImageJob]) -> list[ImageJob]:
    """Reorder a plan so that each client's classes alternate.

    A work unit's BatchNorm statistics then cover all of its client's classes.
    """
    return sorted(jobs, key=lambda job: (job.client, job.index, job.label))


def cut_units(
    jobs: list[ImageJob],
    size: int,
    ingredients: Mapping[str, str],
    settings: Mapping[str, object],
    settings_of: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> list[Unit]:
    """Cut a plan into work units of at most `size` images of one client.

    A unit's name is a digest of its jobs, its client's payload and the settings, and independent of
    other clients. So a late client adds units and changes none, except with `class-balance`, where
    the holders of a class share its images.

    Args:
        size: images per unit.
        ingredients: digest of each client's payload.
        settings: of the sampler, including the kit's digest.
        settings_of: those of clients that have others, such as fewer classes.
    """
    units = []
    jobs_of = defaultdict(list)
    for job in jobs:
        jobs_of[job.client].append(job)
    for client, client_jobs in sorted(jobs_of.items()):
        client_settings = dict(settings_of.get(client, settings))
        for start in range(0, len(client_jobs), size):
            unit_jobs = tuple(client_jobs[start : start + size])
            identities = [job.identity() for job in unit_jobs]
            inputs = [identities, ingredients.get(client, ""), client_settings]
            text = json.dumps(inputs, sort_keys=True)
            units.append(Unit(hashlib.sha256(text.encode()).hexdigest()[:24], unit_jobs))
    return units


def initial_noise(
    jobs: Iterable[ImageJob], shape: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    """Draw z_T [B, *shape] ~ N(0, I), each row from its own image's seed.

    The noise is drawn on the CPU, so that it is the same for every device.
    """
    rows = [
        torch.randn(shape, generator=torch.Generator().manual_seed(job.noise_seed)) for job in jobs
    ]
    return torch.stack(rows).to(device)


def from_mixture(
    weights: torch.Tensor,
    means: torch.Tensor,
    variances: torch.Tensor,
    noise: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Draw z_T [c, h, w] from a Gaussian mixture.

    Args:
        weights: [M].
        means, variances: [M, c, h, w].
        noise: standard normal, [c, h, w].
        generator: of the component m.
    """
    m = int(torch.multinomial(weights, 1, generator=generator))
    # z_T = mean_m + sqrt(variance_m) * noise
    return means[m] + variances[m].sqrt() * noise
