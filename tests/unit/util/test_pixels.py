"""Pixels to [-1, 1] and back: one conversion, the same bits as ever."""

import numpy as np
import torch

from osfl.util.pixels import to_float, to_uint8
from tests.helpers.settings import ROOT

BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_byte_becomes_the_same_float_and_comes_back() -> None:
    expected = BYTES.numpy().astype(np.float32) / np.float32(127.5) - np.float32(1)
    assert torch.equal(to_float(BYTES), torch.from_numpy(expected))
    assert to_float(BYTES)[[0, 255]].tolist() == [-1, 1]
    assert torch.equal(to_uint8(to_float(BYTES)), BYTES)


def test_floats_are_rounded_and_cut_off() -> None:
    """0.0008 is 127.6; what is beyond [-1, 1] has no byte of its own."""
    made = to_uint8(torch.tensor([-1.5, -1.0, 0.0008, 1.0, 1.5]))
    assert made.dtype == torch.uint8
    assert made.tolist() == [0, 0, 128, 255, 255]


def test_nothing_else_converts_pixels() -> None:
    """The constant stands in one place; tests that calculate anew with NumPy have their own."""
    folders = ("osfl", "client_app", "server_app", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    users = [file.relative_to(ROOT).as_posix() for file in files if "127.5" in file.read_text()]
    assert users == ["osfl/util/pixels.py"]
