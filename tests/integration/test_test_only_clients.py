"""Clients whose own site only tests (`role = "test"`): they train nothing and take no place."""

import io
import json
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from rich.console import Console

from client_app.app import app
from client_app.errors import PublicConfigError
from osfl.cli import display
from osfl.config import parse_run_config
from osfl.models import classifiers
from osfl.run_folder.events import FollowedRun
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers import analytic_classifier
from tests.helpers.image_folders import grey
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "build_classifier", analytic_classifier.build)


@pytest.fixture
def sites(home: Path) -> list[dict[str, Any]]:
    """Two sites, and a regulator with test images alone, of which the model sees cats in half."""
    for name in ("a", "b"):
        for split in ("train", "test"):
            for number in range(4):
                grey(home / name / split / "cat" / f"{number}.png", 200 + number)
                grey(home / name / split / "dog" / f"{number}.png", number)
    for number in range(3):
        grey(home / "regulator" / "test" / "cat" / f"{number}.png", 210 + number)
    names = ("a", "b", "regulator")
    nodes: list[dict[str, Any]] = [
        {"client-id": name, "data-dir": str(home / name)} for name in names
    ]
    nodes[2]["role"] = "test"
    return nodes


def run_config(**settings: Any) -> dict[str, Any]:
    defaults = {
        "method": "fedavg",
        "data__name": "folder",
        "data__classes": "cat,dog",
        "classifier__init": "none",
        "classifier__lr": 0.3,
        "global_model__init": "none",
        "rounds__count": 1,
    }
    return quick(**{**defaults, **settings})


def messages(grid: LoopGrid, kind: str) -> list[int]:
    return [node for node, sent in grid.sent if sent == kind]


def run(grid: LoopGrid, config: dict[str, Any]) -> None:
    run_job(grid, parse_run_config(config), "job")


