"""Rounds: a Flower strategy over our own exchange of messages, validated, counted, and resumable after every round."""

import math
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
from osfl.payloads import Classifier
from osfl.protocol import ACKNOWLEDGE, pack_state, size_of, unpack_state
from osfl.wire import MAX_MAGNITUDE, PayloadError
from server_app import round as one_round
from server_app.expected import probe
from server_app.job import GlobalModel, ServerJob
from server_app.round import Exchange, RoundError
from server_app.status import log

MOST_EXAMPLES = 1e9
HEADER_BYTES = 2**20  # names and shapes of a model's arrays, at most
Costs = dict[str, dict[str, float]]  # by client


def run_rounds(
    job: ServerJob, grid: Grid, nodes: dict[str, int], strategy: FedAvg, job_id: str
) -> dict[str, GlobalModel]:
    """`rounds.count` rounds of a strategy; started again, it goes on after the last round that was finished.

    Raises:
        RoundError: in a round, fewer than `min-clients` send a model that can be used, or their mean is not finite.
    """
    settings, count = job.config.classifier, job.config.rounds.count
    kit = find_kit(job.config.kit) if settings.init == "kit" else ""
    start = new_classifier(settings, len(job.classes), kit, job.config.seed).state_dict()
    done, seconds, state, costs = _resume(job, strategy, start)
    strategy.first = done  # type: ignore[attr-defined]  # Flower's strategies count from 1 again
    between, began = (
        RoundsGrid(grid, nodes, job.config, job_id, done, start, costs),
        time.monotonic(),
    )
    job.status.phase("rounds", count)
    job.status.advance(done, count)

    def finished(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal state
        if number > 0:
            state = {
                name: value.to(start[name].dtype)
                for name, value in arrays.to_torch_state_dict().items()
            }
            if not all(torch.isfinite(value.float()).all() for value in state.values()):
                raise RoundError(
                    f"the global model is not finite after round {done + number}; see the settings in [rounds]"
                )
            _keep(
                job,
                strategy,
                done + number,
                seconds + time.monotonic() - began,
                state,
                between.costs,
            )
            job.status.advance(done + number, count)
        return None

    if done < count:
        arrays = ArrayRecord({name: Array(value.numpy()) for name, value in state.items()})
        strategy.start(
            between, arrays, count - done, timeout=job.config.deadline, evaluate_fn=finished
        )  # type: ignore[arg-type]
    _release(grid, nodes, job_id)
    name = job.config.method
    job.folder.store_model(
        name, state, {"seconds": job.folder.read_json("rounds/done.json")["seconds"]}
    )
    model = rebuild(state, settings.architecture, len(job.classes), settings.small_stem)
    return {name: GlobalModel(model, settings.architecture, settings.small_stem)}


def _keep(
    job: ServerJob,
    strategy: FedAvg,
    number: int,
    seconds: float,
    state: dict[str, torch.Tensor],
    costs: Costs,
) -> None:
    """A finished round: the model and what the strategy remembers; then the number, which vouches for them, with the costs so far."""
    path = job.folder.path / "rounds"
    memory = {
        name: torch.as_tensor(value) for name, value in getattr(strategy, "memory", {}).items()
    }
    write_atomically(
        path / f"{number:06d}.safetensors", save({n: t.contiguous() for n, t in state.items()})
    )
    write_atomically(path / f"{number:06d}.memory.safetensors", save(memory))
    job.folder.write_json("rounds/done.json", {"round": number, "seconds": seconds, "costs": costs})
    for old in path.glob("*.safetensors"):
        if not old.name.startswith(f"{number:06d}"):
            old.unlink()


def _resume(
    job: ServerJob, strategy: FedAvg, start: dict[str, torch.Tensor]
) -> tuple[int, float, dict[str, torch.Tensor], Costs]:
    """(rounds done, their seconds, model, costs) of the last round that was kept; what the strategy remembers is put back."""
    done = job.folder.read_json("rounds/done.json")
    if done is None:
        return 0, 0.0, start, {}
    number, path = int(done["round"]), job.folder.path / "rounds"
    if hasattr(strategy, "memory"):
        memory = load((path / f"{number:06d}.memory.safetensors").read_bytes())
        strategy.memory = {name: value.numpy() for name, value in memory.items()}
    return (
        number,
        done["seconds"],
        load((path / f"{number:06d}.safetensors").read_bytes()),
        done["costs"],
    )


def _release(grid: Grid, nodes: dict[str, int], job_id: str) -> None:
    """The rounds are over: the clients may forget what they kept between them."""
    exchange, end = (
        Exchange(grid, one_round.THANKS_SECONDS),
        time.monotonic() + one_round.THANKS_SECONDS,
    )
    for node in nodes.values():
        exchange.push(node, ACKNOWLEDGE, RecordDict({"job": ConfigRecord({"job": job_id})}))
    while (
        exchange.pull(lambda node, content: None, lambda node, reason: None)
        and time.monotonic() < end
    ):
        time.sleep(one_round.POLL_SECONDS)


@dataclass
class RoundsGrid:
    """What a Flower strategy sees as the federation: the clients that joined, and replies that were checked, in the clients' order.

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
    costs: Costs = field(default_factory=dict)
    _absent: set[str] = field(
        default_factory=set
    )  # in the last round: they are not waited for as long as the others

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the clients that joined."""
        return list(self.nodes.values())

    def send_and_receive(
        self, messages: Iterable[Message], timeout: float | None = None
    ) -> list[Message]:
        """Send one message to every node and wait for the replies: `deadline`, and `test-timeout` for clients that missed the last round.

        Raises:
            RoundError: fewer than `min-clients` replies can be used.
        """
        # A round that is asked for twice would be trained twice
        exchange, client_of = (
            Exchange(self.grid, self.config.deadline, math.inf),
            {node: client for client, node in self.nodes.items()},
        )
        usable: dict[str, RecordDict] = {}
        problems: dict[str, str] = {}

        def on_reply(node: int, content: RecordDict) -> None:
            client = client_of[node]
            try:
                usable[client] = self._checked(client, content)
            except (KeyError, TypeError, ValueError) as error:
                on_failure(node, str(error))

        def on_failure(node: int, reason: str) -> None:
            problems[client_of[node]] = reason
            log.error("%s: %s", client_of[node], reason)

        packed: dict[int, ArrayRecord] = {}
        messages = list(messages)  # an id is an object's own only while the object is there
        for message in messages:
            said: dict[str, Any] = dict(message.content.config_records["config"])
            said |= {"server-round": self.first + int(said["server-round"]), "job": self.job_id}
            arrays = message.content.array_records["arrays"]
            if id(arrays) not in packed:  # the strategies give all clients the same
                packed[id(arrays)] = pack_state(arrays.to_torch_state_dict())
            model = packed[id(arrays)]
            content = RecordDict({"model": model, "config": ConfigRecord(said)})
            exchange.push(message.metadata.dst_node_id, "train", content)
            self._add(client_of[message.metadata.dst_node_id], download_bytes=size_of(model))
        if not exchange.waiting():  # Flower's strategies also ask for an evaluation, of nobody
            return []
        began = time.monotonic()
        while exchange.pull(on_reply, on_failure):
            late = {client_of[node] for node in exchange.waiting()} <= self._absent
            if time.monotonic() - began > (
                self.config.test_timeout if late else timeout or self.config.deadline
            ):
                break
            exchange.rest()
        for node in exchange.waiting():
            problems[client_of[node]] = (
                "no model in time (deadline; test-timeout after a round that it missed)"
            )
        self._absent = set(self.nodes) - set(usable)
        if len(usable) < self.config.needed_clients:
            reasons = "".join(
                f"\n  {client}: {reason}" for client, reason in sorted(problems.items())
            )
            raise RoundError(
                f"{len(usable)} of {self.config.num_clients} clients sent a model that can be used; {self.config.needed_clients} are "
                f"needed (min-clients, num-clients){reasons}"
            )
        return [
            Message(usable[client], dst_node_id=self.nodes[client], message_type="train")
            for client in sorted(usable)
        ]

    def _checked(self, client: str, content: RecordDict) -> RecordDict:
        """What the strategy may see of a reply: exactly the model's arrays, read and checked, and the number of images.

        Raises:
            ValueError: another model, numbers that no trained model has, or figures that cannot be true.
        """
        if set(content.array_records) != {"model"} or "metrics" not in content.metric_records:
            raise ValueError("its reply must have one model and its figures")
        model, metrics = content.array_records["model"], content.metric_records["metrics"]
        if size_of(model) > sum(like.nbytes for like in self.like.values()) + HEADER_BYTES:
            raise ValueError(f"its model has {size_of(model):,} bytes, more than the run's")
        state = unpack_state(model)
        if set(state) != set(self.like):
            raise ValueError("its model has other arrays than the run's")
        for name, like in self.like.items():
            _check_tensor(name, state[name], like)
        try:
            probe(Classifier((), self.config.classifier.architecture, state), client, self.config)
        except PayloadError as error:
            raise ValueError(str(error)) from None
        keys = ("num-examples", "seconds", "flops", "peak_memory_mb")
        images, seconds, flops, memory = (float(cast(float, metrics[key])) for key in keys)
        if not 1 <= images <= MOST_EXAMPLES or not all(
            np.isfinite(n) and n >= 0 for n in (seconds, flops, memory)
        ):
            raise ValueError(f"its figures are not plausible: {dict(metrics)}")
        self._add(client, upload_bytes=size_of(model), seconds=seconds, flops=flops)
        own = self.costs[client]
        own |= {"images": images, "peak_memory_mb": max(memory, own.get("peak_memory_mb", 0.0))}
        clean = ArrayRecord({name: Array(state[name].numpy()) for name in self.like})
        return RecordDict(
            {"arrays": clean, "metrics": MetricRecord({"num-examples": images, "clients": 1})}
        )

    def _add(self, client: str, **costs: float) -> None:
        own = self.costs.setdefault(client, {})
        for key, value in costs.items():
            own[key] = own.get(key, 0) + value


def _check_tensor(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
    """Whether a client's tensor can be one of the model's.

    Raises:
        ValueError: another shape or type, or its numbers are not finite, too large, or a variance below zero.
    """
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{name} has shape {list(value.shape)[:8]} and type {value.dtype}; expected {list(like.shape)} and {like.dtype}"
        )
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} contains NaN or infinity")
    if value.is_floating_point() and value.numel() and value.abs().max() > MAX_MAGNITUDE:
        raise ValueError(
            f"{name} contains a number beyond {MAX_MAGNITUDE:g}; no trained weight is that large"
        )
    if name.endswith("running_var") and (value < 0).any():
        raise ValueError(f"{name} contains a variance below zero")
