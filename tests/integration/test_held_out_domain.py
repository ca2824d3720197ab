"""Leave one domain out: who is left out sends nothing, trains nothing, and alone tests."""

import json
from pathlib import Path

import pytest
from flwr.app import Message, MetricRecord, RecordDict

from osfl.cli.estimate import estimate_run
from osfl.config import ConfigError, parse_run_config
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start, swap_payload


def asked(grid: LoopGrid, kind: str) -> set[int]:
    """The nodes, by their numbers, that had a message of a kind."""
    return {node - 100 if node >= 100 else node for node, sent in grid.sent if sent == kind}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prompts-domain", "prompts-only", "ceiling", "fedavg"])
def test_a_held_out_client_only_tests(home: Path, tiny_kit: Path, method: str) -> None:
    config = quick(method=method, kit=str(tiny_kit), num_clients=3, held_out="client-1")
    grid = start(config)
    assert asked(grid, "evaluate") == {1}
    trains = {0, 2} if method in ("prompts-domain", "fedavg") else set()
    assert asked(grid, "train") == trains
    result = metrics(home)
    (accuracy,) = result["accuracy"].values()
    assert accuracy.keys() == {"client-1", "average"}
    assert result["not_tested"] == []
    folder = home / "runs" / "job"
    if method == "prompts-domain":
        assert sorted(file.stem for file in folder.glob("payloads/*.pb")) == [
            "client-0",
            "client-2",
        ]
    if method.startswith("prompts"):
        rows = (folder / "manifest.jsonl").read_text().splitlines()
        assert {json.loads(row)["client"] for row in rows} == {"client-0", "client-2"}
    if method == "ceiling":
        description = json.loads((folder / "models" / "real.json").read_text())
        assert description["images"] == 60  # thirty a client here, of which two train
    estimated = estimate_run(parse_run_config(config))
    assert set(estimated.uploads) == {"client-0", "client-2"}
    assert estimated.images == result["server"]["synthetic_images"]


@pytest.mark.slow
def test_a_standby_client_stays_on_standby(home: Path, tiny_kit: Path) -> None:
    """Four nodes for two that train and one that tests: no other is asked."""
    config = quick(method="prompts-domain", kit=str(tiny_kit), num_clients=3, held_out="client-1")
    grid = start(config, count=4)
    assert asked(grid, "train") == {0, 2}
    assert asked(grid, "evaluate") == {1}


@pytest.mark.slow
def test_a_held_out_client_takes_no_place(home: Path, tiny_kit: Path) -> None:
    """Client 1's payload is refused, and no other client is there but the one that tests."""
    config = quick(
        method="prompts-domain",
        kit=str(tiny_kit),
        num_clients=3,
        min_clients=1,
        held_out="client-2",
    )
    grid = start(config, tamper=swap_payload(lambda blob: blob[:-1]))
    assert asked(grid, "train") == {0, 1}
    assert asked(grid, "evaluate") == {2}
    payloads = (home / "runs" / "job" / "payloads").glob("*.pb")
    assert [file.stem for file in payloads] == ["client-0"]


@pytest.mark.slow
def test_a_tester_that_does_not_test_is_named(home: Path, tiny_kit: Path) -> None:
    """Not the client that was not to."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 1:
            reply.content = RecordDict({"metrics": MetricRecord({"confusion": [1]})})
        return reply

    config = quick(
        method="prompts-only", kit=str(tiny_kit), num_clients=3, held_out="client-0,client-1"
    )
    start(config, tamper=tamper)
    assert metrics(home)["not_tested"] == ["client-1"]


def test_a_held_out_client_must_join(home: Path, tiny_kit: Path) -> None:
    config = quick(method="local", kit=str(tiny_kit), num_clients=2, held_out="clinic")
    with pytest.raises(RoundError, match=r"'clinic' has not joined.* client-0, client-1"):
        start(config)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"held_out": "client-0,client-0"}, "must be different clients"),
        ({"held_out": "client-0,client-1"}, "fewer than num-clients = 2"),
        ({"held_out": "client/0"}, "'client/0' is not a client's name"),
        ({"held_out": "client-0", "min_clients": 2}, "most num-clients = 2 minus the held-out"),
    ],
)
def test_an_impossible_hold_out_is_refused(settings: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_run_config(quick(num_clients=2, **settings))