def test_a_test_only_client_tests_beside_the_others(
    home: Path,
    sites: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client is asked for no model of its own, its figures are apart, and the log has them."""
    caplog.set_level("INFO")
    config = run_config(personalization__steps=2, local_baseline=True)
    grid = LoopGrid(app, config, sites)
    run(grid, config)
    assert sorted(messages(grid, "train")) == [0, 1]
    assert messages(grid, "evaluate") == [0, 1, 2, *[0, 1] * 2]
    result = metrics(home)
    assert set(result["clients"]) == {"a", "b"}
    for row in result["accuracy"].values():
        assert set(row) == {"a", "b", "average"}
    ((name, tests),) = result["test_only"].items()
    assert (name, tests["images"]) == ("regulator", 3)
    assert set(tests["accuracy"]) == {"fedavg"}
    assert result["not_tested"] == []
    assert "% of a test-only client's" in result["summary"]
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "<b>regulator only tests</b>" in page
    # A template engine that trims lines joins sentences
    assert not re.search(r"\.(?:A|The|It|Each|Beside) ", page)
    followed = FollowedRun()
    for record in caplog.records:
        followed.read(f"INFO :      {record.getMessage()}")
    assert followed.metrics["test_only"] == {"regulator": {"accuracy": tests["accuracy"]}}
    assert set(followed.metrics["gain"]["clients"]) == {"a", "b"}
    # The terminal of a remote run shows what that of a local one does
    shown = []
    for figures in (result, followed.metrics):
        text = io.StringIO()
        monkeypatch.setattr(display, "console", Console(file=text, width=150))
        display.print_metrics(figures)
        shown.append(text.getvalue())
    assert shown[0] == shown[1]
    row = result["gain"]["clients"]["a"]
    line = next(line for line in shown[0].splitlines() if line.startswith("│ a "))
    assert line.split("│")[2].strip() == f"{row['local']:.1f}"
    assert line.split("│")[-2].strip().startswith(f"{row['points']:+.1f} ({row['low']:.1f} to ")
    assert "regulator only tests: fedavg " in shown[0]
    # Repeated without it, the run has none of its figures
    grid = LoopGrid(app, config, sites[:2])
    run(grid, config)
    assert metrics(home)["test_only"] == {}


def test_a_test_only_client_takes_no_place(home: Path, sites: list[dict[str, Any]]) -> None:
    config = run_config(num_clients=3, join_timeout=1.0)
    with pytest.raises(RoundError, match="2 of 3 clients joined"):
        run(LoopGrid(app, config, sites), config)


def test_a_test_only_client_replaces_none_that_is_awaited(
    home: Path, sites: list[dict[str, Any]]
) -> None:
    """One of three sites is broken, and two more come later: the run waits for them."""

    class Late(LoopGrid):
        polls = 0

        def get_nodes(self) -> Iterable[NodeInfo]:
            self.polls += 1
            return [*super().get_nodes()][: 3 if self.polls < 4 else 5]

    broken = {"client-id": "broken", "data-dir": str(home / "nowhere")}
    shutil.copytree(home / "b", home / "c")
    third = {"client-id": "c", "data-dir": str(home / "c")}
    config = run_config(num_clients=3)
    run(Late(app, config, [sites[0], broken, sites[2], sites[1], third]), config)
    assert set(metrics(home)["clients"]) == {"a", "b", "c"}


def test_a_test_only_client_may_join_until_the_tests(
    home: Path, sites: list[dict[str, Any]]
) -> None:
    """Unlike another site, which comes too late."""

    class Late(LoopGrid):
        def get_nodes(self) -> Iterable[NodeInfo]:
            trained = "train" in {kind for _, kind in self.sent}
            return [*super().get_nodes()][: 4 if trained else 2]

    config = run_config()
    shutil.copytree(home / "b", home / "c")
    late = {"client-id": "c", "data-dir": str(home / "c")}
    grid = Late(app, config, [*sites, late])
    run(grid, config)
    assert messages(grid, "evaluate") == [0, 1, 2]
    result = metrics(home)
    assert set(result["test_only"]) == {"regulator"}
    assert set(result["clients"]) == {"a", "b"}


def test_a_standby_client_that_replies_after_the_join_takes_a_place(
    home: Path, sites: list[dict[str, Any]]
) -> None:
    """The late reply comes before the first round, in which another client fails."""

    class Late(LoopGrid):
        pulls = 0

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            names = list(message_ids)
            # The third request to join; the join polls once
            self.pulls += names == ["3"]
            return [] if names == ["3"] and self.pulls == 1 else super().pull_messages(names)

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            reply = Message(Error(2, "ValueError: no"), reply_to=reply)
        return reply

    shutil.copytree(home / "b", home / "c")
    sites[2] = {"client-id": "c", "data-dir": str(home / "c")}
    config = run_config()
    grid = Late(app, config, sites, tamper)
    run(grid, config)
    assert grid.pulls == 2
    assert sorted(messages(grid, "train")) == [0, 1, 2]
    assert set(metrics(home)["accuracy"]["fedavg"]) == {"a", "c", "average"}


@pytest.mark.parametrize("replies", [True, False])
def test_a_test_only_client_that_comes_late_is_awaited(
    home: Path, sites: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, replies: bool
) -> None:
    """The client comes during training, and its app takes a while to start; or it never replies."""

    class Slow(LoopGrid):
        pulls = 0

        def get_nodes(self) -> Iterable[NodeInfo]:
            trained = "train" in {kind for _, kind in self.sent}
            return [*super().get_nodes()][: 3 if trained else 2]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            names = list(message_ids)
            if (2, "query.join") in self.sent and self.sent[-1] == (2, "query.join"):
                self.pulls += 1
                return super().pull_messages(names) if replies and self.pulls == 3 else []
            return super().pull_messages(names)

    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 0.02)
    if not replies:
        monkeypatch.setattr("server_app.federation.join.TESTER_SECONDS", 0.2)
    config = run_config()
    run(Slow(app, config, sites), config)
    result = metrics(home)
    assert set(result["test_only"]) == ({"regulator"} if replies else set())
    warning = "asked to join, but did not reply: node 102; if its site only tests, its results are"
    assert [text.startswith(warning) for text in result["warnings"]] == [True] * (not replies)


def test_a_run_may_hold_out_a_test_only_client(home: Path, sites: list[dict[str, Any]]) -> None:
    """Then it counts as the run says: it has a place, and alone tests."""
    config = run_config(num_clients=3, held_out="regulator")
    grid = LoopGrid(app, config, sites)
    run(grid, config)
    assert sorted(messages(grid, "train")) == [0, 1]
    assert messages(grid, "evaluate") == [2]
    result = metrics(home)
    assert set(result["accuracy"]["fedavg"]) == {"regulator", "average"}
    assert result["test_only"] == {}
    assert "of a held-out client's test images" in result["summary"]


def test_a_test_only_client_that_fails_is_named(home: Path, sites: list[dict[str, Any]]) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 2:
            reply.content = RecordDict()
        return reply

    config = run_config()
    run(LoopGrid(app, config, sites, tamper), config)
    assert metrics(home)["test_only"] == {"regulator": {"images": 0, "accuracy": {}}}
    assert (
        "regulator only tests</b> (node-config <code>role</code>) and reported no result"
        in (home / "runs" / "job" / "report.html").read_text()
    )


def test_no_server_makes_a_test_only_client_train(home: Path, sites: list[dict[str, Any]]) -> None:
    content = RecordDict({})
    message = Message(content, dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = "1"
    with pytest.raises(PublicConfigError, match="role = 'test': this site sends no payload"):
        app(message, Context(1, 7, sites[2], RecordDict(), run_config()))


def test_a_test_only_site_needs_no_guarantee(home: Path, sites: list[dict[str, Any]]) -> None:
    """A guarantee is about the payload alone, and the site sends none."""
    sites[2] |= {"epsilon-total": 1.0, "seal-to": "0" * 64}
    config = run_config()
    run(LoopGrid(app, config, sites), config)
    assert metrics(home)["withheld"] == ["regulator"]
    assert metrics(home)["test_only"] == {"regulator": {"images": 0, "accuracy": {}}}


def test_a_test_only_site_with_a_guarantee_may_have_no_training_images(
    home: Path, sites: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """If it has any, none of them may be a test image."""
    sites[2] |= {"epsilon": 1.0, "test-results": "exact"}
    config = run_config()
    run(LoopGrid(app, config, sites), config)
    assert metrics(home)["test_only"]["regulator"]["images"] == 3
    shutil.copytree(home / "regulator" / "test", home / "regulator" / "train")
    run(LoopGrid(app, config, sites), config)
    assert metrics(home)["test_only"] == {}
    assert "is also a training image" in caplog.text


def test_the_times_of_a_run_are_in_its_status(home: Path, sites: list[dict[str, Any]]) -> None:
    began = time.time()
    config = run_config()
    run(LoopGrid(app, config, sites), config)
    times = json.loads((home / "runs" / "job" / "status.json").read_text())["times"]
    assert set(times["a"]) == {"joined", "tested"}
    assert set(times["regulator"]) == {"test", "tested"}
    assert began - 1 < times["a"]["joined"] <= times["a"]["tested"] <= time.time()
