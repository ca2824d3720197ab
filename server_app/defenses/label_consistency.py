"""Do a client's images show the classes that it says? The diffusion model judges (`robust`).

A client that swaps the classes of what it sends passes every check of the wire format, and what it
sends is no farther from the others' than an honest client's. Its images show it, for every
synthetic image has an owner. And a diffusion model is a classifier (Li et al., "Your Diffusion
Model is Secretly a Zero-Shot Classifier", arXiv 2303.16203, eq. 6): an image is likeliest under the
prompt under which it is denoised best. So the kit is asked, for some images of each client and
class, how often the prompt of the image's own class fits better than another class's. That share is
the agreement: 1 where the kit always sees the class, 1/2 by chance.

The rule. A class of a client is judged where the kit knows the class: where the median agreement of
the other clients that hold it is nearer to 1 than to chance. A client of whose classes most are
judged is doubted if its agreement, the mean of these, is nearer to chance than to the mean of those
medians; else a judged class of it is doubted that is below chance. Clients are not compared but by
these medians. So a class is judged for as long as more than half of the others who hold it are
honest about it. If they are not, it counts for nobody, and its liars pass.

Images are judged as the global model gets them, at `data.image-size`, and by the server itself,
also where Ray's workers draw.

What it does not see: a swap of classes that look alike; images that show their class and harm the
model otherwise, by a patch or by a style; a payload that is another client's; a classifier of
FedLMG's that teaches wrongly, and only its images are right. An honest client is doubted whose
images hardly show their classes, whatever the reason: too much noise for a guarantee, or a domain
in which the kit knows no class.

Differences from the paper:

1. Theirs: the class of the least error, of all. Ours: how often one class's error is less than
   another's, of nine others at most, so that the cost does not grow with the number of classes.
2. Theirs: noise and timesteps of many draws. Ours: three timesteps, with one noise each for all.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TypeVar

import torch
from torch.nn import functional as F

from osfl.models.diffusion import Kit, forward_noise
from osfl.payload.kinds import Payload
from osfl.util.pixels import to_float
from server_app.context import ServerJob
from server_app.synthesis.engine import load_engine
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
    """What the kit does not see: a client's classes, or one of them."""

    client: str
    label: int | None
    agreement: float


@dataclass(frozen=True)
class Verdict:
    """Whom the kit doubts, and of whom it could say nothing."""

    doubts: tuple[Doubt, ...]
    unjudged: tuple[str, ...]


def without_doubted(
    job: ServerJob, payloads: Mapping[str, P], images: SyntheticSet
) -> tuple[dict[str, P], SyntheticSet]:
    """What is trained with, as `robust` has it; the agreements are kept for the report.

    `min-clients` is of payloads that came, not of clients that are believed.

    Raises:
        KitError: as `load_engine`.
    """
    robust = job.config.robust
    if robust == "off":
        return dict(payloads), images
    verdict = judged(_known_agreements(job, payloads, images))
    for one in verdict.doubts:
        job.status.warn_of(_in_words(job, one))
    if verdict.unjudged:
        job.status.warn_of(
            f"robust = {robust!r} judged nothing of {', '.join(verdict.unjudged)}: the kit does "
            "not know their classes, or too few others hold them"
        )
    if robust == "report":
        return dict(payloads), images
    left = _left(images, verdict.doubts)
    if len(left.labels) < 2:
        job.status.warn_of("robust = 'exclude' would leave no image to train on; all were used")
        return dict(payloads), images
    liars = {one.client for one in verdict.doubts if one.label is None}
    kept = {client: payload for client, payload in payloads.items() if client not in liars}
    return kept, left


def judged(found: Agreements) -> Verdict:
    """By the rule."""
    doubts: list[Doubt] = []
    unjudged = []
    for client, shares in found.items():
        known = {}
        for label in shares:
            others = [
                by_label[label]
                for name, by_label in found.items()
                if name != client and label in by_label
            ]
            if others and median(others) > (1 + CHANCE) / 2:
                known[label] = median(others)
        if not known:
            unjudged.append(client)
            continue
        own = mean(shares[label] for label in known)
        if 2 * len(known) > len(shares) and own < (CHANCE + mean(known.values())) / 2:
            doubts.append(Doubt(client, None, own))
            continue
        doubts += [Doubt(client, label, shares[label]) for label in known if shares[label] < CHANCE]
    return Verdict(tuple(doubts), tuple(unjudged))


@torch.no_grad()
def agreements(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> dict[str, dict[int, float]]:
    """How often the prompt of an image's class fits it better than another class's.

    Of images that are a client's; those of public domains are the server's own. Which images are
    looked at, and with what noise, is drawn anew each time: no client can make its payload for it.
    """
    chance = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))
    # Few-step weights and cached features are made for sampling, and to compile takes minutes
    settings = replace(job.config.synthesis, lora="", cache_interval=1, compile="off")
    kit = load_engine(job.kit, job.device, settings)
    prompts = kit.text(job.config.prompts(job.classes))
    groups = _looked_at(images, set(payloads), chance)
    job.status.phase("judging the images", len(groups))
    found: dict[str, dict[int, float]] = {}
    for done, ((client, label), rows) in enumerate(groups.items(), start=1):
        asked = [label, *_rivals(len(job.classes), label, chance)]
        errors = denoising_errors(kit, latents_of(kit, images.pixels[rows]), prompts[asked], chance)
        found.setdefault(client, {})[label] = share_of_wins(errors)
        job.status.advance(done, len(groups))
    return found


