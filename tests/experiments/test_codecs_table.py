"""benchmarks/codecs.py: bytes and accuracy of the codecs, side by side."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import shufflenet_v2_x1_0

from benchmarks import clients, codecs, main_table
from benchmarks.clients import folder_name, for_clients
from osfl.payload import wire
from osfl.payload.codecs import pack
from osfl.payload.kinds import Classifier, DomainVector
from osfl.util.prompts import DIGITS

NUMBERS = torch.linspace(-1, 1, 16 * 64).view(16, 64)
# What every codec saves of them; the short message around them is the same
SAVED = {codec: 4096 - len(pack(NUMBERS.flatten().numpy(), codec)) for codec in codecs.PACKED}


def keep(row: str, seed: int, accuracy: float) -> None:
    """A cell, and the payloads of its clients."""
    settings = main_table.settings_of(row, seed)
    cell = {"accuracy": [accuracy] * 6, "machine": "one"}
    (main_table.WORK / f"{folder_name(settings)}.json").write_text(json.dumps(cell))
    folder = clients.PAYLOADS / f"payloads-{folder_name(for_clients(settings))}"
    for client in main_table.CLIENTS:
        file = folder / client / "payload.pb"
        file.parent.mkdir(parents=True, exist_ok=True)
        payload = DomainVector(DIGITS, NUMBERS)
        file.write_bytes(wire.encode(payload, "domain-vector", folder.name, client))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tables go; raw has 90 and 92, int8 91 and 91, int4 80 and 84."""
    monkeypatch.setattr(main_table, "WORK", tmp_path / "work")
    monkeypatch.setattr(codecs, "WORK", tmp_path / "work")
    monkeypatch.setattr(clients, "PAYLOADS", tmp_path / "payloads")
    monkeypatch.setattr(codecs, "TABLES", tmp_path / "tables")
    (tmp_path / "work").mkdir()
    (tmp_path / "tables").mkdir()
    for codec, figures in (("raw", (90.0, 92.0)), ("int8", (91.0, 91.0)), ("int4", (80.0, 84.0))):
        for seed, figure in enumerate(figures):
            keep(codecs.row_of("domain-vector", codec), seed, figure)
    return tmp_path / "tables"


def test_the_table_has_bytes_and_paired_differences(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 x 64 numbers: 4,096 bytes. int4 is 10 and 8 lower: 9 with a standard error of 1, and
    Student's t of one degree of freedom is 12.7.
    """
    monkeypatch.setattr("sys.argv", ["codecs", "domain-vector", "--seeds", "0,1"])
    codecs.main()
    rows = json.loads((tables / "codecs.json").read_text())["rows"]
    assert [row["codec"] for row in rows] == ["raw", "int8", "int4"]
    assert [row["average"] for row in rows] == ["91.0", "91.0", "82.0"]
    sizes = [int(row["bytes a client"]) for row in rows]
    assert [sizes[0] - size for size in sizes] == [0, SAVED["int8"], SAVED["int4"]]
    assert SAVED["int8"] >= 4096 - 1024 - 32
    assert rows[0]["to raw"] == ""
    assert rows[2]["to raw"] == "-9.0 [-21.7, +3.7]"
    assert (tables / "codecs.png").stat().st_size > 5_000


def test_bytes_and_errors_need_no_training(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from -1 to 1 in even steps: their mean square is 1/3. Half of int8's steps of 1/127
    are off by 1/127/sqrt(12) or less, where a block's largest is below 1.
    """
    arguments = ["domain-vector", "--seeds", "0,1", "--without-training"]
    monkeypatch.setattr("sys.argv", ["codecs", *arguments])
    monkeypatch.setattr(codecs, "cells", None)
    codecs.main()
    rows = json.loads((tables / "codecs-bytes-seeds-0-1.json").read_text())["rows"]
    sizes = [int(row["bytes a client"]) for row in rows]
    assert [sizes[0] - size for size in sizes] == list(SAVED.values())
    decibels = [row["signal to error (dB)"] for row in rows]
    assert decibels[0] == ""
    worst = 10 * math.log10(1 / 3 / ((1 / 127) ** 2 / 12))
    assert worst < float(decibels[2]) < worst + 6
    # Four bits less: 20 log10 127 / 7 = 25.2 dB
    assert float(decibels[2]) - float(decibels[3]) == pytest.approx(25.2, abs=1)
    assert float(decibels[1]) > float(decibels[2]) + 15


def test_a_classifiers_numbers_are_looked_at_too() -> None:
    state = {"conv.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}
    assert codecs.tensors_of(Classifier(DIGITS, "resnet18", state)) == state
    (name,) = codecs.tensors_of(DomainVector(DIGITS, NUMBERS))
    assert name == "domain"


def test_an_unknown_system_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["codecs", "FedSomething"])
    with pytest.raises(SystemExit):
        codecs.main()
    assert "'FedSomething': must be some of" in capsys.readouterr().err


def test_classifiers_are_tested_as_they_arrive(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The accuracy of a model is here what its first weight is, which int4 has changed: of two
    seeds 70 and 80, and a tenth less.
    """

    def sent(settings: dict[str, object]) -> dict[str, Classifier]:
        model = shufflenet_v2_x1_0(num_classes=10)
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        value = 70.0 + 10 * int(str(settings["seed"]))
        if settings.get("payload-codec") == "int4":
            value -= 7.0 + int(str(settings["seed"]))
        state["fc.bias"][0] = value
        return {"client-0": Classifier(DIGITS, "shufflenet_v2_x1_0", state)}

    def on_own(settings: dict[str, object], models: dict[str, nn.Module]) -> float:
        assert not models["client-0"].training
        return float(models["client-0"].state_dict()["fc.bias"][0])

    request.addfinalizer(codecs.accuracy_of_classifiers.cache_clear)
    monkeypatch.setattr(codecs, "sent", sent)
    monkeypatch.setattr(codecs, "on_own", on_own)
    made = codecs.line_of_bytes("FedLMG", "raw", (0, 1))
    assert (made[codecs.LIKE_OWN], made[f"{codecs.LIKE_OWN}, to raw"]) == ("75.0", "")
    made = codecs.line_of_bytes("FedLMG", "int4", (0, 1))
    assert made[codecs.LIKE_OWN] == "67.5"
    # Differences of 7 and 8: a standard error of a half, and Student's t of 12.7
    assert made[f"{codecs.LIKE_OWN}, to raw"] == "-7.5 [-13.9, -1.1] *"
