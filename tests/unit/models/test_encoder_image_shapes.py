"""Encoders preprocess images of any shape as the library's own processors do, to the bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, BlipProcessor

from client_app.methods import espresso, feddisc, fgl, oscar
from osfl.config import NodeConfig, parse_run_config
from osfl.data.load import Images, load_images, to_pixels
from osfl.models.encoders import load_captioner, load_image_encoder
from tests.helpers.client_jobs import images, job_of
from tests.helpers.encoder_folders import save_captioner, save_clip, save_dinov2, seen
from tests.helpers.settings import ROOT, defaults

CPU = torch.device("cpu")
SHAPES = [(400, 300), (301, 451), (90, 231), (500, 256), (224, 224), (64, 64), (1, 3)]


def textured(width: int, height: int) -> Image.Image:
    """Every pixel its own: another crop, scale or resampling is seen at once."""
    draw = np.random.default_rng(0)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("save", "loaded"), [(save_clip, 224), (save_dinov2, 256)])
def test_an_encoder_sees_a_picture_of_any_shape_as_its_own_processor(
    tmp_path: Path, save: Callable[[Path], Path], loaded: int
) -> None:
    """DINOv2's short side is 256 px before its middle 224 are seen, not 224 px enlarged."""
    folder = save(tmp_path / "encoder")
    encoder = load_image_encoder(str(folder), CPU)
    processor = AutoImageProcessor.from_pretrained(folder)
    for shape in SHAPES:
        picture = textured(*shape)
        pixels = to_pixels(picture, encoder.fit)
        assert pixels.shape == (3, loaded, loaded)
        assert pixels.dtype == torch.uint8
        theirs = processor(picture, return_tensors="pt").pixel_values
        assert torch.equal(seen(encoder, pixels[None]), theirs), shape


def test_a_captioner_squeezes_a_picture_of_any_shape_as_its_own_processor(tmp_path: Path) -> None:
    folder = save_captioner(tmp_path / "blip")
    captioner = load_captioner(str(folder), CPU)
    processor = BlipProcessor.from_pretrained(folder)
    for shape in SHAPES:
        picture = textured(*shape)
        pixels = to_pixels(picture, captioner.fit)
        assert pixels.shape == (3, 48, 48)
        theirs = processor(images=picture, return_tensors="pt").pixel_values
        assert torch.equal(seen(captioner, pixels[None]), theirs), shape


def test_pictures_of_a_folder_fit_their_encoder(tmp_path: Path) -> None:
    """Pictures of several shapes are in one tensor, turned upright first."""
    folder = tmp_path / "data" / "train" / "cat"
    folder.mkdir(parents=True)
    (tmp_path / "data" / "test").mkdir()
    upright = textured(300, 400)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.rotate(90, expand=True).save(folder / "a.png", exif=exif)
    textured(500, 256).save(folder / "b.png")
    encoder = load_image_encoder(str(save_dinov2(tmp_path / "dinov2")), CPU)
    config = replace(
        parse_run_config(defaults()).data, name="folder", classes="cat,dog", image_size=32
    )
    node = NodeConfig(data_dir=str(tmp_path / "data"))
    pictures = load_images(config, node, "train", 0, encoder.fit)
    assert pictures.pixels.shape == (2, 3, 256, 256)
    assert torch.equal(
        pictures.pixels[0], encoder.fit(torch.from_numpy(np.array(upright)).permute(2, 0, 1))
    )
    assert load_images(config, node, "train", 0).pixels.shape == (2, 3, 32, 32)


@pytest.mark.slow
def test_clients_load_their_images_as_their_encoders_want_them(
    tiny_kit: Path, tiny_unclip: Path
) -> None:
    for half, method, kit in (
        (espresso, "espresso", tiny_kit),
        (feddisc, "feddisc", tiny_unclip),
        (oscar, "oscar", tiny_kit),
        (fgl, "fgl", tiny_kit),
    ):
        asked: list[Any] = []
        data = images(0, 4)

        def load(fit: Any, asked: list[Any] = asked, data: Images = data) -> Images:
            asked.append(fit)
            return data

        job = job_of(kit, data, method=method, espresso__gmm=False)
        object.__setattr__(job, "load", load)
        half.make_payload(job)
        owners = [type(fit.__self__).__name__ for fit in asked if callable(fit)]
        encoder_class = "Captioner" if method in ("oscar", "fgl") else "ImageEncoder"
        assert owners == [encoder_class], method


def test_the_shipped_encoders_see_digits_as_they_are() -> None:
    """32 px for networks of 32 px: no pixel changes."""
    kit = ROOT / "kits" / "digits"
    digit = textured(32, 32)
    untouched = torch.from_numpy(np.array(digit)).permute(2, 0, 1)
    for network in (load_image_encoder(str(kit), CPU), load_captioner(str(kit), CPU)):
        assert torch.equal(to_pixels(digit, network.fit), untouched)
        assert torch.equal(to_pixels(digit, 32), untouched)
