"""zero-shot: a CLIP, with the classes' names as its head (arXiv 2103.00020)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import Method
from osfl.util.markers import Doc, SitePath
from osfl.util.text import quote

SEPARATOR = ";"


@dataclass(frozen=True)
class ZeroShotConfig:
    """zero-shot: a CLIP with the classes' names as its head."""

    clip: Annotated[
        str,
        Doc(
            "The folder or hub id of a whole CLIP, such as `openai/clip-vit-base-patch16`. Empty: "
            "the kit's `clip/`, if it has one."
        ),
        SitePath("server"),
    ]
    templates: Annotated[
        str,
        Doc(
            "The texts of a class, separated by semicolons; `{class}` stands for its name. The "
            "head has their mean encoding."
        ),
    ]

    @property
    def texts(self) -> tuple[str, ...]:
        """The templates, in order."""
        return tuple(text.strip() for text in self.templates.split(SEPARATOR))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        if self.clip.startswith("."):
            yield f"zero-shot.clip = {quote(self.clip)}: must be an absolute path or a hub id"
        for text in self.texts:
            if "{class}" not in text:
                yield (
                    f"zero-shot.templates: {quote(text)} must contain {{class}}, as every text "
                    f"between {SEPARATOR!r} must"
                )


METHOD = Method(
    client=None,
    server="zero_shot",
    payload=None,
    sends="nothing",
    samples=False,
    section="zero-shot",
    numbers="none",
    trained_on="no images of the clients: it is a public CLIP with the classes' names as its head",
    zero_shot=True,
)
