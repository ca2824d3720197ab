"""The exchange of messages with nodes that upload for ever, say nothing, or talk nonsense."""

import itertools
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

import osfl
from osfl.config import RunConfig, parse_run_config
from osfl.data.parts import class_names
from osfl.models.classifiers import build_classifier
from osfl.payload import wire
from osfl.payload.kinds import Domain
from osfl.payload.messages import COST_KEYS, WITHHELD, pack_payload, pack_state, unpack_state
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from server_app.baselines import feddf
from server_app.baselines.models import initial_state
from server_app.baselines.run import CheckedGrid, _shapes
from server_app.context import GlobalModel, ServerJob
from server_app.expected import expected_payload
from server_app.federation import counted, pulls
from server_app.federation.collect import collect
from server_app.federation.evaluate import EvaluationNodes, evaluate_on_clients
from server_app.federation.exchange import Exchange, InvalidReplyError, RoundError, _reason
from server_app.federation.join import Members, join
from server_app.federation.pulls import MAX_THREADS, Pulls
from tests.helpers.settings import quick

ARCHITECTURE = "shufflenet_v2_x1_0"
Answer = Callable[[Message], RecordDict | Error | None]
TIGHT = 5.0  # seconds that a phase may last longer than it says


class NodesGrid:
    """Nodes that answer as they are told.

    Content, an error, None (silence), or an upload that lasts.

    Args:
        answers: by node id.
    """

    def __init__(self, answers: dict[int, Answer]):
        self.answers = answers
        self.online = set(answers)
        self.sent: list[tuple[int, str]] = []
        self.looks = 0
        self.online_since = "then"  # when the nodes came online
        self.names: dict[int, str] = {}  # of their keys
        self.uploads: dict[int, threading.Event] = {}  # by node; until it is set, a pull lasts
        self._ids = itertools.count(1)
        self._asked = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        self.looks += 1
        return [
            NodeInfo(node_id=n, last_activated_at=self.online_since, name=self.names.get(n))
            for n in sorted(self.online)
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        (message,) = messages
        if message.metadata.dst_node_id not in self.online:
            return [""]  # what the SuperLink answers
        name = f"m{next(self._ids)}"
        message.metadata.__dict__["_message_id"] = name
        self.sent.append((message.metadata.dst_node_id, message.metadata.message_type))
        self._asked[name] = message
        return [name]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (name,) = message_ids
        message = self._asked[name]
        node = message.metadata.dst_node_id
        answer = self.answers[node](message)
        if answer is None:
            return []
        if node in self.uploads:
            self.uploads[node].wait()
        del self._asked[name]
        return [Message(answer, reply_to=message)]

    def asked(self, message_type: str) -> list[int]:
        return [node for node, kind in self.sent if kind == message_type]


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 0.02)
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.0)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """An event that a slow upload waits for; set at the end, so that no thread remains."""
    event = threading.Event()
    yield event
    event.set()


def settings(**overrides: object) -> RunConfig:
    return parse_run_config(quick(**{"method": "prompts-domain", **overrides}))


def fit(client: str, architecture: str = ARCHITECTURE) -> Answer:
    """A client that does all it is asked."""

    def answer(message: Message) -> RecordDict:
        kind = message.metadata.message_type
        if kind == "query.join":
            record = {"client": client, "version": osfl.__version__, "architecture": architecture}
            return RecordDict({"join": ConfigRecord(record)})
        if kind == "train":
            payload = Domain(class_names(settings().data), "photo")
            blob = wire.encode(payload, "prompts-domain", "job", client)
            return pack_payload(blob, dict.fromkeys(COST_KEYS, 1.0))
        if kind == "evaluate":
            return RecordDict({"metrics": MetricRecord({"confusion": [1] * 100})})
        return RecordDict()

    return answer


def but(client: str, kind: str, other: Answer, architecture: str = ARCHITECTURE) -> Answer:
    """A client that does all it is asked but one thing."""
    usual = fit(client, architecture)

    def answer(message: Message) -> RecordDict | Error | None:
        return other(message) if message.metadata.message_type == kind else usual(message)

    return answer


def joined(grid: NodesGrid, config: RunConfig, folder: Path, stored: Iterable[str] = ()) -> Members:
    (folder / "payloads").mkdir(exist_ok=True)
    return join(grid, config, Status(folder), list(stored))  # type: ignore[arg-type]


def collected(grid: NodesGrid, config: RunConfig, members: Members, folder: Path) -> set[str]:
    expected = expected_payload(config, "job")
    payloads = collect(
        grid,  # type: ignore[arg-type]
        config,
        "job",
        members,
        RunFolder(folder),
        Status(folder),
        expected,
    )
    assert payloads.keys() == {file.stem for file in (folder / "payloads").glob("*.pb")}
    return set(payloads)


def slow_upload(grid: NodesGrid, node: int, event: threading.Event) -> None:
    grid.uploads[node] = event


# Deadlines


@pytest.mark.slow
def test_a_slow_upload_holds_up_neither_the_others_nor_the_deadline(
    tmp_path: Path, stuck: threading.Event
) -> None:
    """And what it brings after the deadline is dropped for good."""
    config = settings(num_clients=3, min_clients=2, deadline=2.5)
    grid = NodesGrid({n: fit(f"client-{n}") for n in range(3)})
    members = joined(grid, config, tmp_path)
    slow_upload(grid, 0, stuck)
    began = time.monotonic()
    clock = time.time()
    assert collected(grid, config, members, tmp_path) == {"client-1", "client-2"}
    assert 2.5 <= time.monotonic() - began < 2.5 + TIGHT
    for name in ("client-1", "client-2"):
        stored = tmp_path / "payloads" / f"{name}.pb"
        assert stored.stat().st_mtime - clock < 2.5
    assert set(grid.asked("query.acknowledge")) == {1, 2}
    stuck.set()
    time.sleep(0.2)
    assert not (tmp_path / "payloads" / "client-0.pb").exists()


