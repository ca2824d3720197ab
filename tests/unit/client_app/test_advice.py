"""Measurements of a client for `osfl advise`: a CLIP, a head, and the kit as a classifier."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from torch.nn import functional as F
from transformers import CLIPModel, CLIPTokenizer

from client_app import advice
from client_app.advice import SiteMeasurement, cross_validate
from osfl.config import NodeConfig, parse_run_config
from osfl.kit.kits import find_clip
from osfl.models.encoders import load_clip
from tests.helpers.encoder_folders import save_clip, save_contrastive_clip
from tests.helpers.settings import quick

NODE = NodeConfig(partition_id=0, num_partitions=2)


def test_the_head_is_scored_on_images_that_it_was_not_trained_on() -> None:
    """The share is computed by hand, fold after fold; a class of one image is left out."""
    draw = np.random.default_rng(0)
    labels = np.array([0] * 8 + [1] * 7 + [2] * 3 + [5])
    features = draw.normal(size=(len(labels), 4)) * 20 + labels[:, None] * 12 + 100
    inputs, truth = features[:-1], labels[:-1]
    correct = 0
    for train, test in StratifiedKFold(3, shuffle=True, random_state=4).split(inputs, truth):
        mean, std = inputs[train].mean(axis=0), inputs[train].std(axis=0)
        head = LogisticRegression(max_iter=1000).fit((inputs[train] - mean) / std, truth[train])
        correct += (head.predict((inputs[test] - mean) / std) == truth[test]).sum()
    assert 0 < correct < len(truth)
    assert cross_validate(features, labels, 4) == pytest.approx(correct / len(truth))
    assert cross_validate(features[:8], labels[:8], 4) is None


def test_a_clip_names_the_class_of_the_nearest_text(tmp_path: Path) -> None:
    texts = ["an image of one", "an image of two", "three", "four"]
    folder = save_contrastive_clip(tmp_path / "clip", texts)
    encoders = load_clip(str(folder), torch.device("cpu"))
    pixels = torch.randint(0, 256, (70, 3, 32, 32), dtype=torch.uint8)
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    mean = torch.tensor(encoders.processor.image_mean).view(3, 1, 1)
    std = torch.tensor(encoders.processor.image_std).view(3, 1, 1)
    with torch.no_grad():
        # The library's own logits are the cosines, scaled
        logits = model(pixel_values=(pixels / 255 - mean) / std, **tokens).logits_per_image
    expected = logits.argmax(dim=1)
    assert len(set(expected.tolist())) > 1
    assert torch.equal(encoders.classify(pixels, texts), expected)


def test_a_clip_is_the_kits_or_the_named_one(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    clip_folder = save_contrastive_clip(kit / "clip", ["a", "b"])
    assert find_clip(str(kit), "") == str(clip_folder)
    assert find_clip(str(tmp_path / "other"), "") == ""
    assert find_clip(str(kit), str(save_clip(tmp_path / "tower"))) == ""
    assert find_clip(str(tmp_path / "other"), str(clip_folder)) == str(clip_folder)


def site(kit: Path, **settings: object) -> SiteMeasurement:
    config = parse_run_config(quick(advise=True, method="local", kit=str(kit), **settings))
    return SiteMeasurement(config, NODE, "client-0")


@pytest.mark.slow
def test_the_share_is_of_images_whose_own_prompt_has_the_smallest_error(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: dict[str, torch.Tensor] = {}
    denoising_errors = advice.denoising_errors

    monkeypatch.setattr(advice, "DIFFUSION_IMAGES", 20)
    place = site(tiny_kit)
    pixels, labels = place._images(32, 2)
    assert labels.bincount().max() == 2

    def keep(*arguments: object) -> torch.Tensor:
        """The kit is untrained, so that some images are made to fit their own prompt."""
        errors = denoising_errors(*arguments)  # type: ignore[arg-type]
        errors[torch.arange(9), labels[:9]] -= 10
        captures["errors"] = errors
        return errors

    monkeypatch.setattr(advice, "denoising_errors", keep)
    share = place.diffusion()
    table = captures["errors"].numpy()
    assert table.shape == (len(labels), 10)
    best = [row.tolist().index(min(row.tolist())) for row in table]
    assert share == pytest.approx(np.mean(np.array(best) == labels.numpy()))
    assert 9 / len(labels) <= share < 1
    assert pixels.shape == (len(labels), 3, 32, 32)


def test_a_figure_without_its_model_is_none(
    home: Path, tmp_path: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = site(tmp_path / "nowhere")
    assert place.attempt("diffusion", place.diffusion) is None
    assert place.attempt("zero-shot", place.zero_shot) is None
    unfit = site(tiny_kit, classifier__init="/nowhere/weights.safetensors")
    assert unfit.attempt("head", unfit.head) is None
    assert place.attempt("head", lambda: 0.123456) == 0.123


def test_the_head_is_on_the_classifiers_features(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features of FedCGS, whose head it foretells."""
    arguments: dict[str, np.ndarray] = {}

    def keep(features: np.ndarray, labels: np.ndarray, seed: int) -> float:
        arguments.update(features=features, labels=labels)
        return 0.5

    monkeypatch.setattr(advice, "cross_validate", keep)
    place = site(tiny_kit)
    assert place.head() == 0.5
    assert arguments["features"].shape == (30, 1024)
    assert F.relu(torch.from_numpy(arguments["features"])).sum() > 0


def test_digits_kits_measure_no_other_images(home: Path) -> None:
    images = {"data__name": "folder", "data__classes": "cat,dog", "classifier__init": "none"}
    values = quick(advise=True, method="local", kit="digits", **images)
    place = SiteMeasurement(parse_run_config(values), NODE, "client-0")
    assert place.diffusion() is None
