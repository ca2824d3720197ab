"""The context that a client half works with."""

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from client_app.privacy.sum_noise import SumNoise
from osfl.config import RunConfig
from osfl.data.load import Images
from osfl.data.pictures import Fit
from osfl.util.costs import FlopMeter

Batch = TypeVar("Batch", bound=Sized)


class Progress(Protocol):
    """A callback that receives the progress of a client."""

    def __call__(self, done: int, total: int, unit: str = "step") -> None:
        """Report that `done` of `total` items are finished. Also called with 0 before the first."""


def _ignore_progress(done: int, total: int, unit: str = "step") -> None:
    pass


@dataclass(frozen=True)
class ClientJob:
    """One client's part of a run."""

    config: RunConfig
    client: str
    # The run's classes, in order
    classes: tuple[str, ...]
    # Loads this client's training images, which never leave it, in the given size or fit
    load: Callable[[Fit], Images]
    # The kit's folder
    kit: str
    device: torch.device
    # Returns the domain's name if the node or the simulation knows it; only prompts-domain sends it
    domain: Callable[[], str] = lambda: ""
    meter: FlopMeter = field(default_factory=FlopMeter)
    progress: Progress = _ignore_progress
    # With an epsilon in a secure sum: the clipping bound of what the client adds
    sum_noise: SumNoise = field(default_factory=SumNoise)
    # Gradient checkpointing: recompute activations in the backward pass
    saves_memory: bool = False

    def batched(self, batches: Iterable[Batch], total: int, unit: str) -> Iterator[Batch]:
        """Yield the batches of `total` items, and report each when the caller asks for the next."""
        finished = 0
        self.progress(finished, total, unit)
        for batch in batches:
            yield batch
            finished += len(batch)
            self.progress(finished, total, unit)
