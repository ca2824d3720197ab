"""Detect label-flipping clients by classifying their synthetic images with the diffusion model.

A client that permutes the labels of its payload passes every check of the wire format, and its
payload is no farther from the others' than an honest client's. But its images show it, because
every synthetic image has an owner, and a diffusion model is a classifier (Li et al., "Your
Diffusion Model is Secretly a Zero-Shot Classifier", arXiv 2303.16203, eq. 6): an image is most
likely under the prompt under which it is denoised best. For some images of each client and class,
the kit is asked how often the prompt of the image's own class fits better than a contrast class's.
This share is the class's score: 1 if the kit always recognizes the class, 1/2 by chance.

The rule (`robust`). A class of a client is scored only if the kit knows the class, that is, if the
median score of the other clients that hold it is nearer to 1 than to chance. A client is flagged if
most of its classes are scored and the mean of these scores is nearer to chance than to the mean of
those medians. Otherwise those of its scored classes are flagged whose score is below chance.
Clients are compared by these medians only. So a class is scored as long as most of the other
clients that hold it are honest about it. Otherwise it counts for no client, and its malicious
clients pass.

Images are classified as the global model gets them, at `data.image-size`. The server does it
itself, even if Ray workers sample.

Known limitations: not detected are a permutation of similar classes, images that show their class
and harm the model in another way (a backdoor patch, a style), a copy of another client's payload,
and a FedLMG classifier that teaches wrongly while its images are right. An honest client is flagged
if its images hardly show their classes for any reason, such as too much noise for a privacy
guarantee, or a domain in which the kit knows no class.

Differences from the paper:

1. Theirs: the class of the lowest error among all. Ours: how often one class's error is lower than
   another's, against at most nine contrast classes, so that the cost does not grow with the number
   of classes.
2. Theirs: noise and timesteps of many draws. Ours: three timesteps, with one noise each for all
   images.
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

NUM_PROBE_IMAGES = 6  # probe images per client and class
NUM_CONTRAST_CLASSES = 9  # contrast classes per image
# Shares of the schedule: below, the image is nearly intact; above, nearly nothing of it is left
TIMES = (0.3, 0.5, 0.7)
BATCH = 32
CHANCE = 0.5  # score of an image that shows no class

P = TypeVar("P", bound=Payload)
Scores = Mapping[str, Mapping[int, float]]  # scores by client and label


@dataclass(frozen=True)
class Flag:
    """A client, or one of its classes, whose images the diffusion model does not recognize.

    Attributes:
        label: the class; None: all classes.
        agreement: its score, or the mean score of the client's scored classes.
    """

    client: str
    label: int | None
    score: float


@dataclass(frozen=True)
class Flags:
    """The flags, and the clients of which no class could be scored."""

    flags: tuple[Flag, ...]
    unscored: tuple[str, ...]


def drop_flagged(
    job: ServerJob, payloads: Mapping[str, P], images: SyntheticSet
) -> tuple[dict[str, P], SyntheticSet]:
    """Return the payloads and images to train with, by `robust`. Store the scores for the report.

    `min-clients` counts the payloads that arrived, including those of flagged clients.

    Raises:
        KitError: as `load_engine`.
    """
    robust = job.config.robust
    if robust == "off":
        return dict(payloads), images
    verdict = flag_clients(_stored_or_new_scores(job, payloads, images))
    for flag in verdict.flags:
        job.status.add_warning(_warning(job, flag))
    if verdict.unscored:
        job.status.add_warning(
            f"robust = {robust!r} could not score {', '.join(verdict.unscored)}: the kit does not "
            "know their classes, or too few other clients hold them"
        )
    if robust == "report":
        return dict(payloads), images
    trusted_images = _without_flagged(images, verdict.flags)
    if len(trusted_images.labels) < 2:
        job.status.add_warning("robust = 'exclude' would leave no image to train on; all were used")
        return dict(payloads), images
    flagged = {flag.client for flag in verdict.flags if flag.label is None}
    trusted = {client: payload for client, payload in payloads.items() if client not in flagged}
    return trusted, trusted_images


def flag_clients(scores: Scores) -> Flags:
    """Flag clients and classes by the rule at the top of this module."""
    flags: list[Flag] = []
    unscored = []
    for client, by_label in scores.items():
        medians = _medians_of_others(scores, client)
        if not medians:
            unscored.append(client)
            continue
        score = mean(by_label[label] for label in medians)
        most_scored = 2 * len(medians) > len(by_label)
        if most_scored and score < (CHANCE + mean(medians.values())) / 2:
            flags.append(Flag(client, None, score))
            continue
        flags += [
            Flag(client, label, by_label[label]) for label in medians if by_label[label] < CHANCE
        ]
    return Flags(tuple(flags), tuple(unscored))


def _medians_of_others(scores: Scores, client: str) -> dict[int, float]:
    """Return the other clients' median score of each class of a client that the kit knows."""
    medians = {}
    for label in scores[client]:
        others = [
            by_label[label]
            for other, by_label in scores.items()
            if other != client and label in by_label
        ]
        if others and median(others) > (1 + CHANCE) / 2:
            medians[label] = median(others)
    return medians


