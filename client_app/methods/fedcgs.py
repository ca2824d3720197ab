"""Client half of FedCGS: statistics of a frozen network's features; nothing is trained.

Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning" (AAAI 2025, arXiv
2503.06962), its training-free model. From penultimate-layer features f(x), a client sends the image
count and feature sum of each class, and B = sum of f f^T over all its images.

Differences from the paper:

1. Theirs: a ResNet-18 with ImageNet weights. Ours: `classifier.architecture` at `classifier.init`,
   any torchvision classifier that ends with a linear layer.
2. Theirs: float64 sums. Ours: accumulated in float64, sent in float32.
3. Theirs also sends the sum of all features, which follows from the per-class sums.
4. Theirs: B as a square. Ours: its triangle, because it is symmetric.
5. With a lossy `payload-codec`, ours in place of B: a triangular factor R of the scatter within
   classes, B - sum_j A_j A_j^T / N_j = R^T R. Any rounding of R keeps the scatter positive
   semidefinite; a rounding of B does not, and hides the scatter behind the mean.
6. With `fedcgs.projection` features are P f with a public random P (osfl/models/projection.py).

What it reveals: image count and mean features of each class, with which a receiver could search a
public collection. For a class with one image, the mean is that image's features.
"""

import torch

from client_app.context import ClientJob
from client_app.learning.features import project, width_and_features
from osfl.payload.kinds import FeatureStatistics


def make_payload(job: ClientJob) -> FeatureStatistics:
    """Return counts, sums and second moments of the features of the client's images.

    Raises:
        ClassifierError: the architecture or initialization is unknown, or the classifier does not
            end in a linear layer.
    """
    images = job.load(job.config.data.image_size)
    width, batches = project(job, job.config.fedcgs.projection, *width_and_features(job, images))
    class_labels = images.held()
    sums = torch.zeros(len(job.classes), width, dtype=torch.float64)
    moments = torch.zeros(width, width, dtype=torch.float64)
    for rows, f in batches:
        # FedCGS, section 3: A_j, the sum of a class's features, and B, the sum of outer products
        sums.index_add_(0, images.labels[rows], f)
        moments += f.T @ f
    counts = torch.bincount(images.labels, minlength=len(job.classes))[class_labels]
    sums = sums[class_labels]
    names = tuple(job.classes[label] for label in class_labels)
    triangle = torch.triu_indices(width, width)
    if job.config.payload_codec == "raw":
        return FeatureStatistics(names, counts, sums.float(), moments[*triangle].float())
    factor = scatter_factor(moments - sums.T @ (sums / counts[:, None]))
    return FeatureStatistics(names, counts, sums.float(), factor=factor[*triangle].float()[None])


def scatter_factor(scatter: torch.Tensor) -> torch.Tensor:
    """Return an upper triangular R with R^T R = a positive semidefinite matrix, [D, D].

    Unlike Cholesky's, it exists for fewer images than features, too.
    """
    values, vectors = torch.linalg.eigh(scatter)
    # Rounding may leave an eigenvalue below 0
    root = values.clamp_min(0).sqrt()[:, None] * vectors.T
    r: torch.Tensor = torch.linalg.qr(root).R
    return r
