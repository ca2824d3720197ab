"""What a client half gets to work with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from osfl.config import RunConfig
from osfl.data.load import Fit, Images
from osfl.util.costs import FlopMeter


class Progress(Protocol):
    """Hears how far a client is."""

    def __call__(self, done: int, total: int, what: str = "step") -> None:
        """So many of what it is working through are done, before the first of them too."""


def _nobody(done: int, total: int, what: str = "step") -> None:
    pass


@dataclass(frozen=True)
class ClientJob:
    """One client's part of a run."""

    config: RunConfig
    client: str
    classes: tuple[str, ...]  # of the run, in order
    # how they fit -> this client's own training images, which do not leave it
    load: Callable[[Fit], Images]
    kit: str  # its folder
    device: torch.device
    # Its name, where the node or the simulation tells it; only prompts-domain sends it
    domain: Callable[[], str] = lambda: ""
    meter: FlopMeter = field(default_factory=FlopMeter)
    progress: Progress = _nobody
    saves_memory: bool = False  # activations are computed again for a gradient
