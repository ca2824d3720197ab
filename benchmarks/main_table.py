"""The main table: thirty images a class and client, one recipe for all, five seeds, differences
paired by seed; to benchmarks/tables/main.{md,json}.

python -m benchmarks.main_table                          # every row
python -m benchmarks.main_table ceiling domain-vector    # some; the table keeps its other rows
python -m benchmarks.main_table --at-once 12             # so many cells side by side, on one GPU
python -m benchmarks.main_table --partition label        # clients of two to four classes each
python -m benchmarks.main_table --partition dirichlet    # alpha 0.1: clients of unlike classes

By another partition than by domain the table is main-label or main-dirichlet; with --seeds 0,3 it
is main-seeds-0-3.

Every seed has payloads, noise and training of its own, on the same real images; rows whose clients
do the same share payloads. Clients and server do what they do in `osfl run`, but in one process,
without the network between them, and on a GPU where there is one. Interrupted, the same command
goes on.
"""

import json
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from scipy import stats

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.approximations import accuracy
from benchmarks.clients import CLIENTS, DOMAINS, Settings, folder_name, for_clients, sent
from benchmarks.left_out import COMMON as RECIPE
from benchmarks.left_out import SYSTEMS, against
from benchmarks.server import job_in
from osfl.config import RunConfig, Scalar, parse_run_config
from osfl.methods import server_module
from osfl.settings import default_config
from osfl.tables.markdown import machine
from osfl.tables.table_file import as_arguments
from osfl.util.costs import Stopwatch
from osfl.util.files import make_private_folder, write_atomically

WORK = Path(__file__).resolve().parent.parent / "runs" / "main-table"
SEEDS = (0, 1, 2, 3, 4)
Cell = dict[str, Any]
REFERENCES = ("ceiling", "prompts-domain", "domain-vector", "ceiling, as long")
COMMON: Settings = {
    **{key: value for key, value in RECIPE.items() if key != "global-model.epochs"},
    # Of 1,800 images, eleven epochs
    "global-model.steps": 627,
    "global-model.precision": "float32",
    # A GPU takes many small images at once
    "synthesis.unit-size": 300,
}
VECTOR = SYSTEMS["domain-vector"]
LONG: Settings = {"global-model.steps": 2508, "global-model.precision": "bfloat16"}
# Ten times as many images, drawn in a quarter of the steps, and four times as long a training, as
# the row "ceiling, as long" has for real images
MANY: Settings = {
    **VECTOR,
    "synthesis.images-per-class": 300,
    "synthesis.steps": 5,
    "domain-vector.guidance": 1.5,
    **LONG,
}
# Systems whose payloads are coded, too
CODED: dict[str, Settings] = {
    "FedDEO description alone": SYSTEMS["FedDEO description alone"],
    "FedDEO, one for all tokens": {
        **SYSTEMS["FedDEO description alone"],
        "feddeo.tokens": "all",
    },
    "OSCAR": SYSTEMS["OSCAR"],
    "domain-vector": VECTOR,
}
ROWS: dict[str, Settings] = {
    "ceiling": {"method": "ceiling"},
    **SYSTEMS,
    "domain-vector, 300 images": MANY,
    "domain-vector, 300 images, UniPC, 6 steps": {
        **MANY,
        "synthesis.solver": "unipc",
        "synthesis.steps": 6,
    },
    # What a second opinion takes for another class is left out
    "domain-vector, 300 images, checked": {**MANY, "label-check": "filter"},
    "ceiling, as long": {"method": "ceiling", **LONG},
    "domain-vector, 10 sampling steps": {**VECTOR, "synthesis.steps": 10},
    "domain-vector, UniPC, 6 steps": {
        **VECTOR,
        "synthesis.solver": "unipc",
        "synthesis.steps": 6,
    },
    "domain-vector, guided at 200 to 800": {
        **VECTOR,
        "synthesis.guided-from": 200,
        "synthesis.guided-to": 800,
    },
    "domain-vector, features cached, 1 of 2": {**VECTOR, "synthesis.cache-interval": 2},
    # Guidance is within the weights
    "domain-vector, LCM, 4 steps": {
        **VECTOR,
        "synthesis.lora": "kit",
        "synthesis.solver": "lcm",
        "synthesis.steps": 4,
        "domain-vector.guidance": 1.0,
    },
    "domain-vector, public domains": {
        **VECTOR,
        "public-domains": ", ".join(DOMAINS),
        # Of 3,600 images, five epochs
        "global-model.steps": 565,
    },
    "domain-vector, one for all tokens": {**VECTOR, "domain-vector.tokens": "all"},
    "domain-vector, one for all tokens, epsilon 1": {
        **VECTOR,
        "domain-vector.tokens": "all",
        "epsilon": 1.0,
        # Chosen on validation images: benchmarks.noise
        "clip-norm": 1.5,
    },
    "votes, epsilon 1": {**SYSTEMS["votes"], "epsilon": 1.0},
    "votes of all classes together, epsilon 0.1": {
        **SYSTEMS["votes"],
        "votes.electorate": "client",
        "epsilon": 0.1,
    },
    "FedDEO, one for all tokens": CODED["FedDEO, one for all tokens"],
    **{
        f"{row}, {codec}": {**settings, "payload-codec": codec}
        for row, settings in CODED.items()
        for codec in ("int8", "int4")
    },
}
PARTITIONS: dict[str, Settings] = {
    "domain": {},
    "label": {"data.partition": "label"},
    "dirichlet": {"data.partition": "dirichlet", "data.alpha": 0.1},
}
# Where clients hold other classes: the five papers' systems, and ours, which draws all classes; of
# these a third, for clients hold some third of the classes
PAPERS = ("FedCADO", "FedLMG", "FedDEO", "FedDEO description alone", "OSCAR", "Espresso")
SKEWED_ROWS: dict[str, Settings] = {
    **{row: ROWS[row] for row in ("ceiling", "prompts-only", *PAPERS)},
    "domain-vector, all classes": {
        **VECTOR,
        "domain-vector.classes": "all",
        "synthesis.images-per-class": 10,
    },
}
SKEWED_REFERENCES = ("ceiling", "domain-vector, all classes")


