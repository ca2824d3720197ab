"""A tensor's numbers in fewer bytes: what `payload-codec` says.

- `raw`: float32.
- `float16`: half of that.
- `int8`, `int4`: blocks of 64 numbers along the tensor, row by row, each with a scale: the largest
  magnitude of the block is 127, or 7. Blockwise absmax quantisation (Dettmers et al.,
  arXiv 2110.02861), there with a dynamic exponent, here with even steps. With the scales, in
  float16, a number takes 8.25 or 4.25 bits. A block whose numbers are all below some 4e-6, or 2e-7,
  becomes 0. The whole is deflated (RFC 1950) where that is shorter: most of four bits' values are
  rare.
"""

import math
import zlib

import numpy as np

# Numbers that share a scale
BLOCK = 64
LARGEST = {"int8": 127, "int4": 7}
# Numbers that are unpacked together: whole blocks
PART = 1024 * BLOCK


def packed_size(count: int, codec: str) -> int:
    """Bytes of so many numbers, at most; exactly, of `raw` and `float16`."""
    scales = 2 * math.ceil(count / BLOCK)
    sizes = {
        "raw": 4 * count,
        "float16": 2 * count,
        "int8": scales + count,
        "int4": scales + math.ceil(count / 2),
    }
    return sizes[codec]


def packed(flat: np.ndarray, codec: str) -> memoryview:
    """The bytes of float32 numbers [n], at most `packed_size`.

    Raises:
        ValueError: a number is too large for the codec, or not finite.
    """
    if codec == "raw":
        return flat.view(np.uint8).data
    if codec == "float16":
        return _halves(flat, codec).view(np.uint8).data
    blocks = np.zeros((math.ceil(len(flat) / BLOCK), BLOCK), "<f4")
    blocks.reshape(-1)[: len(flat)] = flat
    largest = LARGEST[codec]
    scales = _halves(np.abs(blocks).max(axis=1, keepdims=True) / largest, codec)
    steps = scales.astype("<f4")
    whole = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
    whole = np.rint(whole).clip(-largest, largest).astype(np.int8).reshape(-1)[: len(flat)]
    if codec == "int4":
        whole = _in_pairs(whole)
    plain = np.concatenate([scales.reshape(-1).view(np.uint8), whole.view(np.uint8)]).data
    deflated = memoryview(zlib.compress(plain, level=9))
    return min(plain, deflated, key=len)


def unpacked(data: bytes, count: int, codec: str) -> np.ndarray:
    """`count` numbers [count] as float32, of what `packed` gave. They may be NaN or infinite.

    Nothing larger than the numbers is made, whatever the bytes say.

    Raises:
        ValueError: the bytes are too many, too few, or damaged.
    """
    size = packed_size(count, codec)
    if codec in LARGEST and len(data) < size:
        data = _inflated(data, size)
    if len(data) != size:
        raise ValueError(f"{len(data):,} bytes; its shape needs {size:,}")
    if codec == "raw":
        return np.frombuffer(data, "<f4")
    if codec == "float16":
        return np.frombuffer(data, "<f2").astype("<f4")
    blocks = math.ceil(count / BLOCK)
    scales = np.frombuffer(data, "<f2", blocks).astype("<f4")
    whole = np.frombuffer(data, np.int8, offset=2 * blocks)
    numbers = np.empty(count, "<f4")
    held = 2 if codec == "int4" else 1
    # Part by part, so that beside the numbers little is made
    for first in range(0, count, PART):
        part = numbers[first : first + PART]
        taken = whole[first // held : -(-(first + len(part)) // held)]
        steps = _out_of_pairs(taken)[: len(part)] if codec == "int4" else taken
        of_part = scales[first // BLOCK : -(-(first + len(part)) // BLOCK)]
        # An infinite scale of zeros is NaN
        with np.errstate(invalid="ignore"):
            np.multiply(np.repeat(of_part, BLOCK)[: len(part)], steps, out=part)
    return numbers


def _inflated(data: bytes, size: int) -> bytes:
    """`size` bytes, of fewer; ValueError where they are not whole, or are more."""
    inflater = zlib.decompressobj()
    try:
        # One byte more would show that there are more
        found = inflater.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(
            f"{len(data):,} bytes are no deflated {size:,}, which its shape needs ({error})"
        ) from None
    if len(found) != size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"{len(data):,} bytes are no deflated {size:,}, which its shape needs")
    return found


def _halves(numbers: np.ndarray, codec: str) -> np.ndarray:
    """As float16, of the same shape; what is too large for it raises ValueError."""
    with np.errstate(over="ignore"):
        halves = numbers.astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError(
            f"payload-codec = {codec!r}: a number is too large for it, or not finite; take raw"
        )
    return halves


def _in_pairs(whole: np.ndarray) -> np.ndarray:
    """[n] of -7 to 7 as [ceil(n / 2)] bytes, the first of two in the lower half."""
    even = np.zeros(len(whole) + len(whole) % 2, np.int8)
    even[: len(whole)] = whole
    return (even[::2] & 0x0F) | (even[1::2] << 4)


def _out_of_pairs(pairs: np.ndarray) -> np.ndarray:
    """[n] bytes as [2 n] numbers of -8 to 7."""
    # A shift to the left and back fills the upper half with the sign
    return np.stack([(pairs << 4) >> 4, pairs >> 4], axis=1).reshape(-1)
