"""What is said of a key on its field: `Annotated[int, Range(1, 9), Doc("Its meaning.")]`."""

from dataclasses import dataclass
from typing import Any

Scalar = int | float | bool | str
AUTO = "auto"


class ConfigError(ValueError):
    """A configuration that cannot be used; names the key, the value and what is allowed."""


@dataclass(frozen=True)
class Range:
    """A number inside [low, high]."""

    low: float
    high: float


class OneOf:
    """One of some texts."""

    def __init__(self, *choices: str):
        self.choices = choices


@dataclass(frozen=True)
class Doc:
    """What a key means, in a sentence or two."""

    meaning: str


@dataclass(frozen=True)
class ByData:
    """A key that may be "auto": the kind of the images then decides its value.

    Attributes:
        digits: the value for the embedded digits.
        others: the value for all other data.
    """

    digits: Scalar
    others: Scalar


@dataclass(frozen=True)
class ManyNames:
    """A text that lists names, as many as a data set has classes."""


@dataclass(frozen=True)
class NotIdentity:
    """A key that may differ between a run and its resumption: how long, and where.

    In the node-config: a key that does not shape a payload.
    """


@dataclass(frozen=True)
class SitePath:
    """A run-config key that can name a file or folder of the machines that use it.

    Attributes:
        on: "server"; or "client", where the site's `allowed-dirs` bound it.
    """

    on: str


@dataclass(frozen=True)
class Approximate:
    """A key by which images are sampled otherwise than the papers do, for speed.

    Attributes:
        exact: the value with which they are sampled as in the papers.
        words: what a report says of any other value; {name} stands for the value of a field of the
            same section.
        methods: those that the key matters to; (): all that have the key's section.
    """

    exact: Scalar
    words: str
    methods: tuple[str, ...] = ()


def marks_of(annotated: Any, kind: type) -> list[Any]:
    """The markers of one kind on an annotated type."""
    return [mark for mark in getattr(annotated, "__metadata__", ()) if isinstance(mark, kind)]
