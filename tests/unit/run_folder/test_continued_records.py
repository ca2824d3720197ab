"""Records of what a run carries from the one that it continues, or of what would mislead it."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from osfl.config import ConfigError, RunConfig, flatten, parse_run_config
from osfl.run_folder.continuation import (
    continue_run,
    drop_departed,
    find_continuation,
    with_new_clients,
)
from osfl.run_folder.continuation_store import Continuation
from osfl.run_folder.forgotten_store import Removal, name_digest
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.payload_store import PayloadSource
from osfl.run_folder.verify import write_checksums
from osfl.run_folder.version import version_label, version_of
from osfl.util.files import CorruptFileError
from tests.helpers.settings import quick

BLOB = b"payload"
DIGEST = hashlib.sha256(BLOB).hexdigest()
FOLDERS = {"data__name": "folder", "data__classes": "cat,dog"}


def config_of(method: str = "votes", **changes: Any) -> RunConfig:
    return parse_run_config(quick(method=method, num_clients=4, kit="/kit", **changes))


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of the clients a and b, with a work unit of each and one of a public domain."""
    monkeypatch.setenv("OSFL_RUNS", str(tmp_path))
    folder = RunFolder(tmp_path / "first")
    folder.write_json("config.json", {**flatten(config_of(**FOLDERS)), "num-clients": 2})
    folder.store_kit_digests({"payloads": {"vae": "1"}, "images": {"vae": "2"}, "models": {}})
    folder.store_sampling_choice({"batch_size": 3})
    for client in ("a", "b"):
        folder.store_payload(client, BLOB, {"sha256": DIGEST})
    for owner in ("a", "b", "public.sketch"):
        image = folder.path / f"images/{owner}/000-cat/00000.png"
        image.parent.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(image)
        row = {"file": str(image.relative_to(folder.path)), "client": owner, "class": "cat"}
        folder.unit_file(owner).parent.mkdir(exist_ok=True)
        folder.unit_file(owner).write_text(json.dumps({**row, "seed": 1, "sha256": ""}) + "\n")
    return folder


def second(first: RunFolder, **changes: Any) -> RunFolder:
    """Start a run that continues the first."""
    folder = RunFolder(first.path.with_name("second"))
    continue_run(config_of(**FOLDERS, continue_from="first", **changes), folder)
    return folder


def test_a_run_carries_payloads_units_and_how_to_sample(first: RunFolder) -> None:
    folder = second(first)
    assert [file.stem for file in folder.payload_files()] == ["a", "b"]
    assert {file.stem for file in folder.unit_files()} == {"a", "b", "public.sketch"}
    assert len(list(folder.path.glob("images/*/*/*.png"))) == 3
    assert folder.sampling_choice({}) == {"batch_size": 3}
    # Steps that have results are bound to the kit that made these
    assert folder.kit_digests() == {"payloads": {"vae": "1"}, "images": {"vae": "2"}}
    record = folder.continuation()
    assert record == Continuation(
        run=str(first.path),
        job="first",
        version=2,
        payloads={"a": DIGEST, "b": DIGEST},
        jobs={"a": "first", "b": "first"},
        classes={"a": ("cat", "dog"), "b": ("cat", "dog")},
        is_carried=True,
    )
    assert folder.payload_job("a", "second") == "first"
    # A payload of the client's own in its place is one of this job
    folder.store_payload("a", b"new", {"sha256": hashlib.sha256(b"new").hexdigest()})
    assert folder.payload_job("a", "second") == folder.payload_job("c", "second") == "second"


def test_a_replaced_client_is_not_carried(first: RunFolder) -> None:
    folder = second(first, replace_clients="b")
    assert [file.stem for file in folder.payload_files()] == ["a"]
    assert {file.stem for file in folder.unit_files()} == {"a", "public.sketch"}
    assert not (folder.path / "images" / "b").exists()


def test_other_settings_of_the_synthesis_draw_all_images(first: RunFolder) -> None:
    folder = second(first, synthesis__steps=5)
    assert folder.unit_files() == []
    assert folder.sampling_choice({}) is None
    assert folder.kit_digests() == {"payloads": {"vae": "1"}}


