"""Iterative baselines: a Flower strategy over this project's own message exchange.

Replies are validated and their costs recorded. A restarted run resumes after the last finished
round.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from osfl.config import RunConfig, split_names
from osfl.kit.used_parts import final_model
from osfl.models.classifiers import meta_classifier, rebuild_classifier
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
from server_app.defenses.filters import dropped_warning, filter_payloads
from server_app.defenses.image_counts import ALL, check_counts, find_caps
from server_app.defenses.outliers import Outlier, find_large_counts, find_outliers
from server_app.expected import check_plausible
from server_app.federation import exchange as exchange_module
from server_app.federation.exchange import (
    Exchange,
    InvalidReplyError,
    RoundError,
    format_reasons,
    ignore,
)
from server_app.federation.join import Members

# The metric by which Flower's strategies weight a client's model
WEIGHT_METRIC = "num-examples"
Costs = dict[str, dict[str, float]]  # by client
State = dict[str, torch.Tensor]


def run_rounds(
    job: ServerJob, grid: Grid, members: Members, strategy: FedAvg, job_id: str
) -> dict[str, GlobalModel]:
    """Run `rounds.count` rounds of a strategy, or the remaining ones of a resumed run.

    Raises:
        RoundError: in a round, fewer than `min-clients` send a usable model, or their mean is not
            finite.
    """
    settings = final_model(job.config)
    count = job.config.rounds.count
    initial = initial_state(job, settings)
    first, seconds, state, costs = _resume(job, strategy, initial)
    strategy.first = first  # type: ignore[attr-defined]  # Flower's strategies count from 1 again
    identity = job.folder.rounds_identity()
    federation = CheckedGrid(
        grid, members, job.config, job_id, first, _shapes(job), costs, job.status.warn
    )
    federation.identity = identity
    federation.filter_payloads = partial(filter_payloads, job)
    federation.weighted = strategy.weighted_by_key == WEIGHT_METRIC
    recorder = _RoundRecorder(job, strategy, federation, seconds, state)
    job.status.phase("rounds", count)
    job.status.advance(first, count)
    if first < count:
        arrays = ArrayRecord({name: Array(value.numpy()) for name, value in state.items()})
        strategy.start(
            federation,  # type: ignore[arg-type]
            arrays,
            count - first,
            timeout=job.config.deadline,
            evaluate_fn=recorder.finish_round,
        )
    _release(grid, members.nodes, job_id, identity)
    name = job.config.method
    last = job.folder.last_round()
    assert last is not None, "no round was stored"
    model = rebuild_classifier(
        recorder.state, settings.architecture, len(job.classes), settings.small_stem
    )
    record = {"seconds": last["seconds"]}
    job.folder.store_model(name, recorder.state, record, job.metadata(name, model))
    return {name: GlobalModel(model, settings.architecture, settings.small_stem)}


class _RoundRecorder:
    """Checks and stores the global model after every round.

    Args:
        seconds: of the rounds before this process.
        state: the model to start from.
    """

    def __init__(
        self,
        job: ServerJob,
        strategy: FedAvg,
        federation: "CheckedGrid",
        seconds: float,
        state: State,
    ):
        self.state = state
        self._job = job
        self._strategy = strategy
        self._federation = federation
        self._seconds = seconds
        self._start = time.monotonic()

    def finish_round(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Record a round. Flower calls it as its evaluation, with 0 before the first round.

        Raises:
            RoundError: the global model is not finite.
        """
        if number == 0:
            return None
        total = self._federation.first + number
        self.state = {
            name: value.to(self.state[name].dtype)
            for name, value in arrays.to_torch_state_dict().items()
        }
        memory = getattr(self._strategy, "memory", {})
        values = [*self.state.values(), *map(torch.as_tensor, memory.values())]
        if not all(torch.isfinite(value.float()).all() for value in values):
            raise RoundError(
                f"the global model is not finite after round {total}; see the settings in [rounds]"
            )
        seconds = self._seconds + time.monotonic() - self._start
        costs = self._federation.costs
        _keep(self._job, self._strategy, total, seconds, self.state, costs)
        self._job.status.advance(total, self._job.config.rounds.count)
        return None


def _shapes(job: ServerJob) -> dict[str, State]:
    """Return a state dict without values for each architecture that a client may have."""
    shapes = {}
    for architecture in split_names(job.config.classifier.architecture):
        model = meta_classifier(architecture, len(job.classes), job.config.classifier.small_stem)
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
    """Store a finished round: the model, the strategy's memory, and the costs so far."""
    memory = {
        name: torch.as_tensor(value) for name, value in getattr(strategy, "memory", {}).items()
    }
    job.folder.store_round(number, seconds, costs, state, memory)


