"""Sweep FedCGS' and FedPFT's hyperparameters on the digits' validation split.

python -m benchmarks.accuracy.feature_hyperparameters

No client's image, of training or test, chooses a setting. The clients' halves make the payloads
with seed 100, and the servers' halves solve or train for the last layer. Takes some minutes.
"""

from collections.abc import Iterator

from benchmarks.federation import (
    CLIENTS,
    Settings,
    cell_name,
    config_of,
    payloads_of,
    server_job,
    validation_accuracies,
)
from benchmarks.harness import Experiment, Line, average, command_line
from osfl.methods import server_module
from osfl.payload.wire import encode
from osfl.run_folder.report.page import human_bytes

SEED = 100
COMMON: Settings = {"num-clients": len(CLIENTS), "seed": SEED}
# The settings that shape a payload, and those of the server
GRIDS: dict[str, tuple[list[Settings], list[Settings]]] = {
    "fedcgs": (
        [{"fedcgs.projection": size} for size in (0, 128, 60)],
        [
            {"fedcgs.head": head, "fedcgs.shrinkage": shrinkage}
            for head in ("total", "within", "ridge")
            for shrinkage in (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
        ],
    ),
    "fedpft": (
        [
            {"fedpft.covariance": covariance, "fedpft.components": components}
            for covariance in ("spherical", "diag")
            for components in (1, 2, 5)
        ],
        [{"fedpft.inverse-penalty": value} for value in (0.001, 0.01, 0.1, 1.0)],
    ),
}
EXPERIMENT = Experiment(
    __file__,
    caption="Top-1 accuracy (%) on the digits' validation split (public scans drawn anew in the "
    "clients' domains), average of the domains, of the last layer made from the clients' features; "
    f"payloads and draws with seed {SEED}.",
)


def lines() -> Iterator[Line]:
    """Yield a row for every pair of settings."""
    for method, (client_grid, server_grid) in GRIDS.items():
        for client_settings in client_grid:
            for server_settings in server_grid:
                both = {**client_settings, **server_settings}
                yield line(method, both, {**both, **COMMON, "method": method})


def line(method: str, changed: Settings, settings: Settings) -> Line:
    """Return the row of a method's settings."""
    config = config_of(settings)
    job = server_job(config, f"solved-{cell_name(settings)}")
    payloads = payloads_of(settings)
    (result,) = server_module(method).run(job, payloads).values()
    text = ", ".join(f"{key}={value}" for key, value in changed.items())
    accuracy = average(validation_accuracies(config, result.model))
    print(method, text, accuracy, flush=True)
    sizes = [len(encode(payload, method, "job", name)) for name, payload in payloads.items()]
    size = human_bytes(max(sizes))
    return {"": method, "settings": text, "payload": size, "average": accuracy}


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    EXPERIMENT.write_all(lines())
