"""The record of a run that continues another one (`continue-from`), and the models it starts from.

Such a run is a new version of the model: it has the other run's payloads and images, and asks only
clients that the other run lacks.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.run_folder.job_files import HINT_RESTORE
from osfl.run_folder.payload_store import PayloadStore, are_digests
from osfl.util.files import CorruptFileError, link_file, read_json
from osfl.util.names import is_identifier

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

_NAME = "continued-from.json"


@dataclass(frozen=True)
class Continuation:
    """Payloads, images and models that a run has from the one that it continues.

    Attributes:
        run: the other run's folder.
        job: its job id.
        version: the number of this version of the model; a run that continues none is version 1.
        payloads: the SHA-256 of each payload as it is stored, by client.
        jobs: the job that each client made its payload for, which is in the payload.
        classes: the run's class names when each client made its payload.
        replaced: clients that are asked for a new payload.
        departed: the SHA-256 of the names of clients that the other run has forgotten.
        dropped: the number of these that it forgot after this run had their payloads.
        from_model: whether training starts from the other run's models.
        model_clients: the clients whose payloads shaped the other run's models; only with
            `from_model`.
        is_carried: whether everything is in this run's folder.
    """

    run: str
    job: str
    version: int
    payloads: dict[str, str]
    jobs: dict[str, str]
    classes: dict[str, tuple[str, ...]]
    replaced: tuple[str, ...] = ()
    departed: tuple[str, ...] = ()
    dropped: int = 0
    from_model: bool = False
    model_clients: tuple[str, ...] = ()
    is_carried: bool = False

    def without(self, client: str) -> "Continuation":
        """Return the record without a client, as if the other run had never had it.

        No training may start from a model that the client shaped.
        """
        from_model = self.from_model and client not in self.model_clients
        return replace(
            self,
            payloads=_without(self.payloads, client),
            jobs=_without(self.jobs, client),
            classes=_without(self.classes, client),
            replaced=tuple(name for name in self.replaced if name != client),
            from_model=from_model,
            model_clients=self.model_clients if from_model else (),
        )


class ContinuationStore(PayloadStore):
    """Owner of `continued-from.json` and `previous/`, the models that training starts from."""

    def continuation(self) -> Continuation | None:
        """Read the record of the run that this one continues; None if it continues none.

        Raises:
            CorruptFileError: the record is corrupt.
        """
        if not os.path.lexists(self.path / _NAME):
            return None
        record = read_json(self.path / _NAME, hint=HINT_RESTORE)
        try:
            names = {key: tuple(record[key]) for key in ("replaced", "departed", "model_clients")}
            classes = {client: tuple(names) for client, names in record["classes"].items()}
            continuation = Continuation(**{**record, **names, "classes": classes})
        except (AttributeError, KeyError, TypeError):
            raise CorruptFileError(f"{self.path / _NAME} is corrupt; {HINT_RESTORE}") from None
        if not _is_valid(continuation):
            raise CorruptFileError(f"{self.path / _NAME} is corrupt; {HINT_RESTORE}")
        return continuation

    def store_continuation(self, continuation: Continuation) -> None:
        """Store the record, which binds the run to the one that it continues."""
        self.write_json(_NAME, asdict(continuation))

    @property
    def version(self) -> int:
        """The number of this version of the model, from 1."""
        continuation = self.continuation()
        return 1 if continuation is None else continuation.version

    @property
    def has_payloads_of_another(self) -> bool:
        """Return whether the run has payloads of another run, so that it may need no client."""
        return self.payload_source() is not None or self.continuation() is not None

    def payload_job(self, client: str, job: str) -> str:
        """Return the job that a stored payload was made for.

        Args:
            job: returned for a payload that is not from another run.
        """
        source = self.payload_source()
        if source is not None and client in source.jobs:
            return source.jobs[client]
        continuation = self.continuation()
        if continuation is None or client not in continuation.payloads:
            return job
        # A carried payload that was refused may have been replaced by one of this job
        is_carried = self.payload_digest(client) == continuation.payloads[client]
        return continuation.jobs[client] if is_carried else job

    @property
    def previous_folder(self) -> Path:
        """The folder of the models that this run's are trained from."""
        return self.path / "previous"

    def link_previous_model(self, file: Path) -> None:
        """Store a model of the continued run: as a hard link, or a copy on another disk."""
        link_file(file, self.previous_folder / file.name)

    def previous_model(self, name: str) -> "tuple[dict[str, torch.Tensor], str] | None":
        """Read the state dict that training of a global model starts from, and its file's SHA-256.

        Returns:
            None for a run that trains its models from their initial weights.

        Raises:
            CorruptFileError: the model is missing.
        """
        continuation = self.continuation()
        if continuation is None or not continuation.from_model:
            return None
        file = self.previous_folder / f"{name}.safetensors"
        if not file.is_file():
            raise CorruptFileError(
                f"continue-from-model = true: {file} is missing, because job {continuation.job} "
                f"has no model {name}; set continue-from-model to false, with another job-id"
            )
        from safetensors.torch import load

        weights = file.read_bytes()
        return load(weights), hashlib.sha256(weights).hexdigest()


def _without(by_client: Mapping[str, Any], client: str) -> dict[str, Any]:
    return {name: value for name, value in by_client.items() if name != client}


def _is_valid(record: Continuation) -> bool:
    texts = (record.run, record.job, *record.jobs.values(), *record.departed)
    return (
        are_digests(record.payloads)
        and record.payloads.keys() == record.jobs.keys() == record.classes.keys()
        and all(isinstance(text, str) for text in texts)
        and all(map(is_identifier, (*record.jobs.values(), *record.replaced)))
        and type(record.version) is int
        and type(record.dropped) is int
    )
