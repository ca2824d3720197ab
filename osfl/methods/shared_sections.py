"""Parts of a config section that several methods have."""

from dataclasses import dataclass
from typing import Annotated

from osfl.util.markers import Doc, OneOf, Range, ServerKey

# A scale of guidance or noise in sampling, which the server does
Scale = Annotated[float, Range(0, 100), ServerKey()]
Weight = Annotated[float, Range(0, 1e4)]
Components = Annotated[int, Range(1, 1000), Doc("M: components of a mixture.")]
MixtureFit = Annotated[
    str,
    OneOf("closed", "sampled"),
    Doc(
        "The data that mixtures are fitted to: clean latents, then diffused forward in closed "
        "form (closed), or samples of noisy latents (sampled)."
    ),
]
NoiseDraws = Annotated[
    int, Range(1, 10_000), Doc("With mixture-fit = sampled: noise samples per latent.")
]


@dataclass(frozen=True)
class ConditionTraining:
    """The training of a client's conditions through the frozen diffusion model (Adam)."""

    epochs: Annotated[int, Range(1, 100_000), Doc("S: passes over a condition's images.")]
    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc("Training steps per condition, in place of epochs. 0: `epochs`."),
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images of one condition per step.")]
    conditions_per_batch: Annotated[
        int,
        Range(1, 100_000),
        Doc("Conditions that share a UNet batch. Fewer take less memory, with the same result."),
    ]
    lr: Annotated[float, Range(1e-8, 1000), Doc("Learning rate of Adam.")]


def passes_per_image(section: str, epochs: int) -> str:
    """Describe how conditions are trained with a guarantee."""
    return (
        f"with epsilon, each image is trained on separately, in {epochs} passes "
        f"({section}.epochs); steps and batch-size have no effect"
    )
