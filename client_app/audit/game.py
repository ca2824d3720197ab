"""Trial of a membership-inference audit: a random bit puts one of two images into the payload.

The attacker guesses which one. Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training
Run" (arXiv 2305.08846): one payload has many canary bits, so that it need not be made thousands of
times. Theirs: each image is in or out. Ours: a training image, or a test image of the same class in
its place, which is the neighboring relation of `epsilon`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from client_app.audit.attacks import attack
from client_app.audit.linear import linear_attack
from client_app.context import ClientJob
from osfl.data.load import Images
from osfl.data.pictures import Fit
from osfl.methods import client_module
from osfl.payload.kinds import Payload
from osfl.util.pixels import LazyPixels, Pixels, concatenate


@dataclass(frozen=True)
class Pairs:
    """Pairs of a training image and a test image.

    Attributes:
        members: [P], rows of the training images.
        others: [P], rows of the test images.
        canary_bits: [P] bool; whether the test image replaces the training image in
            the payload.
    """

    members: torch.Tensor
    others: torch.Tensor
    canary_bits: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """The attacker's scores of the two images of each pair.

    Attributes:
        members: of the images that helped to make the payload, [P].
        others: of the images that did not, [P].
    """

    members: torch.Tensor
    others: torch.Tensor


def draw_pairs(train: torch.Tensor, test: torch.Tensor, generator: torch.Generator) -> Pairs:
    """Draw as many pairs of each class as its smaller split has images, and their canary bits.

    Args:
        train, test: labels.
    """
    ours = []
    others = []
    for label in train.unique():
        train_rows = (train == label).nonzero().flatten()
        test_rows = (test == label).nonzero().flatten()
        count = min(len(train_rows), len(test_rows))
        ours.append(train_rows[torch.randperm(len(train_rows), generator=generator)[:count]])
        others.append(test_rows[torch.randperm(len(test_rows), generator=generator)[:count]])
    paired = torch.cat(ours)
    canary_bits = torch.rand(len(paired), generator=generator) < 0.5
    return Pairs(paired, torch.cat(others), canary_bits)


def run_trial(
    job: ClientJob,
    test: Callable[[Fit], Images],
    pairs: Pairs,
    received: Callable[[Payload], Payload],
) -> dict[str, Scores]:
    """Make a payload from the images that the canary bits select, attack it, and return its scores.

    Args:
        job: a client's.
        test: loads images that the client did not train on, as `job.load` loads those it did.
        received: converts a payload to what the server receives after its codec.

    Returns:
        scores by attack target.
    """
    swap = pairs.canary_bits

    def load_members(fit: Fit) -> Images:
        train = job.load(fit)
        rows = torch.arange(len(train))
        rows[pairs.members[swap]] = len(train) + pairs.others[swap]
        return _select(_concatenated(train, test(fit)), rows)

    def load_pairs(fit: Fit) -> Images:
        train = job.load(fit)
        rows = torch.cat([pairs.members, len(train) + pairs.others])
        return _select(_concatenated(train, test(fit)), rows)

    def load_pairs_and_rest(fit: Fit) -> Images:
        train = job.load(fit)
        is_unpaired = torch.ones(len(train), dtype=torch.bool)
        is_unpaired[pairs.members] = False
        unpaired = is_unpaired.nonzero().flatten()
        rows = torch.cat([pairs.members, len(train) + pairs.others, unpaired])
        return _select(_concatenated(train, test(fit)), rows)

    make_payload = client_module(job.config.method).make_payload
    payload = received(make_payload(replace(job, load=load_members)))
    scores_by_target = attack(replace(job, load=load_pairs), payload)
    scores_by_target |= linear_attack(
        replace(job, load=load_pairs_and_rest), payload, len(pairs.members)
    )
    results = {}
    for target, scores in scores_by_target.items():
        ours, others = scores.chunk(2)
        results[target] = Scores(torch.where(swap, others, ours), torch.where(swap, ours, others))
    return results


def _concatenated(train: Images, test: Images) -> Images:
    pixels = concatenate([train.pixels, test.pixels])
    return Images(pixels, torch.cat([train.labels, test.labels]))


def _select(images: Images, rows: torch.Tensor) -> Images:
    pixels: Pixels = images.pixels
    if isinstance(pixels, LazyPixels):
        source = pixels
        pixels = LazyPixels(lambda number: source[rows[number : number + 1]][0], len(rows))
    else:
        pixels = pixels[rows]
    return Images(pixels, images.labels[rows])
