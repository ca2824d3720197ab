"""What a client half gets to work with."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from osfl.config import RunConfig
from osfl.costs import FlopMeter
from osfl.data import Images


@dataclass(frozen=True)
class ClientJob:
    """One client's part of a run."""

    config: RunConfig
    client: str
    classes: tuple[str, ...]  # of the run, in order
    images: Images  # this client's own; they do not leave it
    kit: str  # folder or hub id
    device: torch.device
    meter: FlopMeter = field(default_factory=FlopMeter)
    progress: Callable[[int, int], None] = lambda done, total: None  # (steps done, steps in all)
