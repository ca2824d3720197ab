"""`osfl export`: its options, and a run's models and figures from the run to the foreign file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from typer.testing import CliRunner

import osfl
from osfl.cli.main import app
from tests.helpers.described_models import digit_files
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start


def export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_errors_name_the_argument(tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    file = tmp_path / "file"
    file.write_text("mine")
    new = tmp_path / "new"
    for arguments, problem in (
        (["--to", "xml", "--out", new], "--to = 'xml': must be onnx or huggingface"),
        (["--to", "onnx", "--out", new, "--run", tmp_path], "--run: requires --to huggingface"),
        (["--to", "onnx", "--out", new, "--client-names"], "--client-names: requires --to hug"),
        (["--to", "huggingface", "--out", new, "--preprocessing"], "--preprocessing: requires"),
        (["--to", "onnx", "--out", file], "exists; set another file, or --overwrite"),
        (["--to", "onnx", "--out", tmp_path], "is a folder; set --out to a file"),
        (["--to", "huggingface", "--out", file], "is a file; set --out to a folder"),
        (["--to", "huggingface", "--out", tmp_path], "is not empty; set another folder, or --over"),
        (["--to", "onnx", "--out", new], "no such file; set MODEL to a model's file"),
        (["--to", "onnx", "--out", file, "--overwrite"], "no such file; set MODEL"),
    ):
        result = export(model, *arguments)
        assert result.exit_code == 1
        assert problem in " ".join(result.stderr.split())
        assert result.stdout == ""
    assert file.read_text() == "mine"
    assert not new.exists()


@pytest.mark.slow
def test_a_runs_model_and_figures_are_exported(home: Path, tiny_kit: Path) -> None:
    """FedCGS' head on a frozen encoder, whose statistics are all that clients send."""
    start(quick(method="fedcgs", kit=str(tiny_kit)))
    file = home / "runs" / "job" / "models" / "FedCGS.safetensors"
    result = export(file, "--to", "huggingface", "--out", home / "hub")
    assert result.exit_code == 0, result.output
    assert "states no figures" not in result.output
    state = load_file(home / "hub" / "model.safetensors")
    weights = load_file(file)
    assert all(torch.equal(state[f"network.{name}"], value) for name, value in weights.items())
    text = ModelCard.load(home / "hub" / "README.md").text
    run = metrics(home)
    accuracies = [run["accuracy"]["FedCGS"][client] for client in run["clients"]]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| client ")]
    # The other rows are those of scores
    shown = rows[: len(accuracies)]
    assert [row[2].split()[0] for row in shown] == [
        f"{value:.1f}" for value in sorted(accuracies, reverse=True)
    ]
    assert "client-0" not in text
    assert "(`FeatureStatistics`). 2 clients sent " in text
    assert "a linear head on frozen features; seed 0" in text
    result = export(file, "--to", "huggingface", "--out", home / "hub", "--client-names")
    assert "--overwrite" in result.stderr
    result = export(
        file, "--to", "huggingface", "--out", home / "hub", "--client-names", "--overwrite"
    )
    assert result.exit_code == 0
    assert "| client-0 | 20 | " in (home / "hub" / "README.md").read_text()
    assert export(file, "--to", "onnx", "--out", home / "model.onnx").exit_code == 0
    model = osfl.load_model(file)
    images = torch.stack([model.transform(name) for name in digit_files(home / "digits")])
    session = onnxruntime.InferenceSession(home / "model.onnx")
    names = {entry: json.loads(value) for entry, value in properties(session).items()}
    assert tuple(names["classes"]) == model.classes
    logits = session.run(None, {"image": images.numpy()})[0]
    with torch.no_grad():
        expected = model.module(images).numpy()
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(logits / scale, expected / scale, atol=1e-5, rtol=0)


def properties(session: onnxruntime.InferenceSession) -> dict[str, str]:
    metadata = session.get_modelmeta().custom_metadata_map
    return {name: metadata[name] for name in ("classes", "osfl")}
