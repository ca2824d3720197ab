"""A picture in a file or in bytes, and its pixels."""

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

# A scan of 20,000 x 25,000 pixels, which takes some 4 GB of memory while it is read
MOST_PIXELS = 500_000_000
MOST_LEVEL = 2**16 - 1  # of a pixel of 16 bits
# Of the 16-bit range, what the brightest pixel of a 12-bit image reaches
TWELVE_BITS = 1 / 16
_OPENING = Lock()

# How big, and in which part, a picture is seen: pixels on a side (short side resized, the middle
# cut out), or an encoder's own way with [3, H, W] uint8.
Fit = int | Callable[[torch.Tensor], torch.Tensor]


def open_picture(source: Path | bytes) -> Image.Image:
    """Open a picture without decoding it.

    Pillow warns of pictures above 89 million pixels and refuses those above 179 million, to protect
    servers from strangers' files. A site's scans are its own.

    Raises:
        ValueError: more than `MOST_PIXELS` pixels, or no format that Pillow knows.
        Exception: whatever Pillow raises for a file that is damaged.
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
    if width * height > MOST_PIXELS:
        image.close()
        raise ValueError(
            f"{width:,} x {height:,} pixels; it must have at most {MOST_PIXELS:,}: scale it down"
        )
    return image


def _unknown(source: Path | bytes) -> str:
    """Say what a file is in place of a picture, as far as its first bytes tell."""
    if isinstance(source, bytes):
        start = source[:200]
    else:
        with open(source, "rb") as opened:
            start = opened.read(200)
    if start[4:8] == b"ftyp":
        return "HEIC, or a film; save it as JPEG or PNG"
    return placeholder_problem(start) or "it has no format of pictures that Pillow knows"


def stored_picture(value: object, mode: str | None = None) -> Image.Image:
    """A picture as a row of a data set holds it: decoded, its bytes, or {bytes, path}.

    Args:
        mode: Pillow's mode that the data set asks for.

    Raises:
        ValueError: nothing is there, or an address in the network.
        Exception: as `open_picture`.
    """
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        image = open_picture(value)
    elif isinstance(value, str) and "://" in value:
        raise ValueError("the row holds an address instead of a picture")
    elif isinstance(value, str) and value:
        image = open_picture(Path(value))
    else:
        raise ValueError("the row holds no picture")
    if mode and mode != image.mode:
        image = ImageOps.exif_transpose(image).convert(mode)
    return image


def check_range(image: Image.Image) -> None:
    """Check that the range of a picture's pixels is known.

    Raises:
        ValueError: floating-point pixels.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels; save it with 8 or 16 bits")


def to_pixels(image: Image.Image, fit: Fit) -> torch.Tensor:
    """A picture of any mode and shape as [3, S, S] uint8 RGB.

    Upright, transparent on white, and of the size that fits.

    16 bits a channel are taken for the whole range, 0 to 65,535.

    Raises:
        ValueError: floating-point pixels, whose range is unknown, or whole numbers beyond 16 bits.
    """
    check_range(image)
    image = ImageOps.exif_transpose(image)
    # 16 bits, as X-rays and microscopes save; Pillow would clip them to white
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.float64)
        # Of 32 bits, or signed, such as a CT's Hounsfield units
        if levels.min() < 0 or levels.max() > MOST_LEVEL:
            raise ValueError(
                f"pixels from {levels.min():.0f} to {levels.max():.0f}; they must be from 0 to "
                f"{MOST_LEVEL}: rescale them, and save it with 8 or 16 bits"
            )
        image = Image.fromarray((levels / 257).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image)
    tensor = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
    if callable(fit):
        return fit(tensor)
    if tensor.shape[1:] == (fit, fit):
        return tensor
    # Seconds to import, and the digits need no resizing
    from torchvision.transforms.v2 import (
        functional,
    )

    resized = functional.resize(crop_long_side(tensor), [fit], antialias=True)
    return functional.center_crop(resized, [fit, fit])


@dataclass(frozen=True)
class FileTraits:
    """What its pixels do not tell of a picture's file.

    Attributes:
        frames: frames, pages or layers, of which the first is read.
        is_dark: whether it has 16 bits a channel and uses less than a sixteenth of their range, as
            12-bit images do that were not rescaled.
    """

    frames: int
    is_dark: bool


def traits_of(image: Image.Image) -> FileTraits:
    """Look at a picture that was opened, and not read yet."""
    # Pillow reads 16-bit colours as 8 bits; only how the file is laid out tells
    layouts = [str(tile.args) for tile in getattr(image, "tile", [])]
    is_dark = False
    if image.mode.startswith("I"):
        is_dark = float(np.asarray(image).max()) < 2**16 * TWELVE_BITS
    elif any(";16" in layout for layout in layouts):
        is_dark = int(np.asarray(image.convert("RGB")).max()) < 2**8 * TWELVE_BITS
    return FileTraits(_count_frames(image), is_dark)


def _count_frames(image: Image.Image) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    # A run reads the first frame, whatever is wrong with the others
    except Exception:
        return 1
