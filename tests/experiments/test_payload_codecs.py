"""benchmarks/privacy/payload_codecs.py: bytes and accuracy of the codecs, side by side."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import shufflenet_v2_x1_0

from benchmarks import federation, harness, recipe
from benchmarks.accuracy import method_comparison
from benchmarks.federation import CLIENTS, cell_name, client_settings
from benchmarks.privacy import payload_codecs
from osfl.data.load import Images
from osfl.payload import wire
from osfl.payload.codecs import pack
from osfl.payload.kinds import Classifier, DomainVector
from osfl.util.prompts import DIGITS

NUMBERS = torch.linspace(-1, 1, 16 * 64).view(16, 64)
# What every codec saves of them; the short message around them is the same
SAVED = {
    codec: 4096 - len(pack(NUMBERS.flatten().numpy(), codec)) for codec in payload_codecs.ALL_CODECS
}


def keep(row: str, seed: int, accuracy: float) -> None:
    """A cell, and the payloads of its clients."""
    settings = recipe.settings_of(row, seed)
    cell = {"accuracy": [accuracy] * 6, "machine": "one"}
    method_comparison.experiment("domain").cell(cell_name(settings), lambda: cell)
    folder = harness.RUNS / "payloads" / f"payloads-{cell_name(client_settings(settings))}"
    for client in CLIENTS:
        file = folder / client / "payload.pb"
        file.parent.mkdir(parents=True, exist_ok=True)
        payload = DomainVector(DIGITS, NUMBERS)
        file.write_bytes(wire.encode(payload, "domain-vector", folder.name, client))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tables; raw has 90 and 92, int8 91 and 91, int4 80 and 84."""
    for codec, figures in (("raw", (90.0, 92.0)), ("int8", (91.0, 91.0)), ("int4", (80.0, 84.0))):
        for seed, figure in enumerate(figures):
            keep(payload_codecs.row_of("domain-vector", codec), seed, figure)
    return harness.BENCHMARKS / "privacy" / "tables"


@pytest.mark.slow
def test_the_table_has_bytes_and_paired_differences(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 x 64 numbers: 4,096 bytes. int4 is 10 and 8 lower: 9 with a standard error of 1, and
    Student's t of one degree of freedom is 12.7.
    """
    monkeypatch.setattr("sys.argv", ["codecs", "domain-vector", "--seeds", "0,1"])
    payload_codecs.main()
    rows = json.loads((tables / "payload-codecs-seeds-0-1.json").read_text())["rows"]
    assert [row["codec"] for row in rows] == ["raw", "int8", "int4"]
    assert [row["average"] for row in rows] == ["91.0", "91.0", "82.0"]
    sizes = [int(row["bytes a client"]) for row in rows]
    assert [sizes[0] - size for size in sizes] == [0, SAVED["int8"], SAVED["int4"]]
    assert SAVED["int8"] >= 4096 - 1024 - 32
    assert rows[0]["to raw"] == ""
    assert rows[2]["to raw"] == "-9.0 [-21.7, +3.7]"
    assert (tables / "payload-codecs.png").stat().st_size > 5_000


def test_bytes_and_errors_need_no_training(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from -1 to 1 in even steps: their mean square is 1/3. Half of int8's steps of 1/127
    are off by 1/127/sqrt(12) or less, where a block's largest is below 1.
    """
    arguments = ["domain-vector", "--seeds", "0,1", "--without-training"]
    monkeypatch.setattr("sys.argv", ["codecs", *arguments])
    monkeypatch.setattr(payload_codecs, "cells", None)
    payload_codecs.main()
    rows = json.loads((tables / "payload-codecs-bytes-seeds-0-1.json").read_text())["rows"]
    sizes = [int(row["bytes a client"]) for row in rows]
    assert [sizes[0] - size for size in sizes] == list(SAVED.values())
    decibels = [row["signal to error (dB)"] for row in rows]
    assert decibels[0] == ""
    worst = 10 * math.log10(1 / 3 / ((1 / 127) ** 2 / 12))
    assert worst < float(decibels[2]) < worst + 6
    # Four bits less: 20 log10 127 / 7 = 25.2 dB
    assert float(decibels[2]) - float(decibels[3]) == pytest.approx(25.2, abs=1)
    assert float(decibels[1]) > float(decibels[2]) + 15


def test_a_classifiers_tensors_count() -> None:
    state = {"conv.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}
    assert payload_codecs.tensors_of(Classifier(DIGITS, "resnet18", state)) == state
    (name,) = payload_codecs.tensors_of(DomainVector(DIGITS, NUMBERS))
    assert name == "domain"


@pytest.mark.slow
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

    def accuracy_on_own(settings: dict[str, object], models: dict[str, nn.Module]) -> float:
        assert not models["client-0"].training
        return float(models["client-0"].state_dict()["fc.bias"][0])

    request.addfinalizer(payload_codecs.accuracy_of_classifiers.cache_clear)
    monkeypatch.setattr(payload_codecs, "payloads_of", sent)
    monkeypatch.setattr(payload_codecs, "accuracy_on_own", accuracy_on_own)
    line = payload_codecs.line_of_bytes("FedLMG", "raw", (0, 1))
    assert (line[payload_codecs.LIKE_OWN], line[f"{payload_codecs.LIKE_OWN}, to raw"]) == (
        "75.0",
        "",
    )
    line = payload_codecs.line_of_bytes("FedLMG", "int4", (0, 1))
    assert line[payload_codecs.LIKE_OWN] == "67.5"
    # Differences of 7 and 8: a standard error of a half, and Student's t of 12.7
    assert line[f"{payload_codecs.LIKE_OWN}, to raw"] == "-7.5 [-13.9, -1.1] *"


def test_clients_are_tested_on_images_of_their_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two clients has classes 0 and 1; its model predicts 0 for both. The second has
    class 2, which its model recognizes. Images of other classes do not count.
    """
    classes = {0: [0, 0, 1], 1: [2]}

    def load(data: object, node: Any, split: str, seed: int) -> Images:
        labels = torch.tensor(classes[node.partition_id] if split == "train" else [0, 1, 2, 0, 0])
        pixels = labels.view(-1, 1, 1, 1).expand(-1, 3, 2, 2).byte()
        return Images(pixels, labels)

    def logits(model: dict[int, int], pixels: torch.Tensor, device: object) -> torch.Tensor:
        predicted = torch.tensor([model[label] for label in pixels[:, 0, 0, 0].tolist()])
        return nn.functional.one_hot(predicted, 3).float()

    monkeypatch.setattr(payload_codecs, "CLIENTS", ("a", "b"))
    monkeypatch.setattr(payload_codecs, "load_images", load)
    monkeypatch.setattr(federation, "compute_logits", logits)
    models: Any = {"a": {0: 0, 1: 0, 2: 2}, "b": {0: 1, 1: 1, 2: 2}}
    accuracy = payload_codecs.accuracy_on_own(recipe.settings_of("FedLMG", 0), models)
    # Three of four, and one of one
    assert accuracy == pytest.approx(100 * (3 / 4 + 1) / 2)
