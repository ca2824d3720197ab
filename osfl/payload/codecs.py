"""Codecs that store a tensor's numbers in fewer bytes (the config key `payload-codec`).

- `raw`: float32.
- `float16`: half of that.
- `int8`, `int4`: blocks of 64 consecutive numbers in row-major order, each with a float16 scale
  that maps the block's largest magnitude to 127 or 7. This is blockwise absmax quantization
  (Dettmers et al., arXiv 2110.02861) with uniform steps in place of their dynamic exponent. With
  its share of the scales a number takes 8.25 or 4.25 bits. A block whose magnitudes are all below
  about 4e-6 (int8) or 2e-7 (int4) becomes 0, because float16 cannot hold its scale. The result is
  deflated (RFC 1950) if that is shorter: most of the four-bit values are rare.
"""

import math
import zlib

import numpy as np

# Numbers that share a scale
BLOCK = 64
MAX_LEVEL = {"int8": 127, "int4": 7}
# Numbers that are decoded together: whole blocks
NUMBERS_PER_PART = 1024 * BLOCK


def packed_size(count: int, codec: str) -> int:
    """Return the size in bytes of `count` packed numbers.

    It is exact for `raw` and `float16`, and an upper bound for `int8` and `int4`.
    """
    scales = 2 * math.ceil(count / BLOCK)
    sizes = {
        "raw": 4 * count,
        "float16": 2 * count,
        "int8": scales + count,
        "int4": scales + math.ceil(count / 2),
    }
    return sizes[codec]


def pack(flat: np.ndarray, codec: str) -> memoryview:
    """Pack float32 numbers [n] into at most `packed_size` bytes.

    Raises:
        ValueError: a number is too large for the codec, or not finite.
    """
    if codec == "raw":
        return flat.view(np.uint8).data
    if codec == "float16":
        return _to_float16(flat, codec).view(np.uint8).data
    blocks = np.zeros((math.ceil(len(flat) / BLOCK), BLOCK), "<f4")
    blocks.reshape(-1)[: len(flat)] = flat
    largest = MAX_LEVEL[codec]
    scales = _to_float16(np.abs(blocks).max(axis=1, keepdims=True) / largest, codec)
    steps = scales.astype("<f4")
    levels = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
    levels = np.rint(levels).clip(-largest, largest).astype(np.int8).reshape(-1)[: len(flat)]
    if codec == "int4":
        levels = _pack_nibbles(levels)
    quantized = np.concatenate([scales.reshape(-1).view(np.uint8), levels.view(np.uint8)]).data
    deflated = memoryview(zlib.compress(quantized, level=9))
    return min(quantized, deflated, key=len)


def unpack(data: bytes, count: int, codec: str) -> np.ndarray:
    """Unpack the bytes of `pack` into `count` float32 numbers [count], possibly NaN or infinite.

    Memory is bounded by the size of the numbers, whatever the bytes are.

    Raises:
        ValueError: there are too many bytes or too few, or they are corrupt.
    """
    size = packed_size(count, codec)
    if codec in MAX_LEVEL and len(data) < size:
        data = _inflate(data, size)
    if len(data) != size:
        raise ValueError(f"{len(data):,} bytes; its shape needs {size:,}")
    if codec == "raw":
        return np.frombuffer(data, "<f4")
    if codec == "float16":
        return np.frombuffer(data, "<f2").astype("<f4")
    blocks = math.ceil(count / BLOCK)
    scales = np.frombuffer(data, "<f2", blocks).astype("<f4")
    levels = np.frombuffer(data, np.int8, offset=2 * blocks)
    numbers = np.empty(count, "<f4")
    per_byte = 2 if codec == "int4" else 1
    # Part by part, so that temporary arrays stay small
    for first in range(0, count, NUMBERS_PER_PART):
        part = numbers[first : first + NUMBERS_PER_PART]
        end = first + len(part)
        part_bytes = levels[first // per_byte : -(-end // per_byte)]
        part_levels = _unpack_nibbles(part_bytes)[: len(part)] if codec == "int4" else part_bytes
        part_scales = scales[first // BLOCK : -(-end // BLOCK)]
        # 0 times an infinite scale is NaN
        with np.errstate(invalid="ignore"):
            np.multiply(np.repeat(part_scales, BLOCK)[: len(part)], part_levels, out=part)
    return numbers


def _inflate(data: bytes, size: int) -> bytes:
    """Inflate to exactly `size` bytes.

    Raises:
        ValueError: the data are not deflated, cut short, or inflate to another size.
    """
    inflater = zlib.decompressobj()
    try:
        # The limit is one byte more, which shows whether there are too many
        inflated = inflater.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(
            f"{len(data):,} bytes do not inflate to {size:,}, which its shape needs ({error})"
        ) from None
    if len(inflated) != size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"{len(data):,} bytes do not inflate to {size:,}, which its shape needs")
    return inflated


def _to_float16(numbers: np.ndarray, codec: str) -> np.ndarray:
    """Convert to float16.

    Raises:
        ValueError: a number is too large, or not finite.
    """
    with np.errstate(over="ignore"):
        halves = numbers.astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError(
            f"payload-codec = {codec!r}: a number is too large for it, or not finite; "
            "set payload-codec = 'raw'"
        )
    return halves


def _pack_nibbles(levels: np.ndarray) -> np.ndarray:
    """Pack [n] numbers of -7 to 7 into [ceil(n / 2)] bytes, the first of a pair in the low half."""
    even = np.zeros(len(levels) + len(levels) % 2, np.int8)
    even[: len(levels)] = levels
    return (even[::2] & 0x0F) | (even[1::2] << 4)


def _unpack_nibbles(pairs: np.ndarray) -> np.ndarray:
    """Unpack [n] bytes into [2 n] numbers of -8 to 7."""
    # A shift to the left and back fills the upper half with the sign
    return np.stack([(pairs << 4) >> 4, pairs >> 4], axis=1).reshape(-1)
