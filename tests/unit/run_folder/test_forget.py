"""Removals by `osfl forget`: what they take from a run's folder, record, and leave after a kill."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from PIL import Image

from osfl.config import ConfigError, RunConfig, flatten, parse_run_config
from osfl.run_folder.continuation_store import Continuation
from osfl.run_folder.forget import finish_removal, remove_client
from osfl.run_folder.forgotten_store import name_digest, record_problems, signer_of
from osfl.run_folder.layout import CHECKSUMS, RunFolder, check_same_run
from osfl.run_folder.payload_store import PayloadSource
from osfl.run_folder.verify import read_checksums
from osfl.util.files import CorruptFileError
from server_app.recompute import _drawn_images
from tests.helpers.settings import quick
from tests.helpers.whole_runs import Killed, files

# The third name begins with that of the client who leaves
CLIENTS = ("client-0", "client-1", "client-10")
OWNERS = (*CLIENTS, "public.sketch")
FINISHED = {"phase": "finished", "clients": {}, "done": 0, "total": 0}
KEPT = {"config.json", "kit.json", "synthesis.json", "timings.jsonl", ".lock"}
DERIVED = (
    *("report.html", "metrics.json", "manifest.jsonl", "agreement.json", "SHA256SUMS", "notes.txt"),
    *("models/FT.safetensors", "models/FT.json", "curves/FT.json", "tests/FT.json"),
    *("histograms/FT.json", "contribution/done.json", "rounds/done.json", "server.log"),
    *("tensorboard/events", "shards/00000.tar", "previous/FT.safetensors", ".hidden"),
    *("payloads/client-1.pb.refused", "payloads/client-1.decoding", "payloads/.client-1.pb.x.tmp"),
    *("payloads/client-1.json.refused", "images/client-10/stale.png", "units/broken.jsonl"),
)


def payload(client: str) -> bytes:
    return f"the payload of <{client}>".encode()


def settings(**more: Any) -> RunConfig:
    return parse_run_config(quick(method="oscar", num_clients=3, **more))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run with a work unit for each client and a public domain."""
    folder = RunFolder(tmp_path / "runs" / "job")
    folder.write_json("config.json", flatten(settings()))
    for name in ("kit.json", "synthesis.json"):
        folder.write_json(name, {})
    folder.write_json("status.json", FINISHED)
    for name in DERIVED:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text("{}")
    timings = []
    for owner in OWNERS:
        if owner in CLIENTS:
            digest = hashlib.sha256(payload(owner)).hexdigest()
            folder.store_payload(owner, payload(owner), {"sha256": digest})
        image = folder.path / "images" / owner / "000-zero" / "00000.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(image)
        row = {"file": str(image.relative_to(folder.path)), "client": owner, "class": "zero"}
        unit = folder.unit_file(f"unit-of-{OWNERS.index(owner)}")
        unit.parent.mkdir(exist_ok=True)
        unit.write_text(json.dumps({**row, "seed": 1, "sha256": ""}) + "\n")
        timings.append(json.dumps({"unit": unit.stem, "images": 1, "seconds": 1.0}) + "\n")
    folder.timings_file.write_text("".join(timings))
    (tmp_path / "outside").write_text("kept")
    (folder.path / "link").symlink_to(tmp_path / "outside")
    (folder.path / "folder-link").symlink_to(tmp_path)
    return folder


def kept_files() -> set[str]:
    clients = ("client-0", "client-10")
    names = {f"payloads/{client}.{ending}" for client in clients for ending in ("pb", "json")}
    names |= {f"images/{owner}/000-zero/00000.png" for owner in (*clients, "public.sketch")}
    names |= {f"units/unit-of-{number}.jsonl" for number in (0, 2, 3)}
    return KEPT | names | {"payloads-from.json", "forgotten/0001.json"}


def assert_removed(run: RunFolder, before: dict[str, bytes], record: Path) -> None:
    """Only what cannot depend on client-1 is there, and the record lists everything else."""
    assert set(files(run.path, ".")) == kept_files()
    assert not list(run.path.rglob("*client-1/*"))
    contents = b"".join(files(run.path, ".").values())
    assert payload("client-1") not in contents
    assert b"client-1" not in contents.replace(b"client-10", b"")
    timed = [json.loads(line)["unit"] for line in run.timings_file.read_text().splitlines()]
    assert timed == ["unit-of-0", "unit-of-2", "unit-of-3"]
    source = run.payload_source()
    assert source is not None
    assert set(source.payloads) == {"client-0", "client-10"}
    removal = run.removals()[record]
    assert (removal.state, removal.had_payload, removal.client) == ("removed", True, "")
    assert removal.client_sha256 == hashlib.sha256(b"client-1").hexdigest()
    listed = {row["file"]: row["sha256"] for row in removal.files}
    removed = {name: text for name, text in before.items() if name not in kept_files()}
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in removed.items()}
    hidden = {
        name.replace("client-1", "[client]").replace("[client]0", "client-10"): value
        for name, value in digests.items()
    }
    assert listed == {**hidden, "link": "", "folder-link": ""}


