"""Whether a site's training and test images are different ones."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osfl.config import DataConfig, NodeConfig
from osfl.data.named import side_of
from osfl.data.partition import DataError
from osfl.data.parts import has_rows, list_folder


def check_apart(config: DataConfig, node: NodeConfig) -> None:
    """Check that this site tests on no image that it trains on, by the images' bytes.

    The results of its tests have no guarantee, and would tell of that training image.

    Raises:
        DataError: one image is in both.
    """
    # The embedded digits are public, and no source image is in two splits
    if config.name == "digits":
        return
    trained_on = set(_digests(config, node, "train"))
    for number, digest in enumerate(_digests(config, node, "test")):
        if digest in trained_on:
            raise DataError(
                f"test image {number} of this site is a training image, too, and its guarantee "
                "holds for no test; remove it from one of them, or set test-results to off in its "
                "node-config"
            )


def _digests(config: DataConfig, node: NodeConfig, split: str) -> Iterator[bytes]:
    if not has_rows(config, node):
        for file, _ in list_folder(config, node, split):
            yield hashlib.sha256(file.read_bytes()).digest()
        return
    for row in side_of(config, node, split):
        yield hashlib.sha256(_stored(row["image"])).digest()


def _stored(image: Any) -> bytes:
    """The bytes of an image as the data set keeps it: within a row, or in a file."""
    held = image.get("bytes") if isinstance(image, dict) else image
    if held is None:
        held = Path(image["path"]).read_bytes()
    return held if isinstance(held, bytes) else repr(held).encode()
