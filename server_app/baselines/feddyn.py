"""FedDyn (Acar et al., arXiv 2111.04263): FedAvg with dynamic regularization.

The clients' objectives are corrected so that their minima agree with the global one. The server
step (algorithm 1) is

    h <- h - alpha (1/m) sum_k (theta_k - theta),    theta <- mean_k theta_k - h / alpha

The client step is in client_app/learning/local_training.py.

Differences from the paper:

1. Theirs: parameters only. Ours: BatchNorm's running statistics are averaged too, without
   correction.
2. Theirs: a mean over clients. Ours: the same, so not weighted by images as in FedAvg.
"""

from collections.abc import Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from osfl.models.classifiers import meta_classifier
from server_app.baselines.fedavg import all_clients
from server_app.context import ServerJob


class FedDyn(FedAvg):
    """FedAvg whose mean is corrected by h.

    Attributes:
        memory: h by parameter name, which is stored after every round.

    Args:
        alpha: the regularization weight.
        clients: m.
        parameters: the arrays to correct; the others are BatchNorm's statistics.
    """

    def __init__(self, alpha: float, clients: int, parameters: frozenset[str], **settings: int):
        super().__init__(
            fraction_evaluate=0.0,
            weighted_by_key="clients",
            **settings,  # type: ignore[arg-type]
        )
        self.alpha = alpha
        self.clients = clients
        self.parameters = parameters
        self.memory: dict[str, np.ndarray] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Store theta, and send alpha to the clients."""
        self._theta = {name: arrays[name].numpy() for name in self.parameters}
        config["dyn-alpha"] = self.alpha
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the clients' models by FedDyn's server step."""
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return arrays, metrics
        model = {name: array.numpy() for name, array in arrays.items()}
        for name in self.parameters:
            mean = model[name]
            theta = self._theta[name]
            h = self.memory.get(name, np.zeros_like(theta))
            # FedDyn, algorithm 1: h <- h - alpha (1/m) sum_k (theta_k - theta)
            h = h - self.alpha * len(replies) / self.clients * (mean - theta)
            self.memory[name] = h.astype(theta.dtype)
            # FedDyn, algorithm 1: theta <- mean_k theta_k - h / alpha
            model[name] = (mean - h / self.alpha).astype(theta.dtype)
        result = ArrayRecord({name: Array(np.asarray(value)) for name, value in model.items()})
        return result, metrics


def strategy(job: ServerJob) -> FedAvg:
    """Return FedDyn with `rounds.dyn-alpha`."""
    settings = job.config.classifier
    model = meta_classifier(settings.architecture, len(job.classes), settings.small_stem)
    parameters = frozenset(name for name, _ in model.named_parameters())
    return FedDyn(job.config.rounds.dyn_alpha, len(job.clients), parameters, **all_clients(job))
