"""Everything that can leave a client, on one page. There is no image field.

The docstring of a payload says if images can be reconstructed from it. Shape, dtype and value
constraints are declared beside each tensor, and osfl/payload/wire.py accepts exactly those.
osfl/payload/fields.py explains the names of the dimensions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, get_args

import torch

from osfl.payload.fields import Shape, Values, fields_of


@dataclass(frozen=True)
class Descriptions:
    """FedDEO: one learned description d_y per class, in the text encoder's output space.

    With `feddeo.tokens = "all"` it is u_y, one vector added to every token of the prompt's
    encoding.
    """

    # The classes that the client holds, in the run's order
    classes: tuple[str, ...]
    vectors: Annotated[torch.Tensor, Shape("classes", "p", "d")]


@dataclass(frozen=True)
class Classifier:
    """FedLMG, FedCADO, Local: a classifier trained on the client's images."""

    # The classes that the client holds; the head has all classes of the run
    classes: tuple[str, ...]
    # The model's name, and its state dict
    architecture: str
    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encodings:
    """OSCAR: the mean encoding of each class's captions. A pooled encoding has no token axis."""

    classes: tuple[str, ...]
    vectors: Annotated[torch.Tensor, Shape("classes", "L", "d"), Shape("classes", "d")]


@dataclass(frozen=True)
class Mixtures:
    """Espresso: conditions of each class's clusters, and a Gaussian mixture of noisy latents.

    The means of small clusters and components decode to blurred images.
    """

    classes: tuple[str, ...]
    # Zeros where a class has fewer than J clusters
    conditions: Annotated[torch.Tensor, Shape("classes", "J", "L", "d")]
    # Each cluster's share of the class's images
    weights: Annotated[torch.Tensor, Shape("classes", "J"), Values.SHARES]
    # These three are None in a run without mixtures (`espresso.gmm = false`)
    component_weights: Annotated[torch.Tensor | None, Shape("classes", "M"), Values.SHARES] = None
    component_means: Annotated[torch.Tensor | None, Shape("classes", "M", "c", "h", "w")] = None
    component_variances: Annotated[
        torch.Tensor | None, Shape("classes", "M", "c", "h", "w"), Values.VARIANCES
    ] = None


@dataclass(frozen=True)
class LatentMixture:
    """FedLD: one Gaussian mixture of the noisy latents of all the client's images.

    The means of small components decode to blurred images.
    """

    classes: tuple[str, ...]
    # Zeros where the client has fewer latents than components
    weights: Annotated[torch.Tensor, Shape("M"), Values.SHARES]
    means: Annotated[torch.Tensor, Shape("M", "c", "h", "w")]
    variances: Annotated[torch.Tensor, Shape("M", "c", "h", "w"), Values.VARIANCES]


@dataclass(frozen=True)
class LatentStatistics:
    """latent-gaussian: each class's sums of latents and of their squares.

    The mean latent of a class decodes to a blurred image; that of a single image, to its likeness.
    """

    classes: tuple[str, ...]
    counts: Annotated[torch.Tensor, Shape("classes", dtype=torch.int64), Values.COUNTS]
    sums: Annotated[torch.Tensor, Shape("classes", "c", "h", "w"), Values.SUMS]
    squares: Annotated[torch.Tensor, Shape("classes", "c", "h", "w"), Values.SUMS]


@dataclass(frozen=True)
class Captions:
    """FGL: a caption of every image, in plain text."""

    classes: tuple[str, ...]
    # The captions of each class
    texts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Embeddings:
    """FedDISC: K cluster centers of each class's noisy image embeddings, then their mean."""

    classes: tuple[str, ...]
    vectors: Annotated[torch.Tensor, Shape("classes", "K + 1", "2e")]


@dataclass(frozen=True)
class Concepts:
    """FedBiP: learned words, and the latent posterior of every image.

    The kit's decoder reconstructs each image from its posterior.
    """

    classes: tuple[str, ...]
    domain: Annotated[torch.Tensor, Shape("d")]
    vectors: Annotated[torch.Tensor, Shape("classes", "d")]
    labels: Annotated[torch.Tensor, Shape("images", dtype=torch.int64), Values.LABELS]
    means: Annotated[torch.Tensor, Shape("images", "c", "h", "w")]
    deviations: Annotated[torch.Tensor, Shape("images", "c", "h", "w"), Values.DEVIATIONS]


@dataclass(frozen=True)
class DomainVector:
    """domain-vector: a vector that the client's domain adds to the encoding of any prompt."""

    classes: tuple[str, ...]
    domain: Annotated[torch.Tensor, Shape("p", "d")]
    # A further vector per class; None without them (`domain-vector.class-lr = 0`)
    offsets: Annotated[torch.Tensor | None, Shape("classes", "o", "L", "d")] = None


