"""Ceiling: all clients' real images in one place. The upper reference that federated learning exists to avoid.

It needs data that no server has. With the embedded digits the server draws the clients' images itself; with folders it reads
`data.server-dir`/<client>/train/<class>/*.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from osfl.config import ConfigError, NodeConfig
from osfl.data import load_images
from osfl.payloads import Payload
from server_app.job import GlobalModel, ServerJob
from server_app.training import train_global


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """One global model on the real images.

    Raises:
        ConfigError: the images are folders and `data.server-dir` is empty.
    """
    parts = [load_images(job.config.data, _node(job, client), "train", job.config.seed) for client in job.clients]
    pixels, labels = torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts])
    return {"real": train_global(job, "real", pixels, labels)}


def _node(job: ServerJob, client: str) -> NodeConfig:
    data = job.config.data
    if data.name == "folder":
        if not data.server_dir:
            raise ConfigError(
                "method = 'ceiling' with data.name = 'folder' needs data.server-dir: all clients' folders in one place"
            )
        return NodeConfig(data_dir=str(Path(data.server_dir).expanduser() / client))
    return NodeConfig(partition_id=int(client.rpartition("-")[2]), num_partitions=job.config.num_clients)
