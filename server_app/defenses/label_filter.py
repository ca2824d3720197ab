"""Noisy-label filtering of synthetic images by cross-fitting (`label-filter`).

Confident learning (Northcutt et al., arXiv 1911.00068), section 3: each half of the images is
predicted by a classifier trained on the other half. An image whose label is not predicted is
dropped (`label-filter = "filter"`), or the predictions are soft targets of the global model beside
the labels (`"soft"`).

Differences from the paper:

1. Theirs: each probability is compared with its class's mean confidence. Ours: the label must have
   the largest probability (their baseline C_confusion).
"""

import torch
from torch.nn import functional as F

from osfl.models.classifiers import compute_logits
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import train_global


def apply_label_filter(
    job: ServerJob, images: SyntheticSet
) -> tuple[SyntheticSet, torch.Tensor | None]:
    """Return the images to train on, and the soft targets [N, C] or None, by `label-filter`."""
    if job.config.label_filter == "none":
        return images, None
    opinions = cross_fitted_predictions(job, images)
    if job.config.label_filter == "filter":
        return drop_noisy_labels(job, images, opinions), None
    return images, opinions


def cross_fitted_predictions(job: ServerJob, images: SyntheticSet) -> torch.Tensor:
    """Return softmax outputs [N, C] for every image, by a classifier not trained on it.

    The halves alternate over the plan, which is ordered by client and class. With at least two
    images per class, which the configuration requires, both have all clients and classes.
    """
    first = torch.arange(len(images.labels)) % 2 == 0
    opinions = torch.zeros(len(images.labels), len(job.classes))
    for name, half in (("opinion-1", first), ("opinion-2", ~first)):
        # An earlier version's was trained on some of the images that this one judges
        classifier = train_global(
            job, name, images.pixels[half], images.labels[half], continues=False
        )
        logits = compute_logits(classifier.model, images.pixels[~half], job.device)
        opinions[~half] = F.softmax(logits, dim=1)
    return opinions


def drop_noisy_labels(job: ServerJob, images: SyntheticSet, opinions: torch.Tensor) -> SyntheticSet:
    """Return the images whose label is predicted; a class that would have none keeps all."""
    is_clean = opinions.argmax(dim=1) == images.labels
    for label in images.labels.unique():
        of_class = images.labels == label
        if not (is_clean & of_class).any():
            is_clean |= of_class
    dropped = len(is_clean) - int(is_clean.sum())
    job.status.add_warning(
        f"label-filter: {dropped:,} of {len(is_clean):,} synthetic images are dropped, because a "
        "classifier trained on other images predicts another class"
    )
    return images.select(is_clean.nonzero().flatten().tolist())
