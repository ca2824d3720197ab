"""Byzantine-robust aggregation of the clients' models (`rounds.aggregation`), by Flower.

Of the n models of a round, at most f are of malicious clients (`rounds.malicious-clients`).

- median and trimmed-mean, of each coordinate (Yin et al., arXiv 1803.01498). The trimmed mean drops
  the share `rounds.trim` at each end.
- krum: the model with the least sum of squared distances to its n - f - 2 nearest (Blanchard et
  al., arXiv 1703.02757); multi-krum: the mean of the n - f - 2 models with the least sums.
- bulyan: the n - 2 f models that Krum scores best, and of each coordinate the mean of the n - 4 f
  values nearest to their median (El Mhamdi et al., arXiv 1802.07927).

Differences from the papers:

1. Theirs: gradients. Ours: models after a round's local training. BatchNorm's running statistics
   are aggregated like weights, and count in Krum's distances. Its batch counters do not, because
   they differ with the clients' numbers of images; their median is used.
2. Bulyan, theirs: Krum selects models one by one. Flower's: all by one pass of Multi-Krum.

No client counts more for stating more images.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum

from osfl.config import RoundsConfig
from server_app.federation.exchange import RoundError

# The metric of a reply that is 1 for every client
EQUAL_WEIGHTS = "clients"


def with_aggregation(strategy: FedAvg, settings: RoundsConfig) -> FedAvg:
    """Return the strategy with `rounds.aggregation` in place of its weighted mean."""
    return strategy if settings.aggregation == "mean" else RobustAggregation(strategy, settings)


class RobustAggregation(FedAvg):
    """A strategy whose weighted mean of the clients' models is replaced.

    Attributes:
        base: the strategy, which configures the rounds.
    """

    def __init__(self, base: FedAvg, settings: RoundsConfig):
        super().__init__(
            fraction_evaluate=0.0,
            weighted_by_key=EQUAL_WEIGHTS,
            min_train_nodes=base.min_train_nodes,
            min_available_nodes=base.min_available_nodes,
        )
        self.base = base
        self.settings = settings

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send what the base strategy sends."""
        return self.base.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the clients' models by Flower's strategy of `rounds.aggregation`.

        Raises:
            RoundError: it requires more models.
        """
        replies = list(replies)
        if len(replies) < self.settings.least_models:
            raise RoundError(
                f"rounds.aggregation = {self.settings.aggregation!r} requires "
                f"{self.settings.least_models} models in a round, and got {len(replies)}"
            )
        models = [reply.content.array_records[self.arrayrecord_key] for reply in replies]
        dtypes = {name: np.dtype(array.dtype) for name, array in models[0].items()}
        weights = [name for name, dtype in dtypes.items() if dtype.kind == "f"]
        arrays = {
            name: np.median([model[name].numpy() for model in models], axis=0)
            for name in dtypes
            if name not in weights
        }
        # Flower computes |x - y|^2 as |x|^2 + |y|^2 - 2 x y: in float32, models that are close to
        # each other would differ by rounding errors alone
        for reply, model in zip(replies, models, strict=True):
            values = {name: model[name].numpy().astype(np.float64) for name in weights}
            reply.content[self.arrayrecord_key] = ArrayRecord(
                {name: Array(value) for name, value in values.items()}
            )
        aggregator = flower_strategy(self.settings, len(replies))
        result, metrics = aggregator.aggregate_train(server_round, replies)
        assert result is not None, "no models were aggregated"
        arrays |= {name: array.numpy() for name, array in result.items()}
        return ArrayRecord(
            {name: Array(np.asarray(arrays[name], dtype)) for name, dtype in dtypes.items()}
        ), metrics


def flower_strategy(settings: RoundsConfig, models: int) -> FedAvg:
    """Return Flower's strategy that aggregates this number of models."""
    f = settings.malicious_clients
    common: dict[str, Any] = {"weighted_by_key": EQUAL_WEIGHTS}
    match settings.aggregation:
        case "median":
            return FedMedian(**common)
        case "trimmed-mean":
            return FedTrimmedAvg(beta=settings.trim, **common)
        case "krum":
            return Krum(num_malicious_nodes=f, **common)
        case "multi-krum":
            selected = models - f - 2
            return MultiKrum(num_malicious_nodes=f, num_nodes_to_select=selected, **common)
        case "bulyan":
            return Bulyan(num_malicious_nodes=f, **common)
    raise AssertionError(settings.aggregation)
