"""Payloads that stay sealed on the server's disk, in runs that clients join later and leave."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from osfl.cli import certs
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.launch.serve import StandingMode, serve
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import verify_run
from osfl.settings import Setting, merge_settings, read_overrides
from server_app.app import run_job
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import app, files, metrics, nodes

pytestmark = pytest.mark.slow
SECRET = "ward of"


@pytest.fixture
def config(home: Path, tiny_kit: Path) -> dict[str, Any]:
    """Settings of a run whose payloads, the names of domains, are stored sealed."""
    key, _ = certs.make_sealing_key(home / "key")
    sealed: dict[str, Any] = {"sealing_key": str(key), "sealed_store": True}
    return quick(method="prompts-domain", kit=str(tiny_kit), **sealed)


@pytest.fixture
def sites() -> list[dict[str, Any]]:
    return [{**node, "domain": f"{SECRET} {number}"} for number, node in enumerate(nodes(4))]


def play(config: dict[str, Any], sites: list[dict[str, Any]], job: str) -> set[int]:
    """Run a job with these sites, and return the sites that were asked for a payload."""
    grid = LoopGrid(app, config, sites)
    run_job(grid, parse_run_config(config), job)
    return {index for index, kind in grid.sent if kind == "train"}


def results(folder: Path) -> dict[str, Any]:
    """Images, their seeds, and the models' weights."""
    weights: dict[str, Any] = {}
    for file in folder.glob("models/*.safetensors"):
        tensors = load_file(file)
        weights[file.name] = {name: value.numpy().tobytes() for name, value in tensors.items()}
    assert weights
    return files(folder, "images", "manifest.jsonl") | weights


def assert_sealed(folder: Path, *clients: str) -> None:
    run = RunFolder(folder)
    assert run.stored_clients() == list(clients)
    for client in clients:
        assert run.sealing_fingerprint(client)
        assert SECRET.encode() not in run.stored_payload(client)
    assert [problem for finding in verify_run(folder) for problem in finding.problems] == []


def forget(folder: Path, client: str) -> Any:
    return CliRunner().invoke(cli, ["forget", str(folder), "--client", client])


def test_versions_of_sealed_payloads_equal_those_of_open_ones(
    home: Path, config: dict[str, Any], sites: list[dict[str, Any]]
) -> None:
    """One client comes, one leaves, one replaces its payload, and one comes and leaves."""
    play(config, sites[:2], "first")
    assert_sealed(home / "runs" / "first", "client-0", "client-1")
    later = {**config, "num-clients": 3, "continue-from": "first"}
    assert play(later, sites[:3], "second") == {2}
    second = home / "runs" / "second"
    assert_sealed(second, "client-0", "client-1", "client-2")
    is_open = {**config, "sealing-key": "", "sealed-store": False}
    play({**is_open, "num-clients": 3}, sites[:3], "open")
    assert results(second) == results(home / "runs" / "open")

    result = forget(second, "client-1")
    assert result.exit_code == 0, result.output
    assert_sealed(second, "client-0", "client-2")
    play(is_open, sites[:3:2], "open-without")
    assert results(second) == results(home / "runs" / "open-without")
    # Those that stay only test
    assert play(later, sites[:3], "second") == set()
    assert metrics(home, "second")["not_tested"] == []

    before = (second / "payloads" / "client-2.pb").read_bytes()
    sites[2]["domain"] = f"{SECRET} another"
    replacing = {**config, "continue-from": "second", "replace-clients": "client-2"}
    assert play(replacing, sites[:3], "third") == {2}
    third = home / "runs" / "third"
    assert_sealed(third, "client-0", "client-2")
    assert (third / "payloads" / "client-2.pb").read_bytes() != before
    play(is_open, sites[:3:2], "open-replaced")
    assert results(third) == results(home / "runs" / "open-replaced")
    # A run with the payloads of three jobs opens each with its own
    assert play({**config, "payloads-from": "third"}, sites[:3:2], "reused") == set()
    assert results(home / "runs" / "reused") == results(third)


def test_a_continued_run_needs_the_key_of_its_payloads(
    home: Path, config: dict[str, Any], sites: list[dict[str, Any]]
) -> None:
    """No client is asked without it. The same job continues with it."""
    play(config, sites[:2], "first")
    wrong_key, _ = certs.make_sealing_key(home / "other")
    later = {**config, "num-clients": 3, "continue-from": "first"}
    message = "are sealed to the key with the fingerprint .*. Set sealing-key to that key, or start"
    for changes in ({"sealing-key": str(wrong_key)}, {"sealing-key": "", "sealed-store": False}):
        grid = LoopGrid(app, {**later, **changes}, sites[:3])
        with pytest.raises(ConfigError, match=message):
            run_job(grid, parse_run_config({**later, **changes}), "second")
        assert grid.sent == []
    assert play(later, sites[:3], "second") == {2}
    # Payloads that come from now on may be stored open
    open_store = {**later, "continue-from": "second", "num-clients": 4, "sealed-store": False}
    assert play(open_store, sites, "third") == {3}
    third = RunFolder(home / "runs" / "third")
    sealed = [bool(third.sealing_fingerprint(client)) for client in third.stored_clients()]
    assert sealed == [True, True, True, False]


def test_a_client_is_removed_without_the_key(
    home: Path, config: dict[str, Any], sites: list[dict[str, Any]]
) -> None:
    """The results follow when the key is back."""
    play({**config, "num-clients": 3}, sites[:3], "first")
    first = home / "runs" / "first"
    key = Path(config["sealing-key"])
    key.rename(home / "elsewhere")
    failed = forget(first, "client-1")
    assert failed.exit_code == 1
    text = " ".join(failed.output.split())
    assert "the client is removed, but the run has no results: sealing-key = " in text
    assert text.endswith("Repeat the command to compute them")
    assert RunFolder(first).stored_clients() == ["client-0", "client-2"]
    assert not list(first.glob("models/*"))
    (home / "elsewhere").rename(key)
    result = forget(first, "client-1")
    assert result.exit_code == 0, result.output
    play(config, sites[:3:2], "without")
    assert results(first) == results(home / "runs" / "without")
    assert_sealed(first, "client-0", "client-2")


def test_a_standing_federation_keeps_payloads_sealed(
    home: Path, config: dict[str, Any], sites: list[dict[str, Any]]
) -> None:
    """A client leaves between two versions."""
    waves = iter([sites[:2], sites[:3], sites[1:]])

    def run_version(settings: list[Setting]) -> Any:
        values = merge_settings(config, read_overrides(settings))
        play(dict(values), next(waves), str(values["job-id"]))
        if values["job-id"] == "study-v2":
            assert forget(home / "runs" / "study-v2", "client-0").exit_code == 0
        return metrics(home, str(values["job-id"]))

    serve([], StandingMode("study", 1, 5.0, versions=3), home / "state.json", run_version, print)
    assert_sealed(home / "runs" / "study-v3", "client-1", "client-2", "client-3")
    play({**config, "num-clients": 3}, sites[1:], "fresh")
    assert results(home / "runs" / "study-v3") == results(home / "runs" / "fresh")