@pytest.mark.parametrize(("limit", "calls"), [(1, 3), (2**24, 0)])
def test_small_payloads_share_the_release_of_memory(
    limit: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr("server_app.federation.collect.RELEASE_BYTES", limit)
    monkeypatch.setattr("server_app.federation.collect.release_memory", lambda: released.append(1))
    config = settings(num_clients=3, deadline=20.0)
    grid = NodesGrid({n: fit(f"client-{n}") for n in range(3)})
    members = joined(grid, config, tmp_path)
    assert len(collected(grid, config, members, tmp_path)) == 3
    assert len(released) == calls


def test_a_slow_upload_that_comes_in_time_is_used(tmp_path: Path, stuck: threading.Event) -> None:
    config = settings(num_clients=2, deadline=20.0)
    grid = NodesGrid({n: fit(f"client-{n}") for n in range(2)})
    members = joined(grid, config, tmp_path)
    slow_upload(grid, 0, stuck)
    threading.Timer(0.7, stuck.set).start()
    began = time.monotonic()
    assert collected(grid, config, members, tmp_path) == {"client-0", "client-1"}
    assert 0.7 <= time.monotonic() - began < 0.7 + TIGHT
    assert Counter(grid.asked("train")) == {0: 1, 1: 1}


@pytest.mark.slow
def test_an_upload_that_is_half_here_is_not_asked_for_anew(
    tmp_path: Path, stuck: threading.Event
) -> None:
    """The node was away: Flower goes on with the upload where it was cut."""
    config = settings(num_clients=1, deadline=20.0)
    grid = NodesGrid({0: fit("client-0")})
    members = joined(grid, config, tmp_path)
    slow_upload(grid, 0, stuck)
    threading.Timer(0.7, setattr, (grid, "online_since", "later")).start()
    threading.Timer(2.0, stuck.set).start()
    assert collected(grid, config, members, tmp_path) == {"client-0"}
    assert grid.asked("train") == [0]


def test_a_node_that_was_away_and_has_sent_nothing_is_asked_again(tmp_path: Path) -> None:
    config = settings(num_clients=1, deadline=20.0)
    usual = fit("client-0")

    def once_more(message: Message) -> RecordDict | Error | None:
        return usual(message) if len(grid.asked("train")) == 2 else None

    grid = NodesGrid({0: but("client-0", "train", once_more)})
    members = joined(grid, config, tmp_path)
    threading.Timer(0.5, setattr, (grid, "online_since", "later")).start()
    assert collected(grid, config, members, tmp_path) == {"client-0"}
    assert grid.asked("train") == [0, 0]


CRASH = Error(ErrorCode.CLIENT_APP_CRASHED, "the app died")
AWAY = Error(ErrorCode.NODE_UNAVAILABLE, "away")


@pytest.mark.parametrize(
    ("errors", "is_used"),
    [
        ([CRASH], True),
        ([CRASH, AWAY], True),
        ([AWAY, CRASH, AWAY], True),
        ([AWAY, AWAY, AWAY], True),
        ([CRASH, CRASH], False),
        ([CRASH, AWAY, CRASH], False),
    ],
)
def test_only_crashes_count_as_attempts(errors: list[Error], is_used: bool, tmp_path: Path) -> None:
    """The second crash is final."""
    config = settings(num_clients=2, min_clients=1, deadline=20.0)
    usual = fit("client-0")
    left = list(errors)
    failing = but("client-0", "train", lambda message: left.pop(0) if left else usual(message))
    grid = NodesGrid({0: failing, 1: fit("client-1")})
    members = joined(grid, config, tmp_path)
    expected = {"client-0", "client-1"} if is_used else {"client-1"}
    assert collected(grid, config, members, tmp_path) == expected
    assert grid.asked("train").count(0) == len(errors) + is_used


@pytest.mark.slow
def test_a_slow_upload_does_not_hold_up_joining(tmp_path: Path, stuck: threading.Event) -> None:
    grid = NodesGrid({n: fit(f"client-{n}") for n in range(3)})
    slow_upload(grid, 0, stuck)
    began = time.monotonic()
    assert list(joined(grid, settings(num_clients=2), tmp_path).nodes) == ["client-1", "client-2"]
    assert time.monotonic() - began < TIGHT
    config = settings(num_clients=3, join_timeout=2.0)
    with pytest.raises(RoundError, match=r"2 of 3 .* within 2 s \(join.*\n  1 did not reply: 0$"):
        joined(grid, config, tmp_path)
    assert time.monotonic() - began < TIGHT + 2.0 + TIGHT


@pytest.mark.slow
def test_a_slow_upload_does_not_hold_up_the_test(tmp_path: Path, stuck: threading.Event) -> None:
    grid = NodesGrid({n: fit(f"client-{n}") for n in range(2)})
    slow_upload(grid, 1, stuck)
    nodes = {"client-0": 0, "client-1": 1}
    model = torch.nn.Linear(1, 1)
    (tmp_path / "tests").mkdir()
    began = time.monotonic()
    evaluate_on_clients(
        grid,  # type: ignore[arg-type]
        settings(test_timeout=1.5),
        EvaluationNodes(nodes),
        {"FT": GlobalModel(model, "none", True)},
        RunFolder(tmp_path),
        Status(tmp_path),
    )
    assert 1.5 <= time.monotonic() - began < 1.5 + TIGHT
    assert set(RunFolder(tmp_path).read_json("tests/FT.json")) == {"client-0"}


@pytest.mark.parametrize("tester", ["tests", "withholds"])
def test_a_test_only_client_does_not_hide_that_no_participant_tested(
    tmp_path: Path, tester: str
) -> None:
    withheld = RecordDict({"metrics": MetricRecord({WITHHELD: 1})})
    answers = {
        0: but("a", "evaluate", lambda _: Error(2, "ValueError: no")),
        1: but("t", "evaluate", lambda _: withheld) if tester == "withholds" else fit("t"),
    }
    (tmp_path / "tests").mkdir()
    with pytest.raises(RoundError, match="no client could test the global model FT"):
        evaluate_on_clients(
            NodesGrid(answers),  # type: ignore[arg-type]
            settings(),
            EvaluationNodes({"a": 0}, {"t": 1}),
            {"FT": GlobalModel(torch.nn.Linear(1, 1), "none", True)},
            RunFolder(tmp_path),
            Status(tmp_path),
        )


def test_a_node_that_was_asked_long_ago_is_not_awaited_before_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is awaited only while its request is new."""
    monkeypatch.setattr("server_app.federation.join.TESTER_SECONDS", 0.5)
    grid = NodesGrid({0: fit("a"), 1: but("b", "query.join", lambda _: None)})
    members = joined(grid, settings(num_clients=1), tmp_path)
    for shortest, longest in ((0.3, 2.0), (0.0, 0.2)):
        began = time.monotonic()
        members.await_testers()
        assert shortest < time.monotonic() - began < longest


def test_a_client_whose_payload_is_stored_may_join_before_the_tests(tmp_path: Path) -> None:
    """Such a client tests. A new client, and a second node of the same name, come too late."""
    grid = NodesGrid({0: fit("a"), 1: fit("b"), 2: fit("c"), 3: fit("b")})
    grid.online = {0}
    config = settings(num_clients=2, min_clients=1, join_timeout=1.0)
    members = joined(grid, config, tmp_path, stored=["a", "b"])
    assert members.test_nodes() == {"a": 0}
    grid.online = {0, 1, 2, 3}
    members.await_testers()
    assert members.test_nodes() == {"a": 0, "b": 1}
    assert members.failures == {3: "its client id 'b' is already used by another node"}
    members.leave("b")
    assert members.test_nodes() == {"a": 0}


@pytest.mark.slow
def test_a_client_whose_payload_is_stored_is_awaited_though_asked_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was asked, went away, and comes back once the run has begun to wait for it."""
    monkeypatch.setattr("server_app.federation.join.TESTER_SECONDS", 2.0)
    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 0.1)
    grid = NodesGrid({0: fit("a"), 1: but("b", "query.join", lambda _: None)})
    config = settings(num_clients=2, min_clients=1, join_timeout=2.0)
    members = joined(grid, config, tmp_path, stored=["a", "b"])
    assert members.test_nodes() == {"a": 0}
    grid.online = {0}
    time.sleep(2.1)

    def come_back() -> None:
        grid.online_since = "now"
        grid.answers[1] = fit("b")
        grid.online = {0, 1}

    threading.Timer(0.3, come_back).start()
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.2)
    members.await_testers()
    assert members.test_nodes() == {"a": 0, "b": 1}


