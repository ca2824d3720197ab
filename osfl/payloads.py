"""Everything that can leave a client, on one screen. There is no image field; where a payload can be turned back into pictures, it says so."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Descriptions:
    """FedDEO: one learned description d_y a class, in the text encoder's output space."""

    classes: tuple[str, ...]  # those the client holds, in the run's order
    vectors: torch.Tensor  # [classes, L, d]


@dataclass(frozen=True)
class Classifier:
    """FedLMG, FedCADO, Local: a classifier trained on the client's images, BatchNorm statistics included."""

    classes: tuple[str, ...]  # those the client holds; the head has all of the run's classes
    architecture: str  # a torchvision model name
    state: dict[str, torch.Tensor]  # its state dict


@dataclass(frozen=True)
class Encodings:
    """OSCAR: the mean encoding of a class's captions."""

    classes: tuple[str, ...]
    vectors: torch.Tensor  # [classes, L, d]; oscar-pooled: [classes, d]


@dataclass(frozen=True)
class Mixtures:
    """Espresso: conditions of every class's clusters, and a Gaussian mixture of its noised latents."""

    classes: tuple[str, ...]
    conditions: torch.Tensor  # [classes, J, L, d]; zeros where a class has fewer than J clusters
    weights: torch.Tensor  # [classes, J], shares of the class's images
    component_weights: torch.Tensor | None = None  # [classes, M]; None: without the mixture
    component_means: torch.Tensor | None = None  # [classes, M, c, h, w]
    component_variances: torch.Tensor | None = None  # [classes, M, c, h, w]


@dataclass(frozen=True)
class Captions:
    """FGL: a caption of every image, in plain words."""

    classes: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]  # of every class


@dataclass(frozen=True)
class Embeddings:
    """FedDISC: cluster centres and the mean of a class's noised image embeddings."""

    classes: tuple[str, ...]
    vectors: torch.Tensor  # [classes, K + 1, 2e]: K centres, then the mean


@dataclass(frozen=True)
class Concepts:
    """FedBiP: learned words, and the latent posterior of every image. Whoever has the decoder can turn each posterior back into its image."""

    classes: tuple[str, ...]
    domain: torch.Tensor  # [d]
    vectors: torch.Tensor  # [classes, d]
    labels: torch.Tensor  # [images] int64
    means: torch.Tensor  # [images, c, h, w]
    deviations: torch.Tensor  # [images, c, h, w]


@dataclass(frozen=True)
class Domain:
    """prompts-domain: the name of the client's domain, given away."""

    classes: tuple[str, ...]
    name: str


Payload = (
    Descriptions | Classifier | Encodings | Mixtures | Captions | Embeddings | Concepts | Domain
)
