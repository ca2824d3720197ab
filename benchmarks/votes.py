"""How often the right name wins with differential privacy; to benchmarks/tables/votes.{md,json}.

python -m benchmarks.votes

Each client's training images of the digits vote once, with the defaults of `votes`. For every
epsilon the chance that the client's own style wins is then computed from the counts, over all
orders of permute-and-flip: nothing is drawn at random. Ten images of a class elect for their class,
or a client's hundred for all of its classes.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from statistics import mean

import torch

from benchmarks import TABLES, command_line, write_table
from benchmarks.clients import CLIENTS, DOMAINS
from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.methods.votes import candidate_errors
from osfl.config import NodeConfig, parse_run_config
from osfl.data.load import load_images
from osfl.kit.kits import find_kit
from osfl.models.diffusion import load_kit
from osfl.settings import default_config
from osfl.util.prompts import DIGITS

EPSILONS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
CPU = torch.device("cpu")


def ballots(number: int) -> torch.Tensor:
    """How many of a client's images of each class vote for each candidate [C, m]."""
    config = parse_run_config({**default_config(), "method": "votes", "num-clients": len(CLIENTS)})
    node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
    kit = load_kit(find_kit(config.kit), CPU)
    images = load_images(config.data, node, "train", config.seed, kit.image_size)
    job = ClientJob(config, CLIENTS[number], DIGITS, lambda fit: images, config.kit, CPU)
    mean_latents, _ = posteriors(kit, images, job)
    votes = candidate_errors(kit, mean_latents, images.labels, job).argmin(dim=1)
    counts = torch.zeros(len(DIGITS), len(config.votes.words), dtype=torch.int64)
    for label, vote in zip(images.labels.tolist(), votes.tolist(), strict=True):
        counts[label, vote] += 1
    return counts


@cache
def chances(counts: tuple[int, ...], epsilon: float) -> tuple[float, ...]:
    """Of each candidate to win by permute-and-flip: the mean over all orders."""
    taken = [math.exp(epsilon * (count - max(counts)) / 2) for count in counts]
    found = [0.0] * len(counts)
    orders = list(permutations(range(len(counts))))
    for order in orders:
        reached = 1.0
        for candidate in order:
            found[candidate] += reached * taken[candidate] / len(orders)
            reached *= 1 - taken[candidate]
    return tuple(found)


def line(epsilon: float, counts: Sequence[torch.Tensor], right: Sequence[int]) -> dict[str, str]:
    """A row of the table: mean chances (%) over clients, and classes, that the own style wins."""
    by_class = []
    by_client = []
    for votes, style in zip(counts, right, strict=True):
        by_class += [chances(tuple(row), epsilon)[style] for row in votes.tolist()]
        by_client.append(chances(tuple(votes.sum(dim=0).tolist()), epsilon)[style])
    return {
        "epsilon": f"{epsilon:g}",
        "elected by a class's 10 images": f"{100 * mean(by_class):.1f}",
        "by a client's 100 images": f"{100 * mean(by_client):.1f}",
    }


def main() -> None:
    """Make the table, and keep it."""
    command_line(__doc__).parse_args()
    counts = [ballots(number) for number in range(len(CLIENTS))]
    words = parse_run_config(default_config()).votes.words
    right = [words.index(style) for style in DOMAINS]
    agreeing = [
        100 * votes[:, style].sum().item() / votes.sum().item()
        for votes, style in zip(counts, right, strict=True)
    ]
    shares = ", ".join(f"{name} {share:.0f}" for name, share in zip(DOMAINS, agreeing, strict=True))
    write_table(
        TABLES / "votes",
        [line(epsilon, counts, right) for epsilon in EPSILONS],
        f"The chance (%) that a client's own style wins among {len(words)} candidates, computed "
        f"from the votes of its images; the mean over clients, and classes. Of the images vote for "
        f"their style (%): {shares}. Command: `python -m benchmarks.votes`.",
    )


if __name__ == "__main__":
    main()
