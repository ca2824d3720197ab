"""Costs of a method, which its server half states where they are not the usual ones.

A server half may define `branches(config)`, `rows_per_image(config, timesteps)`,
`guidance_cost(config, kit, most)` and `noisy_mean(sizes)`; the functions of these names here ask
it, and have the defaults.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from osfl.config import FedLMGConfig, RunConfig
from osfl.methods import server_module
from osfl.util.costs import Cost
from server_app.expected import run_dimensions

if TYPE_CHECKING:
    from osfl.models.diffusion import Kit


@dataclass(frozen=True)
class NoisyMean:
    """A mean in a payload, to which a guarantee adds noise.

    Attributes:
        dimensions: those that determine the norm of the noise.
        over_classes: whether there is a mean for each class, or else one over all images.
    """

    dimensions: int
    over_classes: bool = True


def branches(config: RunConfig) -> int:
    """Return the rows per image of a guided UNet pass: unconditional, and one per condition."""
    half = server_module(config.method)
    if hasattr(half, "branches"):
        return int(half.branches(config))
    # A method may have no section of its own
    return guided_branches(getattr(config.method_settings, "guidance", 0.0))


def guided_branches(*scales: float) -> int:
    """Return the rows per image of a pass that composes conditions with these guidance scales.

    A single condition of scale 1 needs no unconditional row.
    """
    return 1 if scales == (1.0,) else 1 + len(scales)


def rows_with_gradient(passes: int, settings: FedLMGConfig) -> int:
    """Return the UNet rows per image of passes that a classifier's gradient guides.

    Through the UNet, the gradient takes one more pass.
    """
    backward = 2 if settings.gradient == "full" else 1
    return passes * guided_branches(settings.guidance) * backward


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the number of UNet rows per image.

    Guidance is assumed at every step.

    Args:
        timesteps: of the kit's scheduler.
    """
    half = server_module(config.method)
    if hasattr(half, "rows_per_image"):
        return int(half.rows_per_image(config, timesteps))
    return config.synthesis.steps * branches(config)


def guidance_cost(config: RunConfig, kit: "Kit", most: int) -> Cost:
    """Measure what guidance costs per image beside UNet rows; nothing by default.

    Args:
        most: images of the batch in which images are made.
    """
    half = server_module(config.method)
    if not hasattr(half, "guidance_cost"):
        return Cost(0.0, 0.0)
    cost: Cost = half.guidance_cost(config, kit, most)
    return cost


def noisy_mean(config: RunConfig) -> NoisyMean | None:
    """Return the payload's mean with the most noise relative to its norm; None without one."""
    half = server_module(config.method)
    if not hasattr(half, "noisy_mean"):
        return None
    mean: NoisyMean = half.noisy_mean(run_dimensions(config))
    return mean
