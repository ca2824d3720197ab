"""The audit's game: of two images a coin takes one into the payload; the attacker guesses which.

Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run" (arXiv 2305.08846): many
coins are thrown for one payload, so that it need not be made thousands of times. Theirs: each image
is in or out. Ours: a training image or a test image of the same class in its place, which is what
`epsilon` speaks of.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from client_app.audit.attacks import attack
from client_app.audit.linear import linear_attack
from client_app.context import ClientJob
from osfl.data.load import Fit, Images
from osfl.methods import client_half
from osfl.payload.kinds import Payload
from osfl.util.pixels import LazyPixels, Pixels, concatenated


@dataclass(frozen=True)
class Pairs:
    """Which image stands against which.

    Attributes:
        ours: [P], rows of the training images.
        others: [P], rows of the test images.
        swapped: [P] bool; whether the other one is in the payload in place of ours.
    """

    ours: torch.Tensor
    others: torch.Tensor
    swapped: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """What the attacker thinks of each pair.

    Attributes:
        members: of the images that helped to make the payload, [P].
        others: of those that did not, [P].
    """

    members: torch.Tensor
    others: torch.Tensor


def draw_pairs(train: torch.Tensor, test: torch.Tensor, generator: torch.Generator) -> Pairs:
    """As many pairs of each class as it has images on the side that has fewer.

    Args:
        train, test: labels.
    """
    ours = []
    others = []
    for label in train.unique():
        own = (train == label).nonzero().flatten()
        strange = (test == label).nonzero().flatten()
        count = min(len(own), len(strange))
        ours.append(own[torch.randperm(len(own), generator=generator)[:count]])
        others.append(strange[torch.randperm(len(strange), generator=generator)[:count]])
    paired = torch.cat(ours)
    coins = torch.rand(len(paired), generator=generator) < 0.5
    return Pairs(paired, torch.cat(others), coins)


def play(
    job: ClientJob,
    test: Callable[[Fit], Images],
    pairs: Pairs,
    received: Callable[[Payload], Payload],
) -> dict[str, Scores]:
    """Make a payload of what the coins took, and attack it; scores by what is attacked.

    Args:
        job: a client's.
        test: images that the client did not train on, as `job.load` has those it did.
        received: what a payload is to the server, after its codec.
    """
    swap = pairs.swapped

    def members(fit: Fit) -> Images:
        own = job.load(fit)
        both = _both(own, test(fit))
        rows = torch.arange(len(own))
        rows[pairs.ours[swap]] = len(own) + pairs.others[swap]
        return _some(both, rows)

    def asked(fit: Fit) -> Images:
        own = job.load(fit)
        return _some(_both(own, test(fit)), torch.cat([pairs.ours, len(own) + pairs.others]))

    def known(fit: Fit) -> Images:
        own = job.load(fit)
        alone = torch.ones(len(own), dtype=torch.bool)
        alone[pairs.ours] = False
        always = alone.nonzero().flatten()
        rows = torch.cat([pairs.ours, len(own) + pairs.others, always])
        return _some(_both(own, test(fit)), rows)

    payload = received(client_half(job.config.method).make_payload(replace(job, load=members)))
    every = attack(replace(job, load=asked), payload)
    every |= linear_attack(replace(job, load=known), payload, len(pairs.ours))
    found = {}
    for name, scores in every.items():
        ours, others = scores.chunk(2)
        found[name] = Scores(torch.where(swap, others, ours), torch.where(swap, ours, others))
    return found


def _both(train: Images, test: Images) -> Images:
    pixels = concatenated([train.pixels, test.pixels])
    return Images(pixels, torch.cat([train.labels, test.labels]))


def _some(images: Images, rows: torch.Tensor) -> Images:
    pixels: Pixels = images.pixels
    if isinstance(pixels, LazyPixels):
        every = pixels
        pixels = LazyPixels(lambda number: every[rows[number : number + 1]][0], len(rows))
    else:
        pixels = pixels[rows]
    return Images(pixels, images.labels[rows])
