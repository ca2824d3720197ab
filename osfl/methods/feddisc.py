"""FedDISC: cluster centers of image embeddings, and an unCLIP kit (arXiv 2305.04063)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import EMBEDDING_NOISE_PARTS, IMAGE_ENCODER_PARTS, Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc, Range, SitePath

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedDISCConfig:
    """FedDISC: cluster centers of image embeddings."""

    kit: Annotated[
        str, Doc("A Stable unCLIP folder or hub id. Empty: the run's kit."), SitePath("client")
    ]
    clusters: Annotated[int, Range(1, 1000), Doc("K: clusters per class.")]
    noise_level: Annotated[int, Range(0, 999), Doc("Timestep of the noise on image embeddings.")]
    guidance_cluster: Annotated[Scale, Doc("Guidance scale of a cluster's center.")]
    guidance_domain: Annotated[Scale, Doc("Guidance scale of a class's mean.")]


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes of a run's embeddings; in a secure sum, of a class's mean embedding."""
    if run.secure_sum:
        return {**sizes, "K + 1": 1, "2e": sizes["2e"] // 2}
    return {**sizes, "K + 1": run.feddisc.clusters + 1}


METHOD = Method(
    client="feddisc",
    server="feddisc",
    payload="Embeddings",
    sends="cluster centers and the mean of every class's noisy image embeddings",
    reveals="what small groups of images show, and for many images whether they are among "
    "them; for a class with one image, its noisy embedding",
    client_parts=(*IMAGE_ENCODER_PARTS, *EMBEDDING_NOISE_PARTS),
    privacy="approximate",
    section="feddisc",
    image_conditions=True,
    dimensions=dimensions,
    summand_bound=64.0,
)
