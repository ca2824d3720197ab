"""`osfl forget`: a run without a client, bit by bit as if the client had never taken part."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flwr.app import Message, RecordDict
from typer.testing import CliRunner

from osfl.cli.main import app as cli
from osfl.cli.signing import load_signing_key, make_signer
from osfl.config import parse_run_config
from osfl.methods import METHODS
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import verify_run
from server_app.app import run_job
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import app, files, metrics, nodes, start

pytestmark = pytest.mark.slow
# Methods whose clients send something, beside those that whole runs are compared for
COMPARED = {"oscar", "fedlmg", "fedcgs", "fedpft", "local"}
REMAINING = [name for name, method in METHODS.items() if method.payload and name not in COMPARED]
# What depends on no clock
RESULTS = ("images", "units", "manifest.jsonl")


def settings(kit: Path, method: str, **more: Any) -> dict[str, Any]:
    return quick(method=method, kit=str(kit), **{"num_clients": 3, **more})


def forget(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["forget", str(folder), "--client", "client-1", *options])


def without_client(
    config: dict[str, Any],
    home: Path,
    patch: pytest.MonkeyPatch,
    tamper: Callable[[int, str, Message], Message] | None = None,
) -> Path:
    """The folder of a run of the same job in which client-1 never took part."""
    count = config["num-clients"]
    with patch.context() as context:
        context.setenv("OSFL_RUNS", str(home / "others"))
        context.setenv("OSFL_CACHE", str(home / "other-cache"))
        config = {**config, "min-clients": count - 1, "join-timeout": 1.0}
        grid = LoopGrid(app, config, nodes(count)[::2], tamper)
        run_job(grid, parse_run_config(config), "job")
    return home / "others" / "job"


def results(folder: Path) -> dict[str, bytes]:
    weights = {file.name: file.read_bytes() for file in folder.glob("models/*.safetensors")}
    return files(folder, *RESULTS) | weights


def traces(folder: Path, needles: list[bytes]) -> list[str]:
    """The files of a folder that contain one of these bytes, or have the client's name."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*")]
    contents = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    places = [str(file) for file, text in contents.items() if any(n in text for n in needles)]
    return places + [name for name in names if "client-1" in name]


def pieces(payloads: Path) -> list[bytes]:
    """About fifty pieces of client-1's payload that no other client's payload has."""
    payload = (payloads / "client-1.pb").read_bytes()
    blobs = [(payloads / f"client-{number}.pb").read_bytes() for number in (0, 2)]
    step = max(4096, len(payload) // 50)
    parts = [payload[begin : begin + 64] for begin in range(0, len(payload), step)]
    return [part for part in parts if not any(part in blob for blob in blobs)]


def timed_units(folder: Path) -> set[str]:
    """The work units whose times a run has."""
    if not (folder / "timings.jsonl").exists():
        return set()
    lines = (folder / "timings.jsonl").read_text().splitlines()
    return {json.loads(line)["unit"] for line in lines}


def problems(folder: Path) -> list[str]:
    return [problem for finding in verify_run(folder) for problem in finding.problems]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("oscar", {}),
        ("oscar", {"class_balance": True, "data__partition": "label"}),
        ("oscar", {"public_domains": "sketch", "defense": "label-consistency-report"}),
        ("fedlmg", {}),
        ("fedcgs", {"classifier__architecture": "resnet18"}),
        ("fedpft", {"classifier__architecture": "resnet18"}),
        ("local", {}),
    ],
)
def test_the_result_is_that_of_a_run_without_the_client(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, method: str, more: dict[str, Any]
) -> None:
    """Images, units, manifest and models bit by bit; no image of another client is drawn."""
    config = settings(tiny_kit, method, **more)
    start(config)
    folder = home / "runs" / "job"
    (folder / "shards").mkdir()
    (folder / "shards" / "00000.tar").write_bytes((folder / "report.html").read_bytes())
    pictures = [file.read_bytes() for file in folder.glob("images/client-1/*/*.png")]
    needles = [b"client-1", *pictures, *pieces(folder / "payloads")]
    assert len(traces(folder, needles)) > 5
    result = forget(folder)
    assert result.exit_code == 0, result.output
    assert results(folder) == results(without_client(config, home, monkeypatch))
    assert traces(folder, needles) == []
    assert problems(folder) == []
    assert not (folder / "shards").exists()
    assert timed_units(folder) == {file.stem for file in folder.glob("units/*")}
    if "class_balance" not in more:
        assert "synthesized 0 images of other clients again" in result.output
    assert set(metrics(home)["clients"]) == {"client-0", "client-2"}
    assert "This run has forgotten 1 client" in (folder / "report.html").read_text()
    # The next federation tests the model, and asks no client for a payload. The client is refused
    again = start(config)
    assert "train" not in {kind for _, kind in again.sent}
    assert {index for index, kind in again.sent if kind == "evaluate"} == {0, 2}
    tested = {client for row in metrics(home)["accuracy"].values() for client in row}
    assert tested == {"client-0", "client-2", "average"}
    # Its log has only the node's number
    assert traces(folder, needles) == []


