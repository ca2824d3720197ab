"""The layout of a run's folder: a run's results, and all that a killed server needs to resume it.

runs/<job id>/
config.json               the resolved run-config of the job
kit.json                  the kit's files that each step used, with their SHA-256
payloads/<client>.pb      the payload as received; a sealed one is opened, unless with sealed-store.
                          <client>.json: its digest, the client's costs, and the key that it is
                          sealed to. <client>.decoding, while it is decoded: how often the server
                          ended during that
payloads-from.json        with payloads-from: the run and job that the payloads are from, and their
                          SHA-256
secure-sum.json           with secure-sum: the members, their public keys, and who is absent.
                          secure-sum.bin: the sum of the others, once it is open
continued-from.json       with continue-from: the run that this one continues, and the SHA-256 of
                          the payloads that it has from there
previous/                 with continue-from-model: the models that training starts from
synthesis.json            sampling settings that the configuration left to a measurement
images/<client>/<class>/  the synthetic images
units/<unit>.jsonl        a manifest row for every image of a finished work unit
timings.jsonl             the time that each unit took
agreement.json            with defense: the scores of each client's classes
contribution/             with client-contribution: done.json, the images that the models without
                          each client classify correctly; clients.json, each client's contribution
rounds/                   of iterative baselines: the last round's model, and done.json with its
                          checksum and the times of all rounds; identity.json, which tells this
                          run from another server's with the same job id
models/<name>.safetensors the global models; <name>.checkpoint, during its training: its state
curves/<name>.json        the loss of their training, by step
tests/<name>.json         their confusion matrices by client; <name>.adapted.json, those of each
                          client's personalized model
histograms/<name>.json    the histograms of these tests' scores by client, where sites send them
local-baseline.json       with local-baseline: the results of the clients' local-only models
test-only.json            the confusion matrices of test-only clients, by model
advice.json               of `osfl advise`, the clients' figures; advice.md, its table
forgotten/<number>.json   the removal of a client by `osfl forget`: names and SHA-256 of the removed
                          files, and what it could not reach
withheld.json             the clients whose sites withhold their test results
status.json               the current state, the start of each phase, and when each client reached
                          its states
tensorboard/              with tracking: TensorBoard's event files
server.log                of a simulation: the log of server and clients
manifest.jsonl metrics.json report.html
SHA256SUMS                of a finished run: the digests of its records (osfl/run_folder/verify.py)
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from osfl.config import NOT_IDENTITY, ConfigError, RunConfig, flatten
from osfl.run_folder.continuation_store import ContinuationStore
from osfl.run_folder.forgotten_store import ForgottenStore, name_digest
from osfl.run_folder.image_store import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    ImageStore,
    image_digest,
    image_name,
    read_image,
    read_rows,
)
from osfl.run_folder.model_store import ADAPTED, ModelStore
from osfl.run_folder.payload_store import MAX_DECODING_CRASHES
from osfl.run_folder.round_store import RoundStore
from osfl.run_folder.sum_store import SumStore
from osfl.util.files import OWNER_ONLY, ensure_own_folder, make_private_folder

__all__ = [
    "ADAPTED",
    "CHECKSUMS",
    "MAX_DECODING_CRASHES",
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "UNRECORDED",
    "RunFolder",
    "check_same_run",
    "image_digest",
    "image_name",
    "open_run_folder",
    "read_image",
    "read_rows",
    "runs_root",
]

CHECKSUMS = "SHA256SUMS"
# These change even when no server is at work
UNRECORDED = frozenset({"status.json", "server.log"})
# Time for another server to end
LOCK_SECONDS = 5.0
HINT_SYNTHESIZE = "remove it, and the images are synthesized again"
# Files that each step of a job leaves
_STEPS = {
    "payloads": ("payloads/*.pb",),
    "images": ("units/*.jsonl",),
    "models": ("models/*.json", "models/*.checkpoint", "rounds/done.json"),
}


@dataclass(frozen=True)
class RunFolder(ContinuationStore, ImageStore, RoundStore, ModelStore, ForgottenStore, SumStore):
    """The folder of one run: its stores, the job's inputs, and its lock."""

    # ---- The job's inputs ----

    @property
    def config_file(self) -> Path:
        """The path of the resolved run-config."""
        return self.path / "config.json"

    @property
    def kit_file(self) -> Path:
        """The path of the kit's digests."""
        return self.path / "kit.json"

    @property
    def status_file(self) -> Path:
        """The path of the run's status."""
        return self.path / "status.json"

    @property
    def job_id(self) -> str:
        """The job that the run's own payloads were made for, also if its folder was renamed.

        Raises:
            CorruptFileError: the run-config is corrupt.
        """
        stored = (self.stored_config() or {}).get("job-id")
        # Without a job id in its settings, a run is named by its folder; the path may be a link
        return str(stored or self.path.resolve().name)

    def stored_config(self) -> dict[str, Any] | None:
        """Read the resolved run-config, flat; None before the run has started.

        Raises:
            CorruptFileError: it is corrupt.
        """
        config: dict[str, Any] | None = self.read_json("config.json", {})
        return config

    def kit_digests(self) -> dict[str, dict[str, str]]:
        """Read the SHA-256 of the kit's files by step of the job; {} before the first step.

        Raises:
            CorruptFileError: `kit.json` is corrupt.
        """
        return self.read_json("kit.json") or {}

    def store_kit_digests(self, digests: Mapping[str, Mapping[str, str]]) -> None:
        """Store the SHA-256 of the kit's files that each step uses."""
        self.write_json("kit.json", digests)

    def departed_digests(self) -> frozenset[str]:
        """Return the digests of the names of clients that must not take part in this run."""
        record = self.continuation()
        if record is None:
            return self.forgotten_digests()
        returned = {name_digest(client) for client in record.replaced}
        return self.forgotten_digests() | (set(record.departed) - returned)

    def vacant_places(self) -> int:
        """Return the number of places that clients had in this run that have left it."""
        record = self.continuation()
        return self.forgotten_places() + (0 if record is None else record.dropped)

    def has_started(self, step: str) -> bool:
        """Return whether a step of the job (`payloads`, `images`, `models`) has left any file."""
        return any(any(self.path.glob(pattern)) for pattern in _STEPS[step])

    def sampling_choice(self, kinds: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read the sampling settings that an earlier measurement chose, or None.

        Args:
            kinds: the types of the keys that the settings must have.

        Raises:
            CorruptFileError: `synthesis.json` is corrupt.
        """
        record: dict[str, Any] | None = self.read_json("synthesis.json", kinds, HINT_SYNTHESIZE)
        return record

    def store_sampling_choice(self, choice: Mapping[str, Any]) -> None:
        """Store the settings that a measurement chose, for the rest of the job."""
        self.write_json("synthesis.json", choice)

    # ---- Files that the `osfl` command reads ----

    @property
    def metrics_file(self) -> Path:
        """The path of a finished run's metrics."""
        return self.path / "metrics.json"

    @property
    def report_file(self) -> Path:
        """The path of the report page."""
        return self.path / "report.html"

    @property
    def tensorboard_folder(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    def remove_status(self) -> None:
        """Remove the previous run's status at the start of a run."""
        self.status_file.unlink(missing_ok=True)

    def move_log(self, log_file: Path) -> Path:
        """Move a simulation's log into the folder; return its new path.

        A missing log was moved by another start of the same job.
        """
        destination = self.path / "server.log"
        with suppress(FileNotFoundError):
            log_file.replace(destination)
        return destination

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other servers. The lock ends with this process in any case.

        Raises:
            ConfigError: another server is at work on it.
        """
        lock = FileLock(self.path / ".lock", mode=OWNER_ONLY)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise ConfigError(
                f"job-id = {self.path.name!r}: another server is at work on it; wait, stop it, or "
                "use another job-id"
            ) from None
        try:
            yield
        finally:
            lock.release()


def runs_root(config: RunConfig) -> Path:
    """Return the folder of all runs: `runs-dir`, or else $OSFL_RUNS, or else ~/.osfl/runs."""
    return Path(config.runs_dir or os.environ.get("OSFL_RUNS", "~/.osfl/runs")).expanduser()


def open_run_folder(config: RunConfig, job_id: str, needed_bytes: int) -> RunFolder:
    """Create or reopen the folder of a job.

    The folder's content is changed only while no other server is at work on it.

    Raises:
        ConfigError: the job id belongs to a run with another configuration or of an older version,
            or a server is at work on it; the disk is too small for the run; the folder has results
            but no config.json; another user could have prepared the folder (`ensure_own_folder`).
        CorruptFileError: config.json is corrupt.
    """
    root = runs_root(config)
    folder = RunFolder(root / job_id)
    make_private_folder(root)
    is_new = not folder.config_file.exists()
    if is_new and (free := shutil.disk_usage(root).free) < needed_bytes:
        raise ConfigError(
            f"runs-dir = {str(root)!r}: {free / 1e6:,.0f} MB free, but this run needs about "
            f"{needed_bytes / 1e6:,.0f} MB"
        )
    try:
        ensure_own_folder(folder.path)
    except OSError as error:
        raise ConfigError(f"job-id = {job_id!r}: {error}, or use another job-id") from None
    with folder.lock():
        _bind(folder, flatten(config))
    return folder


def _bind(folder: RunFolder, config: dict[str, Any]) -> None:
    """Bind the folder to this flat run-config, and mark its run as unfinished."""
    check_same_run(folder, config)
    (folder.path / CHECKSUMS).unlink(missing_ok=True)
    folder.write_json("config.json", config)


def check_same_run(folder: RunFolder, config: dict[str, Any]) -> None:
    """Check that a job's folder, if it exists, belongs to a run with these settings.

    Args:
        config: the flat run-config.

    Raises:
        ConfigError: it belongs to a run with other settings or of an older version, or its
            config.json is missing.
        CorruptFileError: config.json is corrupt.
    """
    if not folder.path.is_dir():
        return
    job_id = folder.path.name
    if folder.interrupted_removal():
        raise ConfigError(
            f"job-id = {job_id!r}: the removal of a client was interrupted; repeat `osfl forget` "
            "with its --client first"
        )
    stored = folder.stored_config()
    if stored is None:
        if results := _results(folder.path):
            raise ConfigError(
                f"job-id = {job_id!r}: {folder.config_file} is missing, so the run that "
                f"{results[0]} belongs to is unknown. Restore it from a backup, or use another "
                "job-id"
            )
        return
    if "kit-sha256" in stored and not folder.kit_file.exists():
        raise ConfigError(
            f"job-id = {job_id!r} was started by an older version of OSFL, which identified the "
            "kit by all files of its folder. Finish it with that version, or use another job-id"
        )
    identity = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    stored_identity = {key: value for key, value in stored.items() if key not in NOT_IDENTITY}
    for key in identity | stored_identity:
        if identity.get(key) != stored_identity.get(key):
            raise ConfigError(
                f"job-id = {job_id!r} was started with {key} = {stored_identity.get(key)!r}; this "
                f"run has {identity.get(key)!r}. Use the same configuration to resume it, or "
                "another job-id"
            )


def _results(folder: Path) -> list[str]:
    """List what a run has left in a folder, except for files that may precede the run."""
    names = sorted(entry.name for entry in folder.iterdir())
    return [name for name in names if name not in UNRECORDED and not name.startswith(".")]
