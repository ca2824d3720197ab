"""Centralized upper bound (`ceiling`): training on all clients' real images in one place.

Federated learning exists to avoid it, and no real server has the data. With the embedded digits the
server renders the clients' images itself; with folders it reads
`data.root`/<client>/train/<class>/*.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from osfl.config import ConfigError, NodeConfig
from osfl.data.load import load_images
from osfl.data.parts import client_name
from osfl.payload.kinds import Payload
from osfl.util.pixels import Pixels, concatenate
from server_app.context import GlobalModel, ServerJob
from server_app.training import train_global


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """Train one global model on the real images.

    Raises:
        ConfigError: as `real_images`.
    """
    return {"real": train_global(job, "real", *real_images(job))}


def real_images(job: ServerJob) -> tuple[Pixels, torch.Tensor]:
    """Return all clients' real training images, [N, 3, S, S] uint8, and their labels [N].

    Raises:
        ConfigError: the images are in folders and `data.root` is empty.
    """
    parts = [load_images(job.config.data, node, "train", job.config.seed) for node in _nodes(job)]
    pixels = concatenate([part.pixels for part in parts])
    labels = torch.cat([p.labels for p in parts])
    return pixels, labels


def _nodes(job: ServerJob) -> list[NodeConfig]:
    data = job.config.data
    count = job.config.num_clients
    if data.name != "folder":
        nodes = [NodeConfig(partition_id=k, num_partitions=count) for k in range(count)]
        testers = job.config.held_out_clients
        return [n for n in nodes if client_name(data, n, job.config.seed) not in testers]
    if not data.root:
        raise ConfigError(
            f"method = {job.config.method!r} with data.name = 'folder' requires data.root: set "
            "it to the folder that has all clients' folders"
        )
    return [NodeConfig(data_dir=str(Path(data.root) / client)) for client in job.clients]
