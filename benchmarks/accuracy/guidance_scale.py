"""Sweep the guidance scale of every method that samples, on held-out public images.

python -m benchmarks.accuracy.guidance_scale              # every row
python -m benchmarks.accuracy.guidance_scale FedDEO OSCAR # some; the table keeps its other rows

`osfl run` collects each method's payloads once. The server's half then synthesizes and trains with
them for every guidance and seed (of noise and training). The digits' validation split tests: no
client's image, of training or test, chooses a guidance.

The grid is of the sum of a method's scales; two branches share it equally. Where both predict the
same, e = e0 + sum_i g_i (e_i - e0) is the same for all methods.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import Any

from benchmarks.federation import (
    CLIENTS,
    Settings,
    as_word,
    client_names,
    digest_of,
    run_once,
    validation_accuracies,
)
from benchmarks.harness import Experiment, Line
from osfl.config import RunConfig, parse_run_config
from osfl.methods import METHODS, server_module
from osfl.payload.kinds import Payload
from osfl.payload.wire import decode
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.settings import default_config
from osfl.util.costs import Stopwatch
from server_app.context import ServerJob
from server_app.expected import expected_payload

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
}
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "Top-1 accuracy (%) on the digits' validation split (public scans drawn anew in the clients' "
    "domains), average of the domains, for each sum of guidance scales; two branches share it "
    "equally. Mean of seeds {seeds} of noise and training on the same payloads (seed "
    f"{SEED}), ± the standard deviation; "
    f"{' '.join(f'{key}={as_word(value)}' for key, value in COMMON.items())}. Default: the sum in "
    "pyproject.toml.",
    (0,),
)


def config_of(row: Row, guidance: float | None, seed: int, base: Settings) -> RunConfig:
    """Return the server's configuration; without a guidance, that of collecting payloads."""
    values = {**default_config(), **base, "method": row.method, "seed": seed}
    if guidance is not None:
        values |= dict.fromkeys(row.scales, guidance / len(row.scales))
    return parse_run_config({**values, "runs-dir": str(EXPERIMENT.work)})


def collect(row: Row, base: Settings) -> tuple[dict[str, Payload], str]:
    """Return the payloads of a run's clients, and their digest; nothing without a client's half."""
    if METHODS[row.method].client is None:
        return {}, ""
    settings = {**base, "method": row.method, "seed": SEED}
    folder = EXPERIMENT.work / f"{row.method}-payloads-{digest_of(settings)}"
    # The run's own images are not used
    few = {"synthesis.images-per-class": 1, "global-model.epochs": 1}
    run_once(folder, {**settings, **few})
    expected = expected_payload(config_of(row, None, SEED, base), folder.name)
    files = sorted((folder / "payloads").glob("*.pb"))
    blobs = {file.stem: file.read_bytes() for file in files}
    payloads = {client: decode(blob, expected(client)) for client, blob in blobs.items()}
    return payloads, hashlib.sha256(b"".join(blobs.values())).hexdigest()


def cell(
    name: str, guidance: float, seed: int, base: Settings, collected: tuple[Mapping, str]
) -> dict[str, Any]:
    """Return the accuracy (%) in each domain, their average, and seconds."""
    row = ROWS[name]
    payloads, digest = collected
    config = config_of(row, guidance, seed, base)
    settings = digest_of({**base, "guidance": guidance, "payloads": digest})
    job_name = f"{name.replace(' ', '-')}-g{guidance * 10:.0f}-s{seed}-{settings}"

    def compute() -> dict[str, Any]:
        folder = open_run_folder(config, job_name, 0)
        watch = Stopwatch()
        clients = tuple(payloads) or client_names(config.num_clients)
        job = ServerJob(config, folder, Status(folder.path), clients)
        domains = validation_accuracies(
            config, server_module(row.method).run(job, payloads)["FT"].model
        )
        return {"domains": domains, "average": mean(domains), "seconds": round(watch.seconds, 1)}

    result: dict[str, Any] = EXPERIMENT.cell(job_name, compute)
    return result


def line(
    name: str, seeds: Sequence[int], base: Settings = COMMON, grid: Sequence[float] = GRID
) -> Line:
    """Return a row of the table, with the best guidance of the grid."""
    collected = collect(ROWS[name], base)
    averages: dict[float, list[float]] = {}
    for guidance in grid:
        compute = partial(cell, name, guidance, base=base, collected=collected)
        averages[guidance] = [compute(seed=seed)["average"] for seed in seeds]
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
