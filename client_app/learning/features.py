"""Features of a client's images before a frozen classifier's last layer."""

from collections.abc import Iterator
from functools import partial

import torch

from client_app.context import ClientJob
from osfl.data.load import Images
from osfl.models.classifiers import new_classifier, normalize, remove_head
from osfl.models.projection import random_projection
from osfl.util.pixels import to_float

BATCH = 64


def width_and_features(
    job: ClientJob, images: Images
) -> tuple[int, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the width D of a frozen classifier's features, and batches of them.

    The classifier is `classifier.architecture` with the weights of `classifier.init`. A batch is
    rows [B] and features [B, D] in float64 on the CPU.

    Raises:
        ClassifierError: the architecture or initialization is unknown, or the classifier does not
            end in a linear layer.
    """
    settings = job.config.classifier
    model = new_classifier(settings, len(job.classes), job.kit, job.config.seed, "classifier.init")
    backbone, width = remove_head(model.to(job.device).eval())
    return width, _batches(job, images, backbone)


def project(
    job: ClientJob, size: int, width: int, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[int, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Project batches of features by the run's public random projection.

    Args:
        size: of the projected features; 0: no projection.
        width, batches: as `width_and_features` returns them.
    """
    if not size:
        return width, batches
    projection = random_projection(width, size, job.config.seed)
    return size, ((rows, features @ projection.T) for rows, features in batches)


def _batches(
    job: ClientJob, images: Images, backbone: torch.nn.Module
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batches = torch.arange(len(images)).split(BATCH)
    for rows in job.batched(batches, len(images), "image"):
        x = normalize(to_float(images.pixels[rows].to(job.device)), backbone)
        with torch.no_grad():
            features = job.meter.run(("features", len(rows)), partial(backbone, x))
        yield rows, features.double().cpu()
