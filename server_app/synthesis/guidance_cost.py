"""The cost of a classifier's gradient in guided sampling (FedCADO, FedLMG), measured here."""

from collections.abc import Callable

import torch

from osfl.config import FedLMGConfig, RunConfig
from osfl.data.parts import class_names
from osfl.models.classifiers import build_classifier
from osfl.models.diffusion import Kit
from osfl.util.costs import Cost
from server_app.synthesis.engine import cost_per_row
from server_app.synthesis.guidance import as_teacher, classifier_loss


def gradient_cost(
    config: RunConfig, settings: FedLMGConfig, kit: Kit, passes: int, most: int
) -> Cost:
    """Measure what an image's gradients cost beside the UNet: decoding, classifier, and back.

    Args:
        settings: FedLMG's or FedCADO's.
        passes: gradients per image.
        most: images of the largest batch to try.
    """
    classifier = config.classifier
    classes = len(class_names(config.data))
    model = build_classifier(classifier.architecture, classes, classifier.small_stem)
    teacher = as_teacher(model.to(kit.device))
    weights = (settings.classifier_weight, settings.bn_weight)

    def gradient(rows: int) -> Callable[[], object]:
        z = torch.randn(rows, *kit.latent_shape, device=kit.device, requires_grad=True)
        labels = torch.arange(rows, device=kit.device) % classes

        def run() -> object:
            images = kit.decode_for_guidance(z)
            size = config.data.image_size
            loss = classifier_loss(teacher, images, labels, *weights, size, settings.bn_statistics)
            return torch.autograd.grad(loss.sum(), z)

        return run

    return cost_per_row(gradient, kit.device, most).times(passes)
