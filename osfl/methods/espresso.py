"""Espresso: conditions of clusters, and Gaussian mixtures of the noise (CVPR 2026)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import DIFFUSION_PARTS, IMAGE_ENCODER_PARTS, Method
from osfl.methods.shared_sections import (
    Components,
    ConditionTraining,
    MixtureFit,
    NoiseDraws,
    Scale,
)
from osfl.util.markers import Doc, Range, ServerKey

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class EspressoConfig(ConditionTraining):
    """Espresso: clusters' conditions (C), Gaussian mixtures of the noise (G), Z-Sampling (Z)."""

    clusters: Annotated[int, Range(1, 1000), Doc("J: clusters per class.")]
    gmm: Annotated[
        bool,
        Doc("G: whether z_T is drawn from Gaussian mixtures, in place of standard Gaussian noise."),
    ]
    components: Components
    mixture_fit: MixtureFit
    noise_draws: NoiseDraws
    z_sampling: Annotated[bool, Doc("Z: whether sampling uses zig-zags."), ServerKey()]
    z_threshold: Annotated[
        int, Range(0, 1000), Doc("T_z: zig-zags happen at timesteps above it."), ServerKey()
    ]
    guidance: Annotated[Scale, Doc("gamma_1: guidance scale of a denoising step.")]
    inversion_guidance: Annotated[
        Scale, Doc("gamma_2: guidance scale of a zig-zag's inversion step.")
    ]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        is_sampled = self.gmm and self.mixture_fit == "sampled"
        if is_sampled and self.noise_draws < self.components:
            yield (
                f"espresso.noise-draws = {self.noise_draws}: must be at least "
                f"espresso.components = {self.components}, or a class with one image has too few "
                "latents for its mixture"
            )
        if self.z_sampling and self.inversion_guidance >= self.guidance:
            yield (
                f"espresso.inversion-guidance = {self.inversion_guidance:g}: must be below "
                f"espresso.guidance = {self.guidance:g}, or the zig-zag removes guidance"
            )


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes of a run's conditions and mixtures; M only with mixtures."""
    mixture = {"M": run.espresso.components} if run.espresso.gmm else {}
    return {**sizes, "J": run.espresso.clusters, **mixture}


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps Espresso from working."""
    solver = run.synthesis.solver
    if solver != "ddim":
        yield (
            f"synthesis.solver = {solver!r}: Espresso requires 'ddim', whose steps its "
            "zig-zags invert, and whose first timestep its clients' mixtures are fitted at"
        )
    if run.synthesis.cache_interval != 1 and run.espresso.z_sampling:
        yield (
            "synthesis.cache-interval: must be 1 with espresso.z-sampling, whose zig-zags step "
            "back and forth"
        )


METHOD = Method(
    client="espresso",
    server="espresso",
    payload="Mixtures",
    sends="conditions of every class's clusters, and a Gaussian mixture of its noisy latents",
    reveals="what small groups of images look like, blurred means of them, and whether a given "
    "image is among them",
    client_parts=(*DIFFUSION_PARTS, *IMAGE_ENCODER_PARTS),
    section="espresso",
    dimensions=dimensions,
    problems=problems,
)
