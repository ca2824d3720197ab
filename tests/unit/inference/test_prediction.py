"""`osfl predict` and `osfl evaluate`, against numbers computed with torch alone."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F
from torchvision.models import shufflenet_v2_x1_0
from typer.testing import CliRunner

import osfl
from osfl.cli.main import app
from osfl.inference.prediction import accuracy_of, find_images

CLASSES = ["zebra", "ant", "cat"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Seven images of 16 x 16, and one wider, with 3 in a folder."""
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(8):
        low = random.integers(0, 200, (1, 1, 3))
        pixels = low + random.integers(0, 56, (16, 30 if number == 7 else 16, 3))
        name = f"inner/{number}.png" if number < 3 else f"{number}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
    return folder


def expected(model_file: Path, image: Path) -> torch.Tensor:
    """The probabilities of an image of height 16, by torchvision's model and by hand."""
    model = shufflenet_v2_x1_0(num_classes=3)
    model.maxpool = torch.nn.Identity()
    model.load_state_dict(load_file(model_file))
    pixels = np.asarray(Image.open(image)).astype(np.float64)
    start = (pixels.shape[1] - 16) // 2
    cut = pixels[:, start : start + 16]
    normalized = (cut / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    inputs = torch.from_numpy(normalized.transpose(2, 0, 1)[None].astype(np.float32))
    with torch.no_grad():
        return F.softmax(model.eval()(inputs), dim=1)[0]


def test_probabilities_are_those_of_the_model(
    model_file: Path, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    command = ["predict", str(model_file), str(images), "--out", str(out), "--batch-size", "3"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    header, *rows = csv.reader(out.read_text().splitlines())
    assert header == ["path", "class", "p(zebra)", "p(ant)", "p(cat)"]
    assert len(rows) == 8
    for path, name, *values in rows:
        probabilities = expected(model_file, Path(path))
        torch.testing.assert_close(
            torch.tensor(list(map(float, values))), probabilities, atol=1e-6, rtol=0
        )
        assert name == CLASSES[int(probabilities.argmax())]
        # Saturated outputs would hide a wrong input
        assert probabilities.max() < 0.999
    assert len({name for _, name, *_ in rows}) > 1
    # One image with `load_model` alone
    model = osfl.load_model(model_file)
    with torch.no_grad():
        logits = model.module(model.transform(images / "7.png")[None])
    alone = F.softmax(logits, dim=1)[0]
    torch.testing.assert_close(alone, expected(model_file, images / "7.png"), atol=1e-6, rtol=0)


def test_json_lines_of_a_pattern(model_file: Path, images: Path) -> None:
    command = ["predict", str(model_file), f"{images}/inner/*.png", "--format", "jsonl"]
    result = CliRunner().invoke(app, command)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "2.png"]
    for row in rows:
        assert list(row["probabilities"]) == CLASSES
        assert row["class"] == max(row["probabilities"], key=row["probabilities"].get)
        assert sum(row["probabilities"].values()) == pytest.approx(1)


def test_a_large_image_is_resized_by_its_short_side(model_file: Path, tmp_path: Path) -> None:
    """Within one level of a pixel, by which the libraries round differently."""
    pixels = np.random.default_rng(1).integers(0, 256, (48, 96, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png")
    values = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    small = F.interpolate(values, (16, 32), mode="bilinear", antialias=True)[0, :, :, 8:24]
    transformed = osfl.load_model(model_file).transform.pixels(tmp_path / "large.png")
    assert (transformed - small).abs().max() <= 1.01


def test_unreadable_files_are_named_and_the_others_predicted(
    model_file: Path, images: Path
) -> None:
    (images / "3.png").write_bytes((images / "3.png").read_bytes()[:60])
    (images / "notes.txt").write_text("no image")
    result = CliRunner().invoke(app, ["predict", str(model_file), str(images)])
    assert result.exit_code == 1
    names = [Path(row[0]).name for row in csv.reader(result.stdout.splitlines())]
    assert sorted(names) == sorted(["path", *(f"{n}.png" for n in range(8) if n != 3)])
    assert "3.png: not a readable image" in result.stderr
    assert "notes.txt: not a readable image (Pillow does not know its format)" in result.stderr
    assert "2 of 9 files are not readable images" in result.stderr


def test_errors_go_to_standard_error(model_file: Path, images: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([str(model_file), str(tmp_path / "none")], "no such file or folder"),
        ([str(model_file), str(images), "--format", "xml"], "must be csv or jsonl"),
        ([str(tmp_path / "none"), str(images)], "no such file; set MODEL"),
        ([str(model_file), str(images), "--device", "tpu"], "Set it to auto, cpu"),
    ):
        result = CliRunner().invoke(app, ["predict", *arguments])
        assert result.exit_code == 1
        assert message in result.stderr
        assert result.stdout == ""


def test_a_file_that_two_paths_name_is_predicted_once(images: Path) -> None:
    assert len(find_images([str(images / "5.png"), f"{images}/*.png", str(images)])) == 8


@pytest.mark.slow
def test_a_labeled_folder_is_evaluated(model_file: Path, images: Path, tmp_path: Path) -> None:
    """Every image lies in the folder of its predicted class, but for one."""
    labeled = tmp_path / "labeled"
    counts = dict.fromkeys(CLASSES, 0)
    files = sorted(images.rglob("*.png"))
    for number, file in enumerate(files):
        name = CLASSES[int(expected(model_file, file).argmax())]
        counts[name] += 1
        if number == 0:
            wrong = CLASSES[CLASSES.index(name) - 1]
            name, mistaken = wrong, name
        (labeled / name).mkdir(parents=True, exist_ok=True)
        (labeled / name / file.name).write_bytes(file.read_bytes())
    result = CliRunner().invoke(app, ["evaluate", str(model_file), str(labeled)])
    assert result.exit_code == 0, result.output
    assert "accuracy 87.5 % (95 % interval 52.9 to 97.8), 8 images" in result.stdout
    assert f"{mistaken} (1)" in result.stdout
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    matrix = [list(map(int, row[1:])) for row in rows if len(row) == 4]
    assert [sum(column) for column in zip(*matrix, strict=True)] == list(counts.values())
    assert matrix[CLASSES.index(wrong)][CLASSES.index(mistaken)] == 1
    labeled_files = sorted(labeled.rglob("*.png"))
    labels = np.array([CLASSES.index(file.parent.name) for file in labeled_files])
    p = torch.stack([expected(model_file, file) for file in labeled_files]).double().numpy()
    classes = sorted(set(labels.tolist()))
    area = np.mean([roc_auc_score(labels == label, p[:, label]) for label in classes])
    brier = ((p - np.eye(3)[labels]) ** 2).sum(axis=1).mean()
    assert f"AUROC {area:.3f} (" in result.stdout
    assert f"Brier score {brier:.3f} (" in result.stdout
    assert "sensitivity at 95 % specificity" in result.stdout
    hints = {"Ant": "rename the folder to 'ant'", "dog": "rename or remove it, or use a model"}
    for name, hint in hints.items():
        (labeled / name).mkdir()
        result = CliRunner().invoke(app, ["evaluate", str(model_file), str(labeled)])
        assert result.exit_code == 1
        problem = f"'{name}' is not one of the model's classes (zebra, ant, cat); {hint}"
        assert problem in result.stderr
        (labeled / name).rmdir()


def test_the_interval_is_wilsons() -> None:
    accuracy = accuracy_of(np.array([[70, 10], [20, 100]]))
    share, count, z = 170 / 200, 200, 1.959963984540054
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    assert accuracy.value == pytest.approx(85)
    assert accuracy.low == pytest.approx(100 * (center - half))
    assert accuracy.high == pytest.approx(100 * (center + half))


@pytest.mark.slow
def test_a_model_needs_neither_its_run_nor_the_diffusion_libraries(
    model_file: Path, images: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.safetensors"
    model_file.rename(alone)
    code = (
        "import sys; from osfl.cli.main import app\n"
        f"try: app(['predict', {str(alone)!r}, {str(images)!r}])\n"
        "except SystemExit as end: print(end.code)\n"
        "print(sorted({'diffusers', 'transformers', 'flwr', 'timm'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-2:] == ["0", "[]"]
    assert len(shown.stdout.splitlines()) == 9 + 2
