"""Rounds: a Flower strategy over our own exchange of messages, validated, counted, and resumable after every round."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load, save

from osfl.classifiers import new_classifier, rebuild
from osfl.config import RunConfig
from osfl.files import write_atomically
from osfl.kits import find_kit
from osfl.protocol import read_arrays
from server_app import round as one_round
from server_app.job import GlobalModel, ServerJob
from server_app.round import Exchange, RoundError
from server_app.status import log

COSTS = ("seconds", "flops", "peak_memory_mb")
MOST_EXAMPLES = 1e9


def run_rounds(job: ServerJob, grid: Grid, nodes: dict[str, int], strategy: FedAvg, job_id: str) -> dict[str, GlobalModel]:
    """`rounds.count` rounds of a strategy; started again, it goes on after the last round that was finished.

    Raises:
        RoundError: in a round, fewer than `min-clients` send a model that can be used.
    """
    settings, count = job.config.classifier, job.config.rounds.count
    kit = find_kit(job.config.kit) if settings.init == "kit" else ""
    model = new_classifier(settings, len(job.classes), kit, job.config.seed)
    done, arrays = _resume(job, strategy, ArrayRecord(model.state_dict()))
    job.status.phase("rounds", count)
    job.status.advance(done, count)

    def finished(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number > 0:
            _keep(job, strategy, done + number, arrays, between.costs)
            job.status.advance(done + number, count)
        return None

    between = RoundsGrid(
        grid, nodes, job.config, job_id, done, model.state_dict(), job.folder.read_json("rounds/costs.json") or {}
    )
    if done < count:
        strategy.start(between, arrays, count - done, timeout=job.config.deadline, evaluate_fn=finished)  # type: ignore[arg-type]
        arrays = _resume(job, strategy, arrays)[1]
    trained = rebuild(_state(arrays), settings.architecture, len(job.classes), settings.small_stem)
    name = job.config.method
    write_atomically(job.folder.path / "models" / f"{name}.safetensors", save(trained.state_dict()))
    job.folder.write_json(f"models/{name}.json", {"seconds": job.folder.read_json("rounds/done.json")["seconds"]})
    return {name: GlobalModel(trained, settings.architecture, settings.small_stem)}


def _state(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}


def _keep(job: ServerJob, strategy: FedAvg, number: int, arrays: ArrayRecord, costs: dict[str, dict[str, float]]) -> None:
    """A finished round: the model, what the strategy remembers, the costs; then the number, which vouches for them."""
    path, before = job.folder.path / "rounds", job.folder.read_json("rounds/done.json") or {"round": 0, "seconds": 0.0}
    memory = {name: torch.as_tensor(value) for name, value in getattr(strategy, "memory", {}).items()}
    write_atomically(path / f"{number:06d}.safetensors", save({n: t.contiguous() for n, t in _state(arrays).items()}))
    write_atomically(path / f"{number:06d}.memory.safetensors", save(memory))
    job.folder.write_json("rounds/costs.json", costs)
    seconds = before["seconds"] + time.monotonic() - getattr(strategy, "began", time.monotonic())
    strategy.began = time.monotonic()  # type: ignore[attr-defined]
    job.folder.write_json("rounds/done.json", {"round": number, "seconds": seconds})
    for old in path.glob("*.safetensors"):
        if not old.name.startswith(f"{number:06d}"):
            old.unlink()


def _resume(job: ServerJob, strategy: FedAvg, start: ArrayRecord) -> tuple[int, ArrayRecord]:
    """(rounds done, model) of the last round that was kept; what the strategy remembers is put back."""
    strategy.began = time.monotonic()  # type: ignore[attr-defined]
    done = job.folder.read_json("rounds/done.json")
    if done is None:
        return 0, start
    number, path = int(done["round"]), job.folder.path / "rounds"
    if hasattr(strategy, "memory"):
        memory = load((path / f"{number:06d}.memory.safetensors").read_bytes())
        strategy.memory = {name: value.numpy() for name, value in memory.items()}
    state = load((path / f"{number:06d}.safetensors").read_bytes())
    return number, ArrayRecord({name: Array(value.numpy()) for name, value in state.items()})


@dataclass
class RoundsGrid:
    """What a Flower strategy sees as the federation: the clients that joined, and replies that are whole, finite and in the clients' order.

    Attributes:
        first: rounds that were done before.
        like: the state dict that every reply must look like.
        costs: of each client, summed over the rounds; bytes as serialised.
    """

    grid: Grid
    nodes: dict[str, int]
    config: RunConfig
    job_id: str
    first: int
    like: dict[str, torch.Tensor]
    costs: dict[str, dict[str, float]] = field(default_factory=dict)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the clients that joined."""
        return list(self.nodes.values())

    def send_and_receive(self, messages: Iterable[Message], timeout: float | None = None) -> list[Message]:
        """Send one message to every node and wait for the replies.

        Raises:
            RoundError: fewer than `min-clients` replies can be used.
        """
        exchange, client_of = Exchange(self.grid, self.config.deadline), {node: client for client, node in self.nodes.items()}
        usable: dict[str, RecordDict] = {}
        problems: dict[str, str] = {}

        def on_reply(node: int, content: RecordDict) -> None:
            client = client_of[node]
            if problem := self._problem(content):
                return on_failure(node, problem)
            usable[client] = content
            self._book(client, content)

        def on_failure(node: int, reason: str) -> None:
            problems[client_of[node]] = reason
            log.error("%s: %s", client_of[node], reason)

        for message in messages:
            said: dict[str, Any] = dict(message.content.config_records["config"])
            said |= {"server-round": self.first + int(said["server-round"]), "job": self.job_id}
            content = RecordDict({"arrays": message.content.array_records["arrays"], "config": ConfigRecord(said)})
            exchange.push(message.metadata.dst_node_id, "train", content)
            own = self.costs.setdefault(client_of[message.metadata.dst_node_id], {})
            own["download_bytes"] = own.get("download_bytes", 0) + _bytes(content)
        if not exchange.waiting():  # Flower's strategies also ask for an evaluation, of nobody
            return []
        end = time.monotonic() + (timeout or self.config.deadline)
        while exchange.pull(on_reply, on_failure) and time.monotonic() < end:
            time.sleep(one_round.POLL_SECONDS)
        for node in exchange.waiting():
            problems[client_of[node]] = f"no model within {self.config.deadline:g} s (deadline)"
        if len(usable) < self.config.needed_clients:
            reasons = "".join(f"\n  {client}: {reason}" for client, reason in sorted(problems.items()))
            raise RoundError(
                f"{len(usable)} of {self.config.num_clients} clients sent a model that can be used; {self.config.needed_clients} are "
                f"needed (min-clients, num-clients){reasons}"
            )
        return [Message(usable[client], dst_node_id=self.nodes[client], message_type="train") for client in sorted(usable)]

    def _problem(self, content: RecordDict) -> str | None:
        """What is wrong with a reply, or None: exactly the model's arrays, finite, and a number of images that can be one."""
        try:
            arrays, metrics = content.array_records["arrays"], content.metric_records["metrics"]
            if set(arrays) != set(self.like):
                return "its model has other arrays than the run's"
            for name, value in read_arrays(arrays).items():
                if tuple(value.shape) != tuple(self.like[name].shape) or value.dtype != self.like[name].dtype:
                    return (
                        f"{name} has shape {list(value.shape)} and type {value.dtype}; expected {list(self.like[name].shape)}"
                    )
                if not torch.isfinite(value.float()).all():
                    return f"{name} contains NaN or infinity"
            numbers = [float(cast(float, metrics[key])) for key in ("num-examples", "clients", *COSTS)]
        except (KeyError, TypeError, ValueError) as error:
            return f"its reply cannot be read: {type(error).__name__}: {error}"
        if not 1 <= numbers[0] <= MOST_EXAMPLES or numbers[1] != 1 or not all(np.isfinite(n) and n >= 0 for n in numbers):
            return f"its figures are not plausible: {dict(metrics)}"
        return None

    def _book(self, client: str, content: RecordDict) -> None:
        own, metrics = self.costs.setdefault(client, {}), content.metric_records["metrics"]
        own["images"] = float(cast(float, metrics["num-examples"]))
        for key in ("seconds", "flops"):
            own[key] = own.get(key, 0.0) + float(cast(float, metrics[key]))
        own["peak_memory_mb"] = max(own.get("peak_memory_mb", 0.0), float(cast(float, metrics["peak_memory_mb"])))
        own["upload_bytes"] = own.get("upload_bytes", 0) + _bytes(content)


def _bytes(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
