"""Client half of FedCGS: statistics of a frozen network's features; nothing is trained.

Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning" (AAAI 2025, arXiv
2503.06962), its training-free model. From penultimate-layer features f(x), a client sends the image
count and feature sum of each class, and B = sum of f f^T over all its images.

Differences from the paper:

1. Theirs: a ResNet-18 with ImageNet weights. Ours: `classifier.architecture` at `classifier.init`,
   any torchvision classifier that ends with a linear layer.
2. Theirs: float64 sums. Ours: accumulated in float64, sent in float32.
3. Theirs also sends the sum of all features, which follows from the per-class sums.

What it reveals: image count and mean features of each class, with which a receiver could search a
public collection. For a class with one image, the mean is that image's features.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.features import width_and_features
from osfl.payload.kinds import FeatureStatistics


def make_payload(job: ClientJob) -> FeatureStatistics:
    """Return counts, sums and second moments of the features of the client's images.

    Raises:
        ClassifierError: the architecture or initialization is unknown, or the classifier does not
            end in a linear layer.
    """
    images = job.load(job.config.data.image_size)
    width, batches = width_and_features(job, images)
    class_labels = images.held()
    sums = torch.zeros(len(job.classes), width, dtype=torch.float64)
    moments = torch.zeros(width, width, dtype=torch.float64)
    for rows, f in batches:
        # FedCGS, section 3: A_j, the sum of a class's features, and B, the sum of outer products
        sums.index_add_(0, images.labels[rows], f)
        moments += f.T @ f
    counts = torch.bincount(images.labels, minlength=len(job.classes))
    return FeatureStatistics(
        tuple(job.classes[label] for label in class_labels),
        counts[class_labels],
        sums[class_labels].float(),
        moments.float(),
    )
