"""What holds whatever liars send: the certified accuracy of an ensemble; to
benchmarks/tables/partitions.{md,json}.

python -m benchmarks.partitions          # of 20 groups
python -m benchmarks.partitions 10       # of 10; the table keeps its other rows

Deep Partition Aggregation (Levine & Feizi, arXiv 2006.14768) with clients in place of training
images. Sixty clients with ten images of the digits each, drawn at random, are parted into groups by
their numbers, and a model is trained on each group's synthetic images alone; the models vote. What
is drawn for a client depends on its payload alone (`class-balance`, `label-check` and `robust` are
off), so that it reaches one model: r liars change r votes at most. A test image is certified for r
liars if it is recognised, and would be with any r votes turned into votes for any other class.

That needs no judge and no assumption of what liars send. It does assume that a client has one name,
which its key can see to, and does not choose its group; that every group has a model; and that the
same images train the same model, as they do on a CPU and not always on a GPU. The price is that a
model sees three or six clients.

`votes` is the method, as it needs no learning on the clients, and the recipe is that of
benchmarks.main_table. Interrupted, the same command goes on.
"""

import json
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch.nn import functional as F

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import Settings, folder_name, names, real, sent
from benchmarks.left_out import SYSTEMS
from benchmarks.main_table import COMMON, config_of
from benchmarks.server import drawn_by, job_in
from osfl.data.parts import class_names
from osfl.models.classifiers import logits_of
from osfl.payload.kinds import Votes
from osfl.util.files import make_private_folder, write_atomically
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import train_global

WORK = Path(__file__).resolve().parent.parent / "runs" / "partitions"
NUMBER = 60
CLIENTS = names(NUMBER)
GROUPS = (10, 20)
LIARS = (1, 2, 3, 5, 9)
SETTINGS: Settings = {
    **COMMON,
    **SYSTEMS["votes"],
    "num-clients": NUMBER,
    "data.partition": "iid",
    "seed": 0,
}


@cache
def drawn() -> tuple[ServerJob, SyntheticSet]:
    """Every client's images, and the job that drew them."""
    job = job_in(config_of(SETTINGS), f"partitions-{folder_name(SETTINGS)}", CLIENTS)
    return job, drawn_by(job, sent(SETTINGS))


def votes_of(groups: int, group: int) -> torch.Tensor:
    """The classes [N] that a group's model sees in the test images of all domains."""
    result = WORK / f"{folder_name(SETTINGS)}-{group}-of-{groups}.json"
    if not result.is_file():
        job, images = drawn()
        members = set(CLIENTS[group::groups])
        rows = [row for row, client in enumerate(images.clients) if client in members]
        own = images.select(rows)
        name = f"group-{group}-of-{groups}"
        model = train_global(job, name, own.pixels, own.labels).model
        said = [
            logits_of(model, part.pixels, torch.device("cpu")).argmax(dim=1)
            for part in real("test")
        ]
        write_atomically(result, json.dumps(torch.cat(said).tolist()).encode())
        print(f"group {group} of {groups}", flush=True)
    return torch.tensor(json.loads(result.read_text()))


def certified(said: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the models [M, N] say together [N], and how many liars cannot change it [N].

    The class with the most votes, of equal ones the first. A liar takes a vote from it and gives it
    to another class: (n_c - max_k (n_k + [k < c])) / 2, rounded down (the paper's theorem 1).
    """
    counts = F.one_hot(said, classes).sum(dim=0)
    winner = counts.argmax(dim=1)
    own = counts.gather(1, winner[:, None])
    before = torch.arange(classes) < winner[:, None]
    rivals = (counts + before.long()).scatter(1, winner[:, None], -1)
    margin = own.flatten() - rivals.max(dim=1).values
    return winner, margin // 2


def drawn_pairs(groups: int) -> Counter[tuple[str, int]]:
    """Of every class and style, how many groups draw that class in that style."""
    payloads = sent(SETTINGS)
    config = config_of(SETTINGS)
    every = product(class_names(config.data), range(len(config.votes.words)))
    counts = Counter(dict.fromkeys(every, 0))
    for group in range(groups):
        of_group: set[tuple[str, int]] = set()
        for client in CLIENTS[group::groups]:
            payload = payloads[client]
            assert isinstance(payload, Votes)
            of_group.update(zip(payload.classes, payload.winners.tolist(), strict=True))
        counts.update(of_group)
    return counts


def line(groups: int) -> dict[str, str]:
    """A row of the table."""
    said = torch.stack([votes_of(groups, group) for group in range(groups)])
    labels = torch.cat([part.labels for part in real("test")])
    winner, radius = certified(said, 10)
    right = winner == labels
    single = (said == labels).double().mean().item()
    made = {"": str(groups), "clients in each": str(NUMBER // groups)}
    counts = sorted(drawn_pairs(groups).values())
    made["pairs a model learns"] = f"{sum(counts) / groups:.0f}"
    made["models that learn a pair"] = f"{mean(counts):.1f} ({counts[0]} to {counts[-1]})"
    made["one model"] = f"{100 * single:.1f}"
    made["together"] = f"{100 * right.double().mean().item():.1f}"
    for liars in LIARS:
        share = (right & (radius >= liars)).double().mean().item()
        made[f"with {liars} liar{'s' if liars > 1 else ''}"] = f"{100 * share:.1f}"
    return made


def main() -> None:
    """Make the table, and keep it."""
    parser = command_line(__doc__)
    parser.add_argument(
        "groups", nargs="*", type=int, help=f"some of {listed(GROUPS)}; none: {GROUPS[-1]}"
    )
    given = parser.parse_args()
    numbers = some_of(given.groups or GROUPS[-1:], GROUPS, parser)
    make_private_folder(WORK)
    about = (
        f"Top-1 accuracy (%) on the test images of all six domains. {NUMBER} clients with ten "
        "images each, drawn at random, parted into groups with a model each, which vote; one "
        "model: their mean. "
        "Pair: a class in a style; ten classes and six styles make sixty. "
        "With liars: at least so many are right whatever so many clients send. `votes`, seed 0; "
        "the recipe is benchmarks.main_table's. Command: `python -m benchmarks.partitions`."
    )
    order = [str(groups) for groups in GROUPS]
    for groups in numbers:
        lines = with_others([line(groups)], TABLES / "partitions.json", about, order)
        write_table(TABLES / "partitions", lines, about)


if __name__ == "__main__":
    main()