@pytest.mark.parametrize("method", REMAINING)
def test_every_kind_of_payload_is_forgotten(
    home: Path, tiny_kit: Path, tiny_unclip: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """FedDISC's clients add noise from the operating system: the other one sends the same again."""
    config = settings(tiny_kit, method, num_clients=2, feddisc__kit=str(tiny_unclip))
    sent: dict[int, RecordDict] = {}

    def record(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            # The server takes the payload out of the reply
            sent[index] = RecordDict(dict(reply.content))
        return reply

    def send_again(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and method == "feddisc":
            reply.content = sent[index]
        return reply

    start(config, tamper=record)
    folder = home / "runs" / "job"
    result = forget(folder)
    assert result.exit_code == 0, result.output
    assert "synthesized 0 images of other clients again" in result.output
    reference = without_client(config, home, monkeypatch, send_again)
    assert results(folder) == results(reference)
    assert results(folder)


def test_a_client_that_only_tests_need_not_be_online(home: Path, tiny_kit: Path) -> None:
    """Neither a held-out client, which keeps its place, nor one whose payload stays."""
    resnet = {"classifier__architecture": "resnet18"}
    start(settings(tiny_kit, "fedcgs", held_out="client-2", **resnet))
    result = forget(home / "runs" / "job")
    assert result.exit_code == 0, result.output
    assert set(metrics(home)["clients"]) == {"client-0"}
    refused = CliRunner().invoke(
        cli, ["forget", str(home / "runs" / "job"), "--client", "client-2"]
    )
    assert "held-out = 'client-2' names it as a tester" in " ".join(refused.output.split())


def test_a_record_is_signed_and_names_what_it_cannot_reach(home: Path, tiny_kit: Path) -> None:
    start(settings(tiny_kit, "oscar"))
    start(settings(tiny_kit, "oscar", oscar__guidance=3.0, payloads_from="job"), "second")
    file = make_signer(home, "officer")
    key = load_signing_key(file)
    folder = home / "runs" / "job"
    result = forget(folder, "--key", str(file), "--name")
    assert result.exit_code == 0, result.output
    assert "the run 'second' has this payload of the client" in result.output
    record = json.loads((folder / "forgotten" / "0001.json").read_text())
    assert record["content"]["client"] == "client-1"
    before = files(folder, ".")
    again = forget(folder)
    assert again.exit_code == 0, again.output
    assert f"the client was removed on {record['content']['removed']}" in again.output
    assert files(folder, ".") == before
    message = json.dumps(record["content"], sort_keys=True).encode()
    key.public_key().verify(bytes.fromhex(record["signature"]["value"]), message)
    shown = CliRunner().invoke(cli, ["verify", str(folder)])
    assert shown.exit_code == 0, shown.output
    public = key.public_key().public_bytes_raw().hex()
    assert f"0001.json: signed by the Ed25519 key {public}" in shown.output
    # Its own digest is not enough
    record["content"]["files"] = []
    content = json.dumps(record["content"], sort_keys=True).encode()
    record["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "forgotten" / "0001.json").write_text(json.dumps(record))
    assert any("its signature does not match" in problem for problem in problems(folder))
    # A run with `payloads-from` forgets, too, and stays bound to the other run
    assert forget(home / "runs" / "second").exit_code == 0
    source = RunFolder(home / "runs" / "second").payload_source()
    assert source is not None
    assert (source.job, sorted(source.payloads)) == ("job", ["client-0", "client-2"])
    assert metrics(home, "second")["payloads_from"] == "job"
