"""Open and decode images from files or bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from osfl.util.files import placeholder_problem
from osfl.util.pixels import crop_long_side

# A scan of 20,000 x 25,000 pixels, which needs about 4 GB of memory for decoding
MAX_PIXELS = 500_000_000
# Maximum value of a 16-bit pixel
MAX_LEVEL = 2**16 - 1
# The part of the 16-bit range that 12-bit images use
TWELVE_BIT_SHARE = 1 / 16
_OPENING = Lock()

# How images are resized: to a side length in pixels (resize the short side, crop the center), or
# by an encoder's own transform of [3, H, W] uint8
Fit = int | Callable[[torch.Tensor], torch.Tensor]


def open_image(source: Path | bytes) -> Image.Image:
    """Open an image without decoding it.

    Pillow warns of images above 89 million pixels and rejects those above 179 million, to protect
    servers from untrusted files. A site trusts its own scans.

    Raises:
        ValueError: the image has more than `MAX_PIXELS` pixels, or an unknown format.
        Exception: whatever Pillow raises for a corrupt file.
    """
    with _OPENING:
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            image = Image.open(BytesIO(source) if isinstance(source, bytes) else source)
        except UnidentifiedImageError:
            raise ValueError(_unknown(source)) from None
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    width, height = image.size
    if width * height > MAX_PIXELS:
        image.close()
        raise ValueError(
            f"{width:,} x {height:,} pixels; an image must have at most {MAX_PIXELS:,}: scale it "
            "down"
        )
    return image


def _unknown(source: Path | bytes) -> str:
    """Describe a file that is not an image, by its first bytes."""
    if isinstance(source, bytes):
        start = source[:200]
    else:
        with open(source, "rb") as opened:
            start = opened.read(200)
    if start[4:8] == b"ftyp":
        return "HEIC, or a video; save it as JPEG or PNG"
    return placeholder_problem(start) or "Pillow does not know its format"


def open_stored_image(value: object, mode: str | None = None) -> Image.Image:
    """Open an image of a data set's row.

    Args:
        value: the decoded image, its bytes, or {bytes, path}.
        mode: Pillow's mode that the data set declares.

    Raises:
        ValueError: the row has no image, or a URL.
        Exception: as `open_image`.
    """
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        image = open_image(value)
    elif isinstance(value, str) and "://" in value:
        raise ValueError("the row has a URL instead of an image")
    elif isinstance(value, str) and value:
        image = open_image(Path(value))
    else:
        raise ValueError("the row has no image")
    if mode and mode != image.mode:
        image = ImageOps.exif_transpose(image).convert(mode)
    return image


def check_range(image: Image.Image) -> None:
    """Check that the range of an image's pixels is known.

    Raises:
        ValueError: the pixels are floating-point numbers.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels; save it with 8 or 16 bits")


def to_pixels(image: Image.Image, fit: Fit) -> torch.Tensor:
    """Decode an image of any mode and shape to [3, S, S] uint8 RGB.

    The image is turned upright by its EXIF data, put on a white background, and resized. 16 bits
    per channel are assumed to use the whole range, 0 to 65,535.

    Raises:
        ValueError: the pixels are floating-point numbers, or integers beyond 16 bits.
    """
    check_range(image)
    image = ImageOps.exif_transpose(image)
    # 16 bits, as in X-rays and microscopy; Pillow would clip them to white
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.float64)
        # 32-bit or signed pixels, such as a CT's Hounsfield units
        if levels.min() < 0 or levels.max() > MAX_LEVEL:
            raise ValueError(
                f"pixels from {levels.min():.0f} to {levels.max():.0f}; they must be from 0 to "
                f"{MAX_LEVEL}: rescale them, and save it with 8 or 16 bits"
            )
        image = Image.fromarray((levels / 257).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image)
    tensor = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
    if callable(fit):
        return fit(tensor)
    if tensor.shape[1:] == (fit, fit):
        return tensor
    # Takes seconds to import, and the digits need no resizing
    from torchvision.transforms.v2 import (
        functional,
    )

    resized = functional.resize(crop_long_side(tensor), [fit], antialias=True)
    picture: torch.Tensor = functional.center_crop(resized, [fit, fit])
    return picture


@dataclass(frozen=True)
class FileTraits:
    """Traits of an image file that its decoded pixels do not show.

    Attributes:
        frames: number of frames, pages or layers, of which the first is read.
        is_dark: whether the file has 16 bits per channel, but uses less than a sixteenth of their
            range, like 12-bit images that were not rescaled.
    """

    frames: int
    is_dark: bool


def traits_of(image: Image.Image) -> FileTraits:
    """Return the traits of an image that was opened, but not decoded yet."""
    # Pillow decodes 16-bit colors to 8 bits; only the tile layout shows their depth
    layouts = [str(tile.args) for tile in getattr(image, "tile", [])]
    is_dark = False
    if image.mode.startswith("I"):
        is_dark = float(np.asarray(image).max()) < 2**16 * TWELVE_BIT_SHARE
    elif any(";16" in layout for layout in layouts):
        is_dark = int(np.asarray(image.convert("RGB")).max()) < 2**8 * TWELVE_BIT_SHARE
    return FileTraits(_count_frames(image), is_dark)


def _count_frames(image: Image.Image) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    # A run only reads the first frame, so corrupt others do not matter
    except Exception:
        return 1
