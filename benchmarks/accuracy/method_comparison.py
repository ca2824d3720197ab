"""Compare all methods: thirty images per class and client, one recipe, five paired seeds.

python -m benchmarks.accuracy.method_comparison                        # every row
python -m benchmarks.accuracy.method_comparison ceiling domain-vector  # some; the others stay
python -m benchmarks.accuracy.method_comparison --jobs 12              # twelve cells in parallel
python -m benchmarks.accuracy.method_comparison --partition label      # two to four classes each
python -m benchmarks.accuracy.method_comparison --partition dirichlet  # label skew, alpha 0.1

Every seed has its own payloads, noise and training on the same real images; rows whose clients do
the same share payloads. Clients and server do what they do in `osfl run`, but in one process
without a network, on a GPU where there is one.
"""

from collections.abc import Sequence
from importlib.metadata import version
from statistics import mean
from typing import Any

from benchmarks import recipe
from benchmarks.federation import (
    CLIENTS,
    DOMAINS,
    Settings,
    accuracy_on_test,
    cell_name,
    client_settings,
    config_of,
    payloads_of,
    server_job,
)
from benchmarks.harness import (
    PAIRED,
    Experiment,
    Line,
    average,
    difference,
    in_parallel,
    parsed_seeds,
    some_of,
    standard_error,
)
from benchmarks.recipe import COMMON, PARTITIONS, rows_of, settings_of
from osfl.methods import server_module
from osfl.tables.markdown import describe_machine
from osfl.tables.table_file import as_arguments
from osfl.util.costs import Stopwatch

SEEDS = (0, 1, 2, 3, 4)
Cell = dict[str, Any]
# Rows that all others are compared with
REFERENCES = ("ceiling", "prompts-domain", "domain-vector", "ceiling, as long")
SKEWED_REFERENCES = ("ceiling", "domain-vector, all classes")


def experiment(partition: str) -> Experiment:
    """Return the table of a partition."""
    common = " ".join(as_arguments({**COMMON, **PARTITIONS[partition]}))
    by_domain = partition == "domain"
    partitioned = "" if by_domain else ", which every seed partitions in its own way"
    return Experiment(
        __file__,
        rows_of(partition),
        "Top-1 accuracy (%) on the clients' test images, mean of the seeds {seeds}; every seed has "
        f"its own payloads, noise and training on the same real images{partitioned}. {common}; the "
        f"program has each row's own settings. {PAIRED}",
        SEEDS,
        "" if by_domain else f"--partition {partition}",
        "" if by_domain else f"method-comparison-{partition}",
    )


def references_of(partition: str) -> tuple[str, ...]:
    """Return the rows that all others are compared with."""
    return REFERENCES if partition == "domain" else SKEWED_REFERENCES


def cell(row: str, seed: int, partition: str = "domain") -> Cell:
    """Return "accuracy" (%) on every client's test images, "seconds" and "machine"."""
    settings = settings_of(row, seed, partition)

    def compute() -> Cell:
        watch = Stopwatch()
        config = config_of(settings)
        job = server_job(config, cell_name(settings))
        (result,) = server_module(config.method).run(job, payloads_of(settings)).values()
        accuracies = [accuracy_on_test(config, result.model, k) for k in range(len(CLIENTS))]
        cost = {
            "seconds": watch.seconds,
            "machine": f"{describe_machine()}, torch {version('torch')}",
        }
        return {"row": row, "seed": seed, "accuracy": accuracies, **cost}

    result: Cell = experiment(partition).cell(cell_name(settings), compute)
    return result


def cells(rows: Sequence[str], seeds: Sequence[int], partition: str, jobs: int) -> None:
    """Compute all cells; rows that share payloads do not make them at the same time."""
    every = [(row, seed, partition) for row in rows for seed in seeds]
    if jobs > 1:
        settings = [settings_of(*arguments) for arguments in every]
        distinct = {
            cell_name(client_settings(row_settings)): (row_settings,) for row_settings in settings
        }
        in_parallel(make_payloads, list(distinct.values()), jobs)
    in_parallel(cell, every, jobs)


def make_payloads(settings: Settings) -> None:
    """Make payloads without returning them, for a process of its own."""
    payloads_of(settings)


def averages(row: str, seeds: Sequence[int], partition: str = "domain") -> dict[int, float]:
    """Return the clients' average accuracy by seed."""
    return {seed: mean(cell(row, seed, partition)["accuracy"]) for seed in seeds}


def line(row: str, seeds: Sequence[int], partition: str) -> Line:
    """Return a row of the table."""
    records = [cell(row, seed, partition) for seed in seeds]
    by_client = zip(*(record["accuracy"] for record in records), strict=True)
    names = DOMAINS if partition == "domain" else CLIENTS
    by_seed = averages(row, seeds, partition)
    columns = {"": row}
    columns |= {name: average(values) for name, values in zip(names, by_client, strict=True)}
    columns["average"] = average(by_seed.values())
    columns["standard error"] = standard_error(by_seed.values())
    for reference in references_of(partition):
        baseline = averages(reference, seeds, partition)
        columns[f"to {reference}"] = "" if row == reference else difference(by_seed, baseline)
    columns["made on"] = "; ".join(sorted({record["machine"] for record in records}))
    return columns


def main() -> None:
    """Make the table of a partition."""
    parser = experiment("domain").parser(__doc__)
    parser.add_argument("--partition", choices=PARTITIONS, default="domain")
    parser.add_argument("--jobs", type=int, default=1, help="cells in parallel (default 1)")
    arguments = parser.parse_args()
    partition = arguments.partition
    rows = some_of(arguments.rows, recipe.rows_of(partition), parser)
    seeds = parsed_seeds(arguments.seeds)
    with_references = dict.fromkeys((*references_of(partition), *rows))
    cells(list(with_references), seeds, partition, arguments.jobs)
    experiment(partition).write(rows, lambda row, seeds: line(row, seeds, partition), seeds)


if __name__ == "__main__":
    main()
