"""FedAvg of the tables' federation, where malicious clients state more images than they have.

The ServerApp's run and the ClientApps are the real ones, in this process, and so are the messages
and Flower's strategy.
"""

import json
from collections.abc import Callable, Sequence
from statistics import mean

from flwr.app import ConfigRecord, Message, MetricRecord

from benchmarks.federation import (
    CLIENTS,
    Settings,
    accuracy_on_test,
    config_of,
    digest_of,
)
from benchmarks.robustness.attacks import HEAD, MALICIOUS
from client_app.app import app
from osfl.config import RunConfig
from osfl.inference.loading import load_model
from osfl.payload.messages import pack_state, unpack_state
from osfl.run_folder.layout import RunFolder, open_run_folder
from osfl.settings import default_config
from server_app.app import run_in_folder
from server_app.baselines.run import WEIGHT_METRIC
from tests.helpers.loop_grid import LoopGrid, begin_task

# As in configs/tables/digits.toml. A refused client is not awaited, and the others go on.
SETTINGS: Settings = {
    "method": "fedavg",
    "rounds.count": 10,
    "min-clients": len(CLIENTS) - max(MALICIOUS),
    "join-timeout": 1.0,
}
Tamper = Callable[[int, str, Message], Message]


def inflating(malicious: Sequence[int], total: int, permuted: bool) -> Tamper:
    """Return a change of malicious clients' replies: they state `total` images, at the join too.

    Args:
        malicious: the clients' numbers.
        permuted: whether their models' last layers have all classes permuted (label flipping).
    """

    def tamper(number: int, kind: str, reply: Message) -> Message:
        if number not in malicious or not reply.has_content():
            return reply
        if kind == "query.join":
            record = reply.content.config_records["join"]
            reply.content["join"] = ConfigRecord({**record, "images": [total]})
        if kind == "train":
            metrics = reply.content.metric_records["metrics"]
            reply.content["metrics"] = MetricRecord({**metrics, WEIGHT_METRIC: total})
            if permuted:
                state = unpack_state(reply.content.array_records["model"])
                head = {name: state[name].roll(1, 0) for name in HEAD}
                reply.content["model"] = pack_state({**state, **head})
        return reply

    return tamper


def run_fedavg(
    settings: Settings, name: str, clients: Sequence[int], tamper: Tamper | None = None
) -> dict[str, float]:
    """Run FedAvg of some clients, and return the model's accuracy and what happened to them.

    Returns:
        accuracy: top-1 (%) on all clients' test images, mean of the clients.
        refused: clients that did not take part.
        capped: clients with a capped weight.
    """
    begin_task()
    settings = {**settings, "num-clients": len(clients)}
    config = config_of(settings)
    nodes = [{"partition-id": number, "num-partitions": len(CLIENTS)} for number in clients]
    grid = LoopGrid(app, {**default_config(), **settings}, nodes, tamper)
    folder = open_run_folder(config, f"fedavg-{digest_of({**settings, 'name': name})}", 0)
    run_in_folder(grid, config, folder)  # type: ignore[arg-type]
    warnings = json.loads((folder.path / "status.json").read_text())["warnings"]
    metrics = json.loads((folder.path / "metrics.json").read_text())
    return {
        "accuracy": accuracy_of(config, folder),
        "refused": len(clients) - len(metrics["clients"]),
        "capped": sum("weight capped" in warning for warning in warnings),
    }


def accuracy_of(config: RunConfig, folder: RunFolder) -> float:
    """Return the accuracy (%) of a run's global model, mean of all clients."""
    model = load_model(folder.path / "models" / "fedavg.safetensors").module
    return mean(accuracy_on_test(config, model, number) for number in range(len(CLIENTS)))
