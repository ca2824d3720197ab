"""The number of training images that a site declares when it joins a run."""

from collections import Counter

from osfl.config import NodeConfig, RunConfig
from osfl.data.parts import class_names
from osfl.methods import METHODS


def declared_images(config: RunConfig, node: NodeConfig) -> list[int]:
    """The training images of every class; of a method with rounds, their number alone.

    The site declares no more than its payload states later. It declares nothing if the method
    does not weight clients by their images, or if it gives a guarantee: exact counts must not leave
    it then.

    Raises:
        DataError: the images cannot be listed.
    """
    method = METHODS[config.method]
    guarded = config.epsilon or node.epsilon or node.epsilon_total
    if guarded or not (method.features or method.rounds):
        return []
    # It imports torch, which the other methods' clients join without
    from osfl.data.load import image_labels

    labels = image_labels(config.data, node, "train", config.seed)
    if method.rounds:
        return [len(labels)]
    counts = Counter(labels)
    return [counts[label] for label in range(len(class_names(config.data)))]
