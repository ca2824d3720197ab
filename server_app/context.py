"""What a server half gets to work with, and what it gives back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import nn

from osfl.config import RunConfig
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.devices import pick_device

P = TypeVar("P", bound=Payload)
Row = TypeVar("Row")


@dataclass(frozen=True)
class GlobalModel:
    """A trained model and how to build it again."""

    model: nn.Module
    architecture: str
    small_stem: bool


@dataclass(frozen=True)
class ServerJob:
    """One run on the server."""

    config: RunConfig
    folder: RunFolder
    status: Status
    clients: tuple[str, ...]  # that take part, sorted
    architectures: Mapping[str, str] = field(default_factory=dict)  # of each client, with rounds

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The run's class names, in order."""
        return class_names(self.config.data)

    @cached_property
    def kit(self) -> str:
        """Folder of the diffusion model."""
        return find_kit(self.config.sampling_kit)

    @cached_property
    def initialisation(self) -> str:
        """Where the global model starts from: the run's kit, or nothing that is needed."""
        return find_kit(self.config.kit) if self.config.global_model.init == "kit" else ""

    def held(self, payloads: Mapping[str, Payload]) -> dict[str, list[int]]:
        """The labels that every client holds."""
        return {
            client: list(map(self.classes.index, payload.classes))
            for client, payload in payloads.items()
        }

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.config.device)


def by_class(
    job: ServerJob, payloads: Mapping[str, P], rows: Callable[[P], Iterable[Row]]
) -> dict[tuple[str, int], Row]:
    """What a payload has for each of its classes, by (client, label).

    Args:
        rows: of a payload, one for each of its classes, in their order.
    """
    return {
        (client, job.classes.index(name)): row
        for client, payload in payloads.items()
        for name, row in zip(payload.classes, rows(payload), strict=True)
    }
