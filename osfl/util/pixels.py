"""Pixels as bytes and as the floats in [-1, 1] that diffusion models and classifiers take."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

# Half of a byte's 255: how many of its levels there are to 1 of [-1, 1].
LEVELS = 127.5
# Short sides that the long side of a picture has at most when it is resized
LONGEST = 4


def to_float(pixels: torch.Tensor) -> torch.Tensor:
    """Of uint8 pixels of any shape, float32 in [-1, 1]: 0 is -1 and 255 is 1."""
    return pixels.float() / LEVELS - 1


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Of floats of any shape, uint8 pixels, rounded; what is beyond [-1, 1] is cut off."""
    return ((images.clamp(-1, 1) + 1) * LEVELS).round().to(torch.uint8)


def cut_ends(picture: torch.Tensor) -> torch.Tensor:
    """Return the middle of a picture [3, H, W] whose long side exceeds `LONGEST` short ones.

    Resizing the ends, which the central square lacks, would take memory for nothing. Any other
    picture comes back as it is.
    """
    height, width = picture.shape[1:]
    most = LONGEST * min(height, width)
    top = max(0, height - most) // 2
    left = max(0, width - most) // 2
    return picture[:, top : top + most, left : left + most].contiguous()


class LazyPixels:
    """Images that are decoded when they are taken, for more of them than memory holds.

    `pixels[rows]` and the parts of `pixels.split(size)` are tensors [B, 3, S, S] uint8, as they are
    of a tensor.

    Args:
        read: image number -> [3, S, S] uint8.
        count: of images.
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
        """The same images; what is taken of them goes to the device."""
        moved = LazyPixels(self._read, self._count)
        moved._device = device
        return moved

    def contiguous(self) -> "LazyPixels":
        """Itself: what is taken is contiguous."""
        return self

    def split(self, size: int) -> Iterator[torch.Tensor]:
        """All images, `size` at a time."""
        for rows in torch.arange(self._count).split(size):
            yield self[rows]


Pixels = torch.Tensor | LazyPixels


def concatenated(parts: list[Pixels]) -> Pixels:
    """All images of several sets, in their order."""
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