def test_a_node_that_restarted_since_it_was_asked_is_awaited_before_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first SuperNode fetched the request, and ended before it replied."""
    monkeypatch.setattr("server_app.federation.join.TESTER_SECONDS", 0.5)
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.2)
    grid = NodesGrid({0: fit("a"), 1: but("b", "query.join", lambda _: None)})
    config = settings(num_clients=2, min_clients=1, join_timeout=1.0)
    members = joined(grid, config, tmp_path, stored=["a", "b"])
    assert members.test_nodes() == {"a": 0}
    time.sleep(0.5)
    grid.online_since = "now"
    lost = set(grid._asked)
    grid.answers[1] = but(
        "b", "query.join", lambda m: None if m.metadata.message_id in lost else fit("b")(m)
    )
    members.await_testers()
    assert members.test_nodes() == {"a": 0, "b": 1}


def test_a_node_that_went_offline_is_awaited_while_its_request_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower says that it is away, so that its request waits for its return."""
    monkeypatch.setattr("server_app.federation.join.TESTER_SECONDS", 0.8)
    gone = Error(ErrorCode.NODE_UNAVAILABLE, "gone")
    grid = NodesGrid({0: fit("a"), 1: but("b", "query.join", lambda _: gone)})
    members = joined(grid, settings(num_clients=1), tmp_path)
    grid.online = {0}
    for shortest, longest in ((0.2, 2.0), (0.0, 0.2)):
        began = time.monotonic()
        members.await_testers()
        assert shortest < time.monotonic() - began < longest


def test_what_the_server_prepares_is_no_quiet_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that joins soon afterwards is awaited, although enough payloads are stored."""
    monkeypatch.setattr("server_app.federation.join.QUIET_SECONDS", 0.6)
    monkeypatch.setattr(Members, "present", lambda members, stored: {"a", "b"})
    looks = itertools.count()
    slow = but("b", "query.join", lambda m: fit("b")(m) if next(looks) > 3 else None)
    grid = NodesGrid({0: slow})
    config = settings(num_clients=2, join_timeout=20.0)
    (tmp_path / "payloads").mkdir()
    members = join(
        grid,  # type: ignore[arg-type]
        config,
        Status(tmp_path),
        ["a", "b"],
        prepare=lambda: time.sleep(0.7),
    )
    assert members.nodes == {"b": 0}


def trained(message: Message) -> RecordDict:
    """A round's reply: the model as it was sent."""
    figures = {"num-examples": 30, "seconds": 1.0, "flops": 1e9, "peak_memory_mb": 500.0}
    model = message.content.array_records["model"]
    return RecordDict({"model": model, "metrics": MetricRecord(figures)})


def rounds_grid(grid: NodesGrid, config: RunConfig, members: Members) -> tuple[CheckedGrid, list]:
    """A grid for a strategy, and the messages of a first round."""
    like = build_classifier(ARCHITECTURE, 10, small_stem=True).state_dict()
    arrays = ArrayRecord({name: Array(value.numpy()) for name, value in like.items()})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    messages = [
        Message(content, dst_node_id=n, message_type="train") for n in members.nodes.values()
    ]
    between = CheckedGrid(grid, members, config, "job", 0, {ARCHITECTURE: like})  # type: ignore[arg-type]
    return between, messages


@pytest.mark.slow
def test_a_slow_upload_does_not_hold_up_a_round(tmp_path: Path, stuck: threading.Event) -> None:
    config = settings(method="fedavg", num_clients=2, min_clients=1, deadline=3.5, test_timeout=1.0)
    grid = NodesGrid({n: but(f"client-{n}", "train", trained) for n in range(2)})
    between, messages = rounds_grid(grid, config, joined(grid, config, tmp_path))
    slow_upload(grid, 1, stuck)
    for seconds in (3.5, 1.0):  # who missed a round is not waited for as long in the next
        began = time.monotonic()
        (reply,) = between.send_and_receive(messages)
        assert seconds <= time.monotonic() - began < seconds + TIGHT
        assert reply.metadata.dst_node_id == 0


