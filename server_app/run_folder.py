"""A run's folder: everything that a run leaves behind, and all that a killed server needs to go on.

runs/<job id>/
config.json               the resolved run-config and the kit's digest; a job id stands for one of each
payloads/<client>.pb      as received; <client>.json: its digest and what it cost the client
images/<client>/<class>/  the synthetic images
units/<unit>.jsonl        a manifest row for every image of a finished unit of work
models/<name>.safetensors the global models
tests/<name>.json         their confusion matrices, client by client
status.json               what is going on now
manifest.jsonl metrics.json report.html
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load, save

from osfl.config import NOT_IDENTITY, ConfigError, RunConfig, flatten
from osfl.files import write_atomically

LOCK_SECONDS = 5.0  # for a server that is just ending


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    def write_json(self, name: str, value: Any) -> None:
        """Store a small result, whole or not at all."""
        write_atomically(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(self, name: str) -> Any:
        """A stored result, or None."""
        file = self.path / name
        return json.loads(file.read_text()) if file.is_file() else None

    def store_payload(self, client: str, blob: bytes, about: dict[str, Any]) -> None:
        """Put a payload on the disk; when this returns, the client may forget it."""
        self.write_json(f"payloads/{client}.json", about)
        write_atomically(self.path / "payloads" / f"{client}.pb", blob)

    def stored_payload(self, client: str) -> bytes:
        """A payload as it was received."""
        return (self.path / "payloads" / f"{client}.pb").read_bytes()

    def payload_size(self, client: str) -> int:
        """In bytes."""
        return (self.path / "payloads" / f"{client}.pb").stat().st_size

    def stored_clients(self) -> list[str]:
        """Whose payloads are there."""
        return sorted(file.stem for file in (self.path / "payloads").glob("*.pb"))

    def refuse_payload(self, client: str) -> None:
        """Set an invalid payload aside, as `<client>.pb.refused`."""
        for file in (
            self.path / "payloads" / f"{client}.pb",
            self.path / "payloads" / f"{client}.json",
        ):
            if file.is_file():
                file.replace(file.with_name(file.name + ".refused"))

    def store_model(
        self, name: str, state: Mapping[str, torch.Tensor], about: dict[str, Any]
    ) -> None:
        """Put a global model on the disk, then what vouches for it."""
        file, weights = (
            self.path / "models" / f"{name}.safetensors",
            save({n: t.contiguous() for n, t in state.items()}),
        )
        file.with_suffix(".json").unlink(missing_ok=True)
        write_atomically(file, weights)
        self.write_json(
            f"models/{name}.json", {**about, "sha256": hashlib.sha256(weights).hexdigest()}
        )

    def stored_model(self, name: str, inputs: str) -> dict[str, torch.Tensor] | None:
        """The model that was trained on just these inputs, if it is there as it was written."""
        file, about = (
            self.path / "models" / f"{name}.safetensors",
            self.read_json(f"models/{name}.json") or {},
        )
        if about.get("inputs") != inputs or not file.is_file():
            return None
        weights = file.read_bytes()
        return load(weights) if hashlib.sha256(weights).hexdigest() == about["sha256"] else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other servers out of the folder; a lock that ends with this process, however it ends.

        Raises:
            ConfigError: a server is at work in it.
        """
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise ConfigError(
                f"job-id = {self.path.name!r}: another server is at work on it; wait, end it, or use another job-id"
            ) from None
        try:
            yield
        finally:
            lock.release()


def runs_root(config: RunConfig) -> Path:
    """Where runs are kept: `runs-dir`, else $OSFL_RUNS, else ~/.osfl/runs."""
    return Path(config.runs_dir or os.environ.get("OSFL_RUNS", "~/.osfl/runs")).expanduser()


def open_run_folder(
    config: RunConfig, job_id: str, needed_bytes: int, kit_sha256: str = ""
) -> RunFolder:
    """Make or reopen the folder of a job.

    Raises:
        ConfigError: the job id belongs to a run with another configuration or kit, or the disk cannot hold the run.
    """
    root = runs_root(config)
    root.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(root / job_id)
    earlier = folder.read_json("config.json")
    if earlier is None and (free := shutil.disk_usage(root).free) < needed_bytes:
        raise ConfigError(
            f"runs-dir = {str(root)!r}: {free / 1e6:,.0f} MB free, this run needs about {needed_bytes / 1e6:,.0f} MB"
        )
    now = {**flatten(config), "kit-sha256": kit_sha256}
    identity = {key: value for key, value in now.items() if key not in NOT_IDENTITY}
    if earlier is not None:
        before = {key: value for key, value in earlier.items() if key not in NOT_IDENTITY}
        if differing := [key for key in identity | before if identity.get(key) != before.get(key)]:
            key = differing[0]
            raise ConfigError(
                f"job-id = {job_id!r} was started with {key} = {before.get(key)!r}; this run has {identity.get(key)!r}. "
                "Give the same configuration to resume it, or another job-id"
            )
    folder.write_json("config.json", now)
    return folder
