"""latent-gaussian: one Gaussian of the autoencoder's latents per class."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc, Range, ServerKey

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class LatentGaussianConfig:
    """latent-gaussian: images decoded from a Gaussian of each class's latents."""

    strength: Annotated[
        float,
        Range(0, 1),
        Doc(
            "The share of `synthesis.steps` in which a drawn latent, with noise, is denoised "
            "(SDEdit). 0: it is only decoded."
        ),
        ServerKey(),
    ]
    guidance: Annotated[Scale, Doc("Guidance scale of these steps.")]


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps latent-gaussian from working."""
    solver = run.synthesis.solver
    if run.latent_gaussian.strength and solver != "ddim":
        yield (
            f"synthesis.solver = {solver!r}: latent-gaussian.strength requires 'ddim', of whose "
            "steps it takes the last; set the solver to ddim, or the strength to 0"
        )


METHOD = Method(
    client="latent_gaussian",
    server="latent_gaussian",
    payload="LatentStatistics",
    sends="for every class its number of images, and sums of their latents and of the squares",
    reveals="what an average image of a class looks like, a blurred mean; with few images also "
    "whether a given image is among them",
    client_parts=("vae",),
    privacy="approximate",
    section="latent-gaussian",
    numbers="exact",
    problems=problems,
    summand_bound=64.0,
)