@torch.no_grad()
def score_label_consistency(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> dict[str, dict[int, float]]:
    """Score how often the prompt of an image's class fits better than a contrast class's.

    Only clients' images are scored; those of public domains are the server's own. Probe images and
    noise are drawn from the operating system's randomness each time, so that no client can craft
    its payload for them.
    """
    rng = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))
    # A distilled LoRA and cached features suit sampling only, and compiling takes minutes
    settings = replace(job.config.synthesis, lora="", cache_interval=1, compile="off")
    kit = load_engine(job.kit, job.device, settings)
    prompts = kit.text(job.config.prompts(job.classes))
    groups = {
        owner: _sample_of(rows, NUM_PROBE_IMAGES, rng)
        for owner, rows in images.rows_by_class(set(payloads)).items()
    }
    job.status.phase("scoring label consistency", len(groups))
    scores: dict[str, dict[int, float]] = {}
    for number, ((client, label), rows) in enumerate(groups.items(), start=1):
        labels = [label, *_contrast_classes(len(job.classes), label, rng)]
        errors = denoising_errors(
            kit, encode_images(kit, images.pixels[rows]), prompts[labels], rng
        )
        scores.setdefault(client, {})[label] = win_rate(errors)
        job.status.advance(number, len(groups))
    return scores


def unet_rows(images: int, classes: int) -> int:
    """Return how many rows go through the UNet to score a client's class.

    Args:
        images: of the class.
        classes: of the run.
    """
    return min(images, NUM_PROBE_IMAGES) * (1 + min(classes - 1, NUM_CONTRAST_CLASSES)) * len(TIMES)


def win_rate(errors: torch.Tensor) -> float:
    """Return how often the first error of a row of [N, M] is below another; ties count half."""
    first, others = errors[:, :1], errors[:, 1:]
    return ((first < others).double() + (first == others).double() / 2).mean().item()


