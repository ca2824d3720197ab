"""FedPFT: Gaussian mixtures of frozen features (arXiv 2402.01862)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import Method
from osfl.methods.feature_statistics import problems
from osfl.util.markers import Doc, OneOf, Range, ServerKey

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedPFTConfig:
    """FedPFT: Gaussian mixtures of the frozen features of `[classifier]`'s initial weights."""

    components: Annotated[int, Range(1, 1000), Doc("K: Gaussians per class.")]
    covariance: Annotated[
        str,
        OneOf("spherical", "diag"),
        Doc(
            "The variances of a Gaussian: one for all features (spherical), or one per feature "
            "(diag)."
        ),
    ]
    samples: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "Upper bound on the features that are drawn per client and class. The class's "
            "weight is its number of images all the same."
        ),
        ServerKey(),
    ]
    inverse_penalty: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc("C: the factor by which the head's L2 penalty is divided."),
        ServerKey(),
    ]
    iterations: Annotated[
        int,
        Range(1, 1_000_000),
        Doc("Upper bound on the iterations of the head's training."),
        ServerKey(),
    ]


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes of a run's mixtures."""
    variances = 1 if run.fedpft.covariance == "spherical" else sizes["f"]
    return {**sizes, "K": run.fedpft.components, "v": variances}


METHOD = Method(
    client="fedpft",
    server="fedpft",
    payload="FeatureMixtures",
    sends="the number of images of every class, and a Gaussian mixture of their features",
    reveals="what groups of images show; with few images, for many of them also whether they "
    "are in the training set",
    samples=False,
    privacy="approximate",
    section="fedpft",
    dimensions=dimensions,
    problems=problems,
)
