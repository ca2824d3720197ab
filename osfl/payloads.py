"""Everything that can leave a client, on one screen. There is no image field."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Descriptions:
    """FedDEO: one learned description d_y a class, in the text encoder's output space."""

    classes: tuple[str, ...]  # those the client holds, in the run's order
    vectors: torch.Tensor  # [len(classes), L, d] float32


@dataclass(frozen=True)
class Classifier:
    """FedLMG, FedCADO, Local: a classifier trained on the client's images, BatchNorm statistics included."""

    classes: tuple[str, ...]  # those the client holds; the head has all of the run's classes
    architecture: str  # a torchvision model name
    state: dict[str, torch.Tensor]  # its state dict


Payload = Descriptions | Classifier
