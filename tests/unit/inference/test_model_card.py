"""The model card of an export: figures by hand, no names unless asked, valid front matter."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import osfl
from osfl.config import ConfigError
from osfl.inference.model_card import card_text, read_run_record
from osfl.metrics.histograms import count_scores
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import gather
from osfl.util.files import CorruptFileError
from tests.helpers.described_models import stored_model
from tests.helpers.digit_scores import digit_logits

CLIENTS = ("ward-north", "ward-south", "ward-west")


def matrix(*correct: int) -> list[list[int]]:
    """Return a confusion matrix; of ten images `correct` are right in the first of ten classes."""
    rows = []
    for label in range(10):
        hits = correct[label] if label < len(correct) else 10
        row = [0] * 10
        row[label] = hits
        row[(label + 1) % 10] = 10 - hits
        rows.append(row)
    return rows


def finished(file: Path) -> Path:
    """Finish a model's run: two clients tested, one withholds its results, and each sent bytes."""
    run = RunFolder(file.parents[1])
    run.store_test("FT", {"ward-south": matrix(0, 5), "ward-north": matrix(0)})
    run.store_withheld(["ward-west"])
    for number, client in enumerate(CLIENTS):
        run.write_json(f"payloads/{client}.json", {"costs": {}, "bytes": 1000 * (number + 1)})
    run.write_json("status.json", {"phase": "finished", "clients": dict.fromkeys(CLIENTS, "x")})
    run.metrics_file.write_text(json.dumps(gather(run.path)))
    return run.path


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    settings: dict[str, Any] = {"method": "feddeo", "epsilon": 2.0, "delta": 1e-6}
    return stored_model(tmp_path, "shufflenet_v2_x1_0", True, 16, **settings)


def card(file: Path, run: Path | None = None, client_names: bool = False) -> str:
    model = osfl.load_model(file)
    record = read_run_record(file, run, len(model.classes))
    return card_text(model.description, "transformers", record, client_names)


def test_the_hub_accepts_the_front_matter(trained: Path) -> None:
    parsed = ModelCard(card(trained), ignore_metadata_errors=False)
    data = parsed.data.to_dict()
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "image-classification"
    assert "federated-learning" in data["tags"]
    assert parsed.text.lstrip().startswith("# job FT")


def test_figures_are_those_of_the_tests(trained: Path) -> None:
    """The better client, with 90 of 100, comes first; together 175 of 200 are correct."""
    finished(trained)
    text = card(trained)
    lines = [line for line in text.splitlines() if line.startswith(("| client ", "| **all"))]
    assert lines == [
        "| client 1 | 100 | 90.0 (82.6 to 94.5) | 90.0 |",
        "| client 2 | 100 | 85.0 (76.7 to 90.7) | 85.0 |",
        "| client 3 | not reported | - | - |",
        "| **all images** | 200 | 87.5 (82.2 to 91.4) | 87.5 |",
    ]
    assert "3 clients sent 1 kB to 3 kB each, 6 kB in all" in text
    assert "a learned description of every class (`Descriptions`)" in text
    assert "Epsilon 2, delta 1e-06: " in text
    assert "| 3 | three |" in text
    assert "epochs 1, batch-size 50, lr 0.01" in text
    assert "License of the base weights, from which training started: none" in text
    assert not [client for client in CLIENTS if client in text]