def rows_judged(images: int, classes: int) -> int:
    """How many rows go through the UNet for a client's class that has so many images."""
    return min(images, LOOKED_AT) * (1 + min(classes - 1, RIVALS)) * len(TIMES)


def share_of_wins(errors: torch.Tensor) -> float:
    """How often the first of each row of [N, M] is less than another; an equal one counts half."""
    own, others = errors[:, :1], errors[:, 1:]
    return ((own < others).double() + (own == others).double() / 2).mean().item()


def latents_of(kit: Kit, pixels: torch.Tensor) -> torch.Tensor:
    """The kit's latents [N, c, h, w] of images [N, 3, S, S] uint8 of any size."""
    size = (kit.image_size, kit.image_size)
    floats = to_float(pixels)
    if pixels.shape[-2:] != size:
        floats = F.interpolate(floats, size, mode="bilinear", antialias=True)
    # One by one: a decoder's memory is the most that sampling takes, and these are few
    return torch.cat([kit.encode(image)[0].float() for image in floats.split(1)])


def denoising_errors(
    kit: Kit, latents: torch.Tensor, prompts: torch.Tensor, chance: torch.Generator
) -> torch.Tensor:
    """Of every image under every prompt, [N, M] on the CPU.

    Noise is the same for all images and prompts.

    Args:
        latents: [N, c, h, w].
        prompts: [M, L, d].
    """
    found = torch.zeros(len(latents), len(prompts))
    pairs = torch.cartesian_prod(torch.arange(len(latents)), torch.arange(len(prompts)))
    for time in TIMES:
        t = int(time * len(kit.alphas_cumprod))
        eps = torch.randn(latents.shape[1:], generator=chance).to(kit.device)
        for part in pairs.split(BATCH):
            image, prompt = part.unbind(1)
            # Diffusion classifier, eq. 6: the mean over draws of ||eps - e(z_t, t, c)||^2
            found[image, prompt] += _errors(kit, latents[image], t, prompts[prompt], eps)
    return found / len(TIMES)


def _errors(
    kit: Kit, latents: torch.Tensor, t: int, c: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """||eps - e(z_t, t, c)||^2, the mean over numbers [B]; in parts where memory asks for it."""
    noise = eps.expand(len(latents), *eps.shape)
    at = torch.full((len(latents),), t, device=kit.device)
    try:
        z_t = forward_noise(latents, noise, kit.alphas_cumprod[at])
        return (noise - kit.eps(z_t, at, c)).square().flatten(1).mean(dim=1).cpu().float()
    except torch.OutOfMemoryError:
        if len(latents) == 1:
            raise
    torch.cuda.empty_cache()
    halves = zip(latents.chunk(2), c.chunk(2), strict=True)
    return torch.cat([_errors(kit, some, t, of_some, eps) for some, of_some in halves])


def _known_agreements(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> Agreements:
    """Those of a killed server that had judged the same images, or new ones."""
    digest = hashlib.sha256(images.pixels.numpy().tobytes() + images.labels.numpy().tobytes())
    digest.update("\n".join((*images.clients, *payloads)).encode())
    inputs = digest.hexdigest()
    if stored := job.folder.stored_agreements(inputs):
        return {
            client: {job.classes.index(name): share for name, share in by_name.items()}
            for client, by_name in stored.items()
        }
    found = agreements(job, payloads, images)
    verdict = judged(found)
    about = {}
    for client, by_label in found.items():
        about[client] = {
            "agreement": mean(by_label.values()),
            "classes": {job.classes[label]: share for label, share in by_label.items()},
            "doubted": _doubted(job, verdict, client),
        }
    job.folder.store_agreements(inputs, about)
    return found


def _doubted(job: ServerJob, verdict: Verdict, client: str) -> str:
    """What of a client is doubted, in words; "" for nothing."""
    if client in verdict.unjudged:
        return "not judged"
    labels = [one.label for one in verdict.doubts if one.client == client]
    if None in labels:
        return "all classes"
    return ", ".join(job.classes[label] for label in labels if label is not None)


def _in_words(job: ServerJob, one: Doubt) -> str:
    what = "its classes" if one.label is None else f"its class {job.classes[one.label]!r}"
    fate = "they were used all the same"
    if job.config.robust == "exclude":
        fate = "they are left out" if one.label is None else "those are left out"
    return (
        f"{one.client}: the kit does not see {what} in its images (agreement {one.agreement:.2f}, "
        f"chance {CHANCE}); {fate}"
    )


def _looked_at(
    images: SyntheticSet, clients: set[str], chance: torch.Generator
) -> dict[tuple[str, int], list[int]]:
    """Some rows of each client's class, in the images' order."""
    groups = images.rows_by_class(clients)
    return {owner: _some(rows, LOOKED_AT, chance) for owner, rows in groups.items()}


def _rivals(classes: int, label: int, chance: torch.Generator) -> list[int]:
    """The classes that images of one are compared with: all others, or some of them."""
    return _some([other for other in range(classes) if other != label], RIVALS, chance)


def _some(values: list[int], most: int, chance: torch.Generator) -> list[int]:
    places = torch.randperm(len(values), generator=chance)[:most].sort().values
    return [values[place] for place in places.tolist()]


def _left(images: SyntheticSet, doubts: tuple[Doubt, ...]) -> SyntheticSet:
    """Without a doubted client's images, and those of a doubted class of a client."""
    out = {(one.client, one.label) for one in doubts}
    owners = zip(images.clients, images.labels.tolist(), strict=True)
    rows = [
        row
        for row, (client, label) in enumerate(owners)
        if (client, None) not in out and (client, label) not in out
    ]
    return images.only(rows)
