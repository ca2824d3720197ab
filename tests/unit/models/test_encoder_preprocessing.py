"""CLIP, DINOv2 and BLIP preprocess pixels as the library's own processors do.

The library has each processor twice: over torchvision, which the product uses, and over Pillow, as
the models were trained with. How pictures become pixels for an encoder is in
test_encoder_image_shapes.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    BitImageProcessorPil,
    BlipImageProcessorPil,
    BlipProcessor,
    CLIPImageProcessorPil,
)

from osfl.data.load import to_pixels
from osfl.models.encoders import load_captioner, load_image_encoder
from tests.helpers.analytic import random_pixels
from tests.helpers.encoder_folders import save_captioner, save_clip, save_dinov2, seen

CPU = torch.device("cpu")
# one of 256 grey levels after normalisation: the deviations are 0.224 to 0.276
LEVEL = 1 / 255 / 0.224


def textured(width: int, height: int) -> Image.Image:
    """Every pixel its own, and none so bright or dark that bicubic weights overshoot 0 or 255,
    where the two kinds differ.
    """
    draw = np.random.default_rng(0)
    return Image.fromarray(draw.integers(60, 196, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module", params=[save_clip, save_dinov2], ids=["clip", "dinov2"])
def encoder_folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    return request.param(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def captioner_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_captioner(tmp_path_factory.mktemp("captioner"))


def seen_by_encoder(folder: Path, pixels: torch.Tensor) -> torch.Tensor:
    return seen(load_image_encoder(str(folder), CPU), pixels)


def seen_by_captioner(folder: Path, pixels: torch.Tensor) -> torch.Tensor:
    return seen(load_captioner(str(folder), CPU), pixels)


SHAPES = [(224, 224), (300, 300), (500, 320), (240, 410)]


def noise(width: int, height: int) -> torch.Tensor:
    """Pixels [1, 3, H, W] of noise: another crop, scale or interpolation is seen at once."""
    return torch.from_numpy(np.array(textured(width, height))).permute(2, 0, 1)[None]


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_an_encoder_sees_what_its_processors_make_of_a_picture(
    encoder_folder: Path, width: int, height: int
) -> None:
    """Equal to the bit, and within two gray levels of Pillow's, which rounds after each of two
    passes.
    """
    image = textured(width, height)
    ours = seen_by_encoder(encoder_folder, noise(width, height))
    theirs = AutoImageProcessor.from_pretrained(encoder_folder)
    assert torch.equal(ours, theirs(image, return_tensors="pt").pixel_values)
    pillow = CLIPImageProcessorPil if "CLIP" in type(theirs).__name__ else BitImageProcessorPil
    by_pillow = pillow.from_pretrained(encoder_folder)(image, return_tensors="pt").pixel_values
    assert ours.shape == by_pillow.shape == (1, 3, 224, 224)
    assert (ours - by_pillow).abs().max() < 2 * LEVEL


@pytest.mark.parametrize(("width", "height"), [(48, 48), (100, 100), (90, 60), (60, 100)])
def test_blip_sees_what_its_processors_make_of_a_picture(
    captioner_folder: Path, width: int, height: int
) -> None:
    """Likewise."""
    image = textured(width, height)
    ours = seen_by_captioner(captioner_folder, noise(width, height))
    theirs = BlipProcessor.from_pretrained(captioner_folder)
    assert torch.equal(ours, theirs(images=image, return_tensors="pt").pixel_values)
    pillow = BlipImageProcessorPil(size={"height": 48, "width": 48})
    by_pillow = pillow(image, return_tensors="pt").pixel_values
    assert ours.shape == by_pillow.shape == (1, 3, 48, 48)
    assert (ours - by_pillow).abs().max() < 2 * LEVEL


def test_more_pictures_than_a_batch_are_all_seen_in_their_order(encoder_folder: Path) -> None:
    pixels = random_pixels(70, 224)
    pictures = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels]
    theirs = AutoImageProcessor.from_pretrained(encoder_folder)(pictures, return_tensors="pt")
    assert torch.equal(seen_by_encoder(encoder_folder, pixels), theirs.pixel_values)


@pytest.mark.parametrize(("width", "height"), [(120, 80), (80, 300), (96, 96), (20, 30), (33, 32)])
def test_pictures_are_decoded_as_pillow_resizes_and_cuts_them(width: int, height: int) -> None:
    """Short side to 32, bilinear with antialiasing, then the middle: within one of 256 levels of
    Pillow's, in a picture of noise.
    """
    image = textured(width, height)
    ours = to_pixels(image, 32)
    short = min(width, height)
    long = 32 * max(width, height) // short
    wide, high = (long, 32) if width > height else (32, long)
    resized = image.resize((wide, high), Image.Resampling.BILINEAR)
    left = (wide - 32) // 2
    top = (high - 32) // 2
    theirs = np.asarray(resized.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1)
    assert ours.shape == (3, 32, 32)
    assert np.abs(ours.numpy().astype(int) - theirs.astype(int)).max() <= 1