def encode_images(kit: Kit, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images [N, 3, S, S] uint8 of any size as the kit's latents [N, c, h, w]."""
    size = (kit.image_size, kit.image_size)
    floats = to_float(pixels)
    if pixels.shape[-2:] != size:
        floats = F.interpolate(floats, size, mode="bilinear", antialias=True)
    # One by one: the VAE needs more memory per image than anything else here, and these are few
    return torch.cat([kit.encode(image)[0].float() for image in floats.split(1)])


def denoising_errors(
    kit: Kit, latents: torch.Tensor, prompts: torch.Tensor, rng: torch.Generator
) -> torch.Tensor:
    """Return the denoising error of every image under every prompt, [N, M] on the CPU.

    The noise of a timestep is the same for all images and prompts.

    Args:
        latents: [N, c, h, w].
        prompts: [M, L, d].
        rng: the random generator of the noise.
    """
    errors = torch.zeros(len(latents), len(prompts))
    pairs = torch.cartesian_prod(torch.arange(len(latents)), torch.arange(len(prompts)))
    for time in TIMES:
        t = int(time * len(kit.alphas_cumprod))
        eps = torch.randn(latents.shape[1:], generator=rng).to(kit.device)
        for batch in pairs.split(BATCH):
            image, prompt = batch.unbind(1)
            # Diffusion classifier, eq. 6: the mean over draws of ||eps - e(z_t, t, c)||^2
            errors[image, prompt] += _errors(kit, latents[image], t, prompts[prompt], eps)
    return errors / len(TIMES)


def _errors(
    kit: Kit, latents: torch.Tensor, t: int, c: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """Return ||eps - e(z_t, t, c)||^2 as a mean over elements, [B].

    A batch that does not fit into GPU memory is halved.
    """
    noise = eps.expand(len(latents), *eps.shape)
    timesteps = torch.full((len(latents),), t, device=kit.device)
    try:
        z_t = forward_noise(latents, noise, kit.alphas_cumprod[timesteps])
        return (noise - kit.eps(z_t, timesteps, c)).square().flatten(1).mean(dim=1).cpu().float()
    except torch.OutOfMemoryError:
        if len(latents) == 1:
            raise
    torch.cuda.empty_cache()
    halves = zip(latents.chunk(2), c.chunk(2), strict=True)
    return torch.cat([_errors(kit, half, t, half_c, eps) for half, half_c in halves])


def _stored_or_new_scores(
    job: ServerJob, payloads: Mapping[str, Payload], images: SyntheticSet
) -> Scores:
    """Return the scores that a previous server process stored for these images, or new ones."""
    digest = hashlib.sha256(images.pixels.numpy().tobytes() + images.labels.numpy().tobytes())
    digest.update("\n".join((*images.clients, *payloads)).encode())
    inputs = digest.hexdigest()
    if stored := job.folder.stored_consistency_scores(inputs):
        return {
            client: {job.classes.index(name): score for name, score in by_name.items()}
            for client, by_name in stored.items()
        }
    scores = score_label_consistency(job, payloads, images)
    verdict = flag_clients(scores)
    records = {}
    for client, by_label in scores.items():
        records[client] = {
            "agreement": mean(by_label.values()),
            "classes": {job.classes[label]: score for label, score in by_label.items()},
            "doubted": _flagged_classes(job, verdict, client),
        }
    job.folder.store_consistency_scores(inputs, records)
    return scores


def _flagged_classes(job: ServerJob, verdict: Flags, client: str) -> str:
    """Return a client's flagged classes as the report shows them; "" if there is none."""
    if client in verdict.unscored:
        return "not judged"
    labels = [flag.label for flag in verdict.flags if flag.client == client]
    if None in labels:
        return "all classes"
    return ", ".join(job.classes[label] for label in labels if label is not None)


def _warning(job: ServerJob, flag: Flag) -> str:
    if flag.label is None:
        problem = "the kit does not recognize its classes in its images"
        dropped = "all its images are dropped"
    else:
        name = job.classes[flag.label]
        problem = f"the kit does not recognize its class {name!r} in its images"
        dropped = "the images of this class are dropped"
    consequence = dropped if job.config.robust == "exclude" else "they were used nevertheless"
    return (
        f"{flag.client}: suspicious, {problem} (score {flag.score:.2f}, chance {CHANCE}); "
        f"{consequence}"
    )


def _contrast_classes(classes: int, label: int, rng: torch.Generator) -> list[int]:
    """Return the classes to compare a class with: all others, or a sample of them."""
    return _sample_of(
        [other for other in range(classes) if other != label], NUM_CONTRAST_CLASSES, rng
    )


def _sample_of(values: list[int], limit: int, rng: torch.Generator) -> list[int]:
    """Return at most `limit` of the values, drawn without replacement, in their order."""
    places = torch.randperm(len(values), generator=rng)[:limit].sort().values
    return [values[place] for place in places.tolist()]


def _without_flagged(images: SyntheticSet, flags: tuple[Flag, ...]) -> SyntheticSet:
    """Drop the images of flagged clients and of flagged classes."""
    flagged = {(flag.client, flag.label) for flag in flags}
    owners = zip(images.clients, images.labels.tolist(), strict=True)
    rows = [
        row
        for row, (client, label) in enumerate(owners)
        if (client, None) not in flagged and (client, label) not in flagged
    ]
    return images.select(rows)
