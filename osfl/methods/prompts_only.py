"""prompts-only: images from the class prompts alone."""

from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc


@dataclass(frozen=True)
class PromptsOnlyConfig:
    """prompts-only: classifier-free guidance on the class prompt."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]


METHOD = Method(
    client=None,
    server="prompts_only",
    payload=None,
    sends="nothing",
    section="prompts-only",
    numbers="none",
)