def _resume(
    job: ServerJob, strategy: FedAvg, initial: dict[str, torch.Tensor]
) -> tuple[int, float, dict[str, torch.Tensor], Costs]:
    """Restore the strategy's memory, and return the state after the last stored round.

    Returns:
        (finished rounds, their seconds, model, costs); of a new run (0, 0, `initial`, {}).

    Raises:
        CorruptFileError: the stored files are corrupt.
    """
    last = job.folder.last_round()
    if last is None:
        return 0, 0.0, initial, {}
    if hasattr(strategy, "memory"):
        memory = job.folder.round_memory(last)
        strategy.memory = {name: value.numpy() for name, value in memory.items()}
    return last["round"], last["seconds"], job.folder.round_model(last), last["costs"]


def _release(grid: Grid, nodes: dict[str, int], job_id: str, identity: str) -> None:
    """Acknowledge the last round, so that clients delete what they store between rounds."""
    exchange = Exchange(grid, exchange_module.ACKNOWLEDGE_SECONDS)
    end = time.monotonic() + exchange_module.ACKNOWLEDGE_SECONDS
    for node in nodes.values():
        exchange.push(node, ACKNOWLEDGE, pack_acknowledgement(job_id, rounds=identity))
    while exchange.pull(ignore, ignore, ignore, end) and time.monotonic() < end:
        exchange.wait(end)
    exchange.end()


