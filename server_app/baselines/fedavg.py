"""FedAvg (McMahan et al., arXiv 1602.05629) by Flower's strategy.

The global model is the mean of the clients' models, weighted by their numbers of images, or
another aggregation of them (aggregation.py).

Differences from the paper:

1. Ours: BatchNorm's running statistics are averaged too, as FedAvg's implementations do.
2. Theirs: a sample of the clients participates in a round. Ours: all clients do.
"""

from typing import Any

from flwr.serverapp.strategy import FedAvg

from server_app.baselines.aggregation import with_aggregation
from server_app.context import ServerJob


def strategy(job: ServerJob) -> FedAvg:
    """Return FedAvg with all clients in every round, without evaluation between rounds."""
    fedavg = FedAvg(fraction_evaluate=0.0, **all_clients(job))
    return with_aggregation(fedavg, job.config.rounds)


def all_clients(job: ServerJob) -> dict[str, Any]:
    """Return settings with which Flower's strategies select, and wait for, all joined nodes."""
    return {"min_train_nodes": len(job.clients), "min_available_nodes": len(job.clients)}
