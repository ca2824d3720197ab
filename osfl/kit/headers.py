"""Read the headers of safetensors files: the names and shapes of tensors, without the tensors.

The size of a header is limited: a few megabytes can name a million empty tensors, which would take
half a minute and 400 MB.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from osfl.util.files import CorruptFileError, not_weights, placeholder_problem
from osfl.util.text import sanitize

MAX_HEADER_BYTES = 2**23  # the UNet of SDXL has 250 kB
# Types of quantized weights, which a model can use only with their scales
QUANTIZED = ("I8", "U8", "I4", "U4", "F4")

Shapes = Mapping[str, tuple[int, ...]]


def tensor_shapes(file: Path, is_network: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a file, by its name.

    Args:
        is_network: whether the file has a network's weights, which must not be quantized.

    Raises:
        CorruptFileError: the file cannot be read or is not safetensors, its header is longer than
            `MAX_HEADER_BYTES` or states another size than the file's, or its weights are
            quantized.
    """
    try:
        check_header(file)
        with safe_open(file, framework="np") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118  (not a mapping)
            if is_network:
                _check_types({name: part.get_dtype() for name, part in slices.items()})
            return {name: tuple(part.get_shape()) for name, part in slices.items()}
    except CorruptFileError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CorruptFileError(sanitize(error)) from None


def _check_types(types: Mapping[str, str]) -> None:
    for name, dtype in types.items():
        if dtype in QUANTIZED:
            raise CorruptFileError(
                f"{sanitize(name, 200)!r} is of type {dtype}, as quantized weights are; it must "
                "have floating-point numbers of 16 or 32 bits"
            )


def check_header(file: Path) -> None:
    """Check that a file starts like safetensors, before a library reads its header.

    Raises:
        CorruptFileError: it does not, or its header is too long.
        OSError: the file cannot be read.
    """
    with open(file, "rb") as stream:
        start = stream.read(200)
    if problem := placeholder_problem(start):
        raise CorruptFileError(problem)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        if problem := not_weights(start):
            raise CorruptFileError(problem)
        raise CorruptFileError(
            f"header too large: {length:,} bytes; it must have at most {MAX_HEADER_BYTES:,}"
        )
