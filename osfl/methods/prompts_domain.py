"""prompts-domain: images from prompts with the name of the client's domain."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc
from osfl.util.text import quote


@dataclass(frozen=True)
class PromptsDomainConfig:
    """prompts-domain: classifier-free guidance on a prompt that names class and domain."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]
    prompt: Annotated[str, Doc("The prompt; `{domain}` and `{class}` stand for the names.")]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        if "{class}" not in self.prompt or "{domain}" not in self.prompt:
            yield (
                f"prompts-domain.prompt = {quote(self.prompt)}: must contain {{class}} and "
                "{domain}"
            )


METHOD = Method(
    client="domain",
    server="prompts_domain",
    payload="Domain",
    sends="the name of its domain",
    reveals="that name",
    section="prompts-domain",
    numbers="none",
)
