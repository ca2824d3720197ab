"""Conversion of pixels between bytes and the floats in [-1, 1] of diffusion models and classifiers.

Also sets of images that are decoded on demand.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile

import torch

# Levels of a byte per unit of [-1, 1]
LEVELS = 127.5
# Upper bound on the ratio of a picture's long side to its short side before resizing
MAX_ASPECT_RATIO = 4


def to_float(pixels: torch.Tensor) -> torch.Tensor:
    """Convert uint8 pixels of any shape to float32 in [-1, 1]: 0 to -1, and 255 to 1."""
    return pixels.float() / LEVELS - 1


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Convert floats of any shape to uint8 pixels: clamp to [-1, 1], scale and round."""
    return ((images.clamp(-1, 1) + 1) * LEVELS).round().to(torch.uint8)


def crop_long_side(picture: torch.Tensor) -> torch.Tensor:
    """Crop a picture [3, H, W] to an aspect ratio of at most `MAX_ASPECT_RATIO`.

    The ends are cropped because resizing them would cost memory, although the central square that
    is used later excludes them.
    """
    height, width = picture.shape[1:]
    longest = MAX_ASPECT_RATIO * min(height, width)
    top = max(0, height - longest) // 2
    start = max(0, width - longest) // 2
    return picture[:, top : top + longest, start : start + longest].contiguous()


def allocate_pixels(shape: tuple[int, ...], max_bytes: int, folder: Path) -> torch.Tensor:
    """Allocate pixels uint8 of any shape, beyond `max_bytes` in a file that memory maps.

    The file has no name, and its space is free again with the tensor, or when the process dies.

    Raises:
        OSError: the folder's disk has no room for them.
    """
    size = math.prod(shape)
    if size <= max_bytes:
        return torch.empty(shape, dtype=torch.uint8)
    with TemporaryFile(dir=folder) as file:
        try:
            # Writing to a mapped page for which a full disk has no room would end the process
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OSError(
                error.errno, f"{size / 1e9:,.2f} GB for pixels: {error.strerror}", str(folder)
            ) from error
        mapped = mmap.mmap(file.fileno(), size)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(shape)


class LazyPixels:
    """A set of images that are decoded on access, for data larger than memory.

    Like those of a tensor, `pixels[rows]` and the parts of `pixels.split(size)` are tensors
    [B, 3, S, S] uint8.

    Args:
        read: function from an image's number to [3, S, S] uint8.
        count: the number of images.
    """

    def __init__(self, read: Callable[[int], torch.Tensor], count: int):
        self._read = read
        self._count = count
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as readers:
            images = list(readers.map(self._read, rows.tolist()))
        return torch.stack(images).to(self._device)

    def to(self, device: torch.device) -> "LazyPixels":
        """Return the same images, which are moved to the device on access."""
        moved = LazyPixels(self._read, self._count)
        moved._device = device
        return moved

    def contiguous(self) -> "LazyPixels":
        """Return itself: the tensors that it gives are contiguous."""
        return self

    def split(self, size: int) -> Iterator[torch.Tensor]:
        """Yield all images, `size` at a time."""
        for rows in torch.arange(self._count).split(size):
            yield self[rows]


Pixels = torch.Tensor | LazyPixels


def concatenate(parts: list[Pixels]) -> Pixels:
    """Concatenate several sets of images."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    places = []
    for part in parts:
        places += [(part, row) for row in range(len(part))]

    def read(number: int) -> torch.Tensor:
        part, row = places[number]
        return part[torch.tensor([row])][0]

    return LazyPixels(read, len(places))
