"""FedCGS' and FedPFT's settings, scored on the digits' validation split.

To benchmarks/tables/features.{md,json}.

python -m benchmarks.features

No client's image, neither of training nor of the test, chooses a setting. The clients' halves make
the payloads with seed 100, and the servers' halves solve or train for the last layer. Some minutes.
"""

import tempfile
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import TABLES, write_table
from benchmarks.guidance import score
from client_app.context import ClientJob
from osfl.config import NodeConfig, RunConfig, Scalar, parse_run_config
from osfl.data.load import load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.methods import client_module, server_module
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.settings import default_config
from server_app.context import ServerJob

CLIENTS = 6
SEED = 100
Settings = dict[str, Scalar]
# What shapes a payload, and what the server does with it
GRIDS: dict[str, tuple[list[Settings], list[Settings]]] = {
    "fedcgs": (
        [{}],
        [{"fedcgs.shrinkage": value} for value in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)],
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


def config_of(method: str, settings: Settings) -> RunConfig:
    """Six clients, a domain each."""
    common: Settings = {"method": method, "num-clients": CLIENTS, "seed": SEED}
    return parse_run_config({**default_config(), **common, **settings})


def payloads_of(config: RunConfig) -> dict[str, Payload]:
    """What each client would send."""
    made = {}
    for number in range(CLIENTS):
        node = NodeConfig(partition_id=number, num_partitions=CLIENTS)
        load = partial(load_images, config.data, node, "train", config.seed)
        job = ClientJob(
            config,
            f"client-{number}",
            class_names(config.data),
            load,
            find_kit(config.kit),
            torch.device("cpu"),
        )
        made[job.client] = client_module(config.method).make_payload(job)
    return made


def rows() -> Iterator[dict[str, str]]:
    """A row for every pair of settings."""
    for method, (clients, servers) in GRIDS.items():
        for sent in clients:
            payloads = payloads_of(config_of(method, sent))
            for used in servers:
                with tempfile.TemporaryDirectory() as runs:
                    config = config_of(method, {**sent, **used, "runs-dir": runs})
                    folder = open_run_folder(config, "solved", 0)
                    job = ServerJob(config, folder, Status(folder.path), tuple(payloads))
                    (made,) = server_module(method).run(job, payloads).values()
                domains = score(config, made.model)
                settings = ", ".join(f"{key}={value}" for key, value in {**sent, **used}.items())
                print(method, settings, f"{sum(domains) / CLIENTS:.1f}", flush=True)
                yield {
                    "": method,
                    "settings": settings,
                    "average": f"{sum(domains) / CLIENTS:.1f}",
                }


def main() -> None:
    """Make the table and keep it."""
    about = (
        "Top-1 accuracy (%) on the digits' validation split (public scans drawn anew in the "
        "clients' domains), average of the domains, of the last layer that the clients' features "
        f"give; payloads and draws with seed {SEED}. Command: `python -m benchmarks.features`."
    )
    write_table(TABLES / "features", list(rows()), about)


if __name__ == "__main__":
    main()
