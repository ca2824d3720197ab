"""A frozen network with a last layer that a server has worked out, for methods that draw no
image.
"""

import hashlib

import torch

from osfl.kit.kits import find_kit
from osfl.models.classifiers import new_classifier, replace_head
from osfl.util.costs import Stopwatch
from server_app.context import GlobalModel, ServerJob

NEVER = -1e6  # the bias of a class that nobody holds


def store_with_head(
    job: ServerJob,
    name: str,
    weight: torch.Tensor,
    bias: torch.Tensor,
    images: int,
    watch: Stopwatch,
) -> dict[str, GlobalModel]:
    """The clients' frozen network with this last layer, kept as the run's global model.

    Args:
        name: of the model.
        weight: [C, D].
        bias: [C].
        images: how many the clients speak of.
        watch: what the head took.
    """
    settings = job.config.classifier
    kit = find_kit(job.config.kit) if settings.init == "kit" else ""
    model = new_classifier(settings, len(job.classes), kit, job.config.seed, "classifier.init")
    replace_head(model, weight, bias)
    inputs = hashlib.sha256(weight.numpy().tobytes() + bias.numpy().tobytes()).hexdigest()
    about = {"seconds": watch.seconds, "images": images, "inputs": inputs}
    job.folder.store_model(name, model.state_dict(), about)
    return {name: GlobalModel(model.eval(), settings.architecture, settings.small_stem)}
