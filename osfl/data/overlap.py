"""Check that a site's training and test images are disjoint."""

import hashlib
from collections.abc import Iterator

from osfl.config import DataConfig, NodeConfig
from osfl.data.named import stored_bytes, stored_images
from osfl.data.partition import DataError
from osfl.data.parts import has_rows, has_training_split, list_folder


def check_disjoint(config: DataConfig, node: NodeConfig) -> None:
    """Check that no test image of this site is also a training image, by the files' bytes.

    Test results have no guarantee, and would reveal information about that training image. A site
    that only tests may have no training images.

    Raises:
        DataError: an image is in both.
    """
    # The embedded digits are public, and no scan is in two splits
    if config.name == "digits":
        return
    if node.tests_only and not has_training_split(config, node):
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
        yield hashlib.sha256(stored_bytes(row["image"])).digest()
