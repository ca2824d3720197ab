"""Pixels to [-1, 1] and back: one conversion, the same bits as ever."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from osfl.util.pixels import allocate_pixels, to_float, to_uint8
from tests.helpers.settings import ROOT

BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_byte_becomes_the_same_float_and_comes_back() -> None:
    expected = BYTES.numpy().astype(np.float32) / np.float32(127.5) - np.float32(1)
    assert torch.equal(to_float(BYTES), torch.from_numpy(expected))
    assert to_float(BYTES)[[0, 255]].tolist() == [-1, 1]
    assert torch.equal(to_uint8(to_float(BYTES)), BYTES)


def test_floats_are_rounded_and_cut_off() -> None:
    """0.0008 is 127.6; what is beyond [-1, 1] has no byte of its own."""
    pixels = to_uint8(torch.tensor([-1.5, -1.0, 0.0008, 1.0, 1.5]))
    assert pixels.dtype == torch.uint8
    assert pixels.tolist() == [0, 0, 128, 255, 255]


def mapped_files(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f" {folder}/" in line]


def test_pixels_above_the_limit_are_in_a_file_without_a_name(tmp_path: Path) -> None:
    """5 x 3 x 4 x 4 pixels have 240 bytes."""
    shape = (5, 3, 4, 4)
    small = allocate_pixels(shape, 240, tmp_path)
    assert mapped_files(tmp_path) == []
    large = allocate_pixels(shape, 239, tmp_path)
    assert len(mapped_files(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []
    small[:] = large[:] = torch.arange(240, dtype=torch.uint8).view(shape)
    assert torch.equal(small, large)
    assert large[[3, 1]].tolist() == small[[3, 1]].tolist()
    del large
    assert mapped_files(tmp_path) == []


def test_a_disk_without_room_is_named_before_a_pixel_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, a write to the mapped pages would end the process by a signal."""

    def reserve(handle: int, start: int, size: int) -> None:
        assert (start, size) == (0, 30_000_000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(OSError, match=r"0\.03 GB for pixels: No space left.*: '.*'") as caught:
        allocate_pixels((10, 3, 1000, 1000), 10**6, tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_converts_pixels() -> None:
    """The constant stands in one place; tests that calculate anew with NumPy have their own."""
    folders = ("osfl", "client_app", "server_app", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    users = [file.relative_to(ROOT).as_posix() for file in files if "127.5" in file.read_text()]
    assert users == ["osfl/util/pixels.py"]
