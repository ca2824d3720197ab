"""Do a client's images show the classes that it says? The diffusion model judges (`robust`).

A client that swaps the classes of what it sends passes every check of the wire format, and what it
sends is no farther from the others' than an honest client's. Its images show it: every synthetic
image has an owner. And a diffusion model is a classifier (Li et al., arXiv 2303.16203, eq. 6): an
image is likeliest under the prompt under which it is denoised best. So the kit is asked, for some
images of each client and class, how often the prompt of the image's own class fits better than
another class's. That share is the agreement: 1 where the kit always sees the class, 1/2 by chance.

No other client has a say in it. Liars who work together gain nothing by that, and an honest client
with a domain of its own is not outvoted, as long as the kit knows its classes in that domain.

The rule: a client is doubted whose agreement, the mean of its classes', is nearer to chance than to
the median of the other clients'; and so is a class of a client, of which it is below chance. The
kit must know the classes: where that median is nearer to chance than to 1, it judges nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import TypeVar

import torch
from torch.nn import functional as F

from osfl.models.diffusion import Kit, forward_noise, load_kit
from osfl.models.kits import find_kit
from osfl.payloads import Payload
from osfl.pixels import to_float
from osfl.seeds import generator_of
from server_app.job import ServerJob
from server_app.synthesis.images import SyntheticSet

LOOKED_AT = 6  # images of a client's class
RIVALS = 9  # classes that each image is compared with
TIMES = (0.3, 0.5, 0.7)  # of the schedule: before, nothing is lost; behind, hardly anything is left
BATCH = 32
CHANCE = 0.5

P = TypeVar("P", bound=Payload)
Agreements = Mapping[str, Mapping[int, float]]  # by client and label


@dataclass(frozen=True)
class Doubt:
    """What the kit does not see: all of a client's classes, or one of them."""

    client: str
    label: int | None
    agreement: float


def without_doubted(
    job: ServerJob, payloads: Mapping[str, P], images: SyntheticSet
) -> tuple[dict[str, P], SyntheticSet]:
    """What is trained with, as `robust` has it; the agreements are kept for the report."""
    robust = job.config.robust
    if robust == "off":
        return dict(payloads), images
    found = agreements(job, payloads, images)
    doubts = doubted(found)
    job.folder.store_agreements(
        {
            client: {
                "agreement": mean(by_label.values()),
                "classes": {job.classes[label]: share for label, share in by_label.items()},
                "doubted": any(one.client == client for one in doubts),
            }
            for client, by_label in found.items()
        }
    )
    used = "its images are left out" if robust == "exclude" else "they were used all the same"
    for one in doubts:
        what = "its classes" if one.label is None else f"its class {job.classes[one.label]!r}"
        job.status.warn_of(
            f"{one.client}: the kit does not see {what} in its images (agreement "
            f"{one.agreement:.2f}, chance {CHANCE}); {used}"
        )
    if not knows(list(map(mean, (by_label.values() for by_label in found.values())))):
        job.status.warn_of(
            f"robust = {robust!r} found nothing out: the kit does not tell these classes apart"
        )
    if robust == "report":
        return dict(payloads), images
    liars = {one.client for one in doubts if one.label is None}
    kept = {client: payload for client, payload in payloads.items() if client not in liars}
    return kept, _left(images, doubts)


def doubted(found: Agreements) -> list[Doubt]:
    """The clients, and the classes of other clients, whose agreement is too low."""
    shares = {client: mean(by_label.values()) for client, by_label in found.items()}
    doubts = []
    for client, share in shares.items():
        others = [other for name, other in shares.items() if name != client]
        if not others or not knows(others):
            continue
        if share < (CHANCE + median(others)) / 2:
            doubts.append(Doubt(client, None, share))
            continue
        for label, of_class in found[client].items():
            if of_class < CHANCE:
                doubts.append(Doubt(client, label, of_class))
    return doubts


def knows(shares: list[float]) -> bool:
    """Whether the kit tells classes apart: their median is nearer to 1 than to chance."""
    return median(shares) > (1 + CHANCE) / 2


