"""Headers of safetensors files: names and shapes of tensors, without the tensors.

A header of a few megabytes can name a million empty tensors, which take half a minute and 400 MB.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from osfl.util.files import DamageError, placeholder
from osfl.util.text import plain

MOST_HEADER_BYTES = 2**23  # the UNet of SDXL has 250 kB

Shapes = Mapping[str, tuple[int, ...]]


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a file, by its name.

    Raises:
        DamageError: the file cannot be read, is something else, its header is longer than
            `MOST_HEADER_BYTES`, or it speaks of more or fewer bytes than the file has.
    """
    try:
        check_header(file)
        with safe_open(file, framework="np") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  (it is no mapping)
    except DamageError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise DamageError(plain(error)) from None


def check_header(file: Path) -> None:
    """Check that a file begins as safetensors do, before a library reads its header.

    Raises:
        DamageError: it is something else, or its header is too long.
        OSError: it cannot be read.
    """
    with open(file, "rb") as opened:
        start = opened.read(200)
    if problem := placeholder(start):
        raise DamageError(problem)
    length = int.from_bytes(start[:8], "little")
    if length > MOST_HEADER_BYTES:
        raise DamageError(
            f"header too large: {length:,} bytes, of at most {MOST_HEADER_BYTES:,} that are read"
        )
