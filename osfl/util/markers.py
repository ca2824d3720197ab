"""Markers that annotate a key's field: `Annotated[int, Range(1, 9), Doc("Its meaning.")]`."""

from dataclasses import dataclass
from typing import Any

Scalar = int | float | bool | str
AUTO = "auto"


class ConfigError(ValueError):
    """An unusable configuration. The message names the key, its value and what is allowed."""


@dataclass(frozen=True)
class Range:
    """A number in [low, high]."""

    low: float
    high: float


class OneOf:
    """One of several texts."""

    def __init__(self, *choices: str):
        self.choices = choices


@dataclass(frozen=True)
class Doc:
    """The meaning of a key, in a sentence or two."""

    meaning: str


@dataclass(frozen=True)
class ByData:
    """A key that may be "auto", which the data set resolves.

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
    """A key that may differ between a run and its resumption, because it changes no result.

    In the node-config: a key that does not affect a payload.
    """


@dataclass(frozen=True)
class ServerKey:
    """A key, or a whole section, that shapes no payload: only the server uses it.

    A run that reuses payloads (`payloads-from`) may have another value. A key without this mark
    may shape a payload. A key's mark takes precedence over its section's.

    Attributes:
        except_for: client halves whose payloads the key shapes all the same.
    """

    except_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class SitePath:
    """A run-config key that can name a file or folder on the machines that use it.

    Attributes:
        on: "server"; or "client", where the site's `allowed-dirs` restricts it.
    """

    on: str


@dataclass(frozen=True)
class Approximate:
    """A key that can make sampling faster, but different from the papers'.

    Attributes:
        exact: the value with which sampling is as in the papers.
        words: a report's text for any other value; {name} stands for the value of a field of the
            same section.
        methods: the methods that the key affects; () for all that have the key's section.
    """

    exact: Scalar
    words: str
    methods: tuple[str, ...] = ()


def markers_of(annotated: Any, kind: type) -> list[Any]:
    """Return the markers of one kind on an annotated type."""
    return [mark for mark in getattr(annotated, "__metadata__", ()) if isinstance(mark, kind)]
