"""Shared by the methods whose clients send statistics of features: fedcgs and fedpft."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from osfl.util.names import split_names
from osfl.util.text import quote

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps a head on frozen features from working."""
    if len(split_names(run.classifier.architecture)) > 1:
        yield (
            f"classifier.architecture = {quote(run.classifier.architecture)}: must name one "
            f"model, because {run.method} uses the features of one architecture"
        )
