"""oscar-pooled: OSCAR with one vector per class, in OSCAR's section and halves."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from osfl.methods.oscar import METHOD as OSCAR

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes of a run's encodings, which have no axis of tokens."""
    return {name: size for name, size in sizes.items() if name != "L"}


METHOD = replace(
    OSCAR,
    sends="the mean pooled encoding of every class's captions",
    dimensions=dimensions,
)
