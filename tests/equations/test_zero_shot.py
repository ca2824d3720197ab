"""zero-shot: the model against transformers' CLIP and NumPy, and the files that make it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

import osfl
from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.kit.folder import KitError
from osfl.models.classifiers import ClassifierError, build_classifier, compute_logits
from osfl.models.clip_classifier import ImageTower, parse_tower
from osfl.models.encoders import load_clip
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from server_app.context import ServerJob
from server_app.methods import zero_shot
from tests.helpers.client_jobs import images
from tests.helpers.encoder_folders import save_whole_clip
from tests.helpers.settings import quick

# {class} has another word, and the second template another length
SETTINGS = {
    "method": "zero-shot",
    "num_clients": 2,
    "data__image_size": 32,
    "data__words": "two=pair",
    "zero_shot__templates": "a photo of a {class}.; a {class}",
}
PHRASES = ("zero", "one", "pair", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A CLIP with random weights, and a temperature and statistics unlike the defaults."""
    torch.manual_seed(3)
    folder = save_whole_clip(tmp_path / "clip", words=PHRASES)
    model = CLIPModel.from_pretrained(folder)
    torch.nn.init.constant_(model.logit_scale, 1.7)
    model.save_pretrained(folder)
    statistics = {"image_mean": [0.2, 0.4, 0.6], "image_std": [0.3, 0.5, 0.9]}
    edge = {"height": 32, "width": 32}
    CLIPImageProcessor(size=edge, crop_size=edge, **statistics).save_pretrained(folder)
    return folder


def config_of(clip: Path, home: Path, **more: Any) -> RunConfig:
    return parse_run_config(
        quick(**SETTINGS, zero_shot__clip=str(clip), runs_dir=str(home), **more)
    )


def made(config: RunConfig) -> Any:
    """Return what the server half returns and stores."""
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a", "b"))
    (model,) = zero_shot.run(job, {}).values()
    return model, folder.model_files()[0]


@torch.no_grad()
def embeddings_by_library(clip: Path, pixels: torch.Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
    """Images' projected embeddings [N, e], and for every class those of its two texts [2, e]."""
    model = CLIPModel.from_pretrained(clip).eval()
    tokenizer = AutoTokenizer.from_pretrained(clip)
    inputs = CLIPImageProcessor.from_pretrained(clip)(list(pixels), return_tensors="pt")
    image_embeddings = model.get_image_features(**inputs).pooler_output.double().numpy()
    written = []
    for phrase in PHRASES:
        texts = [f"a photo of a {phrase}.", f"a {phrase}"]
        ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
        written.append(model.get_text_features(ids).pooler_output.double().numpy())
    return image_embeddings, written


def test_logits_are_clips_scaled_cosines(clip: Path, tmp_path: Path) -> None:
    """l = exp(t) cos(image, mean of the normalized texts), in 64 bits by NumPy."""
    pixels = images(0, 4, 0, 4, 9).pixels
    image_embeddings, written = embeddings_by_library(clip, pixels)
    image_embeddings /= np.linalg.norm(image_embeddings, axis=1, keepdims=True)
    means = np.stack(
        [(rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0) for rows in written]
    )
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    expected = np.exp(1.7) * image_embeddings @ means.T
    model, _ = made(config_of(clip, tmp_path / "runs"))
    logits = compute_logits(model.model, pixels, torch.device("cpu"))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


def test_one_template_gives_transformers_own_logits(clip: Path) -> None:
    """`CLIPModel.forward` computes `logits_per_image`."""
    pixels = images(1, 2, 3).pixels
    single = parse_run_config(
        quick(**{**SETTINGS, "zero_shot__templates": "a {class}"}, zero_shot__clip=str(clip))
    )
    loaded = load_clip(str(clip), torch.device("cpu"))
    names = tuple("two" if phrase == "pair" else phrase for phrase in PHRASES)
    classifier, _ = loaded.classifier(zero_shot.encode_classes(loaded, single, names))
    tokenizer = AutoTokenizer.from_pretrained(clip)
    inputs = CLIPImageProcessor.from_pretrained(clip)(list(pixels), return_tensors="pt")
    inputs |= tokenizer([f"a {phrase}" for phrase in PHRASES], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = CLIPModel.from_pretrained(clip).eval()(**inputs).logits_per_image
    logits = compute_logits(classifier, pixels, torch.device("cpu"))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_stored_model_needs_no_other_file(clip: Path, tmp_path: Path) -> None:
    """The model loads by its description where its CLIP is gone."""
    model, file = made(config_of(clip, tmp_path / "runs"))
    (tmp_path / "clip").rename(tmp_path / "gone")
    loaded = osfl.load_model(file)
    described = loaded.description
    assert described.architecture == model.architecture == str(parse_tower(model.architecture))
    assert described.trained_on.startswith("no images of the clients")
    assert (described.image_size, described.input_size, described.base_license) == (
        32,
        32,
        "unknown",
    )
    picture = images(1).pixels[0]
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path / "one.png")
    logits = loaded.module(loaded.transform(tmp_path / "one.png")[None])
    expected = compute_logits(model.model, picture[None], torch.device("cpu"))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_an_image_tower_is_named_by_its_sizes() -> None:
    tower = ImageTower(224, 16, 768, 12, 12, 3072, 512, "quick_gelu")
    assert parse_tower(str(tower)) == tower
    name = str(ImageTower(32, 8, 8, 1, 2, 8, 6, "gelu"))
    assert build_classifier(name, 3).head.weight.shape == (3, 6)
    wrong = {
        "must be clip:side=...": ("clip:vit", f"{name};more=1", name.replace("=8", "=x")),
        "side = 99999: must be a whole number from 1 to 16,384": (name.replace("=32", "=99999"),),
        "patch must be at most side": (name.replace("patch=8", "patch=33"),),
        "heads must divide width": (name.replace("heads=2", "heads=3"),),
        "activation = 'swish'": (name.replace("gelu", "swish"),),
    }
    for message, names in wrong.items():
        for variant in names:
            with pytest.raises(ClassifierError, match=message):
                build_classifier(variant, 3)
    with pytest.raises(ClassifierError, match="small-stem must be false"):
        build_classifier(name, 3, small_stem=True)


def test_a_tower_of_another_kind_is_refused(clip: Path) -> None:
    loaded = load_clip(str(clip), torch.device("cpu"))
    loaded.model.config.vision_config.layer_norm_eps = 1e-6
    with pytest.raises(KitError, match="layer_norm_eps = 1e-06: must be 1e-05"):
        loaded.classifier(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("zero_shot__templates", "a {class}; a photo", "'a photo' must contain {class}"),
        ("zero_shot__templates", "a {class};", "'' must contain {class}"),
        ("zero_shot__clip", "./clip", "must be an absolute path or a hub id"),
        ("epsilon", 1.0, "'zero-shot' gives no guarantee"),
        ("payload_codec", "int8", "sends no payload with numbers"),
        ("defense", "label-consistency", "requires a method that synthesizes images"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_config(quick(**{**SETTINGS, key: value}))


def test_a_kit_without_a_clip_says_what_to_set() -> None:
    from osfl.kit.run_check import check_run_models

    config = parse_run_config(quick(**SETTINGS, kit="digits"))
    with pytest.raises(KitError, match=r"lacks clip; .* set zero-shot.clip to the folder"):
        check_run_models(config)