def rows_of(partition: str) -> dict[str, Settings]:
    """Of its table."""
    return ROWS if partition == "domain" else SKEWED_ROWS


def references_of(partition: str) -> tuple[str, ...]:
    """The rows that all others are held against."""
    return REFERENCES if partition == "domain" else SKEWED_REFERENCES


def settings_of(row: str, seed: int, partition: str = "domain") -> dict[str, Scalar]:
    """A row's own, over what all have."""
    return {**COMMON, **PARTITIONS[partition], **rows_of(partition)[row], "seed": seed}


def config_of(settings: Settings) -> RunConfig:
    """The server's, and the clients'."""
    return parse_run_config({**default_config(), **settings, "runs-dir": str(WORK)})


def cell(row: str, seed: int, partition: str) -> Cell:
    """One row with one seed: "accuracy" (%) on every client's test images, "seconds", "machine"."""
    settings = settings_of(row, seed, partition)
    result = WORK / f"{folder_name(settings)}.json"
    if not result.is_file():
        watch = Stopwatch()
        taken = sent(settings)
        config = config_of(settings)
        job = job_in(config, folder_name(settings))
        (model,) = server_module(config.method).run(job, taken).values()
        accuracies = [accuracy(config, model.model, number) for number in range(len(CLIENTS))]
        found = {"row": row, "seed": seed, "accuracy": accuracies, "seconds": watch.seconds}
        about = {"machine": f"{machine()}, torch {version('torch')}"}
        write_atomically(result, json.dumps({**found, **about}).encode())
        print(row, seed, partition, f"{mean(accuracies):.1f}, {watch.seconds:.0f} s", flush=True)
    made: Cell = json.loads(result.read_text())
    return made


