"""What a client half gets to work with."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from osfl.config import RunConfig
from osfl.costs import FlopMeter
from osfl.data.load import Images


@dataclass(frozen=True)
class ClientJob:
    """One client's part of a run."""

    config: RunConfig
    client: str
    classes: tuple[str, ...]  # of the run, in order
    load: Callable[
        [int], Images
    ]  # size -> this client's own training images at that size; they do not leave it
    kit: str  # folder or hub id
    device: torch.device
    domain: Callable[[], str] = lambda: (
        ""
    )  # its name, where the node or the simulation tells it; only prompts-domain sends it
    meter: FlopMeter = field(default_factory=FlopMeter)
    progress: Callable[[int, int], None] = lambda done, total: None  # (steps done, steps in all)
    saves_memory: bool = False  # activations are computed again for a gradient
