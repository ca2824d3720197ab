"""FGL: captions as prompts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc
from osfl.util.text import quote


@dataclass(frozen=True)
class FGLConfig:
    """FGL: captions as prompts."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]
    prompt: Annotated[str, Doc("The prompt; `{class}` and `{caption}` stand for the texts.")]
    negative_prompt: Annotated[str, Doc("The negative prompt, which guidance leads away from.")]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        if "{caption}" not in self.prompt:
            yield f"fgl.prompt = {quote(self.prompt)}: must contain {{caption}}"


METHOD = Method(
    client="fgl",
    server="fgl",
    payload="Captions",
    sends="a caption of every image",
    reveals="everything that these captions say",
    client_parts=("captioner",),
    section="fgl",
    numbers="none",
)
