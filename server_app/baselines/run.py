"""Methods with rounds: a Flower strategy over our own exchange of messages.

Replies are validated and counted, and a run goes on after the last round that was finished.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from osfl.config import RunConfig, split_names
from osfl.kit.used_parts import final_model
from osfl.models.classifiers import blank_classifier, rebuild
from osfl.payload.kinds import Classifier, Payload
from osfl.payload.messages import (
    ACKNOWLEDGE,
    HEADER_BYTES,
    check_costs,
    pack_acknowledgement,
    pack_state,
    size_of,
    unpack_state,
)
from osfl.payload.wire import MAX_MAGNITUDE, PayloadError
from osfl.util.log import log
from server_app.baselines.models import initial_state
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.image_counts import ALL, check_counts, find_caps
from server_app.defenses.outliers import Outlier, find_large_counts, find_outliers
from server_app.expected import probe
from server_app.federation import exchange as under_way
from server_app.federation.exchange import Exchange, RoundError, UnfitError, ignore, listed
from server_app.federation.join import Members

# What of a reply Flower's strategies weight a model by
WEIGHT = "num-examples"
Costs = dict[str, dict[str, float]]  # by client
State = dict[str, torch.Tensor]


def run_rounds(
    job: ServerJob, grid: Grid, members: Members, strategy: FedAvg, job_id: str
) -> dict[str, GlobalModel]:
    """`rounds.count` rounds of a strategy.

    Started again, it goes on after the last round that was finished.

    Raises:
        RoundError: in a round, fewer than `min-clients` send a model that can be used, or their
            mean is not finite.
    """
    settings = final_model(job.config)
    count = job.config.rounds.count
    start = initial_state(job, settings)
    done, seconds, state, costs = _resume(job, strategy, start)
    strategy.first = done  # type: ignore[attr-defined]  # Flower's strategies count from 1 again
    began = time.monotonic()
    identity = job.folder.rounds_identity()
    between = RoundsGrid(
        grid, members, job.config, job_id, done, _shapes(job), costs, job.status.warn
    )
    between.identity = identity
    between.weighted = strategy.weighted_by_key == WEIGHT
    job.status.phase("rounds", count)
    job.status.advance(done, count)

    def finished(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal state
        if number > 0:
            state = {
                name: value.to(start[name].dtype)
                for name, value in arrays.to_torch_state_dict().items()
            }
            kept = [
                *state.values(),
                *map(torch.as_tensor, getattr(strategy, "memory", {}).values()),
            ]
            if not all(torch.isfinite(value.float()).all() for value in kept):
                raise RoundError(
                    f"the global model is not finite after round {done + number}; see the settings "
                    "in [rounds]"
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
            between,  # type: ignore[arg-type]
            arrays,
            count - done,
            timeout=job.config.deadline,
            evaluate_fn=finished,
        )
    members.end()
    _release(grid, members.nodes, job_id, identity)
    name = job.config.method
    last = job.folder.last_round()
    assert last is not None, "a round was kept"
    job.folder.store_model(name, state, {"seconds": last["seconds"]})
    model = rebuild(state, settings.architecture, len(job.classes), settings.small_stem)
    return {name: GlobalModel(model, settings.architecture, settings.small_stem)}


def _shapes(job: ServerJob) -> dict[str, State]:
    """What a client's model must look like, by its architecture.

    A spare's may be any of the run's.
    """
    shapes = {}
    for architecture in split_names(job.config.classifier.architecture):
        model = blank_classifier(architecture, len(job.classes), job.config.classifier.small_stem)
        shapes[architecture] = model.state_dict()
    return shapes


def _keep(
    job: ServerJob,
    strategy: FedAvg,
    number: int,
    seconds: float,
    state: dict[str, torch.Tensor],
    costs: Costs,
) -> None:
    """A finished round: the model, what the strategy remembers, and the costs so far."""
    memory = {
        name: torch.as_tensor(value) for name, value in getattr(strategy, "memory", {}).items()
    }
    job.folder.store_round(number, seconds, costs, state, memory)


def _resume(
    job: ServerJob, strategy: FedAvg, start: dict[str, torch.Tensor]
) -> tuple[int, float, dict[str, torch.Tensor], Costs]:
    """(rounds done, their seconds, model, costs) of the last round that was kept.

    What the strategy remembers is put back.

    Raises:
        DamageError: they are not as they were written.
    """
    done = job.folder.last_round()
    if done is None:
        return 0, 0.0, start, {}
    if hasattr(strategy, "memory"):
        memory = job.folder.round_memory(done)
        strategy.memory = {name: value.numpy() for name, value in memory.items()}
    return done["round"], done["seconds"], job.folder.round_model(done), done["costs"]


def _release(grid: Grid, nodes: dict[str, int], job_id: str, identity: str) -> None:
    """The rounds are over: the clients may forget what they kept between them."""
    exchange = Exchange(grid, under_way.THANKS_SECONDS)
    end = time.monotonic() + under_way.THANKS_SECONDS
    for node in nodes.values():
        exchange.push(node, ACKNOWLEDGE, pack_acknowledgement(job_id, rounds=identity))
    while exchange.pull(ignore, ignore, ignore, end) and time.monotonic() < end:
        exchange.rest(end)
    exchange.end()


@dataclass
class RoundsGrid:
    """What a Flower strategy sees as the federation.

    The clients that joined, and replies that were checked, in the clients' order.

    Attributes:
        first: rounds that were done before.
        likes: for each architecture the state dict that a reply must look like; without numbers.
        costs: of each client, summed over the rounds; bytes as serialised.
        warn: told of clients whose models or image counts are far from the others', whose weight is
            capped, or whose count changes, of all rounds so far.
        weighted: whether the strategy weights models by their clients' images.
        contents: what a strategy has for a spare, by its architecture, where it may be another than
            those of the clients that the strategy asks.
        identity: tells the run's rounds from another server's with the same job id.
    """

    grid: Grid
    members: Members
    config: RunConfig
    job_id: str
    first: int
    likes: Mapping[str, State]
    costs: Costs = field(default_factory=dict)
    warn: Callable[[list[str]], None] = ignore
    contents: dict[str, RecordDict] = field(default_factory=dict)
    weighted: bool = True
    identity: str = ""
    # In the last round: they are not waited for as long as the others.
    _absent: set[str] = field(default_factory=set)
    # What was told, by client and what it is about
    _told: dict[tuple[str, str], str] = field(default_factory=dict)
    # Of the last round that each client took part in
    _images: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._images = {
            client: int(cost["images"]) for client, cost in self.costs.items() if "images" in cost
        }

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the clients that joined."""
        return list(self.members.nodes.values())

    def send_and_receive(
        self, messages: Iterable[Message], timeout: float | None = None
    ) -> list[Message]:
        """Send one message to every node and wait for the replies.

        They have until the `deadline`; clients that missed the last round until `test-timeout`.
        A spare is asked in the place of a client that failed for good.

        Raises:
            RoundError: fewer than `min-clients` replies can be used.
        """
        messages = list(messages)
        if not messages:  # Flower's strategies also ask for an evaluation, of nobody
            return []
        sizes = []
        for state in self.likes.values():
            sizes.append(sum(tensor.nbytes for tensor in state.values()))
        largest = max(sizes)
        # A round that is asked for twice would be trained twice
        exchange = Exchange(self.grid, self.config.deadline, math.inf, largest)
        asked = _Round(self, exchange)
        for message in messages:
            asked.push(message.metadata.dst_node_id, message.content)
        usable = asked.replies(timeout or self.config.deadline, self._absent)
        self._absent = set(self.members.nodes) - set(usable)
        if len(usable) < self.config.needed_clients:
            raise RoundError(
                f"{len(usable)} of {self.config.training_clients} clients sent a model that can be "
                f"used; {self.config.needed_clients} are needed (min-clients, num-clients)"
                f"{listed(asked.problems)}"
            )
        config = messages[0].content.config_records["config"]
        number = self.first + int(cast(int, config["server-round"]))
        self._tell(number, "model", self._far_models(usable))
        self._weigh(number, usable)
        return [
            Message(usable[client], dst_node_id=self.members.nodes[client], message_type="train")
            for client in sorted(usable)
        ]

    def _far_models(self, usable: Mapping[str, RecordDict]) -> dict[str, str]:
        """The clients whose models' norms or spreads are far from the others'. They are used."""
        models: dict[str, Payload] = {}
        for client, content in usable.items():
            state = content.array_records["arrays"].to_torch_state_dict()
            models[client] = Classifier((), self.members.architectures[client], state)
        return {outlier.client: str(outlier) for outlier in find_outliers(models)}

    def _weigh(self, number: int, usable: Mapping[str, RecordDict]) -> None:
        """Cap the weights of clients that state far more images than the others."""
        metrics = {client: reply.metric_records["metrics"] for client, reply in usable.items()}
        images = {client: int(cast(float, own[WEIGHT])) for client, own in metrics.items()}
        ratio = self.config.max_weight_ratio if self.weighted else 0.0
        caps = find_caps({client: {ALL: count} for client, count in images.items()}, ratio)
        for client, cap in caps.items():
            metrics[client][WEIGHT] = cap.weights[ALL] * images[client]
        large = {
            client: str(Outlier(client, "counts", found["counts"], 1, "total"))
            for client, found in find_large_counts(images).items()
        }
        self._tell(number, "images", large | {client: str(cap) for client, cap in caps.items()})
        changed = {
            client: f"{client}: states {count:,} images, and {self._images[client]:,} before"
            for client, count in images.items()
            if count != self._images.get(client, count)
        }
        self._images |= images
        self._tell(number, "change of images", changed)

    def _tell(self, number: int, about: str, found: Mapping[str, str]) -> None:
        """Warn of what was found of some clients; of each client once."""
        new = [client for client in sorted(found) if (client, about) not in self._told]
        for client in new:
            self._told[client, about] = f"round {number}: {found[client]}"
        if new:
            self.warn(list(self._told.values()))

    def _checked(self, client: str, content: RecordDict) -> RecordDict:
        """What the strategy may see of a reply.

        Exactly the model's arrays, read and checked, and the number of images.

        Raises:
            ValueError: another model, numbers that no trained model has, or figures that cannot be
                true.
        """
        if set(content.array_records) != {"model"} or "metrics" not in content.metric_records:
            raise ValueError("its reply must have one model and its figures")
        model = content.array_records["model"]
        metrics = content.metric_records["metrics"]
        architecture = self.members.architectures[client]
        expected = self.likes[architecture]
        if size_of(model) > sum(like.nbytes + HEADER_BYTES for like in expected.values()):
            raise ValueError(f"its model has {size_of(model):,} bytes, more than the run's")
        state = unpack_state(model, len(expected))
        if set(state) != set(expected):
            raise ValueError(f"its model has other arrays than the run's {architecture}")
        for name, like in expected.items():
            _check_tensor(name, state[name], like)
        try:
            probe(Classifier((), architecture, state), client, self.config)
        except PayloadError as error:
            raise ValueError(str(error)) from None
        keys = (WEIGHT, "seconds", "flops", "peak_memory_mb")
        images, seconds, flops, memory = (float(cast(float, metrics[key])) for key in keys)
        costs = {"seconds": seconds, "flops": flops, "peak_memory_mb": memory, "images": images}
        check_costs(costs)
        if images < 1:
            raise ValueError("a model that was trained on no image")
        declared = self.members.declared.get(client)
        check_counts({ALL: int(images)}, self.config.max_images, declared)
        self._add(client, upload_bytes=size_of(model), seconds=seconds, flops=flops)
        cost = self.costs[client]
        cost |= {"images": images, "peak_memory_mb": max(memory, cost.get("peak_memory_mb", 0.0))}
        return RecordDict(
            {
                "arrays": ArrayRecord({name: Array(state[name].numpy()) for name in expected}),
                "metrics": MetricRecord({WEIGHT: images, "clients": 1}),
                "model": ConfigRecord({"architecture": architecture}),
            }
        )

    def _add(self, client: str, **costs: float) -> None:
        cost = self.costs.setdefault(client, {})
        for key, value in costs.items():
            cost[key] = cost.get(key, 0) + value


