"""Compare mixed federations with pure ones: six clients with the same kind, or with several.

python -m benchmarks.accuracy.mixed_federations                 # every row
python -m benchmarks.accuracy.mixed_federations --seeds 0,1     # a table of its own

In a mixed federation the kinds of payload are dealt out cyclically, as by
`mixed.assignment=cyclic`. Every order of the kinds has its run, so that every client has sent each
kind once; a row is the mean of its runs. With one FedDEO among the cheap kinds, its client changes
with run and seed. A client's payload and images are those of the pure run. Clients and server do
what they do in `osfl run method=mixed`, but in one process without a network.
"""

from collections.abc import Sequence
from statistics import mean

from benchmarks.federation import (
    CLIENTS,
    Settings,
    accuracy_on_test,
    cell_name,
    config_of,
    payloads_of,
    server_job,
)
from benchmarks.harness import PAIRED, Experiment, Line, average, difference, standard_error
from benchmarks.recipe import SYSTEMS, TRAINING
from osfl.config import Scalar
from osfl.methods import server_module
from osfl.tables.table_file import as_arguments

COMMON: Settings = {
    **TRAINING,
    "synthesis.images-per-class": 10,
    # 17 epochs of 600 images
    "global-model.steps": 320,
    "global-model.precision": "bfloat16",
    "synthesis.solver": "unipc",
    "synthesis.steps": 6,
    "synthesis.unit-size": 100,
}
PAPERS = ("FedLMG", "OSCAR", "FedDEO")
# About 140 bytes each, and nothing is trained
CHEAP = ("votes", "prompts-domain")
PURE: dict[str, Settings] = {name: SYSTEMS[name] for name in (*PAPERS, *CHEAP)}
# The rows of mixed federations, and the rows whose mean each is compared with
MIXED = "two FedLMG, two OSCAR, two FedDEO"
MIXED_CHEAP = "three votes, three prompts-domain"
CHEAP_AND_ONE = "cheap kinds, one FedDEO"
PARTS: dict[str, tuple[str, ...]] = {
    MIXED: PAPERS,
    MIXED_CHEAP: CHEAP,
    CHEAP_AND_ONE: (MIXED_CHEAP,),
}
EXPERIMENT = Experiment(
    __file__,
    [*PURE, *PARTS],
    "Top-1 accuracy (%) on the clients' test images of the six handwritten domains, mean of the "
    "seeds {seeds} and, in mixed rows, of the orders in which the kinds are dealt out. Every seed "
    "has its own payloads, noise and training. The difference is that of a mixed row to the mean "
    "of the rows that it names; the last columns are of the clients that sent this kind. "
    f"{' '.join(as_arguments(COMMON))}; methods as in benchmarks/recipe.py. {PAIRED}",
    (0, 1, 2, 3, 4),
)


def settings_of(kind: str, seed: int) -> dict[str, Scalar]:
    """Return a pure federation's settings."""
    return {**COMMON, **PURE[kind], "seed": seed}


def mixed_settings_of(kinds: Sequence[str], seed: int) -> dict[str, Scalar]:
    """Return the settings of a federation whose clients send several kinds."""
    distinct = sorted(set(kinds))
    settings: dict[str, Scalar] = dict(COMMON)
    for kind in distinct:
        settings |= PURE[kind]
    methods = ",".join(str(PURE[kind]["method"]) for kind in distinct)
    return {**settings, "method": "mixed", "mixed.methods": methods, "seed": seed}


def accuracies(kinds: Sequence[str], seed: int) -> list[float]:
    """Return the accuracy (%) on every client's test images.

    Args:
        kinds: every client's kind; a single one makes a pure federation.
    """
    is_pure = len(set(kinds)) == 1
    settings = settings_of(kinds[0], seed) if is_pure else mixed_settings_of(kinds, seed)
    name = cell_name({**settings, "kinds": ",".join(kinds)})

    def compute() -> list[float]:
        sent = {kind: payloads_of(settings_of(kind, seed)) for kind in sorted(set(kinds))}
        payloads = {client: sent[kind][client] for client, kind in zip(CLIENTS, kinds, strict=True)}
        methods = [str(PURE[kind]["method"]) for kind in kinds]
        config = config_of(settings)
        job = server_job(config, name, kinds=dict(zip(CLIENTS, methods, strict=True)))
        (result,) = server_module(config.method).run(job, payloads).values()
        return [accuracy_on_test(config, result.model, k) for k in range(len(CLIENTS))]

    result: list[float] = EXPERIMENT.cell(name, compute)
    return result


def runs_of(row: str, seed: int) -> list[tuple[str, ...]]:
    """Return the kinds of the six clients in each run of a row."""
    if row in PURE:
        return [(row,) * len(CLIENTS)]
    kinds = PAPERS if row == MIXED else CHEAP
    repeats = len(CLIENTS) // len(kinds)
    orders = [(kinds[first:] + kinds[:first]) * repeats for first in range(len(kinds))]
    if row == CHEAP_AND_ONE:
        return [
            replaced(order, (seed + number) % len(CLIENTS), "FedDEO")
            for number, order in enumerate(orders)
        ]
    return orders


def replaced(kinds: tuple[str, ...], client: int, kind: str) -> tuple[str, ...]:
    """Return the clients' kinds with another one for a client."""
    return (*kinds[:client], kind, *kinds[client + 1 :])


def by_seed(row: str, seeds: Sequence[int]) -> dict[int, float]:
    """Return a row's average accuracy (%) by seed."""
    values = {}
    for seed in seeds:
        values[seed] = mean(mean(accuracies(kinds, seed)) for kinds in runs_of(row, seed))
    return values


def of_senders(row: str, kind: str, seeds: Sequence[int]) -> list[float]:
    """Return the accuracies (%) on the images of the clients that sent a kind, in all runs."""
    values = []
    for seed in seeds:
        for kinds in runs_of(row, seed):
            by_client = zip(kinds, accuracies(kinds, seed), strict=True)
            values += [accuracy for sent, accuracy in by_client if sent == kind]
    return values


def line(row: str, seeds: Sequence[int]) -> Line:
    """Return a row of the table."""
    values = by_seed(row, seeds)
    columns = {
        "": row,
        "average": average(values.values()),
        "standard error": standard_error(values.values()),
        "to": "",
        "difference": "",
    }
    if row in PARTS:
        parts = [by_seed(part, seeds) for part in PARTS[row]]
        baseline = {seed: mean(part[seed] for part in parts) for seed in seeds}
        columns["to"] = " and ".join(PARTS[row])
        columns["difference"] = difference(values, baseline)
    for kind in PURE:
        sent = of_senders(row, kind, seeds)
        columns[f"with {kind}"] = average(sent) if sent else ""
    return columns


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
