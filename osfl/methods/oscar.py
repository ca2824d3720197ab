"""OSCAR: the mean encoding of every class's captions (arXiv 2502.08488)."""

from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import CAPTION_PARTS, Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc

# Of a caption at most
CAPTION_TOKENS = 30


@dataclass(frozen=True)
class OscarConfig:
    """OSCAR and oscar-pooled: mean caption encodings."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]


METHOD = Method(
    client="oscar",
    server="oscar",
    payload="Encodings",
    sends="the mean encoding of every class's captions",
    reveals="what the captions of a class have in common; for a class with one image, its caption",
    client_parts=CAPTION_PARTS,
    privacy="approximate",
    section="oscar",
    summand_bound=64.0,
)
