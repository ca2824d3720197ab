"""Sweep the guidance scale of every method that samples, on held-out public images.

python -m benchmarks.accuracy.guidance_scale              # every row
python -m benchmarks.accuracy.guidance_scale FedDEO OSCAR # some; the table keeps its other rows

Clients make each method's payloads once. The server's half then synthesizes and trains with them
for every guidance and seed (of noise and training). The digits' validation split tests: no
client's image, of training or test, chooses a guidance.

The grid is of the sum of a method's scales; two branches share it equally. Where both predict the
same, e = e0 + sum_i g_i (e_i - e0) is the same for all methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.federation import (
    CLIENTS,
    Settings,
    cell_name,
    client_names,
    config_of,
    payloads_of,
    server_job,
    validation_accuracies,
)
from benchmarks.harness import Experiment, Line
from osfl.config import Scalar
from osfl.methods import server_module
from osfl.settings import default_config
from osfl.tables.table_file import as_arguments
from osfl.util.costs import Stopwatch

GRID = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
# Of the payloads; no table of results has it
SEED = 100
COMMON: Settings = {
    "num-clients": len(CLIENTS),
    "global-model.batch-size": 8,
    "synthesis.images-per-class": 5,
    "feddeo.steps": 150,
    "espresso.steps": 150,
    "fedbip.steps": 150,
    "fedlmg.strategies": "ft",
    "fedcado.strategies": "ft",
}


@dataclass(frozen=True)
class Row:
    """A method, and the keys that share a guidance."""

    method: str
    scales: tuple[str, ...]


ROWS = {
    "prompts-only": Row("prompts-only", ("prompts-only.guidance",)),
    "prompts-domain": Row("prompts-domain", ("prompts-domain.guidance",)),
    "FGL": Row("fgl", ("fgl.guidance",)),
    "FedDISC": Row("feddisc", ("feddisc.guidance-cluster", "feddisc.guidance-domain")),
    "FedBiP": Row("fedbip", ("fedbip.guidance",)),
    "domain-vector": Row("domain-vector", ("domain-vector.guidance",)),
    "votes": Row("votes", ("votes.guidance",)),
    "FedCADO": Row("fedcado", ("fedcado.guidance",)),
    "FedLMG": Row("fedlmg", ("fedlmg.guidance",)),
    "FedDEO": Row("feddeo", ("feddeo.guidance-text", "feddeo.guidance-description")),
    "FedDEO description alone": Row("feddeo", ("feddeo.guidance-description",)),
    "OSCAR": Row("oscar", ("oscar.guidance",)),
    "OSCAR-pooled": Row("oscar-pooled", ("oscar.guidance",)),
    "Espresso": Row("espresso", ("espresso.guidance",)),
    "FedLD": Row("fedld", ("fedld.guidance",)),
}
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "Top-1 accuracy (%) on the digits' validation split (public scans drawn anew in the clients' "
    "domains), average of the domains, for each sum of guidance scales; two branches share it "
    "equally. Mean of seeds {seeds} of noise and training on the same payloads (seed "
    f"{SEED}), ± the standard deviation; "
    f"{' '.join(as_arguments(COMMON))}. Default: the sum in "
    "pyproject.toml.",
    (0,),
)


def settings_of(row: Row, guidance: float, seed: int, base: Settings) -> dict[str, Scalar]:
    """Return a row's settings with a sum of guidance scales."""
    scales = dict.fromkeys(row.scales, guidance / len(row.scales))
    return {**base, "method": row.method, "seed": seed, **scales}


def cell(name: str, guidance: float, seed: int, base: Settings) -> dict[str, Any]:
    """Return the accuracy (%) in each domain, their average, and seconds."""
    row = ROWS[name]
    settings = settings_of(row, guidance, seed, base)
    job_name = f"guidance-{cell_name(settings)}"

    def compute() -> dict[str, Any]:
        payloads = payloads_of({**settings, "seed": SEED})
        config = config_of(settings)
        clients = tuple(payloads) or client_names(config.num_clients)
        watch = Stopwatch()
        results = server_module(row.method).run(server_job(config, job_name, clients), payloads)
        domains = validation_accuracies(config, results["FT"].model)
        return {"domains": domains, "average": mean(domains), "seconds": round(watch.seconds, 1)}

    result: dict[str, Any] = EXPERIMENT.cell(job_name, compute)
    return result


def line(
    name: str, seeds: Sequence[int], base: Settings = COMMON, grid: Sequence[float] = GRID
) -> Line:
    """Return a row of the table, with the best guidance of the grid."""
    averages: dict[float, list[float]] = {}
    for guidance in grid:
        averages[guidance] = [cell(name, guidance, seed, base)["average"] for seed in seeds]
    best = max(averages, key=lambda guidance: mean(averages[guidance]))
    columns = {f"{guidance:g}": with_spread(values) for guidance, values in averages.items()}
    defaults = default_config()
    default = sum(float(defaults[key]) for key in ROWS[name].scales)
    return {"": name, **columns, "best": f"{best:g}", "default": f"{default:g}"}


def with_spread(values: Sequence[float]) -> str:
    """Return the mean and, of several values, the standard deviation."""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}"


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
