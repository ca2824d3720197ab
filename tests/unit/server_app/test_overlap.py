"""Synthesis while clients still work: the runs that do it, and how much room it leaves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.superlink.grid import HttpGrid, InMemoryGrid

from osfl.config import parse_run_config
from osfl.methods import METHODS
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status, read_status
from server_app import overlap
from server_app.defenses import label_consistency
from server_app.overlap import Overlap, overlaps
from tests.helpers.settings import quick

FEDERATION = HttpGrid.__new__(HttpGrid)
SIMULATION = InMemoryGrid.__new__(InMemoryGrid)


def does_overlap(grid: Any, **settings: Any) -> bool:
    return overlaps(grid, parse_run_config(quick(**{"method": "oscar", **settings})))


@pytest.mark.slow
def test_only_a_federation_overlaps_unless_it_is_asked_to() -> None:
    answers = [
        [does_overlap(grid, synthesis__overlap=setting) for setting in ("auto", "on", "off")]
        for grid in (FEDERATION, SIMULATION)
    ]
    assert answers == [[True, True, False], [False, True, False]]
    assert does_overlap(FEDERATION)


@pytest.mark.parametrize(
    "settings",
    [
        {"class_balance": True},
        {"synthesis__workers": 2},
        {"method": "oscar-pooled", "secure_sum": True, "num_clients": 3},
        {"method": "fedavg"},
        {"method": "fedcgs"},
        {"method": "ceiling"},
    ],
)
def test_some_settings_rule_it_out(settings: dict[str, Any]) -> None:
    assert not does_overlap(FEDERATION, synthesis__overlap="on", **settings)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].samples_payloads])
def test_methods_that_synthesize_from_payloads_overlap(name: str) -> None:
    assert does_overlap(FEDERATION, method=name)


def test_a_defense_that_drops_payloads_rules_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"synthesis__overlap": "on", "defense": "label-consistency"}
    assert does_overlap(FEDERATION, **settings)
    monkeypatch.setattr(label_consistency, "filter_payloads", lambda *_: {}, raising=False)
    assert not does_overlap(FEDERATION, **settings)


def test_an_installed_method_rules_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(METHODS["oscar"]), "server", "package.module")
    assert not does_overlap(FEDERATION, synthesis__overlap="on")


def overlap_of(folder: Path, **settings: Any) -> Overlap:
    folder.mkdir(exist_ok=True)
    config = parse_run_config(quick(method="oscar", **settings))
    return Overlap(FEDERATION, config, RunFolder(folder), Status(folder))


@pytest.mark.parametrize(
    ("disk", "memory", "has_kit", "shortage"),
    [
        (250, 300, True, ""),
        (249, 300, True, "249 MB free on the disk"),
        (250, 299, True, "299 MB of memory free"),
        (250, 303, False, "303 MB of memory free"),
        (250, 304, False, ""),
    ],
)
def test_images_leave_room_for_payloads_to_come(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk: int,
    memory: int,
    has_kit: bool,
    shortage: str,
) -> None:
    """50 MB on the disk of each of 2 clients and 3 models, and in memory 3 times 100 MB.

    A kit of 2 MB, which is yet to be loaded, takes 4 MB.
    """
    free = SimpleNamespace(free=disk * 10**6, available=memory * 10**6)
    monkeypatch.setattr(overlap, "shutil", SimpleNamespace(disk_usage=lambda _: free))
    monkeypatch.setattr(overlap, "psutil", SimpleNamespace(virtual_memory=lambda: free))
    monkeypatch.setattr(overlap, "download_bytes", lambda kit, parts: 2 * 10**6)
    synthesis = overlap_of(tmp_path, max_payload_mb=100.0)
    assert synthesis._shortage(has_kit) == shortage
    assert synthesis._is_stopped(has_kit) == bool(shortage)


def test_a_status_tells_how_many_images_a_client_has(tmp_path: Path) -> None:
    """At the end only of those that have all."""
    synthesis = overlap_of(tmp_path)
    status = synthesis._status
    for client in ("a", "b"):
        status.client(client, "delivered 10 bytes")
    synthesis._images = {"a": (4, 8), "b": (0, 8), "c": (8, 8)}
    synthesis._report()
    synthesis._images["a"] = (8, 8)
    synthesis._report()
    half, all_of_it = "0 of 8 images synthesized", "8 of 8 images synthesized"
    assert status.state["clients"] == {
        "a": f"delivered 10 bytes; {all_of_it}",
        "b": f"delivered 10 bytes; {half}",
    }
    assert "synthesized" in status.state["times"]["a"]
    assert "synthesized" not in status.state["times"]["b"]
    synthesis._report(is_ended=True)
    status.phase("next")
    clients = read_status(tmp_path)["clients"]
    assert clients == {"a": f"delivered 10 bytes; {all_of_it}", "b": "delivered 10 bytes"}
