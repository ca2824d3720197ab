"""Encoded pictures of random pixels."""

import io

import numpy as np
from PIL import Image


def noise(width: int, height: int) -> Image.Image:
    draw = np.random.default_rng(0)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()
