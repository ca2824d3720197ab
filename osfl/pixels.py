"""Pixels as bytes and as the floats in [-1, 1] that diffusion models and classifiers take."""

import torch

# Half of a byte's 255: how many of its levels there are to 1 of [-1, 1].
LEVELS = 127.5


def to_float(pixels: torch.Tensor) -> torch.Tensor:
    """Of uint8 pixels of any shape, float32 in [-1, 1]: 0 is -1 and 255 is 1."""
    return pixels.float() / LEVELS - 1


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Of floats of any shape, uint8 pixels, rounded; what is beyond [-1, 1] is cut off."""
    return ((images.clamp(-1, 1) + 1) * LEVELS).round().to(torch.uint8)
