"""FedCADO: FedLMG's guidance, from edited initial noise (arXiv 2311.08870v1)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from osfl.methods.fedlmg import METHOD as FEDLMG
from osfl.methods.fedlmg import FedLMGConfig, problems_of_guidance
from osfl.methods.shared_sections import Weight
from osfl.util.markers import Doc, Range

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedCADOConfig(FedLMGConfig):
    """FedCADO: FedLMG's guidance, and edits of the initial noise."""

    noise_edits: Annotated[int, Range(0, 10_000), Doc("M: edits of the initial noise.")]
    noise_edit_lr: Annotated[Weight, Doc("eta: step size of an edit.")]

    section = "fedcado"

    @property
    def differentiates_unet(self) -> bool:
        """Return whether the sampler, or an edit, computes a gradient through the UNet."""
        return super().differentiates_unet or self.noise_edits > 0


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps FedCADO from working."""
    yield from problems_of_guidance(run, run.fedcado)


METHOD = replace(FEDLMG, server="fedcado", section="fedcado", problems=problems)
