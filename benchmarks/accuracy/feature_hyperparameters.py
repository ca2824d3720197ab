"""Sweep FedCGS' and FedPFT's hyperparameters on the digits' validation split.

python -m benchmarks.accuracy.feature_hyperparameters

No client's image, of training or test, chooses a setting. The clients' halves make the payloads
with seed 100, and the servers' halves solve or train for the last layer. Takes some minutes.
"""

import tempfile
from collections.abc import Iterator
from functools import partial

from benchmarks.federation import CLIENTS, CPU, Settings, node_of, validation_accuracies
from benchmarks.harness import Experiment, Line, average, command_line
from client_app.context import ClientJob
from osfl.config import RunConfig, parse_run_config
from osfl.data.load import load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.methods import client_module, server_module
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.settings import default_config
from server_app.context import ServerJob

SEED = 100
# The settings that shape a payload, and those of the server
GRIDS: dict[str, tuple[list[Settings], list[Settings]]] = {
    "fedcgs": ([{}], [{"fedcgs.shrinkage": value} for value in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)]),
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


def config_of(method: str, settings: Settings) -> RunConfig:
    """Return the configuration of six clients with a domain each."""
    common: Settings = {"method": method, "num-clients": len(CLIENTS), "seed": SEED}
    return parse_run_config({**default_config(), **common, **settings})


def payloads_of(config: RunConfig) -> dict[str, Payload]:
    """Make each client's payload."""
    payloads = {}
    for number, client in enumerate(CLIENTS):
        load = partial(load_images, config.data, node_of(number, config), "train", config.seed)
        job = ClientJob(config, client, class_names(config.data), load, find_kit(config.kit), CPU)
        payloads[client] = client_module(config.method).make_payload(job)
    return payloads


def lines() -> Iterator[Line]:
    """Yield a row for every pair of settings."""
    for method, (client_grid, server_grid) in GRIDS.items():
        for of_clients in client_grid:
            payloads = payloads_of(config_of(method, of_clients))
            for of_server in server_grid:
                both = {**of_clients, **of_server}
                with tempfile.TemporaryDirectory() as runs:
                    config = config_of(method, {**both, "runs-dir": runs})
                    folder = open_run_folder(config, "solved", 0)
                    job = ServerJob(config, folder, Status(folder.path), tuple(payloads))
                    (result,) = server_module(method).run(job, payloads).values()
                settings = ", ".join(f"{key}={value}" for key, value in both.items())
                accuracy = average(validation_accuracies(config, result.model))
                print(method, settings, accuracy, flush=True)
                yield {"": method, "settings": settings, "average": accuracy}


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    EXPERIMENT.write_all(lines())
