"""`osfl advise` over real messages: what clients send, and what the server keeps of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from client_app.app import app
from osfl.config import parse_run_config
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick

pytestmark = pytest.mark.slow
KEYS = {"zero_shot", "head", "diffusion"}


def ask(  # type: ignore[no-untyped-def]
    kit: Path, *nodes: dict, tamper: Callable | None = None, **settings
) -> LoopGrid:
    config = quick(advise=True, method="local", kit=str(kit), num_clients=len(nodes), **settings)
    places = [
        {"partition-id": part, "num-partitions": len(nodes), **node}
        for part, node in enumerate(nodes)
    ]
    grid = LoopGrid(app, config, places, tamper)
    run_job(grid, parse_run_config(config), "job")
    return grid


def stored(home: Path) -> dict:
    return json.loads((home / "runs" / "job" / "advice.json").read_text())


def test_three_shares_are_all_that_clients_send(home: Path, tiny_kit: Path) -> None:
    """Before anything else: no payload and no test follow, and no count of images goes before."""
    replies: list[tuple[str, RecordDict]] = []

    def keep(index: int, kind: str, reply: Message) -> Message:
        replies.append((kind, reply.content))
        return reply

    # A method whose clients state their counts when they join
    grid = ask(tiny_kit, {}, {}, tamper=keep)
    assert [kind for _, kind in grid.sent] == ["query.join"] * 2 + ["query.advise"] * 2
    for kind, content in replies:
        assert not content.array_records
        if kind == "query.join":
            assert content.config_records["join"]["images"] == []
            continue
        assert not content.config_records
        assert list(content.metric_records) == ["metrics"]
        metrics = content.metric_records["metrics"]
        assert set(metrics) == {"zero_shot", "head", "diffusion"}
        assert all(value == round(value, 3) for value in metrics.values())
    assert set(stored(home)["clients"]["client-1"]) == KEYS
    files = {path.name for path in (home / "runs" / "job").iterdir()}
    assert files - {".lock"} == {"advice.json", "config.json", "status.json"}
    status = json.loads((home / "runs" / "job" / "status.json").read_text())
    assert status["phase"] == "finished"
    assert status["clients"] == {"client-0": "measured", "client-1": "measured"}


def test_sites_with_a_guarantee_withhold_and_book_nothing(home: Path, tiny_kit: Path) -> None:
    """Neither their images nor their budget are touched; so do sites of inexact test results."""
    private = [
        {"epsilon": 1.0},
        {"epsilon-total": 2.0, "epsilon": 1.0, "client-id": "budgeted"},
        {"test-results": "confusion"},
    ]
    replies = {}

    def keep(index: int, kind: str, reply: Message) -> Message:
        replies[index, kind] = reply.content
        return reply

    ask(tiny_kit, {}, *private, tamper=keep, min_clients=1)
    for index in range(1, 4):
        assert dict(replies[index, "query.advise"].metric_records["metrics"]) == {
            "seconds": 0.0,
            "withheld": 1,
        }
    assert stored(home)["withheld"] == ["budgeted", "client-1", "client-3"]
    assert list(stored(home)["clients"]) == ["client-0"]
    assert not (home / "state").exists()


def test_with_an_epsilon_of_the_run_all_withhold(home: Path, tiny_kit: Path) -> None:
    ask(tiny_kit, {}, {}, epsilon=1.0)
    assert stored(home) == {"clients": {}, "withheld": ["client-0", "client-1"]}


def test_small_classes_are_left_out(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 30 images of a client's part have classes of several sizes."""
    from client_app import advice

    measured: dict[str, list[int]] = {}
    images = advice.SiteMeasurement._images

    def keep(
        site: advice.SiteMeasurement, fit: object, per_class: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, labels = images(site, fit, per_class)  # type: ignore[arg-type]
        # The kit's classifier sees few images of each class
        if per_class == advice.PER_CLASS:
            measured[site._client] = labels.bincount(minlength=10).tolist()
        return pixels, labels

    monkeypatch.setattr(advice.SiteMeasurement, "_images", keep)
    monkeypatch.setattr(advice, "DIFFUSION_IMAGES", 10)
    ask(tiny_kit, {"min-class-images": 3}, {}, data__partition="dirichlet", data__alpha=1.0)
    assert set(measured["client-0"]) & {1, 2} == set()
    assert set(measured["client-1"]) & {1, 2}


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"head": float("nan")}, "its figure head must be a share from 0 to 1"),
        ({"head": 1.5}, "its figure head must be a share from 0 to 1"),
        ({"diffusion": -0.1}, "its figure diffusion must be a share from 0 to 1"),
        ({"diffusion": [0.1, 0.2]}, "its figure diffusion must be a share from 0 to 1"),
        ({"images": 12}, "its figure 'images' is unknown"),
        (None, "its figures cannot be used"),
    ],
)
def test_figures_that_cannot_be_shares_are_refused(
    metrics: dict | None, reason: str, home: Path, tiny_kit: Path
) -> None:
    def forge(index: int, kind: str, reply: Message) -> Message:
        if kind == "query.advise":
            records = {} if metrics is None else {"metrics": MetricRecord(metrics)}
            reply.content = RecordDict(records)
        return reply

    # The node itself withholds, which takes no time
    with pytest.raises(RoundError, match="no client has measured its images") as caught:
        ask(tiny_kit, {"epsilon": 1.0}, tamper=forge)
    assert reason in str(caught.value)


def test_no_other_work_is_done_under_its_settings(home: Path, tiny_kit: Path) -> None:
    """These settings skip the checks of a guarantee, which a malicious server could abuse."""
    config = quick(advise=True, method="local", kit=str(tiny_kit))
    for kind, records in {
        "train": {"config": ConfigRecord({"job": "job"})},
        "evaluate": {"header": ConfigRecord({"architecture": "resnet18"}), "model": ArrayRecord()},
    }.items():
        replies = []

        def keep(index: int, _: str, reply: Message, replies: list = replies) -> Message:
            replies.append(reply)
            return reply

        place = {"partition-id": 0, "num-partitions": 2, "epsilon": 1.0}
        grid = LoopGrid(app, config, [place], keep)
        grid.push_messages([Message(RecordDict(records), 100, kind)])
        assert "advise = true: clients only measure" in replies[0].error.reason
    asked = LoopGrid(app, {**config, "advise": False}, [{"partition-id": 0, "num-partitions": 2}])
    (message,) = asked.push_messages([Message(RecordDict(), 100, "query.advise")])
    (reply,) = asked.pull_messages([message])
    assert "advise = false: the run must set it to true" in reply.error.reason
