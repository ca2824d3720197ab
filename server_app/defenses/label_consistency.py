"""Detect label-flipping clients by classifying their synthetic images with the diffusion model.

A client that permutes the labels of its payload passes every check of the wire format, and its
payload is no farther from the others' than an honest client's. But its images show it, because
every synthetic image has an owner, and a diffusion model is a classifier (Li et al., "Your
Diffusion Model is Secretly a Zero-Shot Classifier", arXiv 2303.16203, eq. 6): an image is most
likely under the prompt under which it is denoised best. For some images of each client and class,
the kit is asked how often the prompt of the image's own class fits better than a contrast class's.
This share is the class's score: 1 if the kit always recognizes the class, 1/2 by chance.

The rule (`defense`). A class of a client is scored only if the kit knows the class, that is, if the
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

import torch

from osfl.models.diffusion_classifier import TIMES, denoising_errors, encode_images
from server_app.context import ServerJob
from server_app.synthesis.engine import load_engine
from server_app.synthesis.images import SyntheticSet

NUM_PROBE_IMAGES = 6  # probe images per client and class
NUM_CONTRAST_CLASSES = 9  # contrast classes per image
CHANCE = 0.5  # score of an image that shows no class

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


def filter_images(job: ServerJob, images: SyntheticSet) -> SyntheticSet:
    """Return the images to train with, by `defense`. Store the scores for the report.

    Raises:
        KitError: as `load_engine`.
    """
    defense = job.config.defense
    verdict = flag_clients(_stored_or_new_scores(job, images))
    for flag in verdict.flags:
        job.status.add_warning(_warning(job, flag))
    if verdict.unscored:
        job.status.add_warning(
            f"defense = {defense!r} could not score {', '.join(verdict.unscored)}: the kit does "
            "not know their classes, or too few other clients hold them"
        )
    if defense == "label-consistency-report":
        return images
    trusted = _without_flagged(images, verdict.flags)
    if len(trusted.labels) < 2:
        job.status.add_warning(
            "defense = 'label-consistency' would leave no image to train on; all were used"
        )
        return images
    return trusted


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
def score_label_consistency(job: ServerJob, images: SyntheticSet) -> dict[str, dict[int, float]]:
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
        for owner, rows in images.rows_by_class(job.clients).items()
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


def _stored_or_new_scores(job: ServerJob, images: SyntheticSet) -> Scores:
    """Return the scores that a previous server process stored for these images, or new ones."""
    digest = hashlib.sha256(images.pixels.contiguous().numpy().data)
    digest.update(images.labels.numpy().data)
    digest.update("\n".join((*images.clients, *job.clients)).encode())
    inputs = digest.hexdigest()
    if stored := job.folder.stored_consistency_scores(inputs):
        return {
            client: {job.classes.index(name): score for name, score in by_name.items()}
            for client, by_name in stored.items()
        }
    scores = score_label_consistency(job, images)
    verdict = flag_clients(scores)
    records = {}
    for client, by_label in scores.items():
        records[client] = {
            "agreement": mean(by_label.values()),
            "classes": {job.classes[label]: score for label, score in by_label.items()},
            "flagged": _flagged_classes(job, verdict, client),
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
    consequence = (
        dropped if job.config.defense == "label-consistency" else "they were used nevertheless"
    )
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