def test_a_time_that_was_reached_is_named_and_no_other(
    tmp_path: Path, stuck: threading.Event
) -> None:
    config = settings(method="fedavg", num_clients=2, deadline=1.0, test_timeout=50.0)
    grid = NodesGrid({n: but(f"client-{n}", "train", trained) for n in range(2)})
    between, messages = rounds_grid(grid, config, joined(grid, config, tmp_path))
    slow_upload(grid, 1, stuck)
    with pytest.raises(RoundError, match=r"client-1: no model within 1 s \(deadline\)$"):
        between.send_and_receive(messages)
    refusing = NodesGrid({n: lambda _: Error(2, "ConfigError: no data") for n in range(2)})
    with pytest.raises(RoundError) as excinfo:
        joined(refusing, config, tmp_path)
    assert str(excinfo.value) == (
        "0 of 2 clients joined; at least 2 are required (min-clients, num-clients)"
        "\n  node 0: ConfigError: no data (code 2)\n  node 1: ConfigError: no data (code 2)"
    )


@pytest.mark.slow
def test_more_slow_uploads_than_threads_do_not_hold_up_the_phase(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies that are pulled before all threads are held are used; the threads are bounded."""
    monkeypatch.setattr(pulls, "SLOW_SECONDS", 0.02)
    grid = NodesGrid({n: fit(f"client-{n}") for n in range(MAX_THREADS + 40)})
    for node in range(1, MAX_THREADS + 40):
        slow_upload(grid, node, stuck)
    began = time.monotonic()
    with pytest.raises(RoundError, match="1 of 500 .* within 2 s.*\n  103 did not reply: "):
        joined(grid, settings(num_clients=500, join_timeout=2.0), tmp_path)
    assert 2.0 <= time.monotonic() - began < 2.0 + TIGHT
    pull_threads = [thread for thread in threading.enumerate() if "_pull" in thread.name]
    assert len(pull_threads) == MAX_THREADS


def test_large_replies_are_pulled_together_only_as_memory_allows(stuck: threading.Event) -> None:
    grid = SimpleNamespace(pull_messages=lambda names: stuck.wait() and [])

    def at_once(largest: float) -> int:
        pull_pool = Pulls(grid, largest)  # type: ignore[arg-type]
        while pull_pool.room():
            pull_pool.start(str(len(pull_pool._started)))
            for name in pull_pool._started:
                pull_pool._started[name] -= 2 * pulls.SLOW_SECONDS
        return len(pull_pool._started)

    assert (at_once(1e15), at_once(0)) == (pulls.MAX_CONCURRENT_REQUESTS, MAX_THREADS)


def test_the_run_sets_the_largest_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload `max-payload-mb`, a round's model as many bytes as the run's."""
    sizes = []

    def recorded(grid: Grid, largest: float) -> Pulls:
        sizes.append(largest)
        return Pulls(grid, largest)

    monkeypatch.setattr("server_app.federation.exchange.Pulls", recorded)
    config = settings(num_clients=1, max_payload_mb=7.0)
    grid = NodesGrid({0: fit("a")})
    members = joined(grid, config, tmp_path)
    collected(grid, config, members, tmp_path)
    assert max(sizes) == 7e6
    grid.answers[0] = but("a", "train", trained)
    config = settings(method="fedavg", num_clients=1)
    members = joined(grid, config, tmp_path)
    sizes.clear()
    between, messages = rounds_grid(grid, config, members)
    between.send_and_receive(messages)
    assert sizes == [sum(value.nbytes for value in between.state_templates[ARCHITECTURE].values())]


def test_without_slow_nodes_few_are_pulled_at_once(stuck: threading.Event) -> None:
    pull_pool = Pulls(SimpleNamespace(pull_messages=lambda names: stuck.wait() and []))  # type: ignore[arg-type]
    for number in range(pulls.MAX_CONCURRENT_REQUESTS):
        assert pull_pool.room()
        pull_pool.start(str(number))
    assert not pull_pool.room()


@pytest.mark.slow
def test_a_stuck_pull_does_not_keep_the_process() -> None:
    """Nor does it speak up later: the process ends as if it were not there."""
    code = (
        "import threading, types\n"
        "from server_app.federation.pulls import Pulls\n"
        "grid = types.SimpleNamespace(pull_messages=lambda names: threading.Event().wait())\n"
        "Pulls(grid).start('m')\n"
        "print('done')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_phase_that_is_over_keeps_nothing_that_comes_later(stuck: threading.Event) -> None:
    grid = SimpleNamespace(pull_messages=lambda names: stuck.wait() and ["a large reply"])
    over = Pulls(grid)  # type: ignore[arg-type]
    over.start("m")
    over.end()
    stuck.set()
    time.sleep(0.1)
    assert not over._results


def test_a_rest_ends_with_the_phase_or_with_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long silence it would be ten seconds."""
    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 1.0)
    grid = SimpleNamespace(pull_messages=lambda names: time.sleep(0.2) or [])
    # type: ignore[arg-type]
    exchange = Exchange(grid, 10.0, _last_reply=-1e6)
    began = time.monotonic()
    exchange.wait(began + 0.3)
    assert 0.3 <= time.monotonic() - began < 0.3 + TIGHT
    exchange._pulls.start("m")
    exchange.wait(began + 100)
    assert time.monotonic() - began < 0.3 + TIGHT + TIGHT


@pytest.mark.slow
def test_acknowledgements_do_not_outlast_the_deadline(tmp_path: Path) -> None:
    """A client is gone when its payload is here; another is silent."""
    config = settings(num_clients=2, min_clients=1, deadline=1.5)
    grid = NodesGrid({0: fit("gone"), 1: but("mute", "train", lambda _: None)})
    train = grid.answers[0]

    def go(message: Message) -> RecordDict | Error | None:
        if message.metadata.message_type == "train":
            grid.online.discard(0)
        return train(message)

    grid.answers[0] = go
    members = joined(grid, config, tmp_path)
    began = time.monotonic()
    assert collected(grid, config, members, tmp_path) == {"gone"}
    assert 1.5 <= time.monotonic() - began < 1.5 + 2.0 + TIGHT
    assert grid.asked("query.acknowledge") == []


# Spares


@pytest.mark.slow
def test_two_of_five_hundred_nodes_are_eligible(tmp_path: Path, stuck: threading.Event) -> None:
    """The others refuse, are silent, upload for ever, talk nonsense, or are of another version."""
    old = ConfigRecord({"client": "old", "version": "0.0.1"})
    unfit: list[Answer] = [
        lambda _: Error(2, "ConfigError: no kit"),
        lambda _: None,
        lambda _: RecordDict(),
        lambda _: RecordDict({"join": old}),
        lambda _: RecordDict({"join": ConfigRecord({"client": "../x", "version": "1"})}),
    ]
    answers = {n: unfit[n % len(unfit)] for n in range(498)}
    grid = NodesGrid({**answers, 498: fit("client-a"), 499: fit("client-b")})
    for node in range(2, 498, 50):
        slow_upload(grid, node, stuck)
    config = settings(num_clients=2, join_timeout=60.0)
    began = time.monotonic()
    members = joined(grid, config, tmp_path)
    assert members.nodes == {"client-a": 498, "client-b": 499}
    assert time.monotonic() - began < 15.0
    assert grid.looks < 20  # not one for each message
    assert collected(grid, config, members, tmp_path) == {"client-a", "client-b"}
    assert grid.asked("train") == [498, 499]


@pytest.mark.parametrize(
    "bad",
    [
        lambda _: Error(2, "ValueError: no"),
        lambda _: Error(8, "the app died"),
        lambda _: pack_payload(b"nonsense", dict.fromkeys(COST_KEYS, 1.0)),
        lambda _: RecordDict(),
    ],
    ids=["raised", "died", "refused", "empty"],
)
def test_a_standby_client_replaces_a_failed_one(tmp_path: Path, bad: Answer) -> None:
    config = settings(num_clients=2)
    answers = {0: but("client-0", "train", bad), 1: fit("client-1"), 2: fit("client-2")}
    grid = NodesGrid(answers)
    members = joined(grid, config, tmp_path)
    assert (list(members.nodes), members.standby()) == (["client-0", "client-1"], ["client-2"])
    assert collected(grid, config, members, tmp_path) == {"client-1", "client-2"}
    assert members.nodes == {"client-1": 1, "client-2": 2}


@pytest.mark.slow
def test_a_standby_client_that_joins_late_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client was silent when two others joined; when one of them fails, its answer is heard.
    Meanwhile the log says once what is awaited.
    """
    config = settings(num_clients=2, join_timeout=20.0)
    late = []
    answers = {
        0: but("client-0", "train", lambda _: Error(2, "ValueError: no")),
        1: fit("client-1"),
        2: but("late", "query.join", lambda m: fit("late")(m) if late else None),
    }
    grid = NodesGrid(answers)
    members = joined(grid, config, tmp_path)
    threading.Timer(2.5, late.append, [True]).start()
    assert collected(grid, config, members, tmp_path) == {"client-1", "late"}
    lines = [line for line in caplog.messages if "waiting up to" in line]
    assert len(lines) == 1
    assert (
        "s (join-timeout) for another in its place. Asked to join, but silent: node 2" in lines[0]
    )


def test_without_standby_clients_a_failed_one_is_missing(tmp_path: Path) -> None:
    answers = {0: but("client-0", "train", lambda _: Error(2, "ValueError: no")), 1: fit("b")}
    grid = NodesGrid(answers)
    config = settings(num_clients=2)
    members = joined(grid, config, tmp_path)
    with pytest.raises(RoundError, match=r"1 of 2 clients delivered .*\n  client-0: ValueError"):
        collected(grid, config, members, tmp_path)
    again = settings(num_clients=2, min_clients=1)
    assert collected(grid, again, joined(grid, config, tmp_path), tmp_path) == {"b"}


def test_no_failed_client_is_asked_again(tmp_path: Path) -> None:
    config = settings(num_clients=2, min_clients=1)

    def bad(_: object) -> Error:
        return Error(2, "ValueError: no")

    answers = {n: but(f"client-{n}", "train", bad) for n in (0, 2)}
    grid = NodesGrid({**answers, 1: fit("client-1")})
    members = joined(grid, config, tmp_path)
    assert collected(grid, config, members, tmp_path) == {"client-1"}
    assert grid.asked("train") == [0, 1, 2]


def test_a_client_id_is_taken_once(tmp_path: Path) -> None:
    grid = NodesGrid({0: fit("a"), 1: fit("a"), 2: fit("b")})
    members = joined(grid, settings(num_clients=2), tmp_path)
    assert list(members.nodes) == ["a", "b"]
    with pytest.raises(RoundError, match="2 of 3 .*\n.*client id 'a' is already used by another"):
        joined(grid, settings(num_clients=3), tmp_path)


def test_a_client_id_must_be_its_keys_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three keys have names: b's calls itself a, and the third has none and calls itself b.
    A key without a name may have any client id that no key has.
    """
    grid = NodesGrid({0: fit("a"), 1: fit("a"), 2: fit("b"), 3: fit("c")})
    grid.names = {0: "a", 1: "b"}
    members = joined(grid, settings(num_clients=2), tmp_path)
    assert members.nodes == {"a": 0, "c": 3}
    assert (
        "key is registered as 'b', but its client id is 'a'; set client-id" in members.failures[1]
    )
    assert "client id 'b' is the name of another node's key" in members.failures[2]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(", so")[0] for line in warned] == ["c: its key has no name"]
    # There is no warning where no key has a name
    caplog.clear()
    grid = NodesGrid({0: fit("a")})
    joined(grid, settings(num_clients=1), tmp_path)
    assert "no name" not in caplog.text


def test_a_key_whose_name_is_no_client_id_is_refused(tmp_path: Path) -> None:
    grid = NodesGrid({0: fit("a")})
    grid.names = {0: "Ward 7\x1b[31m"}
    with pytest.raises(
        RoundError, match=r"its key is registered as 'Ward 7.*client id is 'a'"
    ) as e:
        joined(grid, settings(num_clients=1), tmp_path)
    assert "\x1b" not in str(e.value)


def test_a_keys_owner_replaces_the_client_with_its_name(tmp_path: Path) -> None:
    """The owner comes online while the run waits, and who was taken for it before is out."""
    grid = NodesGrid({0: fit("b"), 1: fit("b"), 2: fit("a")})
    grid.names = {1: "b"}
    grid.online = {0}
    config = settings(num_clients=2)
    status = Status(tmp_path)
    members = Members(grid, config, status)  # type: ignore[arg-type]
    members.poll(time.monotonic() + 1)
    assert members.joined == {"b": 0}
    grid.online = {0, 1, 2}
    members.poll(time.monotonic() + 1)
    assert members.joined == {"b": 1, "a": 2}
    assert "client id 'b' is the name of another node's key" in members.failures[0]


def test_a_held_out_client_is_not_replaced_and_an_owner_gets_its_place(tmp_path: Path) -> None:
    """t is to test; b failed under its name, and a spare took its place."""
    config = settings(num_clients=2, held_out="t")
    grid = NodesGrid({0: fit("t"), 1: fit("a"), 2: fit("t")})
    grid.names = {2: "t"}
    grid.online = {0, 1}
    members = joined(grid, config, tmp_path)
    assert members.held_out_clients == {"t": 0}
    grid.online = {0, 1, 2}
    members.poll(time.monotonic() + 1)
    assert members.joined["t"] == 0
    assert "already used" in members.failures[2]

    grid = NodesGrid({0: fit("b"), 1: fit("c"), 2: fit("b")})
    grid.names = {2: "b"}
    grid.online = {0, 1}
    members = joined(grid, settings(num_clients=1), tmp_path)
    assert members.nodes == {"b": 0}
    members.admit("c", "b")
    grid.online = {0, 1, 2}
    members.poll(time.monotonic() + 1)
    assert members.joined["b"] == 2
    assert members.standby() == ["b"]


def test_a_working_client_is_not_replaced(tmp_path: Path) -> None:
    """Nor is a node with a name, by another of the same name."""
    grid = NodesGrid({0: fit("b"), 1: fit("b")})
    grid.names = {1: "b"}
    grid.online = {0}
    members = joined(grid, settings(num_clients=1), tmp_path)
    assert members.nodes == {"b": 0}
    grid.online = {0, 1}
    members.poll(time.monotonic() + 1)
    assert members.joined == {"b": 0}
    assert "client id 'b' is already used by another node" in members.failures[1]
    twice = NodesGrid({0: fit("b"), 1: fit("b"), 2: fit("a")})
    twice.names = {0: "b", 1: "b"}
    members = joined(twice, settings(num_clients=2), tmp_path)
    assert members.nodes == {"a": 2, "b": 0}


def test_a_standby_client_takes_over_within_a_round(tmp_path: Path) -> None:
    config = settings(method="fedavg", num_clients=2)
    answers = {n: but(f"client-{n}", "train", trained) for n in range(3)}
    answers[0] = but("client-0", "train", lambda _: Error(2, "ValueError: no"))
    grid = NodesGrid(answers)
    members = joined(grid, config, tmp_path)
    between, messages = rounds_grid(grid, config, members)
    replies = between.send_and_receive(messages)
    assert [reply.metadata.dst_node_id for reply in replies] == [1, 2]
    assert list(between.get_node_ids()) == [1, 2]
    assert between.costs["client-2"]["download_bytes"] > 0


@pytest.mark.parametrize("method", ["prompts-domain", "fedavg"])
def test_a_standby_client_replaces_a_node_that_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The node was asked, and is offline from then on; its place is not kept until the deadline."""
    monkeypatch.setattr("server_app.federation.exchange.OFFLINE_SECONDS", 0.5)
    config = settings(method=method, num_clients=2, deadline=60.0)

    def leaves(_: Message) -> None:
        grid.online.discard(0)

    work = trained if method == "fedavg" else None
    answers = {n: but(f"client-{n}", "train", work or fit(f"client-{n}")) for n in range(3)}
    grid = NodesGrid({**answers, 0: but("client-0", "train", leaves)})
    members = joined(grid, config, tmp_path)
    began = time.monotonic()
    if method == "fedavg":
        between, messages = rounds_grid(grid, config, members)
        replies = between.send_and_receive(messages)
        assert [reply.metadata.dst_node_id for reply in replies] == [1, 2]
    else:
        assert collected(grid, config, members, tmp_path) == {"client-1", "client-2"}
    assert 0.5 < time.monotonic() - began < 20.0
    assert list(members.nodes) == ["client-1", "client-2"]


def test_a_node_that_is_away_keeps_its_place_without_standby_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And delivers when it is back; a SuperLink that names nobody for a while is no absence."""
    monkeypatch.setattr("server_app.federation.exchange.OFFLINE_SECONDS", 0.2)
    config = settings(num_clients=2, deadline=60.0)
    calls: list[float] = []

    def away_then_back(message: Message) -> RecordDict | None:
        calls.append(time.monotonic())
        if calls[-1] - calls[0] < 1.0:
            grid.online.discard(0)
            return None
        grid.online.add(0)
        return fit("client-0")(message)

    grid = NodesGrid({0: but("client-0", "train", away_then_back), 1: fit("client-1")})
    members = joined(grid, config, tmp_path)
    assert collected(grid, config, members, tmp_path) == {"client-0", "client-1"}


def test_no_node_is_away_while_the_superlink_lists_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_app.federation.exchange.OFFLINE_SECONDS", 0.2)
    config = settings(num_clients=2, deadline=60.0)
    first: list[float] = []

    def slow(message: Message) -> RecordDict | None:
        first.append(time.monotonic())
        if first[-1] - first[0] < 1.0:
            grid.online.clear()
            return None
        grid.online.update(range(3))
        return fit("client-0")(message)

    grid = NodesGrid({0: but("client-0", "train", slow), 1: fit("client-1"), 2: fit("client-2")})
    members = joined(grid, config, tmp_path)
    assert collected(grid, config, members, tmp_path) == {"client-0", "client-1"}


def test_an_outlying_model_of_a_round_is_reported_once(tmp_path: Path) -> None:
    """And used, as payloads are: an honest client may be an exception."""
    config = settings(method="fedavg", num_clients=3)

    def scaled(message: Message) -> RecordDict:
        state = unpack_state(message.content.array_records["model"], 10_000)
        larger = {**state, "fc.weight": state["fc.weight"] * 1000}
        reply = trained(message)
        reply["model"] = pack_state(larger)
        return reply

    answers = {n: but(f"client-{n}", "train", trained) for n in range(2)}
    grid = NodesGrid({**answers, 2: but("client-2", "train", scaled)})
    between, messages = rounds_grid(grid, config, joined(grid, config, tmp_path))
    warnings: list[list[str]] = []
    between.warn = warnings.append
    for _ in range(2):
        assert len(between.send_and_receive(messages)) == 3
    assert len(warnings) == 1
    assert len(warnings[0]) == 1
    assert warnings[0][0].startswith("round 1: client-2: part of its payload is 1e+03 times larger")


def test_a_standby_client_of_another_architecture_takes_over_with_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client joins when FedDF's round has begun, and no other client has its architecture."""
    shuffle = "shufflenet_v2_x0_5"
    mobile = "mobilenet_v3_small"
    model_settings = {"architecture": f"{shuffle},{mobile}", "init": "none"}
    config = settings(
        method="feddf",
        num_clients=2,
        global_model__init="none",
        **{f"classifier__{key}": value for key, value in model_settings.items()},
    )
    sent: list[object] = []

    def late(message: Message) -> RecordDict:
        sent.append(message.content.config_records["config"]["architecture"])
        return trained(message)

    def fails(message: Message) -> Error:
        grid.online.add(2)
        return Error(2, "ValueError: no")

    grid = NodesGrid(
        {
            0: but("client-0", "train", fails, shuffle),
            1: but("client-1", "train", trained, shuffle),
            2: but("client-2", "train", late, mobile),
        }
    )
    grid.online.discard(2)
    members = joined(grid, config, tmp_path)
    assert members.architectures == {"client-0": shuffle, "client-1": shuffle}
    job = ServerJob(
        config, RunFolder(tmp_path), Status(tmp_path), tuple(members.nodes), members.architectures
    )
    students: list[torch.nn.Module] = []
    teachers: list[torch.nn.Module] = []
    monkeypatch.setattr(
        feddf, "distill", lambda all_, by, *_: (students.extend(all_), teachers.extend(by))
    )
    strategy = feddf.FedDF(job, torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    initial = initial_state(job, config.global_model)
    arrays = ArrayRecord({name: Array(value.numpy()) for name, value in initial.items()})
    between = CheckedGrid(grid, members, config, "job", 0, _shapes(job))  # type: ignore[arg-type]
    messages = strategy.configure_train(1, arrays, ConfigRecord(), between)  # type: ignore[arg-type]
    replies = between.send_and_receive(messages)
    assert sent == [mobile]
    assert list(members.nodes) == ["client-1", "client-2"]
    assert members.architectures["client-2"] == mobile
    strategy.aggregate_train(1, replies)
    assert [type(teacher).__name__ for teacher in teachers] == ["ShuffleNetV2", "MobileNetV3"]
    # The server's own has an architecture that is none of the clients'
    assert [type(student).__name__ for student in students] == [
        "MobileNetV3",
        "ShuffleNetV2",
        "ShuffleNetV2",
    ]


def test_clients_whose_payload_is_stored_keep_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are faster, but only one place is free; who is gone is expected for some seconds."""
    monkeypatch.setattr("server_app.federation.join.QUIET_SECONDS", 0.5)
    looks = itertools.count()
    began = time.monotonic()
    slow = but("a", "query.join", lambda m: fit("a")(m) if next(looks) > 3 else None)
    grid = NodesGrid({0: fit("b"), 1: fit("c"), 2: fit("d"), 3: slow})
    config = settings(num_clients=3, join_timeout=20.0)
    members = joined(grid, config, tmp_path, stored=["a", "z"])
    assert (list(members.nodes), members.standby()) == (["a", "b"], ["c", "d"])
    assert 0.5 < time.monotonic() - began < 10.0


# Whatever a reply raises


class StrangeError(Exception):
    """No list has it."""


EXCEPTIONS = [
    StrangeError("x"),
    OSError(28, "x"),
    AssertionError("x"),
    RecursionError("x"),
    ZeroDivisionError("x"),
    StopIteration("x"),
    EOFError("x"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "x"),
    MemoryError("x"),
    NotImplementedError("x"),
]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["pulled", "read"])
def test_whatever_a_reply_raises_is_its_nodes_failure(where: str, error: Exception) -> None:
    grid = NodesGrid({1: fit("one"), 2: fit("two")})

    def strange(message: Message) -> RecordDict:
        raise error

    def read(node: int, content: RecordDict) -> int:
        if node == 1 and where == "read":
            raise error
        return node

    if where == "pulled":
        grid.answers[1] = strange
    # type: ignore[arg-type]
    exchange = Exchange(grid, 10.0)
    contents = []
    failures = {}
    for node in (1, 2):
        exchange.push(node, "train", RecordDict())
    assert exchange.pull(read, lambda node, it: contents.append(it), failures.__setitem__) == 0
    assert (contents, list(failures)) == ([2], [1])
    assert type(error).__name__ in failures[1]


@pytest.mark.parametrize("error", [StrangeError("x"), OSError(5, "the disk is broken")])
def test_a_payload_that_cannot_be_decoded_is_its_clients_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever decoding raises, unless it is the disk."""
    decode = wire.decode

    def strange(blob: bytes, limits: wire.Expected, sha256: str) -> object:
        if limits.client == "a":
            raise error
        return decode(blob, limits, sha256)

    monkeypatch.setattr(wire, "decode", strange)
    grid = NodesGrid({0: fit("a"), 1: fit("b")})
    config = settings(num_clients=2, min_clients=1)
    members = joined(grid, config, tmp_path)
    if isinstance(error, OSError):
        with pytest.raises(OSError, match="the disk is broken"):
            collected(grid, config, members, tmp_path)
    else:
        assert collected(grid, config, members, tmp_path) == {"b"}
        assert (tmp_path / "payloads" / "a.pb.refused").exists()


def test_a_failure_of_this_machine_ends_the_run() -> None:
    """A full disk is nobody's failure but its own."""
    exchange = Exchange(NodesGrid({1: fit("one")}), 10.0)  # type: ignore[arg-type]
    exchange.push(1, "train", RecordDict())

    def full(node: int, it: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        exchange.pull(lambda node, content: content, full, pytest.fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_end_of_the_process_is_no_nodes_failure(error: type[BaseException]) -> None:
    def ending(message: Message) -> RecordDict:
        raise error

    exchange = Exchange(NodesGrid({1: ending}), 10.0)  # type: ignore[arg-type]
    exchange.push(1, "train", RecordDict())
    with pytest.raises(error):
        exchange.pull(lambda node, content: content, pytest.fail, pytest.fail)


def test_a_superlink_that_is_not_reached_is_asked_again() -> None:
    """And no node is blamed."""
    tries = iter(range(3))
    request = httpx.Request("POST", "https://x/v1/runtime/pull-messages")

    def refused(message: Message) -> RecordDict:
        if next(tries, None) is not None:
            raise httpx.ConnectError("Connection refused", request=request)
        return RecordDict()

    grid = NodesGrid({1: refused})
    contents = []
    exchange = Exchange(grid, 10.0)  # type: ignore[arg-type]
    exchange.push(1, "train", RecordDict())
    for _ in range(4):
        owed = exchange.pull(lambda node, it: it, lambda *it: contents.append(it), pytest.fail)
    assert (owed, len(contents), grid.asked("train")) == (0, 1, [1])


def test_the_text_of_a_reply_is_bounded() -> None:
    """50 MB of a client's error are one short line."""
    reasons: dict[int, str] = {}
    answers = {
        1: lambda _: Error(2, 50_000_000 * "x" + "\nValueError: what to do"),
        2: lambda _: Error(2, ""),
        3: fit("three"),
        4: lambda _: Error(2, "\n" + 50_000_000 * "x"),
    }
    exchange = Exchange(NodesGrid(answers), 10.0)  # type: ignore[arg-type]
    for node in answers:
        exchange.push(node, "train", RecordDict())

    def read(node: int, content: RecordDict) -> None:
        raise InvalidReplyError(10_000 * "y")

    exchange.pull(read, pytest.fail, reasons.__setitem__)
    assert reasons[1] == "ValueError: what to do (code 2)"
    assert reasons[2] == "no reason given (code 2)"
    assert all(0 < len(reason) < 1100 for reason in reasons.values())


def pulled_over_the_wire(array: Array, largest: float, **records: Any) -> dict[int, str]:
    """The failures when a reply with it is put together as Flower does, from its objects."""
    reply = RecordDict({"payload": ArrayRecord({"0000": array}), **records})
    with no_object_id_recompute():
        name = reply.object_id
        objects = get_all_nested_objects(reply)
        contents = {object_id: entry.deflate() for object_id, entry in objects.items()}
    again = lambda names: [  # noqa: E731
        SimpleNamespace(
            has_error=lambda: False, content=inflate_object_from_contents(name, dict(contents))
        )
    ]
    grid = SimpleNamespace(push_messages=lambda _: ["m"], get_nodes=list, pull_messages=again)
    # type: ignore[arg-type]
    exchange = Exchange(grid, 10.0, largest=largest)
    failures = {}
    exchange.push(1, "train", RecordDict())

    def keep(node: int, content: RecordDict) -> None:
        (reply_array,) = content.array_records["payload"].values()
        assert reply_array.data == array.data

    exchange.pull(lambda node, content: content, keep, failures.__setitem__)
    return failures


def test_an_array_that_would_grow_is_refused_before_it_is_built() -> None:
    """100 MB of zeros travel as one chunk of 5 MB."""
    zeros = Array(dtype="uint8", shape=(10**8,), stype="osfl.payload.v1", data=bytes(10**8))
    assert pulled_over_the_wire(zeros, largest=10**8) == {}
    tracemalloc.start()
    failures = pulled_over_the_wire(zeros, largest=10**7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert failures == {
        1: "its reply to train cannot be read: ValueError: its arrays exceed the size limit of a "
        "reply"
    }
    assert peak < 5e7


@pytest.mark.parametrize(
    ("kind", "value"), [(ConfigRecord, ""), (MetricRecord, 1.0), (ConfigRecord, ["", ""])]
)
def test_records_that_would_grow_are_refused_before_they_are_built(
    kind: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small item takes a dozen bytes, and hundreds in memory; all records share the limit."""
    monkeypatch.setattr(counted, "MAX_RECORD_BYTES", 2**15)
    array = Array(dtype="uint8", shape=(9,), stype="osfl.payload.v1", data=bytes(9))
    records = {
        name: kind({f"{name}{number:04x}": value for number in range(1000)}) for name in "abc"
    }
    assert pulled_over_the_wire(array, 10.0, a=records["a"]) == {}
    built = []
    monkeypatch.setattr(kind, "inflate", lambda *_: built.append(kind) or kind({}))
    assert pulled_over_the_wire(array, 10.0, **records) == {
        1: "its reply to train cannot be read: ValueError: its records exceed the size limit of a "
        "reply"
    }
    assert len(built) < 3


def test_the_matrix_of_a_thousand_classes_is_within_the_limit() -> None:
    array = Array(dtype="uint8", shape=(9,), stype="osfl.payload.v1", data=bytes(9))
    cells = MetricRecord({"confusion": [1] * 10**6})
    assert pulled_over_the_wire(array, 10.0, metrics=cells) == {}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Exception ClientAppException occurred. Message: a.jpg: cut. Remove it'>", "a.jpg: cut."),
        ("<class 'osfl.models.E'>:<'init = '/x' does not fit: 'conv1' more'>", "init = '/x' does"),
        ("<class 'osfl.E'>:<\"it's lost\">", "it's lost"),
        ("plain words", "plain words"),
    ],
)
def test_a_clients_words_lose_flowers(said: str, words: str) -> None:
    reason = _reason(f"Traceback\n  {said}", 2)
    assert reason.startswith(words)
    assert reason.endswith(" (code 2)")
    assert "ClientAppException" not in reason
    assert ">" not in reason
