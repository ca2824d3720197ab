"""Check that a site's training and test images are disjoint."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osfl.config import DataConfig, NodeConfig
from osfl.data.named import stored_images
from osfl.data.partition import DataError
from osfl.data.parts import has_rows, list_folder


def check_disjoint(config: DataConfig, node: NodeConfig) -> None:
    """Check that no test image of this site is also a training image, by the files' bytes.

    Test results have no guarantee, and would reveal information about that training image.

    Raises:
        DataError: an image is in both.
    """
    # The embedded digits are public, and no scan is in two splits
    if config.name == "digits":
        return
    train_digests = set(_digests(config, node, "train"))
    for number, digest in enumerate(_digests(config, node, "test")):
        if digest in train_digests:
            raise DataError(
                f"test image {number} of this site is also a training image, and the guarantee "
                "does not cover test results; remove it from one of them, or set test-results to "
                "off in the node-config"
            )


def _digests(config: DataConfig, node: NodeConfig, split: str) -> Iterator[bytes]:
    if not has_rows(config, node):
        for file, _ in list_folder(config, node, split):
            yield hashlib.sha256(file.read_bytes()).digest()
        return
    for row in stored_images(config, node, split):
        yield hashlib.sha256(_stored(row["image"])).digest()


def _stored(image: Any) -> bytes:
    """Return an image's bytes, which are in the row or in a file."""
    content = image.get("bytes") if isinstance(image, dict) else image
    if content is None:
        content = Path(image["path"]).read_bytes()
    return content if isinstance(content, bytes) else repr(content).encode()
