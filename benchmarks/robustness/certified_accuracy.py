"""Measure the certified accuracy of an ensemble over groups of clients.

python -m benchmarks.robustness.certified_accuracy 20  # 20 groups
python -m benchmarks.robustness.certified_accuracy 10  # 10 groups; the table keeps its other rows

Deep Partition Aggregation (Levine & Feizi, arXiv 2006.14768) with clients in place of training
images. Sixty clients with ten images of the digits each, drawn at random, are partitioned into
groups by their numbers; a model trains on each group's synthetic images alone, and the models vote.
A client's images depend on its payload alone (`class-balance`, `label-check` and `robust` are off),
so that it reaches one model: r malicious clients change at most r votes. A test image is certified
for r if it is predicted correctly, and would be with any r votes moved to any other class.

This needs no defense and no assumption about the attack. It assumes that a client has one identity,
which its key can ensure, and does not choose its group; that every group has a model; and that the
same images train the same model, which holds on a CPU and not always on a GPU. The price is that a
model sees three or six clients.

The method is `votes`, whose clients learn nothing, with the common recipe.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from statistics import mean

import torch
from torch.nn import functional as F

from benchmarks.federation import (
    Settings,
    cell_name,
    client_images,
    client_names,
    config_of,
    images_of,
    payloads_of,
    predictions,
    server_job,
    synthesize,
)
from benchmarks.harness import Experiment, Line
from benchmarks.recipe import COMMON, SYSTEMS
from osfl.data.parts import class_names
from osfl.payload.kinds import Votes
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import train_global

NUMBER = 60
CLIENTS = client_names(NUMBER)
MALICIOUS = (1, 2, 3, 5, 9)
SETTINGS: Settings = {
    **COMMON,
    **SYSTEMS["votes"],
    "num-clients": NUMBER,
    "data.partition": "iid",
    "seed": 0,
}
EXPERIMENT = Experiment(
    __file__,
    ("10", "20"),
    f"Top-1 accuracy (%) on the test images of all six domains. {NUMBER} clients with ten images "
    "each, drawn at random, are partitioned into groups with a model each, which vote; one model: "
    "their mean. Pair: a class in a style; ten classes and six styles make sixty. With liars: the "
    "lower bound whatever so many malicious clients send. `votes`, seed 0; the recipe is "
    "benchmarks.accuracy.method_comparison's.",
)


@cache
def synthetic_set() -> tuple[ServerJob, SyntheticSet]:
    """Return the job, and all clients' images."""
    job = server_job(config_of(SETTINGS), f"partitions-{cell_name(SETTINGS)}", CLIENTS)
    return job, synthesize(job, payloads_of(SETTINGS))


def votes_of(groups: int, group: int) -> torch.Tensor:
    """Return a group's predicted classes [N] of the test images of all domains."""
    name = f"group-{group}-of-{groups}"

    def compute() -> list[int]:
        job, images = synthetic_set()
        of_group = images_of(images, CLIENTS[group::groups])
        model = train_global(job, name, of_group.pixels, of_group.labels).model
        votes = [predictions(model, part.pixels) for part in client_images("test")]
        classes: list[int] = torch.cat(votes).tolist()
        return classes

    return torch.tensor(EXPERIMENT.cell(f"{cell_name(SETTINGS)}-{group}-of-{groups}", compute))


def certified(votes: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the winning classes [N] of models' votes [M, N], and the number of malicious clients
    that cannot change each [N].

    The class with the most votes wins; of equal ones, the first. A malicious client moves one vote:
    (n_c - max_k (n_k + [k < c])) / 2, rounded down (the paper's theorem 1).
    """
    counts = F.one_hot(votes, classes).sum(dim=0)
    winner = counts.argmax(dim=1)
    top = counts.gather(1, winner[:, None])
    before = torch.arange(classes) < winner[:, None]
    rivals = (counts + before.long()).scatter(1, winner[:, None], -1)
    margin = top.flatten() - rivals.max(dim=1).values
    return winner, margin // 2


def pair_counts(groups: int) -> Counter[tuple[str, int]]:
    """Count the groups that draw each pair of class and style."""
    payloads = payloads_of(SETTINGS)
    config = config_of(SETTINGS)
    every = product(class_names(config.data), range(len(config.votes.words)))
    counts = Counter(dict.fromkeys(every, 0))
    for group in range(groups):
        pairs: set[tuple[str, int]] = set()
        for client in CLIENTS[group::groups]:
            payload = payloads[client]
            assert isinstance(payload, Votes)
            pairs.update(zip(payload.classes, payload.winners.tolist(), strict=True))
        counts.update(pairs)
    return counts


def line(row: str, _: Sequence[int] = ()) -> Line:
    """Return a row of the table."""
    groups = int(row)
    votes = torch.stack([votes_of(groups, group) for group in range(groups)])
    labels = torch.cat([part.labels for part in client_images("test")])
    winner, radius = certified(votes, 10)
    right = winner == labels
    single = (votes == labels).double().mean().item()
    counts = sorted(pair_counts(groups).values())
    columns = {
        "": row,
        "clients in each": str(NUMBER // groups),
        "pairs a model learns": f"{sum(counts) / groups:.0f}",
        "models that learn a pair": f"{mean(counts):.1f} ({counts[0]} to {counts[-1]})",
        "one model": f"{100 * single:.1f}",
        "together": f"{100 * right.double().mean().item():.1f}",
    }
    for count in MALICIOUS:
        share = (right & (radius >= count)).double().mean().item()
        columns[f"with {count} liar{'s' if count > 1 else ''}"] = f"{100 * share:.1f}"
    return columns


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
