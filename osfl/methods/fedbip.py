"""FedBiP: learned words for domain and classes, and the latent of every image."""

from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import DIFFUSION_PARTS, Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc, Range


@dataclass(frozen=True)
class FedBiPConfig:
    """FedBiP: learned words for domain and class, and interpolated latents."""

    epochs: Annotated[int, Range(1, 100_000), Doc("Passes over the client's images.")]
    steps: Annotated[
        int, Range(0, 10_000_000), Doc("Training steps, in place of epochs. 0: `epochs`.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images per step.")]
    lr: Annotated[float, Range(1e-8, 1000), Doc("Learning rate of Adam.")]
    guidance: Annotated[Scale, Doc("Guidance scale.")]
    domain_noise: Annotated[Scale, Doc("Standard deviation of the noise on the domain's word.")]


METHOD = Method(
    client="fedbip",
    server="fedbip",
    payload="Concepts",
    sends="learned words for domain and classes, and the latent of every image",
    reveals="every image: its latent decodes to a close reconstruction",
    client_parts=DIFFUSION_PARTS,
    section="fedbip",
)