def cells(rows: Sequence[str], seeds: Sequence[int], partition: str, at_once: int) -> None:
    """Make every cell that is not there, so many side by side."""
    wanted = [(row, seed, partition) for row in rows for seed in seeds]
    if at_once == 1:
        for one in wanted:
            cell(*one)
        return
    threads = max(1, (os.cpu_count() or 1) // at_once)
    # Rows that share payloads must not make them side by side
    settings = [settings_of(*one) for one in wanted]
    payloads = {folder_name(for_clients(one)): one for one in settings}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(at_once, context, torch.set_num_threads, (threads,))
    with pool:
        all_made(pool.submit(_send, one) for one in payloads.values())
        all_made(pool.submit(cell, *one) for one in wanted)


def _send(settings: Settings) -> None:
    sent(settings)


def all_made(futures: Iterable[Future[Any]]) -> None:
    """Wait for all; then raise the error of the first that failed."""
    made = list(futures)
    wait(made)
    for one in made:
        one.result()


def averages(row: str, seeds: Sequence[int], partition: str) -> dict[int, float]:
    """Of the clients, by seed."""
    return {seed: mean(cell(row, seed, partition)["accuracy"]) for seed in seeds}


def line(row: str, seeds: Sequence[int], partition: str) -> dict[str, str]:
    """A row of the table."""
    records = [cell(row, seed, partition) for seed in seeds]
    by_client = zip(*(record["accuracy"] for record in records), strict=True)
    names = DOMAINS if partition == "domain" else CLIENTS
    found = averages(row, seeds, partition)
    made = {"": row}
    made |= {name: f"{mean(ones):.1f}" for name, ones in zip(names, by_client, strict=True)}
    made["average"] = f"{mean(found.values()):.1f}"
    made["standard error"] = f"{stats.sem(list(found.values())):.2f}"
    for reference in references_of(partition):
        own = averages(reference, seeds, partition)
        made[f"to {reference}"] = "" if row == reference else against(found, own)
    made["made on"] = "; ".join(sorted({record["machine"] for record in records}))
    return made


def name_of(partition: str, seeds: Sequence[int]) -> str:
    """Of a table. Other seeds make another one, for its figures are no pairs of the first one's."""
    parts = ["main"]
    if partition != "domain":
        parts.append(partition)
    if tuple(seeds) != SEEDS:
        parts.append(f"seeds-{'-'.join(map(str, seeds))}")
    return "-".join(parts)


def main() -> None:
    """Make the table, and keep it."""
    parser = command_line(__doc__)
    known = listed(dict.fromkeys((*ROWS, *SKEWED_ROWS)))
    parser.add_argument("rows", nargs="*", help=f"some of {known}; none: all of the partition")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--partition", choices=PARTITIONS, default="domain")
    parser.add_argument("--at-once", type=int, default=1, help="cells side by side (default 1)")
    given = parser.parse_args()
    every = rows_of(given.partition)
    rows = some_of(given.rows, every, parser)
    make_private_folder(WORK)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    with_references = dict.fromkeys((*references_of(given.partition), *rows))
    cells(list(with_references), seeds, given.partition, given.at_once)
    common = " ".join(as_arguments({**COMMON, **PARTITIONS[given.partition]}))
    by_domain = given.partition == "domain"
    cut = "" if by_domain else f" --partition {given.partition}"
    same = "" if by_domain else ", which every seed gives to clients in its own way"
    about = (
        "Top-1 accuracy (%) on the clients' test images, mean of the seeds "
        f"{given.seeds}; every seed has payloads, noise and training of its own, on the same real "
        f"images{same}. {common}; a row's own settings are in the file. Differences are paired by "
        "seed, with a 95 % interval by Student's t, and a star where that excludes 0. "
        f"Command: `python -m benchmarks.main_table{cut} --seeds {given.seeds}`."
    )
    table = TABLES / name_of(given.partition, seeds)
    lines = [line(row, seeds, given.partition) for row in rows]
    lines = with_others(lines, table.with_suffix(".json"), about, every)
    write_table(table, lines, about)


if __name__ == "__main__":
    main()
