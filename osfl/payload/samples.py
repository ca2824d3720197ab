"""Synthetic images that the server sends back to the client for which it made them.

They travel beside a global model, to sites that asked for them (node-config `comparison-dir`). A
client does not trust them: it checks their number and bytes before it decodes any, and the size in
pixels of each before its pixels are decoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from osfl.payload.messages import pack_bytes, size_of, unpack_bytes

IMAGES = "synthetic-images"
HEADER = "synthetic-header"
# Limits on what a client receives: images of a class, images and bytes in total, and an image's
# side in pixels
MAX_PER_CLASS = 4
MAX_IMAGES = 400
MAX_BYTES = 2**23
MAX_SIDE = 128


@dataclass(frozen=True)
class Sample:
    """A synthetic image.

    Attributes:
        label: index of its class.
        content: a PNG file.
    """

    label: int
    content: bytes


def pack_samples(samples: Sequence[Sample]) -> dict[str, ArrayRecord | ConfigRecord]:
    """Pack images as two records of a message."""
    labels = [sample.label for sample in samples]
    sizes = [len(sample.content) for sample in samples]
    return {
        IMAGES: pack_bytes(b"".join(sample.content for sample in samples), "png"),
        HEADER: ConfigRecord({"labels": labels, "sizes": sizes}),
    }


def unpack_samples(content: RecordDict, classes: int) -> list[Sample]:
    """Return the images of a message, none of them decoded; [] if it has none.

    Args:
        classes: the number of classes.

    Raises:
        ValueError: they are malformed, too many or too large, or have a label of no class.
    """
    if IMAGES not in content.array_records:
        return []
    record = content.array_records[IMAGES]
    if size_of(record) > MAX_BYTES:
        raise ValueError(f"its synthetic images have more than {MAX_BYTES:,} bytes")
    try:
        header = content.config_records[HEADER]
        labels = cast(list[int], header["labels"])
        sizes = cast(list[int], header["sizes"])
        blob = unpack_bytes(record)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its synthetic images lack {error}") from None
    _check_header({"labels": labels, "sizes": sizes}, len(blob), classes)
    samples = []
    start = 0
    for label, size in zip(labels, sizes, strict=True):
        samples.append(Sample(label, blob[start : start + size]))
        start += size
    return samples


def _check_header(header: Mapping[str, object], total: int, classes: int) -> None:
    """Check the labels and sizes of images of `total` bytes.

    Raises:
        ValueError: they are malformed, or the images are too many.
    """
    for key, values in header.items():
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(f"the {key} of its synthetic images are not whole numbers")
    labels = cast(list[int], header["labels"])
    sizes = cast(list[int], header["sizes"])
    if len(labels) != len(sizes) or len(labels) > MAX_IMAGES:
        raise ValueError(f"its synthetic images are more than {MAX_IMAGES}, or miscounted")
    if not all(0 <= label < classes for label in labels):
        raise ValueError("a synthetic image has a label of no class")
    if any(labels.count(label) > MAX_PER_CLASS for label in set(labels)):
        raise ValueError(f"a class has more than {MAX_PER_CLASS} synthetic images")
    if any(size < 1 for size in sizes) or sum(sizes) != total:
        raise ValueError("the sizes of its synthetic images are not those of their bytes")
