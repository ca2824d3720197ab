"""Do synthetic images show their class? A second opinion, by cross-fitting.

Confident learning (Northcutt et al., arXiv 1911.00068), section 3: each half of the images is
looked at by a classifier that was trained on the other half. An image whose class that classifier
does not see is left out (`label-check = "filter"`), or its opinion teaches the global model beside
the label (`"soft"`).

Difference from the paper: theirs compares each probability with its class's mean confidence. Ours:
the largest probability must be the label's (its baseline C_confusion).
"""

import torch
from torch.nn import functional as F

from osfl.models.classifiers import logits_of
from server_app.context import ServerJob
from server_app.synthesis.images import SyntheticSet
from server_app.training import train_global


def second_opinions(job: ServerJob, images: SyntheticSet) -> torch.Tensor:
    """Softmax outputs [N, C] for every image, of a classifier that was not trained on it.

    The halves are every other image of a plan, client by client and class by class: with two images
    of a class or more (which the configuration asks for) both have all clients and classes.
    """
    first = torch.arange(len(images.labels)) % 2 == 0
    opinions = torch.zeros(len(images.labels), len(job.classes))
    for name, half in (("opinion-1", first), ("opinion-2", ~first)):
        trained = train_global(job, name, images.pixels[half], images.labels[half])
        logits = logits_of(trained.model, images.pixels[~half], job.device)
        opinions[~half] = F.softmax(logits, dim=1)
    return opinions


def without_doubtful(job: ServerJob, images: SyntheticSet, opinions: torch.Tensor) -> SyntheticSet:
    """The images whose class the second opinion sees; of a class that would have none, all."""
    sees = opinions.argmax(dim=1) == images.labels
    for label in images.labels.unique():
        of_class = images.labels == label
        if not (sees & of_class).any():
            sees |= of_class
    left = len(sees) - int(sees.sum())
    job.status.warn_of(
        f"label-check: {left:,} of {len(sees):,} synthetic images are left out, for a classifier "
        "of the others takes them for another class"
    )
    return images.only(sees.nonzero().flatten().tolist())
