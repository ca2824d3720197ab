"""FedProx (Li et al., arXiv 1812.06127): Flower's own strategy.

The clients add mu/2 ||theta - theta_global||^2 (client_app/learning/local_training.py).

Differences: those of fedavg.py; no client does less work than others.
"""

from flwr.serverapp.strategy import FedAvg, FedProx

from server_app.baselines.fedavg import everyone
from server_app.context import ServerJob


def strategy(job: ServerJob) -> FedAvg:
    """Flower's FedProx with `rounds.proximal-mu`."""
    return FedProx(
        fraction_evaluate=0.0, proximal_mu=job.config.rounds.proximal_mu, **everyone(job)
    )