@dataclass
class CheckedGrid:
    """The grid that a Flower strategy sees: joined clients, and checked replies in client order.

    Attributes:
        first: rounds finished before this process.
        likes: the state dict without values that a reply must match, by architecture.
        costs: each client's costs, summed over the rounds; bytes as serialized.
        warn: gets the warnings of all rounds so far, about clients whose models or image counts
            are far from the others', whose model is dropped, whose weight is capped, or whose count
            changes.
        contents: a strategy's messages for standby clients, by architecture, if these may have
            another architecture than the clients that the strategy selects.
        weighted: whether the strategy weights models by their clients' images.
        identity: tells the run's rounds from another server's with the same job id.
        filter_payloads: returns the models that the run's defense keeps.
    """

    grid: Grid
    members: Members
    config: RunConfig
    job_id: str
    first: int
    state_templates: Mapping[str, State]
    costs: Costs = field(default_factory=dict)
    warn: Callable[[list[str]], None] = ignore
    standby_messages: dict[str, RecordDict] = field(default_factory=dict)
    weighted: bool = True
    identity: str = ""
    filter_payloads: Callable[[Mapping[str, Payload]], Mapping[str, Payload]] = dict
    # Clients that missed the last round, which are awaited for a shorter time
    _absent: set[str] = field(default_factory=set)
    # Warnings by (client, topic)
    _warnings: dict[tuple[str, str], str] = field(default_factory=dict)
    # Image counts of the last round in which each client participated
    _images: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._images = {
            client: int(cost["images"]) for client, cost in self.costs.items() if "images" in cost
        }

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of the participating clients."""
        return list(self.members.nodes.values())

    def send_and_receive(
        self, messages: Iterable[Message], timeout: float | None = None
    ) -> list[Message]:
        """Send one message to every node and wait for the replies.

        Clients must reply before the `deadline`, and within `test-timeout` if they missed the last
        round. A standby client replaces one that failed permanently.

        Raises:
            RoundError: fewer than `min-clients` replies are usable, or the defense drops all.
        """
        messages = list(messages)
        # Flower's strategies also run an evaluation without clients
        if not messages:
            return []
        sizes = []
        for state in self.state_templates.values():
            sizes.append(sum(tensor.nbytes for tensor in state.values()))
        largest = max(sizes)
        # No resending: a client that gets the request twice would train twice
        exchange = Exchange(self.grid, self.config.deadline, math.inf, largest)
        current = _Round(self, exchange)
        for message in messages:
            current.push(message.metadata.dst_node_id, message.content)
        usable = current.replies(timeout or self.config.deadline, self._absent)
        self._absent = set(self.members.nodes) - set(usable)
        if len(usable) < self.config.needed_clients:
            raise RoundError(
                f"{len(usable)} of {self.config.training_clients} clients sent a usable model; at "
                f"least {self.config.needed_clients} are required (min-clients, num-clients)"
                f"{format_reasons(current.problems)}"
            )
        config = messages[0].content.config_records["config"]
        number = self.first + int(cast(int, config["server-round"]))
        trusted = self._trusted(number, usable)
        self._weigh(number, trusted)
        return [
            Message(trusted[client], dst_node_id=self.members.nodes[client], message_type="train")
            for client in sorted(trusted)
        ]

    def _trusted(self, number: int, usable: Mapping[str, RecordDict]) -> dict[str, RecordDict]:
        """Warn about outlier models, and drop those that the run's defense drops.

        Raises:
            RoundError: the defense drops all models.
        """
        models: dict[str, Payload] = {}
        for client, content in usable.items():
            state = content.array_records["arrays"].to_torch_state_dict()
            models[client] = Classifier((), self.members.architectures[client], state)
        outliers = {outlier.client: str(outlier) for outlier in find_outliers(models)}
        self._warn_once(number, "model", outliers)
        trusted = self.filter_payloads(models)
        dropped = usable.keys() - trusted.keys()
        warnings = {client: dropped_warning(self.config, client) for client in dropped}
        self._warn_once(number, "defense", warnings)
        return {client: content for client, content in usable.items() if client in trusted}

    def _weigh(self, number: int, usable: Mapping[str, RecordDict]) -> None:
        """Cap the weights of clients that state far more images than the others."""
        metrics = {client: reply.metric_records["metrics"] for client, reply in usable.items()}
        images = {
            client: int(cast(float, record[WEIGHT_METRIC])) for client, record in metrics.items()
        }
        ratio = self.config.max_weight_ratio if self.weighted else 0.0
        caps = find_caps({client: {ALL: count} for client, count in images.items()}, ratio)
        for client, cap in caps.items():
            metrics[client][WEIGHT_METRIC] = cap.weights[ALL] * images[client]
        large = {
            client: str(Outlier(client, "counts", ratios["counts"], 1, "total"))
            for client, ratios in find_large_counts(images).items()
        }
        capped = {client: str(cap) for client, cap in caps.items()}
        self._warn_once(number, "images", large | capped)
        changed = {
            client: f"{client}: states {count:,} images, but stated {self._images[client]:,} before"
            for client, count in images.items()
            if count != self._images.get(client, count)
        }
        self._images |= images
        self._warn_once(number, "change of images", changed)

    def _warn_once(self, number: int, topic: str, warnings: Mapping[str, str]) -> None:
        """Warn about clients, at most once per client and topic."""
        new = [client for client in sorted(warnings) if (client, topic) not in self._warnings]
        for client in new:
            self._warnings[client, topic] = f"round {number}: {warnings[client]}"
        if new:
            self.warn(list(self._warnings.values()))

    def _checked(self, client: str, content: RecordDict) -> RecordDict:
        """Return what the strategy may see of a reply, checked: its arrays and image count.

        Raises:
            ValueError: another model, values that no trained model has, or implausible costs.
        """
        if set(content.array_records) != {"model"} or "metrics" not in content.metric_records:
            raise ValueError("its reply must have one model and its metrics")
        model = content.array_records["model"]
        state = self._checked_state(client, model)
        costs = self._checked_costs(client, content.metric_records["metrics"])
        upload_bytes = size_of(model)
        self._add(client, upload_bytes=upload_bytes, seconds=costs["seconds"], flops=costs["flops"])
        total = self.costs[client]
        peak_memory = max(costs["peak_memory_mb"], total.get("peak_memory_mb", 0.0))
        total |= {"images": costs["images"], "peak_memory_mb": peak_memory}
        architecture = self.members.architectures[client]
        names = self.state_templates[architecture]
        return RecordDict(
            {
                "arrays": ArrayRecord({name: Array(state[name].numpy()) for name in names}),
                "metrics": MetricRecord({WEIGHT_METRIC: costs["images"], "clients": 1}),
                "model": ConfigRecord({"architecture": architecture}),
            }
        )

    def _checked_state(self, client: str, model: ArrayRecord) -> State:
        architecture = self.members.architectures[client]
        expected = self.state_templates[architecture]
        if size_of(model) > sum(like.nbytes + HEADER_BYTES for like in expected.values()):
            raise ValueError(f"its model has {size_of(model):,} bytes, more than the run's")
        state = unpack_state(model, len(expected))
        if set(state) != set(expected):
            raise ValueError(f"its model has other arrays than the run's {architecture}")
        for name, like in expected.items():
            _check_tensor(name, state[name], like)
        try:
            check_plausible(Classifier((), architecture, state), client, self.config)
        except PayloadError as error:
            raise ValueError(str(error)) from None
        return state

    def _checked_costs(self, client: str, metrics: MetricRecord) -> dict[str, float]:
        keys = (WEIGHT_METRIC, "seconds", "flops", "peak_memory_mb")
        images, seconds, flops, memory = (float(cast(float, metrics[key])) for key in keys)
        costs = {"seconds": seconds, "flops": flops, "peak_memory_mb": memory, "images": images}
        check_costs(costs)
        if images < 1:
            raise ValueError("its model must be trained on at least one image")
        declared = self.members.declared.get(client)
        check_counts({ALL: int(images)}, self.config.max_images, declared)
        return costs

    def _add(self, client: str, **costs: float) -> None:
        cost = self.costs.setdefault(client, {})
        for key, value in costs.items():
            cost[key] = cost.get(key, 0) + value


class _Round:
    """One round's requests to the clients, and their replies.

    Attributes:
        usable: checked replies by client.
        problems: reason of each client's failure.
    """

    def __init__(self, federation: CheckedGrid, exchange: Exchange):
        self.federation = federation
        self.members = federation.members
        self.exchange = exchange
        self.usable: dict[str, RecordDict] = {}
        self.problems: dict[str, str] = {}
        self._client_of = {node: client for client, node in self.members.nodes.items()}
        self._contents = dict(federation.standby_messages)  # for standby clients, by architecture
        self._packed: dict[int, ArrayRecord] = {}  # by the id of the strategy's arrays

    def push(self, node: int, content: RecordDict) -> None:
        """Send a client the global model."""
        client = self._client_of[node]
        architecture = self.members.architectures[client]
        self._contents[architecture] = content
        config: dict[str, Any] = dict(content.config_records["config"])
        config["server-round"] = self.federation.first + int(config["server-round"])
        config |= {"job": self.federation.job_id, "architecture": architecture}
        config["rounds"] = self.federation.identity
        model = self._pack(content.array_records["arrays"])
        self.exchange.push(
            node, "train", RecordDict({"model": model, "config": ConfigRecord(config)})
        )
        self.federation._add(client, download_bytes=size_of(model))

    def _pack(self, arrays: ArrayRecord) -> ArrayRecord:
        # Strategies send the same arrays to all clients of an architecture, and hold them during
        # the round, so their ids stay unique
        if id(arrays) not in self._packed:
            self._packed[id(arrays)] = pack_state(arrays.to_torch_state_dict())
        return self._packed[id(arrays)]

    def replies(self, deadline: float, absent: set[str]) -> dict[str, RecordDict]:
        """Return the usable replies by client, when all have replied or time is over.

        Args:
            deadline: seconds.
            absent: clients that missed the last round. If only they owe a reply, the time limit is
                `test-timeout`.
        """
        start = time.monotonic()
        end = start + deadline
        while True:
            self.exchange.pull(self._read, self._keep, self._fail, end)
            self._fill_places(end)
            owing = self._owing()
            only_absent = owing <= absent
            seconds = self.federation.config.test_timeout if only_absent else deadline
            end = start + seconds
            if not owing or time.monotonic() >= end:
                break
            self.exchange.wait(end)
        key = "test-timeout, after a missed round" if only_absent else "deadline"
        self.problems |= dict.fromkeys(owing, f"no model within {seconds:g} s ({key})")
        self.exchange.end()
        return self.usable

    def _owing(self) -> set[str]:
        return {self._client_of[node] for node in self.exchange.pending_nodes()}

    def _fill_places(self, until: float) -> None:
        failed = [client for client in self.members.nodes if client in self.problems]
        offline = self.exchange.offline()
        if (failed or offline) and not self.members.standby():
            self.members.poll(until)
        # An offline node may come back, so it is given up only if a standby replaces it
        for node in offline[: max(0, len(self.members.standby()) - len(failed))]:
            self.exchange.give_up(node)
            self._fail(
                node, f"offline for {exchange_module.OFFLINE_SECONDS:g} s, replaced by a standby"
            )
            failed.append(self._client_of[node])
        for client, standby in zip(failed, self.members.standby(), strict=False):
            node = self.members.admit(standby, client)
            self._client_of[node] = standby
            self.push(node, self._contents[self.members.architectures[standby]])

    def _read(self, node: int, content: RecordDict) -> RecordDict:
        try:
            return self.federation._checked(self._client_of[node], content)
        except ValueError as error:
            raise InvalidReplyError(str(error)) from None

    def _keep(self, node: int, content: RecordDict) -> None:
        self.usable[self._client_of[node]] = content

    def _fail(self, node: int, reason: str) -> None:
        self.problems[self._client_of[node]] = reason
        log.error("%s: %s", self._client_of[node], reason)


def _check_tensor(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
    """Check that a client's tensor can be a tensor of a trained model.

    Raises:
        ValueError: it has another shape or dtype, or values that are not finite, too large, or a
            negative variance.
    """
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{name} has shape {list(value.shape)[:8]} and dtype {value.dtype}; expected "
            f"{list(like.shape)} and {like.dtype}"
        )
    if not torch.isfinite(value).all():
        raise ValueError(f"{name} contains NaN or infinity")
    if value.is_floating_point() and value.numel() and value.abs().max() > MAX_MAGNITUDE:
        raise ValueError(
            f"{name} contains a value beyond {MAX_MAGNITUDE:g}; no trained weight is that large"
        )
    if name.endswith("running_var") and (value < 0).any():
        raise ValueError(f"{name} contains a negative variance")
