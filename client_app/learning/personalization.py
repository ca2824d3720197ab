"""What a client makes of the global model for itself: it trains it on its own images.

Local adaptation by fine-tuning (Yu et al., "Salvaging Federated Learning by Local Adaptation",
arXiv 2002.04758, section 3.1), here of a model that learned synthetic images. Nothing is sent of it
but its test.
"""

from dataclasses import replace

import torch
from torch import nn

from osfl.config import RunConfig
from osfl.data.load import Images
from osfl.models.training import fit
from osfl.util.seeds import seed_of


def adapt(
    model: nn.Module,
    images: Images,
    config: RunConfig,
    client: str,
    device: torch.device,
) -> nn.Module:
    """Train a model in place, by the global model's recipe and `adaptation`'s steps.

    Args:
        images: the client's own.
        client: its name; each has its own order of images.

    Raises:
        ClassifierError: fewer than two images, or the loss is not finite.
    """
    own = config.adaptation
    recipe = replace(config.global_model, steps=own.steps, lr=own.lr, batch_size=own.batch_size)
    seed = seed_of(config.seed, "adaptation", client)
    return fit(model, images.pixels, images.labels, recipe, seed, device)
