"""Everything that can leave a client, on one page. There is no image field.

Where a payload can be turned back into pictures, it says so. A tensor's shape, its dtype and what
its numbers must be stand beside it: the server expects, and osfl/payload/wire.py takes, exactly
that. What the dimensions' names stand for is in osfl/payload/fields.py.
"""

from dataclasses import dataclass
from typing import Annotated, get_args

import torch

from osfl.payload.fields import Shape, Values, fields_of


@dataclass(frozen=True)
class Descriptions:
    """FedDEO: one learned description d_y a class, in the text encoder's output space.

    Or u_y, one vector that every token of its prompt's encoding gets.
    """

    # Those the client holds, in the run's order
    classes: tuple[str, ...]
    vectors: Annotated[torch.Tensor, Shape("classes", "p", "d")]


@dataclass(frozen=True)
class Classifier:
    """FedLMG, FedCADO, Local: a classifier trained on the client's images."""

    # Those the client holds; the head has all of the run's classes
    classes: tuple[str, ...]
    # A torchvision model's name, and its state dict
    architecture: str
    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encodings:
    """OSCAR: the mean encoding of a class's captions. A pooled one has no tokens."""

    classes: tuple[str, ...]
    vectors: Annotated[torch.Tensor, Shape("classes", "L", "d"), Shape("classes", "d")]


@dataclass(frozen=True)
class Mixtures:
    """Espresso: conditions of every class's clusters, and a Gaussian mixture of noised latents."""

    classes: tuple[str, ...]
    # Zeros where a class has fewer than J clusters
    conditions: Annotated[torch.Tensor, Shape("classes", "J", "L", "d")]
    # The clusters' shares of the class's images
    weights: Annotated[torch.Tensor, Shape("classes", "J"), Values.SHARES]
    # None: without the mixture
    component_weights: Annotated[torch.Tensor | None, Shape("classes", "M"), Values.SHARES] = None
    component_means: Annotated[torch.Tensor | None, Shape("classes", "M", "c", "h", "w")] = None
    component_variances: Annotated[
        torch.Tensor | None, Shape("classes", "M", "c", "h", "w"), Values.VARIANCES
    ] = None


@dataclass(frozen=True)
class Captions:
    """FGL: a caption of every image, in plain words."""

    classes: tuple[str, ...]
    # Of every class
    texts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Embeddings:
    """FedDISC: K cluster centres of a class's noised image embeddings, then their mean."""

    classes: tuple[str, ...]
    vectors: Annotated[torch.Tensor, Shape("classes", "K + 1", "2e")]


@dataclass(frozen=True)
class Concepts:
    """FedBiP: learned words, and the latent posterior of every image.

    Whoever has the decoder can turn each posterior back into its image.
    """

    classes: tuple[str, ...]
    domain: Annotated[torch.Tensor, Shape("d")]
    vectors: Annotated[torch.Tensor, Shape("classes", "d")]
    labels: Annotated[torch.Tensor, Shape("images", dtype=torch.int64), Values.LABELS]
    means: Annotated[torch.Tensor, Shape("images", "c", "h", "w")]
    deviations: Annotated[torch.Tensor, Shape("images", "c", "h", "w"), Values.DEVIATIONS]


@dataclass(frozen=True)
class DomainVector:
    """domain-vector: what the client's domain adds to the encoding of any class's prompt."""

    classes: tuple[str, ...]
    domain: Annotated[torch.Tensor, Shape("p", "d")]
    # What each class adds beside; None: nothing
    offsets: Annotated[torch.Tensor | None, Shape("classes", "o", "L", "d")] = None


@dataclass(frozen=True)
class FeatureStatistics:
    """FedCGS: of a frozen network's features, each class's sum, and the sum of outer products.

    Of a class with one image the sum is that image's features.
    """

    classes: tuple[str, ...]
    counts: Annotated[torch.Tensor, Shape("classes", dtype=torch.int64), Values.COUNTS]
    sums: Annotated[torch.Tensor, Shape("classes", "f")]
    moments: Annotated[torch.Tensor, Shape("f", "f")]


@dataclass(frozen=True)
class FeatureMixtures:
    """FedPFT: of a frozen network's features, a Gaussian mixture a class.

    Of a class with as many images as components the means are those images' features.
    """

    classes: tuple[str, ...]
    counts: Annotated[torch.Tensor, Shape("classes", dtype=torch.int64), Values.COUNTS]
    # Zeros where a class has fewer images than components
    weights: Annotated[torch.Tensor, Shape("classes", "K"), Values.SHARES]
    means: Annotated[torch.Tensor, Shape("classes", "K", "f")]
    variances: Annotated[torch.Tensor, Shape("classes", "K", "v"), Values.VARIANCES]


@dataclass(frozen=True)
class Votes:
    """votes: which of the run's candidates each class's images look like, by number."""

    classes: tuple[str, ...]
    winners: Annotated[torch.Tensor, Shape("classes", dtype=torch.uint8)]


@dataclass(frozen=True)
class Domain:
    """prompts-domain: the name of the client's domain, given away."""

    classes: tuple[str, ...]
    name: str


Payload = (
    Descriptions
    | Classifier
    | Encodings
    | Mixtures
    | Captions
    | Embeddings
    | Concepts
    | DomainVector
    | FeatureStatistics
    | FeatureMixtures
    | Votes
    | Domain
)

# Every kind by its name. A declaration that cannot be read ends the import.
KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Payload)}
for _kind in KINDS.values():
    fields_of(_kind)


def kind_of(name: str) -> type:
    """The class of this name.

    Raises:
        TypeError: it is not one of `Payload`.
    """
    if name not in KINDS:
        raise TypeError(
            f"payload {name!r} is not one of Payload in osfl/payload/kinds.py: {', '.join(KINDS)}"
        )
    return KINDS[name]
