"""Linear heads that the server computes for a frozen network, without sampling images."""

import hashlib

import torch

from osfl.kit.kits import find_kit
from osfl.models.classifiers import new_classifier, replace_head
from osfl.util.costs import Stopwatch
from server_app.context import GlobalModel, ServerJob

NEVER_PREDICTED = -1e6  # bias of a class that no client holds, so that it is never predicted


def store_with_head(
    job: ServerJob,
    name: str,
    weight: torch.Tensor,
    bias: torch.Tensor,
    images: int,
    watch: Stopwatch,
) -> dict[str, GlobalModel]:
    """Store the clients' frozen network with this linear head as the run's global model.

    Args:
        name: the model's name.
        weight: [C, D].
        bias: [C].
        images: total image count that the clients state.
        watch: started when the computation of the head began.
    """
    settings = job.config.classifier
    kit = find_kit(job.config.kit) if settings.init == "kit" else ""
    model = new_classifier(settings, len(job.classes), kit, job.config.seed, "classifier.init")
    replace_head(model, weight, bias)
    inputs = hashlib.sha256(weight.numpy().tobytes() + bias.numpy().tobytes()).hexdigest()
    record = {"seconds": watch.seconds, "images": images, "inputs": inputs}
    job.folder.store_model(name, model.state_dict(), record, job.metadata(name, model))
    return {name: GlobalModel(model.eval(), settings.architecture, settings.small_stem)}
