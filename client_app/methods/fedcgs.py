"""FedCGS: sums of a frozen network's features; nothing is trained.

Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning" (AAAI 2025, arXiv
2503.06962), its training-free model. Of features f(x) before the last layer, a client sends its
images of each class, the sum of f over them, and B = sum of f f^T over all its images.

Differences from the paper:

1. Theirs: a ResNet-18 with ImageNet's weights. Ours: `classifier.architecture` at
   `classifier.init`, any torchvision classifier that ends with a linear layer.
2. Theirs: sums in 64 bits. Ours: added up in 64 bits, sent in 32.
3. Theirs sends the sum of all features too, which the sums of the classes give.

What it gives away: the mean features of each class, which its owner could search a public
collection with, and how many images of it there are. With one image of a class, its features.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.features import width_and_features
from osfl.payload.kinds import FeatureStatistics


def make_payload(job: ClientJob) -> FeatureStatistics:
    """Counts, sums and second moments of the features of the client's images.

    Raises:
        ClassifierError: no such architecture or initialisation, or one without a linear layer at
            its end.
    """
    images = job.load(job.config.data.image_size)
    width, batches = width_and_features(job, images)
    held = images.held()
    sums = torch.zeros(len(job.classes), width, dtype=torch.float64)
    moments = torch.zeros(width, width, dtype=torch.float64)
    for rows, f in batches:
        # FedCGS, section 3: A_j, the sum of a class's features, and B, of their outer products
        sums.index_add_(0, images.labels[rows], f)
        moments += f.T @ f
    counts = torch.bincount(images.labels, minlength=len(job.classes))
    return FeatureStatistics(
        tuple(job.classes[label] for label in held),
        counts[held],
        sums[held].float(),
        moments.float(),
    )