@torch.no_grad()
def agreements(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> dict[str, dict[int, float]]:
    """How often the prompt of an image's class fits it better than another class's.

    Of images that are a client's; those of public domains are the server's own.
    """
    kit = load_kit(find_kit(job.config.kit), job.device)
    prompts = kit.text(job.config.prompts(job.classes))
    groups = _looked_at(images, set(payloads) or set(job.clients))
    job.status.phase("looking for liars", len(groups))
    found: dict[str, dict[int, float]] = {}
    for done, ((client, label), rows) in enumerate(groups.items(), start=1):
        rivals = _rivals(job, label)
        latents = latents_of(kit, images.pixels[rows])
        errors = denoising_errors(kit, latents, prompts[[label, *rivals]], job.config.seed)
        share = (errors[:, :1] < errors[:, 1:]).double().mean().item()
        found.setdefault(client, {})[label] = share
        job.status.advance(done, len(groups))
    return found


def latents_of(kit: Kit, pixels: torch.Tensor) -> torch.Tensor:
    """The kit's latents [N, c, h, w] of images [N, 3, S, S] uint8 of any size."""
    size = (kit.image_size, kit.image_size)
    floats = to_float(pixels)
    if pixels.shape[-2:] != size:
        floats = F.interpolate(floats, size, mode="bilinear", antialias=True)
    return torch.cat([kit.encode(part)[0] for part in floats.split(BATCH)])


def denoising_errors(
    kit: Kit, latents: torch.Tensor, prompts: torch.Tensor, seed: int
) -> torch.Tensor:
    """Of every image under every prompt, [N, M] on the CPU.

    Noise is the same for all images and prompts.

    Args:
        latents: [N, c, h, w].
        prompts: [M, L, d].
    """
    generator = generator_of(seed, "agreement")
    found = torch.zeros(len(latents), len(prompts))
    pairs = torch.cartesian_prod(torch.arange(len(latents)), torch.arange(len(prompts)))
    for time in TIMES:
        t = int(time * len(kit.alphas_cumprod))
        eps = torch.randn(latents.shape[1:], generator=generator).to(kit.device)
        for part in pairs.split(BATCH):
            image, prompt = part.unbind(1)
            noise = eps.expand(len(part), *eps.shape)
            at = torch.full((len(part),), t, device=kit.device)
            z_t = forward_noise(latents[image], noise, kit.alphas_cumprod[at])
            e = kit.eps(z_t, at, prompts[prompt])
            # Diffusion classifier, eq. 6: the mean over draws of ||eps - e(z_t, t, c)||^2
            found[image, prompt] += (noise - e).square().flatten(1).mean(dim=1).cpu().float()
    return found / len(TIMES)


def _looked_at(images: SyntheticSet, clients: set[str]) -> dict[tuple[str, int], list[int]]:
    """The first rows of each client's class."""
    groups: dict[tuple[str, int], list[int]] = {}
    for row, (client, label) in enumerate(zip(images.clients, images.labels.tolist(), strict=True)):
        if client in clients and len(groups.setdefault((client, label), [])) < LOOKED_AT:
            groups[client, label].append(row)
    return groups


def _rivals(job: ServerJob, label: int) -> list[int]:
    """The classes that images of one are compared with: all others, or some by chance."""
    others = [other for other in range(len(job.classes)) if other != label]
    generator = generator_of(job.config.seed, "agreement", "rivals", label)
    chosen = torch.randperm(len(others), generator=generator)[:RIVALS].tolist()
    return [others[number] for number in chosen]


def _left(images: SyntheticSet, doubts: list[Doubt]) -> SyntheticSet:
    """Without a doubted client's images, and those of a doubted class of a client."""
    out = {(one.client, one.label) for one in doubts}
    owners = zip(images.clients, images.labels.tolist(), strict=True)
    rows = [
        row
        for row, (client, label) in enumerate(owners)
        if (client, None) not in out and (client, label) not in out
    ]
    clients = tuple(images.clients[row] for row in rows)
    return SyntheticSet(images.pixels[rows], images.labels[rows], clients)
