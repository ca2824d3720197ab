"""FedLD: a Gaussian mixture of the noisy latents of all images (OpenReview KPjHoZdEJe)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import DIFFUSION_PARTS, Method
from osfl.methods.shared_sections import Components, MixtureFit, NoiseDraws, Scale
from osfl.util.markers import Doc

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedLDConfig:
    """FedLD: initial noise from a Gaussian mixture of the client's noisy latents."""

    components: Components
    mixture_fit: MixtureFit
    noise_draws: NoiseDraws
    guidance: Annotated[Scale, Doc("Guidance scale.")]


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes with the number of components."""
    return {**sizes, "M": run.fedld.components}


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps FedLD from working."""
    solver = run.synthesis.solver
    if solver != "ddim":
        yield (
            f"synthesis.solver = {solver!r}: FedLD requires 'ddim', at whose first timestep its "
            "clients' mixtures are fitted"
        )


METHOD = Method(
    client="fedld",
    server="fedld",
    payload="LatentMixture",
    sends="a Gaussian mixture of the noisy latents of all its images",
    reveals="what groups of its images look like, blurred means of them, and, for few images, "
    "whether a given image is among them",
    client_parts=DIFFUSION_PARTS,
    section="fedld",
    dimensions=dimensions,
    problems=problems,
)
