"""The number of training images that a site declares when it joins a run."""

from collections import Counter

from osfl.config import NodeConfig, RunConfig
from osfl.data.parts import class_names
from osfl.methods import METHODS


def declared_images(config: RunConfig, node: NodeConfig) -> list[int]:
    """Return the number of training images per class; with an iterative method, the total alone.

    A site declares no more than its payload states later. It declares nothing if it only tests, if
    the method does not weight clients by their images, or if it gives a DP guarantee or adds its
    payload to a secure sum: exact counts must not leave it then.

    Raises:
        DataError: the images cannot be listed.
    """
    method = METHODS[config.method]
    private = config.epsilon or node.requires_guarantee or config.secure_sum
    if private or node.tests_only or config.advise or not (method.features or method.rounds):
        return []
    # Imports torch, which clients of the other methods do not need to join
    from osfl.data.load import image_labels

    labels = image_labels(config.data, node, "train", config.seed)
    if method.rounds:
        return [len(labels)]
    counts = Counter(labels)
    return [counts[label] for label in range(len(class_names(config.data)))]
