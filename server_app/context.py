"""Inputs and results of a method's server half."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from osfl.config import RunConfig
from osfl.data.parts import class_names
from osfl.inference.description import describe
from osfl.kit.kits import find_kit
from osfl.kit.used_parts import global_settings
from osfl.payload.kinds import Sent
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.run_folder.version import version_label
from osfl.util.devices import pick_device

P = TypeVar("P", bound=Sent)
Row = TypeVar("Row")


@dataclass(frozen=True)
class GlobalModel:
    """A trained model and the settings to rebuild it."""

    model: nn.Module
    architecture: str
    small_stem: bool


@dataclass
class Mixing:
    """The exchange between a mixed run and the server half of one of its methods.

    Attributes:
        counts: images by (client, label) that the run has balanced over all clients; None: each
            method plans its own.
        recipe: the `server_app.pipeline.Recipe` with which the half would make images and models.
    """

    counts: Mapping[tuple[str, int], int] | None = None
    recipe: Any = None


@dataclass(frozen=True)
class ServerJob:
    """One run on the server.

    Attributes:
        clients: the participating clients, sorted.
        architectures: each client's model architecture, for iterative methods.
        kinds: the kind of each client's payload, in a mixed run.
        mixing: what a mixed run sets for the method of some of its clients; None in other runs.
    """

    config: RunConfig
    folder: RunFolder
    status: Status
    clients: tuple[str, ...]
    architectures: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    mixing: "Mixing | None" = None

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The run's class names, in order."""
        return class_names(self.config.data)

    @cached_property
    def kit(self) -> str:
        """Folder of the base diffusion model (*kit*)."""
        return find_kit(self.config.sampling_kit)

    @cached_property
    def init_kit(self) -> str:
        """Folder of the kit that initializes the global model; "" if none is needed."""
        return find_kit(self.config.kit) if self.config.global_model.init == "kit" else ""

    def metadata(self, name: str, model: nn.Module) -> dict[str, str]:
        """Return the metadata of a global model's file, which describe the model.

        Args:
            name: the model's name.
            model: the model, or another of its architecture.
        """
        run = self.folder.path.name
        settings = global_settings(self.config)
        description = describe(self.config, run, name, settings, model)
        if label := version_label(self.folder, self.clients):
            text = f"{description.trained_on}; {label}"
            description = replace(description, trained_on=text)
        return description.metadata()

    def held(self, payloads: Mapping[str, Sent]) -> dict[str, list[int]]:
        """Return the labels that each client holds."""
        return {
            client: list(map(self.classes.index, payload.classes))
            for client, payload in payloads.items()
        }

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.config.device)


def rows_by_class(
    job: ServerJob, payloads: Mapping[str, P], rows: Callable[[P], Iterable[Row]]
) -> dict[tuple[str, int], Row]:
    """Index the payloads' per-class rows by (client, label).

    Args:
        rows: returns a payload's rows, one per class, in the order of its classes.
    """
    return {
        (client, job.classes.index(name)): row
        for client, payload in payloads.items()
        for name, row in zip(payload.classes, rows(payload), strict=True)
    }
