"""Leave one domain out: five clients train, and the sixth client's domain tests.

python -m benchmarks.accuracy.domain_generalization                        # every row
python -m benchmarks.accuracy.domain_generalization ceiling domain-vector  # some; the others stay

Each client makes its payload once: it does not depend on the other clients. The server's half then
synthesizes and trains without each client in turn, as `osfl run held-out=client-0` does, and that
client's test images test the model.
"""

from collections.abc import Sequence

from benchmarks.federation import (
    CLIENTS,
    DOMAINS,
    Settings,
    accuracy_on_test,
    cell_name,
    config_of,
    payloads_of,
)
from benchmarks.harness import Experiment, Line, average, difference
from benchmarks.recipe import SYSTEMS, TRAINING
from osfl.config import Scalar
from osfl.methods import server_module
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.tables.table_file import as_arguments
from server_app.context import ServerJob

# In place of the names of the public domains: all but the held-out one
OTHERS = "others"
# 47 steps an epoch: 1,500 images in batches of 32
COMMON: Settings = {**TRAINING, "global-model.epochs": 13}
ROWS: dict[str, Settings] = {
    # 500 real images make 16 steps an epoch
    "ceiling": {"method": "ceiling", "global-model.epochs": 38},
    **SYSTEMS,
    # Twice as many images with the public domains, so half the epochs
    "domain-vector, all public domains": {
        **SYSTEMS["domain-vector"],
        "public-domains": ", ".join(DOMAINS),
        "global-model.epochs": 6,
    },
    "domain-vector, public domains but the tested": {
        **SYSTEMS["domain-vector"],
        "public-domains": OTHERS,
        "global-model.epochs": 6,
    },
}
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "Top-1 accuracy (%) on the test images of a held-out domain; the other five clients train. "
    f"Seed {{seeds}}; {' '.join(as_arguments(COMMON))}; the program has each row's own settings. "
    "To the ceiling: the mean of the six domains' differences, with its 95 % interval by Student's "
    "t, and a star where that excludes 0.",
    (0,),
)


def settings_of(row: str, seed: int) -> dict[str, Scalar]:
    """Return a row's settings, over what all rows have."""
    return {**COMMON, **ROWS[row], "seed": seed}


def with_names(settings: Settings, held_out: int | None) -> Settings:
    """Name the public domains where the settings say `OTHERS`."""
    if settings.get("public-domains") != OTHERS:
        return settings
    names = [name for number, name in enumerate(DOMAINS) if number != held_out]
    return {**settings, "public-domains": ", ".join(names)}


def accuracy_on(held_out: int, settings: Settings) -> float:
    """Return the accuracy (%) in a client's domain of a model that its images did not train."""
    named = with_names(settings, held_out)

    def compute() -> float:
        config = config_of({**named, "held-out": CLIENTS[held_out]})
        # Folds share a folder, so that the other clients' images are drawn once
        folder = open_run_folder(config_of(with_names(settings, None)), cell_name(settings), 0)
        clients = tuple(client for client in CLIENTS if client != CLIENTS[held_out])
        job = ServerJob(config, folder, Status(folder.path), clients)
        payloads = payloads_of(settings)
        remaining_payloads = {client: payloads[client] for client in clients if client in payloads}
        (result,) = server_module(config.method).run(job, remaining_payloads).values()
        return accuracy_on_test(config, result.model, held_out)

    return float(EXPERIMENT.cell(f"{cell_name(named)}-without-{held_out}", compute))


def accuracies_of(row: str, seed: int) -> dict[int, float]:
    """Return a row's accuracy (%) by held-out client."""
    settings = settings_of(row, seed)
    return {number: accuracy_on(number, settings) for number in range(len(CLIENTS))}


def line(row: str, seeds: Sequence[int]) -> Line:
    """Return a row, with its difference to the ceiling paired by domain."""
    (seed,) = seeds
    values = accuracies_of(row, seed)
    columns = {"": row}
    columns |= {DOMAINS[number]: f"{value:.1f}" for number, value in values.items()}
    columns["average"] = average(values.values())
    same = row == "ceiling"
    columns["to the ceiling"] = "" if same else difference(values, accuracies_of("ceiling", seed))
    return columns


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
