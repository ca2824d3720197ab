"""Compute the probability that the correct name wins a noisy vote.

python -m benchmarks.privacy.noisy_argmax

Each client's training images of the digits vote once, with the defaults of `votes`. From the counts
the probability that the client's own style wins is computed for every epsilon, over all orders of
permute-and-flip: nothing is drawn at random. Ten images vote for their class, or a client's hundred
for all of its classes.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import permutations

import torch

from benchmarks.federation import CLIENTS, CPU, DOMAINS, config_of, node_of
from benchmarks.harness import Experiment, Line, average, command_line
from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.methods.votes import candidate_errors
from osfl.data.load import load_images
from osfl.kit.kits import find_kit
from osfl.models.diffusion import load_kit
from osfl.util.prompts import DIGITS

EPSILONS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def ballots(number: int) -> torch.Tensor:
    """Count a client's votes [C, m]: images of each class that vote for each candidate."""
    config = config_of({"method": "votes", "num-clients": len(CLIENTS)})
    kit = load_kit(find_kit(config.kit), CPU)
    node = node_of(number, config)
    images = load_images(config.data, node, "train", config.seed, kit.image_size)
    job = ClientJob(config, CLIENTS[number], DIGITS, lambda fit: images, config.kit, CPU)
    mean_latents, _ = posteriors(kit, images, job)
    votes = candidate_errors(kit, mean_latents, images.labels, job).argmin(dim=1)
    counts = torch.zeros(len(DIGITS), len(config.votes.words), dtype=torch.int64)
    for label, vote in zip(images.labels.tolist(), votes.tolist(), strict=True):
        counts[label, vote] += 1
    return counts


@cache
def win_probabilities(counts: tuple[int, ...], epsilon: float) -> tuple[float, ...]:
    """Return each candidate's probability to win by permute-and-flip: the mean over all orders."""
    heads = [math.exp(epsilon * (count - max(counts)) / 2) for count in counts]
    wins = [0.0] * len(counts)
    orders = list(permutations(range(len(counts))))
    for order in orders:
        reached = 1.0
        for candidate in order:
            wins[candidate] += reached * heads[candidate] / len(orders)
            reached *= 1 - heads[candidate]
    return tuple(wins)


def line(epsilon: float, counts: Sequence[torch.Tensor], own_styles: Sequence[int]) -> Line:
    """Return a row: mean probabilities (%) over clients and classes that the own style wins."""
    by_class = []
    by_client = []
    for votes, style in zip(counts, own_styles, strict=True):
        by_class += [100 * win_probabilities(tuple(r), epsilon)[style] for r in votes.tolist()]
        total = tuple(votes.sum(dim=0).tolist())
        by_client.append(100 * win_probabilities(total, epsilon)[style])
    return {
        "epsilon": f"{epsilon:g}",
        "votes of a class's 10 images": average(by_class),
        "votes of a client's 100 images": average(by_client),
    }


def main() -> None:
    """Make the table."""
    command_line(__doc__).parse_args()
    counts = [ballots(number) for number in range(len(CLIENTS))]
    words = config_of({"method": "votes"}).votes.words
    own_styles = [words.index(style) for style in DOMAINS]
    shares = []
    for name, votes, style in zip(DOMAINS, counts, own_styles, strict=True):
        shares.append(f"{name} {100 * votes[:, style].sum().item() / votes.sum().item():.0f}")
    experiment = Experiment(
        __file__,
        caption=f"The probability (%) that a client's own style wins among {len(words)} "
        "candidates, computed from the votes of its images; the mean over clients, and classes. "
        f"Images that vote for their style (%): {', '.join(shares)}.",
    )
    experiment.write_all(line(epsilon, counts, own_styles) for epsilon in EPSILONS)


if __name__ == "__main__":
    main()
