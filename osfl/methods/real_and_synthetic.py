"""real-and-synthetic: the centralized upper bound with a run's synthetic images beside the real."""

from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import Method
from osfl.util.markers import Doc, SitePath


@dataclass(frozen=True)
class RealAndSyntheticConfig:
    """real-and-synthetic: the upper bound with another run's images beside the real ones."""

    images_from: Annotated[
        str,
        Doc(
            "A run (folder or job id) of the same data and seed, whose synthetic images are added."
        ),
        SitePath("server"),
    ]


METHOD = Method(
    client=None,
    server="real_and_synthetic",
    payload=None,
    sends="nothing: not deployable, because the server holds all images itself",
    samples=False,
    section="real-and-synthetic",
    numbers="none",
    trained_on="the images of all clients, pooled, and synthetic images of another run",
)
