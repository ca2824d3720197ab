"""FedCGS: a head in closed form from sums of frozen features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import Method
from osfl.methods.feature_statistics import problems
from osfl.util.markers import Doc, OneOf, Range, ServerKey

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedCGSConfig:
    """FedCGS: a head in closed form, on the frozen features of `[classifier]`'s initial weights."""

    head: Annotated[
        str,
        OneOf("total", "within", "ridge"),
        Doc(
            "The head: a discriminant analysis with the covariance of all features (total: FedCGS) "
            "or within the classes (within: GH-OFL's LDA), or ridge regression on the labels "
            "(ridge: AFL)."
        ),
        ServerKey(),
    ]
    shrinkage: Annotated[
        float,
        Range(0.0, 1.0),
        Doc("gamma: shrinkage of the head's matrix towards a multiple of the identity. 0: none."),
        ServerKey(),
    ]
    projection: Annotated[
        int,
        Range(0, 65_536),
        Doc(
            "Dimensions to which a public random projection reduces the features before they are "
            "summed. 0: no projection."
        ),
    ]


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the payload's dimensions: those of the projected features, and of a triangle.

    Rounded moments give no usable head. So with a lossy codec clients send a factor of their
    scatter.
    """
    width = run.fedcgs.projection or sizes["f"]
    triangle = "t" if run.payload_codec == "raw" else "r"
    return {**sizes, "f": width, triangle: width * (width + 1) // 2}


METHOD = Method(
    client="fedcgs",
    server="fedcgs",
    payload="FeatureStatistics",
    sends="the number of images of every class, and sums of their features",
    reveals="what an average image of a class shows; with fewer images than features, also "
    "for every image whether it is in the training set",
    samples=False,
    section="fedcgs",
    dimensions=dimensions,
    problems=problems,
    summand_bound=32.0,
)
