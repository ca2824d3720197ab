"""Features of a client's images before a frozen classifier's last layer."""

from collections.abc import Iterator
from functools import partial

import torch

from client_app.context import ClientJob
from osfl.data.load import Images
from osfl.models.classifiers import headless, new_classifier, normalise
from osfl.util.pixels import to_float

BATCH = 64


def width_and_features(
    job: ClientJob, images: Images
) -> tuple[int, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """(D, batches of (rows [B], features [B, D] in 64 bits)) of `classifier.architecture` as it
    begins.

    Raises:
        ClassifierError: no such architecture or initialisation, or one without a linear layer at
            its end.
    """
    settings = job.config.classifier
    model = new_classifier(settings, len(job.classes), job.kit, job.config.seed, "classifier.init")
    backbone, width = headless(model.to(job.device).eval())
    return width, _batches(job, images, backbone)


def _batches(
    job: ClientJob, images: Images, backbone: torch.nn.Module
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    done = 0
    job.progress(done, len(images), "image")
    for rows in torch.arange(len(images)).split(BATCH):
        x = normalise(to_float(images.pixels[rows].to(job.device)), backbone)
        with torch.no_grad():
            features = job.meter.run(("features", len(rows)), partial(backbone, x))
        yield rows, features.double().cpu()
        done += len(rows)
        job.progress(done, len(images), "image")
