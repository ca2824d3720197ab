"""FedProx (Li et al., arXiv 1812.06127) by Flower's strategy.

Clients add mu/2 ||theta - theta_global||^2 to their loss (client_app/learning/local_training.py).

Differences from the paper:

1. Those of fedavg.py.
2. Theirs: clients may do different amounts of work. Ours: all clients do the same.
"""

from flwr.serverapp.strategy import FedAvg, FedProx

from server_app.baselines.aggregation import with_aggregation
from server_app.baselines.fedavg import all_clients
from server_app.context import ServerJob


def strategy(job: ServerJob) -> FedAvg:
    """Return Flower's FedProx with `rounds.proximal-mu`."""
    settings = job.config.rounds
    fedprox = FedProx(fraction_evaluate=0.0, proximal_mu=settings.proximal_mu, **all_clients(job))
    return with_aggregation(fedprox, settings)