@dataclass(frozen=True)
class FeatureStatistics:
    """FedCGS: each class's sum of a frozen network's features, and the sum of outer products.

    For a class with one image, the sum is that image's features.
    """

    classes: tuple[str, ...]
    counts: Annotated[torch.Tensor, Shape("classes", dtype=torch.int64), Values.COUNTS]
    sums: Annotated[torch.Tensor, Shape("classes", "f"), Values.SUMS]
    # The moments on and above the diagonal, row by row; None in a run with a lossy codec
    triangle: Annotated[torch.Tensor | None, Shape("t"), Values.SUMS] = None
    # There in their place, in the same order: R of the scatter within the classes R^T R. It has two
    # dimensions, because codecs leave tensors of one as they are
    factor: Annotated[torch.Tensor | None, Shape(1, "r")] = None

    @property
    def moments(self) -> torch.Tensor:
        """Return the sum of the features' outer products, symmetric [f, f]."""
        if self.factor is not None:
            r = torch.triu(self._square(self.factor[0].double()))
            sums = self.sums.double()
            return r.T @ r + sums.T @ (sums / self.counts.double()[:, None])
        assert self.triangle is not None, "statistics have moments or their factor"
        return self._square(self.triangle)

    def _square(self, triangle: torch.Tensor) -> torch.Tensor:
        """Return the symmetric matrix [f, f] with these numbers on and above the diagonal."""
        width = self.sums.shape[1]
        rows, columns = torch.triu_indices(width, width)
        square = torch.empty(width, width, dtype=triangle.dtype)
        square[rows, columns] = triangle
        square[columns, rows] = triangle
        return square


@dataclass(frozen=True)
class FeatureMixtures:
    """FedPFT: a Gaussian mixture per class, fitted to a frozen network's features.

    For a class with as many images as components, the means are those images' features.
    """

    classes: tuple[str, ...]
    counts: Annotated[torch.Tensor, Shape("classes", dtype=torch.int64), Values.COUNTS]
    # Zeros where a class has fewer images than components
    weights: Annotated[torch.Tensor, Shape("classes", "K"), Values.SHARES]
    means: Annotated[torch.Tensor, Shape("classes", "K", "f")]
    variances: Annotated[torch.Tensor, Shape("classes", "K", "v"), Values.VARIANCES]


@dataclass(frozen=True)
class Votes:
    """votes: for each class the number of the candidate domain that its images resemble most."""

    classes: tuple[str, ...]
    winners: Annotated[torch.Tensor, Shape("classes", dtype=torch.uint8)]


@dataclass(frozen=True)
class Masked:
    """Secure sums: the client's numbers modulo 2^32 under masks (osfl/payload/masking.py).

    Alone they are random. Only the sum of at least `min-clients` clients can be opened. The classes
    are all classes of the run.
    """

    classes: tuple[str, ...]
    # The SHA-256 of the members and their keys, in hex
    roster: str
    # Bytes of the numbers, four each, little-endian
    numbers: Annotated[torch.Tensor, Shape("4s", dtype=torch.uint8)]
    # Shares of the client's own mask, one for each member, encrypted to it
    shares: Annotated[torch.Tensor, Shape("m", 32, dtype=torch.uint8)]


@dataclass(frozen=True)
class Domain:
    """prompts-domain: the name of the client's domain."""

    classes: tuple[str, ...]
    name: str


Payload = (
    Descriptions
    | Classifier
    | Encodings
    | Mixtures
    | LatentMixture
    | LatentStatistics
    | Captions
    | Embeddings
    | Concepts
    | DomainVector
    | FeatureStatistics
    | FeatureMixtures
    | Votes
    | Masked
    | Domain
)


@dataclass(frozen=True)
class Joint:
    """Mixed runs: the payloads of two methods in one message, by method.

    It reveals what they reveal.
    """

    # The classes of both
    classes: tuple[str, ...]
    parts: Mapping[str, Payload]


# What a client of any run sends
Sent = Payload | Joint

# Every payload kind by its name. An invalid declaration fails here, at import.
KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Payload)}
for _kind in KINDS.values():
    fields_of(_kind)


def kind_of(name: str) -> type:
    """Return the payload class of this name.

    Raises:
        TypeError: there is none.
    """
    if name not in KINDS:
        raise TypeError(
            f"payload {name!r} must be a member of Payload in osfl/payload/kinds.py: "
            f"{', '.join(KINDS)}"
        )
    return KINDS[name]


def by_method(
    payloads: Mapping[str, Sent], kinds: Mapping[str, str]
) -> dict[str, dict[str, Payload]]:
    """Return the payloads of each method by client; a joint payload has several.

    Args:
        payloads: by client.
        kinds: the method of each client's payload.
    """
    groups: dict[str, dict[str, Payload]] = {}
    for client, payload in payloads.items():
        parts = payload.parts if isinstance(payload, Joint) else {kinds[client]: payload}
        for method, part in parts.items():
            groups.setdefault(method, {})[client] = part
    return groups