def test_discrimination_and_calibration_have_intervals(trained: Path) -> None:
    """Two clients sent histograms; they are in the order of the other table."""
    run = finished(trained)
    logits, labels = digit_logits(100)
    histograms = {}
    for first, client in enumerate(("ward-south", "ward-north")):
        counted = count_scores(logits[first::2], labels[first::2])
        assert counted is not None
        histograms[client] = counted
    RunFolder(run).store_histograms("FT", histograms)
    (run / "metrics.json").write_text(json.dumps(gather(run)))
    text = card(trained)
    _, table = text.split("From histograms of each client's scores")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert rows[0] == "|  | AUROC | sensitivity at 95 % specificity | ECE | Brier score |"
    rows = rows[2:5]
    figures = json.loads((run / "metrics.json").read_text())["figures"]["FT"]
    assert [row.split(" | ")[0] for row in rows[:2]] == ["| client 1", "| client 2"]
    # The better one is the first
    clients = [figures["clients"][name] for name in ("ward-north", "ward-south")]
    for row, test in zip(rows, [*clients, figures["together"]], strict=True):
        cells = row.strip("| ").split(" | ")
        area = test["auroc"]
        assert cells[1] == f"{area['value']:.3f} ({area['low']:.3f} to {area['high']:.3f})"
        error = test["ece"]
        shown = f"{100 * error['value']:.1f} % ({100 * error['low']:.1f} to "
        assert cells[3].startswith(shown)
    assert "| **the 2 clients that sent histograms together** |" in text
    assert not [client for client in CLIENTS if client in text]


def test_reused_payloads_were_sent_in_another_run(trained: Path) -> None:
    run = finished(trained)
    metrics = json.loads((run / "metrics.json").read_text())
    text = "3 clients sent 1 kB to 3 kB each, 6 kB in all."
    assert f"{text} An adversary" in card(trained)
    metrics["payloads_from"] = "base*"
    (run / "metrics.json").write_text(json.dumps(metrics))
    shown = card(trained)
    assert f"{text} That was in job base\\*: in this run no client sent a payload." in shown


def test_paths_of_the_server_are_not_shown(trained: Path) -> None:
    run = finished(trained)
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["server"]["synthetic_images"] = 1234
    metrics["kits"] = ["/srv/secret/photographs/", "owner/base"]
    metrics["config"]["global-model.init"] = "/srv/secret/start.pth"
    (run / "metrics.json").write_text(json.dumps(metrics))
    text = card(trained)
    assert "| diffusion model (kit) | photographs, base |" in text
    assert "| synthetic images | 1,234 |" in text
    assert "init start.pth, " in text
    assert "/srv" not in text


def test_clients_are_named_on_demand(trained: Path) -> None:
    finished(trained)
    text = card(trained, client_names=True)
    lines = [line for line in text.splitlines() if line.startswith("| ward-")]
    assert [line.split(" | ")[0] for line in lines] == [f"| {client}" for client in CLIENTS]
    assert lines[0].startswith("| ward-north | 100 | 90.0 ")


@pytest.mark.slow
def test_without_a_run_the_card_says_so(trained: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(trained.read_bytes())
    for file in (alone, trained):
        assert "Not known: this card was written without the run's folder." in card(file)
        assert "How many bytes is not known." in card(file)
    with pytest.raises(ConfigError, match="--run = .*must be the folder of a finished run"):
        card(alone, trained.parents[1])
    run = finished(trained)
    assert "| client 1 | 100 | 90.0 " in card(alone, run)
    alone.write_bytes(stored_model(tmp_path / "other", "resnet18", True).read_bytes())
    beside = run / "elsewhere" / "alone.safetensors"
    beside.parent.mkdir()
    beside.write_bytes(alone.read_bytes())
    assert "Not known: this card was written without the run's folder." in card(beside)
    with pytest.raises(ConfigError, match="--run: the run .* no model with this file's SHA-256"):
        card(alone, run)


def test_a_run_of_other_classes_is_corrupt(trained: Path) -> None:
    run = finished(trained)
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["confusion"]["FT"]["ward-south"] = [[1]]
    (run / "metrics.json").write_text(json.dumps(metrics))
    with pytest.raises(CorruptFileError, match="does not have 10 classes"):
        card(trained)


def test_names_do_not_become_markdown(trained: Path) -> None:
    run = finished(trained)
    metrics = json.loads((run / "metrics.json").read_text())
    for table in (metrics["confusion"]["FT"], metrics["clients"]):
        table["<b>|x"] = table.pop("ward-south")
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert r"| \<b\>\|x | 100 | 85.0" in card(trained, client_names=True)