def test_a_unit_that_was_changed_is_refused(first: RunFolder) -> None:
    write_checksums(first.path)
    unit = first.unit_file("b")
    unit.write_text(unit.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(CorruptFileError, match=r"b\.jsonl is corrupt; repeat the `osfl run` of fi"):
        second(first)


def test_versions_add_up(first: RunFolder) -> None:
    """Jobs, classes and departures of earlier versions stay those of each client."""
    leaver = Removal("first", name_digest("x"), "", "recomputed", True, "1", "then")
    first.store_removal(first.new_forgotten_file(), leaver)
    two = second(first)
    new = hashlib.sha256(b"c's").hexdigest()
    two.store_payload("c", b"c's", {"sha256": new})
    grown = config_of(data__name="folder", data__classes="cat,dog,emu", continue_from="second")
    two.write_json("config.json", flatten(grown))
    record = find_continuation(grown, two)
    assert record.version == 3
    assert record.jobs == {"a": "first", "b": "first", "c": "second"}
    assert record.classes["a"] == ("cat", "dog")
    assert record.classes["c"] == ("cat", "dog", "emu")
    assert record.departed == (name_digest("x"),)
    version = version_of(two, ["a", "b", "c"])
    assert (version["carried"], version["new"], version["number"]) == (["a", "b"], ["c"], 2)
    pairs = f"a {DIGEST}\nb {DIGEST}\nc {new}"
    assert version["payloads"] == hashlib.sha256(pairs.encode()).hexdigest()
    assert version_label(two, ["a", "c"]).startswith(
        "version 2, of 2 payloads: 1 that job first had, 1 new; SHA-256 "
    )
    assert version_of(first, ["a"]) == {}
    assert version_label(first, ["a"]) == ""


@pytest.mark.parametrize("replaced", [(), ("x",)])
def test_a_client_that_left_returns_only_by_name(
    first: RunFolder, replaced: tuple[str, ...]
) -> None:
    folder = second(first)
    record = folder.continuation()
    assert record is not None
    folder.store_continuation(replace(record, departed=(name_digest("x"),), replaced=replaced))
    assert folder.departed_digests() == (set() if replaced else {name_digest("x")})


def leave(folder: RunFolder, client: str) -> None:
    """Record that a run is removing a client, whose files may still be there."""
    removal = Removal(folder.path.name, name_digest(client), "", "removing", True, "1", "then")
    folder.store_removal(folder.new_forgotten_file(), removal)


def test_a_client_that_left_the_continued_run_is_dropped(first: RunFolder) -> None:
    folder = second(first)
    leave(first, "a")
    # At the next start, before payloads are restored
    second(first)
    record = folder.continuation()
    assert record is not None
    assert record.payloads.keys() == record.jobs.keys() == record.classes.keys() == {"b"}
    assert folder.departed_digests() == {name_digest("a")}
    assert [file.stem for file in folder.payload_records()] == ["b"]
    assert [file.stem for file in folder.payload_files()] == ["b"]
    assert {file.stem for file in folder.unit_files()} == {"b", "public.sketch"}
    assert not list(folder.path.glob("images/a/*/*.png"))
    assert folder.config_file.parent.joinpath("kit.json").is_file()
    # In this run's place nothing else changes
    assert [file.stem for file in first.payload_files()] == ["a", "b"]
    # A run with a model is left alone
    (folder.path / "models").mkdir()
    (folder.path / "models" / "FT.json").touch()
    leave(first, "b")
    assert drop_departed(folder) == []
    assert [file.stem for file in folder.payload_files()] == ["b"]
    # And so is one that is bound to its payloads
    (folder.path / "models" / "FT.json").unlink()
    folder.store_payload_source(PayloadSource(str(folder.path), "second", {"b": DIGEST}))
    assert drop_departed(folder) == []
    folder.payload_source_file.unlink()
    assert drop_departed(folder) == ["b"]
    assert drop_departed(first) == []


def test_a_model_that_a_departed_client_has_shaped_is_no_start(first: RunFolder) -> None:
    """The run is trained anew, also when its command is repeated as it was."""
    (first.path / "models").mkdir()
    (first.path / "models" / "FT.safetensors").touch()
    settings = {"continue_from_model": True}
    folder = second(first, **settings)
    assert [file.name for file in folder.previous_folder.iterdir()] == ["FT.safetensors"]
    leave(first, "a")
    second(first, **settings)
    assert not folder.previous_folder.exists()
    record = folder.continuation()
    assert record is not None
    assert (record.from_model, record.model_clients, record.dropped) == (False, (), 1)
    assert folder.vacant_places() == 1
    second(first, **settings)
    with pytest.raises(ConfigError, match="'second' was started with continue-from = "):
        second(first, replace_clients="b")


def test_new_clients_come_beside_those_that_are_carried(first: RunFolder) -> None:
    config = config_of(**FOLDERS, new_clients=3, continue_from="first", min_clients=1)
    folder = second(first, new_clients=3)
    sized = with_new_clients(config, folder)
    assert (sized.num_clients, sized.min_clients) == (5, 3)
    held_out = with_new_clients(replace(config, held_out="x"), folder)
    assert (held_out.num_clients, held_out.needed_clients) == (6, 3)
    assert with_new_clients(config, first) == config
    assert with_new_clients(replace(config, new_clients=0), folder) == replace(
        config, new_clients=0
    )
    # A run that has forgotten a client asks no other
    folder.store_payload_source(PayloadSource(str(folder.path), "second", {"b": DIGEST}))
    bound = with_new_clients(config, folder)
    assert (bound.num_clients, bound.min_clients) == (1, 1)


@pytest.mark.slow
def test_models_are_shaped_by_earlier_versions_too(first: RunFolder) -> None:
    two = second(first)
    record = two.continuation()
    assert record is not None
    two.store_continuation(replace(record, from_model=True, model_clients=("x",)))
    settings = config_of(**FOLDERS, continue_from="second", continue_from_model=True)
    with pytest.raises(ConfigError, match="second has no model; finish it, or set it to false"):
        find_continuation(settings, _with_config(two))
    (two.path / "models").mkdir()
    (two.path / "models" / "FT.safetensors").touch()
    assert find_continuation(settings, two).model_clients == ("a", "b", "x")
    anew = config_of(**FOLDERS, continue_from="second")
    assert find_continuation(anew, two).model_clients == ()


def _with_config(folder: RunFolder) -> RunFolder:
    folder.write_json("config.json", flatten(config_of(**FOLDERS)))
    return folder


@pytest.mark.parametrize(
    ("classes", "method", "message"),
    [
        ("dog,cat,emu", "votes", "must begin with those of .*first, in their order: 'cat,dog'"),
        ("cat,dog,emu", "local", "'emu' is new, but with method 'local' a classifier has a fixed"),
        ("cat,dog,emu", "domain-vector", "'emu' is new, .* every class is synthesized for every"),
    ],
)
def test_classes_grow_at_the_end_alone(
    first: RunFolder, classes: str, method: str, message: str
) -> None:
    settings = (
        {**FOLDERS, "domain_vector__classes": "all"} if method == "domain-vector" else FOLDERS
    )
    first.write_json("config.json", flatten(config_of(method, **settings)))
    grown = config_of(method, **{**settings, "data__classes": classes})
    with pytest.raises(ConfigError, match=message):
        find_continuation(grown, first)


def test_a_resumed_run_keeps_its_record(first: RunFolder, tmp_path: Path) -> None:
    folder = second(first)
    payload = folder.path / "payloads" / "a.pb"
    payload.unlink()
    folder.store_sampling_choice({"batch_size": 4})
    second(first)
    assert payload.read_bytes() == BLOB
    assert folder.sampling_choice({}) == {"batch_size": 4}
    for changes in ({"replace_clients": "a"}, {"continue_from_model": True}):
        with pytest.raises(ConfigError, match="'second' was started with continue-from = "):
            second(first, **changes)
    first.path.rename(tmp_path / "moved")
    # Everything is here
    continue_run(config_of(**FOLDERS), folder)
    payload.unlink()
    os.symlink(tmp_path / "moved" / "payloads" / "a.pb", payload)
    with pytest.raises(ConfigError, match="continue-from: the payload of a in .* is missing"):
        continue_run(config_of(**FOLDERS), folder)
    other_folder = RunFolder(tmp_path / "other")
    other_folder.store_payload("a", BLOB, {"sha256": DIGEST})
    with pytest.raises(ConfigError, match="'other' was started with its own payloads"):
        continue_run(config_of(**FOLDERS, continue_from="first"), other_folder)


@pytest.mark.parametrize(
    "change",
    [
        {"payloads": {"../x": DIGEST}, "jobs": {"../x": "first"}, "classes": {"../x": ()}},
        {"payloads": {"a": "0"}},
        {"jobs": {"a": "../x", "b": "first"}},
        {"jobs": {"a": "first"}, "classes": {"a": ()}},
        {"replaced": ("../x",)},
        {"version": "2"},
    ],
)
def test_a_damaged_record_leads_nowhere(first: RunFolder, change: dict[str, Any]) -> None:
    folder = second(first)
    record = folder.continuation()
    assert record is not None
    folder.store_continuation(replace(record, **change))
    with pytest.raises(CorruptFileError, match=r"continued-from\.json is corrupt"):
        continue_run(config_of(**FOLDERS), folder)


def test_payloads_for_several_jobs_are_reused_with_these(first: RunFolder) -> None:
    """The record of `payloads-from` has them, and no more than before for a single job."""
    folder = RunFolder(first.path.with_name("third"))
    source = PayloadSource("/runs/second", "second", {"a": DIGEST, "c": DIGEST}, {"a": "first"})
    folder.store_payload_source(source)
    assert folder.payload_source() == source
    assert [folder.payload_job(client, "second") for client in "ac"] == ["first", "second"]
    folder.store_payload_source(replace(source, jobs={}))
    record = json.loads(folder.payload_source_file.read_text())
    assert record.keys() == {"run", "job", "payloads"}
    for jobs in ({"a": "../x"}, {"a": 1}, []):
        folder.write_json("payloads-from.json", {**record, "jobs": jobs})
        with pytest.raises(CorruptFileError, match=r"payloads-from\.json is corrupt"):
            folder.payload_source()