def everything(run: RunFolder) -> dict[str, bytes]:
    """The files of a folder without those that are links."""
    return {
        name: text
        for name, text in files(run.path, ".").items()
        if not any("link" in part for part in Path(name).parts)
    }


def test_only_what_cannot_depend_on_the_client_stays(run: RunFolder, tmp_path: Path) -> None:
    before = everything(run)
    assert_removed(run, before, remove_client(run, "client-1"))
    assert (tmp_path / "outside").read_text() == "kept"
    assert run.vacant_places() == 1
    assert run.departed_digests() == {name_digest("client-1")}


def kill(patch: pytest.MonkeyPatch, name: str, turn: int) -> list[int]:
    """End the process at a call of a function of `Path`; return the list of its calls."""
    calls: list[int] = []
    function: Callable[..., Any] = getattr(Path, name)

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(turn)
        if len(calls) == turn:
            raise Killed
        return function(*arguments, **options)

    patch.setattr(Path, name, call)
    return calls


@pytest.mark.parametrize("name", ["replace", "unlink", "rmdir"])
def test_a_killed_removal_continues(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Killed at one call more of a function each time, and continued; meanwhile no run starts."""
    before = everything(run)
    config = flatten(settings())
    kills = 0
    while True:
        with monkeypatch.context() as patch:
            kill(patch, name, kills + 1)
            try:
                record = remove_client(run, "client-1")
                break
            except Killed:
                kills += 1
        removals = list(run.removals().values())
        if removals and removals[0].state == "removing":
            with pytest.raises(ConfigError, match="was interrupted; repeat `osfl forget`"):
                check_same_run(run, config)
            with pytest.raises(ConfigError, match="the removal of another client"):
                remove_client(run, "client-0")
            assert any("interrupted" in text for text in record_problems(run.forgotten_files()))
    assert kills > 1
    assert_removed(run, before, record)
    assert record.name == "0001.json"
    check_same_run(run, config)


@pytest.mark.parametrize("name", ["replace", "unlink"])
def test_a_removal_that_is_killed_at_its_end_is_repeated(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Killed at one call more of a function each time, it ends with its record and checksums."""
    record = remove_client(run, "client-1")
    removed = record.read_bytes()
    states = []
    kills = 0
    while len(states) == kills:
        record.write_bytes(removed)
        run.write_json("status.json", FINISHED)
        (run.path / CHECKSUMS).write_text("those of the results")
        with monkeypatch.context() as patch:
            kill(patch, name, kills + 1)
            try:
                finish_removal(run, record, 0, 1.0)
            except Killed:
                kills += 1
        assert remove_client(run, "client-1") == record
        states.append(run.removals()[record].state)
        if states[-1] == "removed":
            finish_removal(run, record, 0, 1.0)
        assert run.removals()[record].recomputed == {"images": 0, "seconds": 1.0}
        digest = hashlib.sha256(record.read_bytes()).hexdigest()
        assert read_checksums(run.path)["forgotten/0001.json"] == digest
    assert states == sorted(states, reverse=True)
    assert set(states) == {"removed", "recomputed"}


def test_checksums_are_not_made_again(run: RunFolder) -> None:
    """New checksums would fit a file that was damaged since."""
    record = remove_client(run, "client-1")
    run.write_json("status.json", FINISHED)
    finish_removal(run, record, 0, 1.0)
    sums = read_checksums(run.path)
    run.write_json("kit.json", {"damaged": True})
    assert remove_client(run, "client-1") == record
    assert read_checksums(run.path) == sums
    # Nor does a run have any before its end
    run.write_json("status.json", {**FINISHED, "phase": "synthesis"})
    (run.path / CHECKSUMS).unlink()
    assert remove_client(run, "client-1") == record
    assert not (run.path / CHECKSUMS).exists()


def test_a_client_that_came_back_is_removed_again(run: RunFolder) -> None:
    record = remove_client(run, "client-1")
    finish_removal(run, record, 0, 1.0)
    digest = hashlib.sha256(payload("client-1")).hexdigest()
    run.store_payload("client-1", payload("client-1"), {"sha256": digest})
    assert remove_client(run, "client-1").name == "0002.json"
    assert payload("client-1") not in b"".join(files(run.path, ".").values())


@pytest.mark.parametrize(
    ("client", "changes", "message"),
    [
        ("client-1", {"method": "fedavg"}, "every round of an iterative method starts from models"),
        ("client-1", {"method": "prompts-only"}, "stores nothing that a client has sent"),
        ("client-1", {"held-out": "client-1"}, "held-out = 'client-1' names it as a tester"),
        ("client-7", {}, "has no trace of it; its clients are client-0, client-1, client-10"),
        ("../x", {}, "has no trace of it"),
        ("*", {}, "has no trace of it"),
    ],
)
def test_what_cannot_be_forgotten_is_refused(
    run: RunFolder, client: str, changes: dict[str, Any], message: str
) -> None:
    run.write_json("config.json", {**flatten(settings()), **changes})
    before = files(run.path, ".")
    with pytest.raises(ConfigError, match=message):
        remove_client(run, client)
    assert {**files(run.path, "."), ".lock": b""} == {**before, ".lock": b""}


def test_the_last_client_is_refused(run: RunFolder) -> None:
    for client in ("client-0", "client-10"):
        (run.path / "payloads" / f"{client}.pb").unlink()
    with pytest.raises(ConfigError, match="no other client has a payload in"):
        remove_client(run, "client-1")


def test_a_record_is_signed(run: RunFolder) -> None:
    key = Ed25519PrivateKey.generate()
    file = remove_client(run, "client-1", True, key)
    assert signer_of(file) == key.public_key().public_bytes_raw().hex()
    record = json.loads(file.read_text())
    assert record["content"]["client"] == "client-1"
    message = json.dumps(record["content"], sort_keys=True).encode()
    key.public_key().verify(bytes.fromhex(record["signature"]["value"]), message)
    # Its own SHA-256 is not enough
    record["content"]["files"] = []
    content = json.dumps(record["content"], sort_keys=True).encode()
    record["sha256"] = hashlib.sha256(content).hexdigest()
    file.write_text(json.dumps(record))
    with pytest.raises(CorruptFileError, match="a signature that does not match its content"):
        signer_of(file)
    (problem,) = record_problems([file])
    assert f"{file.name} is corrupt, or its signature" in problem


def test_runs_beside_it_that_have_the_payload_are_named(run: RunFolder) -> None:
    digest = hashlib.sha256(payload("client-1")).hexdigest()
    for name, content in (("same", payload("client-1")), ("other", b"another")):
        beside = RunFolder(run.path.parent / name)
        beside.store_payload("client-1", content, {"sha256": hashlib.sha256(content).hexdigest()})
    RunFolder(run.path.parent / "without").store_payload("client-0", b"", {"sha256": digest})
    record = remove_client(run, "client-1")
    texts = run.removals()[record].not_reached
    assert [text for text in texts if text.startswith("the run")] == [
        "the run 'other' has another payload of the client; `osfl forget` it there too",
        "the run 'same' has this payload of the client; `osfl forget` it there too",
    ]
    assert any("backups and snapshots" in text for text in texts)


@pytest.mark.parametrize("shaped", [("client-0", "client-1"), ("client-0",)])
def test_a_model_that_the_client_shaped_is_no_start(
    run: RunFolder, shaped: tuple[str, ...]
) -> None:
    """The record of a continued run has no trace of the client either, nor have its settings."""
    clients = ("client-0", "client-1")
    run.store_continuation(
        Continuation(
            run=str(run.path.parent / "first"),
            job="first",
            version=2,
            payloads=dict.fromkeys(clients, "0" * 64),
            jobs=dict.fromkeys(clients, "first"),
            classes=dict.fromkeys(clients, ()),
            replaced=("client-1", "client-10"),
            from_model=True,
            model_clients=shaped,
        )
    )
    named = {"replace-clients": "client-1,client-10", "continue-from": "first"}
    run.write_json("config.json", {**flatten(settings()), **named})
    remove_client(run, "client-1")
    record = run.continuation()
    assert record is not None
    assert record.from_model == ("client-1" not in shaped)
    assert (run.path / "previous").exists() == record.from_model
    assert record.replaced == ("client-10",)
    assert list(record.payloads) == list(record.jobs) == list(record.classes) == ["client-0"]
    assert (run.stored_config() or {})["replace-clients"] == "client-10"
    contents = b"".join(files(run.path, ".").values())
    assert b"client-1" not in contents.replace(b"client-10", b"")


def test_payloads_of_another_run_stay_bound_to_it(run: RunFolder) -> None:
    digests = {client: run.payload_digest(client) for client in CLIENTS}
    jobs = {"client-1": "first", "client-10": "first"}
    run.store_payload_source(PayloadSource("/runs/base", "base", digests, jobs))
    remove_client(run, "client-1")
    source = run.payload_source()
    assert source is not None
    assert (source.run, source.job, source.jobs) == ("/runs/base", "base", {"client-10": "first"})
    assert "client-1" not in source.payloads


def test_a_line_of_the_timings_that_a_crash_cut_is_left_out(run: RunFolder) -> None:
    """Otherwise the results could never be computed again."""
    with run.timings_file.open("a") as file:
        file.write('{"unit": "abc", "ima')
    assert _drawn_images(run) == len(OWNERS)
