"""Personalization: train the global model on a client's own images.

Local adaptation by fine-tuning (Yu et al., "Salvaging Federated Learning by Local Adaptation",
arXiv 2002.04758, section 3.1), here of a model trained on synthetic images. Only its test result
may be sent.
"""

from dataclasses import replace

import torch
from torch import nn

from osfl.config import RunConfig
from osfl.data.load import Images
from osfl.models.training import fit
from osfl.util.seeds import seed_of


def personalize(
    model: nn.Module,
    images: Images,
    config: RunConfig,
    client: str,
    device: torch.device,
) -> nn.Module:
    """Train a model in place, by the global model's recipe and the settings of `personalization`.

    Args:
        images: the client's own training images.
        client: its name; each client has its own order of images.

    Raises:
        ClassifierError: there are fewer than two images, or the loss is not finite.
    """
    settings = config.personalization
    recipe = replace(
        config.global_model, steps=settings.steps, lr=settings.lr, batch_size=settings.batch_size
    )
    seed = seed_of(config.seed, "adaptation", client)
    return fit(model, images.pixels, images.labels, recipe, seed, device)
