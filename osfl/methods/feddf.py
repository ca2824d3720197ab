"""FedDF: FedAvg, and ensemble distillation after every round (arXiv 2006.07242)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from osfl.methods.iterative import baseline

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps FedDF from working."""
    if run.data.name != "digits" and run.rounds.proxy == "public":
        yield (
            "rounds.proxy = 'public': those images are digits, but the clients' are not; set it to "
            "a folder of unlabeled images"
        )


METHOD = replace(baseline("feddf"), distills=True, problems=problems)
