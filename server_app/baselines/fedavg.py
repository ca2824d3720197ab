"""FedAvg (McMahan et al., arXiv 1602.05629): Flower's own strategy.

The mean of the clients' models by their numbers of images.

Differences: BatchNorm's running statistics are averaged too, as FedAvg's implementations do; all
clients take part in every round.
"""

from typing import Any

from flwr.serverapp.strategy import FedAvg

from server_app.context import ServerJob


def strategy(job: ServerJob) -> FedAvg:
    """Every client in every round; no evaluation between them."""
    return FedAvg(fraction_evaluate=0.0, **everyone(job))


def everyone(job: ServerJob) -> dict[str, Any]:
    """How many nodes Flower's strategies ask and wait for: all that joined."""
    return {"min_train_nodes": len(job.clients), "min_available_nodes": len(job.clients)}