class _Round:
    """One round's messages to the clients, and their models."""

    def __init__(self, federation: RoundsGrid, exchange: Exchange):
        self.federation = federation
        self.members = federation.members
        self.exchange = exchange
        self.usable: dict[str, RecordDict] = {}
        self.problems: dict[str, str] = {}  # by client
        self._client_of = {node: client for client, node in self.members.nodes.items()}
        self._contents = dict(federation.contents)  # by architecture, for spares
        self._packed: dict[int, ArrayRecord] = {}  # by the id of the strategy's arrays

    def push(self, node: int, content: RecordDict) -> None:
        """Send a client the model."""
        client = self._client_of[node]
        architecture = self.members.architectures[client]
        self._contents[architecture] = content
        told: dict[str, Any] = dict(content.config_records["config"])
        told["server-round"] = self.federation.first + int(told["server-round"])
        told |= {"job": self.federation.job_id, "architecture": architecture}
        told["rounds"] = self.federation.identity
        model = self._pack(content.array_records["arrays"])
        self.exchange.push(
            node, "train", RecordDict({"model": model, "config": ConfigRecord(told)})
        )
        self.federation._add(client, download_bytes=size_of(model))

    def _pack(self, arrays: ArrayRecord) -> ArrayRecord:
        # The strategies give the same to all clients of an architecture, and keep it for the round
        if id(arrays) not in self._packed:
            self._packed[id(arrays)] = pack_state(arrays.to_torch_state_dict())
        return self._packed[id(arrays)]

    def replies(self, deadline: float, absent: set[str]) -> dict[str, RecordDict]:
        """What can be used, by client, when all have answered or it is time.

        Args:
            deadline: seconds.
            absent: who missed the last round; for them alone nobody waits longer than
                `test-timeout`.
        """
        began = time.monotonic()
        end = began + deadline
        while True:
            self.exchange.pull(self._read, self._keep, self._fail, end)
            self._fill_places(end)
            owing = self._owing()
            late = owing <= absent
            seconds = self.federation.config.test_timeout if late else deadline
            end = began + seconds
            if not owing or time.monotonic() >= end:
                break
            self.exchange.rest(end)
        key = "test-timeout, after a round that it missed" if late else "deadline"
        self.problems |= dict.fromkeys(owing, f"no model within {seconds:g} s ({key})")
        self.exchange.end()
        return self.usable

    def _owing(self) -> set[str]:
        return {self._client_of[node] for node in self.exchange.waiting()}

    def _fill_places(self, until: float) -> None:
        gone = [client for client in self.members.nodes if client in self.problems]
        away = self.exchange.away()
        if (gone or away) and not self.members.spares():
            self.members.look(until)
        for node in away[: max(0, len(self.members.spares()) - len(gone))]:
            self.exchange.give_up(node)
            self._fail(node, f"offline for {under_way.AWAY_SECONDS:g} s, and another is there")
            gone.append(self._client_of[node])
        for client, spare in zip(gone, self.members.spares(), strict=False):
            node = self.members.take_in(spare, client)
            self._client_of[node] = spare
            self.push(node, self._contents[self.members.architectures[spare]])

    def _read(self, node: int, content: RecordDict) -> RecordDict:
        try:
            return self.federation._checked(self._client_of[node], content)
        except ValueError as error:
            raise UnfitError(str(error)) from None

    def _keep(self, node: int, content: RecordDict) -> None:
        self.usable[self._client_of[node]] = content

    def _fail(self, node: int, reason: str) -> None:
        self.problems[self._client_of[node]] = reason
        log.error("%s: %s", self._client_of[node], reason)


def _check_tensor(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
    """Whether a client's tensor can be one of the model's.

    Raises:
        ValueError: another shape or type, or its numbers are not finite, too large, or a variance
            below zero.
    """
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{name} has shape {list(value.shape)[:8]} and type {value.dtype}; expected "
            f"{list(like.shape)} and {like.dtype}"
        )
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} contains NaN or infinity")
    if value.is_floating_point() and value.numel() and value.abs().max() > MAX_MAGNITUDE:
        raise ValueError(
            f"{name} contains a number beyond {MAX_MAGNITUDE:g}; no trained weight is that large"
        )
    if name.endswith("running_var") and (value < 0).any():
        raise ValueError(f"{name} contains a variance below zero")
