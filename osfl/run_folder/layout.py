"""The layout of a run's folder: a run's results, and all that a killed server needs to resume it.

runs/<job id>/
config.json               the resolved run-config of the job
kit.json                  the kit's files that each step used, with their SHA-256
payloads/<client>.pb      the payload as received; a sealed one is opened, unless with sealed-store.
                          <client>.json: its digest, the client's costs, and the key that it is
                          sealed to. <client>.decoding, while it is decoded: how often the server
                          ended during that
synthesis.json            sampling settings that the configuration left to a measurement
images/<client>/<class>/  the synthetic images
units/<unit>.jsonl        a manifest row for every image of a finished work unit
timings.jsonl             the time that each unit took
agreement.json            with robust: the scores of each client's classes
influence/                with influence: done.json, the images that the models without each client
                          classify correctly; clients.json, each client's contribution
rounds/                   of iterative baselines: the last round's model, and done.json with its
                          checksum and the times of all rounds
models/<name>.safetensors the global models
tests/<name>.json         their confusion matrices by client; <name>.adapted.json, those of each
                          client's adapted model
withheld.json             the clients whose sites withhold their test results
status.json               the current state, and the start of each phase
server.log                of a simulation: the log of server and clients
manifest.jsonl metrics.json report.html
SHA256SUMS                of a finished run: the digests of its records (osfl/run_folder/verify.py)
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from osfl.config import NOT_IDENTITY, ConfigError, RunConfig, flatten
from osfl.util.files import (
    OWNER_ONLY,
    DamageError,
    own_folder,
    private_folder,
    read_json,
    write_atomically,
)
from osfl.util.log import log
from osfl.util.text import plain, safe_name

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

SUMS = "SHA256SUMS"
# These change even when no server is at work
NOT_A_RECORD = frozenset({"status.json", "server.log"})
MADE_ANEW = "repeat the same `osfl run` to recreate it"
_ROW = {"file": str, "client": str, "class": str, "seed": int, "sha256": str}
# Stable Diffusion's images have a million pixels; several are read in parallel
MOST_PICTURE_PIXELS = 4096 * 4096
MOST_PICTURE_BYTES = 4 * MOST_PICTURE_PIXELS
# A PNG's last chunk: length, name, checksum
PNG_END = b"\0\0\0\0IEND" + bytes.fromhex("ae426082")
# Time for another server to end
LOCK_SECONDS = 5.0
# Crashes of the server while it decodes a client's payloads, after which the client is refused. A
# single crash may have another cause.
MOST_ENDS = 2
OTHER_JOB = "restore it from a backup, or use another job-id"
DRAW_ANEW = "remove it, and the images are synthesized again"
BEGIN_AGAIN = "move the folder rounds away, and the same `osfl run` starts with the first round"
# Cannot occur in a model's name, because no identifier has a dot
ADAPTED = ".adapted"
# Endings of a round's files
_MODEL = ".safetensors"
_MEMORY = ".memory.safetensors"
_ROUND = {"round": int, "seconds": int | float, "costs": dict, "sha256": dict}
# Files that each step of a job leaves
_STEPS = {
    "payloads": ("payloads/*.pb",),
    "images": ("units/*.jsonl",),
    "models": ("models/*.json", "rounds/done.json"),
}


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    def write_json(self, name: str, value: Any) -> None:
        """Write a small result atomically."""
        write_atomically(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(
        self, name: str, kinds: Mapping[str, Any] | None = None, cure: str = OTHER_JOB
    ) -> Any:
        """Read a result of `write_json`, or None if there is none.

        Args:
            kinds: the types of the keys that the value, an object, must have; None: any value.
            cure: hint at the end of the error message.

        Raises:
            DamageError: the file is corrupt.
        """
        if not os.path.lexists(self.path / name):
            return None
        value = read_json(self.path / name, object if kinds is None else dict, cure)
        if not all(isinstance(value.get(key), kind) for key, kind in (kinds or {}).items()):
            raise DamageError(f"{self.path / name} is corrupt; {cure}")
        return value

    def write_weights(self, name: str, state: "Mapping[str, torch.Tensor]") -> str:
        """Write tensors in safetensors' format; return the file's SHA-256."""
        from safetensors.torch import save

        weights = save({key: tensor.contiguous() for key, tensor in state.items()})
        write_atomically(self.path / name, weights)
        return hashlib.sha256(weights).hexdigest()

    def read_weights(self, name: str, sha256: object, cure: str) -> "dict[str, torch.Tensor]":
        """Read the tensors of `write_weights`.

        Raises:
            DamageError: the file is missing, or its SHA-256 differs.
        """
        file = self.path / name
        try:
            weights = file.read_bytes()
        except PermissionError:
            raise
        except OSError:
            weights = b""
        if hashlib.sha256(weights).hexdigest() == sha256:
            from safetensors.torch import load

            return load(weights)
        problem = "is corrupt" if file.exists() else "is missing"
        raise DamageError(f"{file} {problem}; {cure}")

    # ---- The job's inputs ----

    def stored_config(self) -> dict[str, Any] | None:
        """Read the resolved run-config, flat; None before the run has started.

        Raises:
            DamageError: it is corrupt.
        """
        config: dict[str, Any] | None = self.read_json("config.json", {})
        return config

    def kit_digests(self) -> dict[str, dict[str, str]]:
        """Read the SHA-256 of the kit's files by step of the job; {} before the first step.

        Raises:
            DamageError: `kit.json` is corrupt.
        """
        return self.read_json("kit.json") or {}

    def store_kit_digests(self, digests: Mapping[str, Mapping[str, str]]) -> None:
        """Store the SHA-256 of the kit's files that each step uses."""
        self.write_json("kit.json", digests)

    def has_begun(self, step: str) -> bool:
        """Return whether a step of the job (`payloads`, `images`, `models`) has left any file."""
        return any(any(self.path.glob(pattern)) for pattern in _STEPS[step])

    def sampling_choice(self, kinds: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read the sampling settings that an earlier measurement chose, or None.

        Args:
            kinds: the types of the keys that the settings must have.

        Raises:
            DamageError: `synthesis.json` is corrupt.
        """
        return self.read_json("synthesis.json", kinds, DRAW_ANEW)

    def store_sampling_choice(self, choice: Mapping[str, Any]) -> None:
        """Store the settings that a measurement chose, for the rest of the job."""
        self.write_json("synthesis.json", choice)

    # ---- Payloads ----

    def store_payload(self, client: str, blob: bytes, record: dict[str, Any]) -> None:
        """Store a payload durably; afterwards the client can delete it.

        Args:
            record: the payload's `sha256`, `bytes`, `costs`, and for a sealed one the key.
        """
        self.write_json(f"payloads/{client}.json", record)
        write_atomically(self.path / "payloads" / f"{client}.pb", blob)

    def stored_payload(self, client: str) -> bytes:
        """Read a payload as it was stored."""
        return (self.path / "payloads" / f"{client}.pb").read_bytes()

    def sealed_to(self, client: str) -> str:
        """Return the fingerprint of the key that a payload is sealed to; "" if it is open."""
        record = self.read_json(f"payloads/{client}.json") or {}
        return str(record.get("sealed-to", ""))

    def payload_size(self, client: str) -> int:
        """Return the size of a stored payload in bytes."""
        return (self.path / "payloads" / f"{client}.pb").stat().st_size

    def payload_digest(self, client: str) -> str:
        """Return the recorded SHA-256 of a payload; "" for a client without one."""
        record = self.read_json(f"payloads/{client}.json") or {}
        return str(record.get("sha256", ""))

    def stored_clients(self) -> list[str]:
        """List the clients whose payloads are stored with a valid record.

        Payloads without one are quarantined, so that their clients are asked again.
        """
        clients = sorted(file.stem for file in (self.path / "payloads").glob("*.pb"))
        for client in clients:
            if problem := self._payload_problem(client):
                log.error("%s; the payload is quarantined, and %s is asked again", problem, client)
                self.refuse_payload(client)
        return [client for client in clients if (self.path / "payloads" / f"{client}.pb").is_file()]

    def _payload_problem(self, client: str) -> str:
        """Return the problem with a payload's record, or ""; the payload itself is not read."""
        file = self.path / "payloads" / f"{client}.json"
        try:
            record = read_json(file)
        except DamageError as error:
            return str(error)
        if not file.with_suffix(".pb").is_file():
            return f"{file.with_suffix('.pb')} is not a file"
        costs = record.get("costs")
        is_valid = (
            isinstance(record.get("sha256"), str)
            and isinstance(record.get("bytes"), int)
            and isinstance(costs, dict)
            and all(isinstance(value, int | float) for value in costs.values())
        )
        return "" if is_valid else f"{file} is corrupt (it lacks sha256, bytes or costs)"

    @contextmanager
    def decoding(self, client: str) -> Iterator[None]:
        """Mark a payload on disk as being decoded, while the context is open.

        A payload that crashes the server is already stored, and would crash every server that
        resumes the run. The mark makes the next server refuse it. The client's next payload is
        decoded, but if the server crashes again, none after it.

        Raises:
            PayloadError: the server ended while it decoded this payload, or too often while it
                decoded this client's payloads; or there is not enough memory to decode it.
        """
        from osfl.payload.wire import PayloadError

        marker = f"payloads/{client}.decoding"
        if self.read_json(marker) is not None:
            raise PayloadError(client, "message", "the server ended while it decoded this payload")
        crashes = self.read_json(f"{marker}.refused") or 0
        if crashes >= MOST_ENDS:
            raise PayloadError(
                client,
                "message",
                f"the server ended {crashes} times while it decoded this client's payloads; this "
                "job accepts no more of them",
            )
        self.write_json(marker, crashes + 1)
        try:
            yield
        except MemoryError as error:
            raise PayloadError(
                client, "message", "there is not enough memory to decode it"
            ) from error
        finally:
            (self.path / marker).unlink()

    def refuse_payload(self, client: str) -> None:
        """Quarantine an invalid payload, as `<client>.pb.refused`."""
        for ending in ("pb", "json", "decoding"):
            file = self.path / "payloads" / f"{client}.{ending}"
            if os.path.lexists(file):
                _quarantine(file)

    # ---- Images: their work units, manifest and times ----

    def unit_file(self, unit: str) -> Path:
        """Return the path of a work unit's rows, which exists if and only if the unit is done."""
        return self.path / "units" / f"{unit}.jsonl"

    def unit_files(self) -> list[Path]:
        """List the row files of all finished work units."""
        return list((self.path / "units").glob("*.jsonl"))

    @property
    def manifest_file(self) -> Path:
        """The path of the rows of all images, in the plan's order."""
        return self.path / "manifest.jsonl"

    @property
    def timings_file(self) -> Path:
        """The path of the work units' times: name, number of images and seconds per line."""
        return self.path / "timings.jsonl"

    # ---- Rounds of iterative baselines ----

    def store_round(
        self,
        number: int,
        seconds: float,
        costs: Mapping[str, Any],
        model: "Mapping[str, torch.Tensor]",
        memory: "Mapping[str, torch.Tensor]",
    ) -> None:
        """Store a finished round: its weights, then the record with their checksums.

        Args:
            number: the round's number.
            seconds: time since the start of the first round.
            costs: each client's costs, summed over all rounds so far.
            model: the global model after the round.
            memory: the strategy's state between rounds.
        """
        digests = {
            "model": self.write_weights(f"rounds/{number:06d}{_MODEL}", model),
            "memory": self.write_weights(f"rounds/{number:06d}{_MEMORY}", memory),
        }
        previous = self.last_round() or {}
        times = [*previous.get("times", []), {"round": number, "seconds": seconds}]
        record = {"round": number, "seconds": seconds, "costs": costs, "sha256": digests}
        self.write_json("rounds/done.json", {**record, "times": times})
        for file in (self.path / "rounds").glob("*.safetensors"):
            if not file.name.startswith(f"{number:06d}"):
                file.unlink()

    def last_round(self) -> dict[str, Any] | None:
        """Read the record of the last round, or None before the first.

        It has the number (`round`), and `seconds`, `costs` and `times` of all rounds so far.

        Raises:
            DamageError: it is corrupt.
        """
        return self.read_json("rounds/done.json", _ROUND, BEGIN_AGAIN)

    def round_model(self, record: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Read the model after the last round.

        Args:
            record: the record of `last_round`.

        Raises:
            DamageError: the model is missing or corrupt.
        """
        name = f"rounds/{record['round']:06d}{_MODEL}"
        return self.read_weights(name, record["sha256"].get("model"), BEGIN_AGAIN)

    def round_memory(self, record: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Read the strategy's state after the last round; like `round_model`."""
        name = f"rounds/{record['round']:06d}{_MEMORY}"
        return self.read_weights(name, record["sha256"].get("memory"), BEGIN_AGAIN)

    # ---- Global models and their tests ----

    def store_model(
        self, name: str, state: "Mapping[str, torch.Tensor]", record: dict[str, Any]
    ) -> None:
        """Store a global model, then its record with the checksum."""
        (self.path / "models" / f"{name}.json").unlink(missing_ok=True)
        digest = self.write_weights(f"models/{name}.safetensors", state)
        self.write_json(f"models/{name}.json", {**record, "sha256": digest})

    def stored_model(self, name: str, inputs: str) -> "dict[str, torch.Tensor] | None":
        """Read the model that was trained on exactly these inputs; None if missing or corrupt."""
        file = self.path / "models" / f"{name}.safetensors"
        try:
            record = read_json(file.with_suffix(".json"))
        # The model is trained again
        except DamageError:
            return None
        if record.get("inputs") != inputs or not file.is_file():
            return None
        weights = file.read_bytes()
        is_intact = hashlib.sha256(weights).hexdigest() == record.get("sha256")
        if not is_intact or not isinstance(record.get("seconds"), int | float):
            return None
        from safetensors.torch import load

        return load(weights)

    def store_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Store a global model's confusion matrices by client: counts [true, predicted class]."""
        # Adapted models of an earlier test had that test's settings
        (self.path / "tests" / f"{name}{ADAPTED}.json").unlink(missing_ok=True)
        self.write_json(f"tests/{name}.json", dict(sorted(matrices.items())))

    def store_adapted_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Store the confusion matrix of each client's adapted model; like `store_test`."""
        self.write_json(f"tests/{name}{ADAPTED}.json", dict(sorted(matrices.items())))

    def store_withheld(self, clients: Iterable[str]) -> None:
        """Store the names of the clients whose sites withhold their test results."""
        self.write_json("withheld.json", {"clients": sorted(clients)})

    def store_agreements(self, inputs: str, clients: Mapping[str, Any]) -> None:
        """Store the label-consistency scores of every client's classes.

        Args:
            inputs: digest of the images that were scored.
        """
        self.write_json("agreement.json", {"inputs": inputs, "clients": clients})

    def stored_agreements(self, inputs: str) -> dict[str, dict[str, float]]:
        """Read the scores by client and class name; {} if they are of other images."""
        try:
            content = self.read_json("agreement.json", {"inputs": str, "clients": dict}) or {}
        # The images are scored again
        except DamageError:
            return {}
        if content.get("inputs") != inputs:
            return {}
        try:
            return {client: dict(row["classes"]) for client, row in content["clients"].items()}
        except (KeyError, TypeError, ValueError):
            return {}

    def store_hits(self, inputs: str, hits: Mapping[str, list[bool]]) -> None:
        """Store which images the models without a client classify correctly.

        The file lets a resumed run continue with the next client.
        """
        self.write_json("influence/done.json", {"inputs": inputs, "hits": hits})

    def stored_hits(self, inputs: str) -> dict[str, list[bool]]:
        """Read the hits by the client that was left out; {} if they are of other images."""
        try:
            content = self.read_json("influence/done.json", {"inputs": str, "hits": dict}) or {}
        # The models are trained again
        except DamageError:
            return {}
        is_valid = all(isinstance(hits, list) for hits in content.get("hits", {}).values())
        return dict(content["hits"]) if is_valid and content.get("inputs") == inputs else {}

    def store_influences(self, clients: Mapping[str, Any]) -> None:
        """Store each client's contribution to the global model."""
        self.write_json("influence/clients.json", clients)

    # ---- Files that the `osfl` command reads ----

    @property
    def metrics_file(self) -> Path:
        """The path of a finished run's metrics."""
        return self.path / "metrics.json"

    @property
    def report_file(self) -> Path:
        """The path of the report page."""
        return self.path / "report.html"

    def forget_status(self) -> None:
        """Remove the previous run's status at the start of a run."""
        (self.path / "status.json").unlink(missing_ok=True)

    def take_log(self, log_file: Path) -> Path:
        """Move a simulation's log into the folder; return its new path.

        A missing log was moved by another start of the same job.
        """
        destination = self.path / "server.log"
        with suppress(FileNotFoundError):
            log_file.replace(destination)
        return destination

    @contextmanager
    def alone(self) -> Iterator[None]:
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
            but no config.json; another user could have prepared the folder (`own_folder`).
        DamageError: config.json is corrupt.
    """
    root = runs_root(config)
    folder = RunFolder(root / job_id)
    private_folder(root)
    is_new = not (folder.path / "config.json").exists()
    if is_new and (free := shutil.disk_usage(root).free) < needed_bytes:
        raise ConfigError(
            f"runs-dir = {str(root)!r}: {free / 1e6:,.0f} MB free, but this run needs about "
            f"{needed_bytes / 1e6:,.0f} MB"
        )
    try:
        own_folder(folder.path)
    except OSError as error:
        raise ConfigError(f"job-id = {job_id!r}: {error}, or use another job-id") from None
    with folder.alone():
        _bind(folder, flatten(config))
    return folder


def _bind(folder: RunFolder, config: dict[str, Any]) -> None:
    """Bind the folder to this flat run-config, and mark its run as unfinished."""
    check_same_run(folder, config)
    (folder.path / SUMS).unlink(missing_ok=True)
    folder.write_json("config.json", config)


def check_same_run(folder: RunFolder, config: dict[str, Any]) -> None:
    """Check that a job's folder, if it exists, belongs to a run with these settings.

    Args:
        config: the flat run-config.

    Raises:
        ConfigError: it belongs to a run with other settings or of an older version, or its
            config.json is missing.
        DamageError: config.json is corrupt.
    """
    if not folder.path.is_dir():
        return
    job_id = folder.path.name
    stored = folder.stored_config()
    if stored is None:
        if results := _results(folder.path):
            raise ConfigError(
                f"job-id = {job_id!r}: {folder.path / 'config.json'} is missing, so the run that "
                f"{results[0]} belongs to is unknown. Restore it from a backup, or use another "
                "job-id"
            )
        return
    if "kit-sha256" in stored and not (folder.path / "kit.json").exists():
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
    return [name for name in names if name not in NOT_A_RECORD and not name.startswith(".")]


def _quarantine(file: Path) -> None:
    """Rename a file to `<name>.refused`, and replace an earlier one."""
    target = file.with_name(file.name + ".refused")
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    file.replace(target)


# ---- Images and their rows ----


def image_name(client: str, label: int, class_name: str, index: int) -> str:
    """Return an image's path in the run's folder. The class name is made safe for a disk."""
    return f"images/{client}/{label:03d}-{safe_name(class_name)}/{index:05d}.png"


def read_picture(file: Path) -> "torch.Tensor | None":
    """Read a synthetic image as uint8 [3, H, W]; None if the file is missing or corrupt."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        if file.stat().st_size > MOST_PICTURE_BYTES:
            return None
        content = file.read_bytes()
        if not _is_whole_png(content):
            return None
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            return pil_to_tensor(image)
    # Pillow's plugins raise exceptions of any kind for corrupt files
    except Exception:
        return None


def _is_whole_png(content: bytes) -> bool:
    """Check a PNG's chunks, end and size without decoding its pixels.

    Pillow alone would accept a file that lacks its last 20 bytes, or has other bytes after them.
    """
    from PIL import Image

    stream = io.BytesIO(content)
    with Image.open(stream, formats=["PNG"]) as image:
        if image.width * image.height > MOST_PICTURE_PIXELS:
            return False
        # Reads as far as the name of the last chunk
        image.verify()
    return content[stream.tell() - 8 :] == PNG_END


def picture_digest(picture: "torch.Tensor") -> str:
    """Return the SHA-256 of an image's pixels."""
    return hashlib.sha256(picture.contiguous().numpy().tobytes()).hexdigest()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a manifest or of a work unit, one per image.

    Raises:
        DamageError: the file is missing or corrupt.
        PermissionError: this user may not read it.
    """
    if not os.path.isfile(file):
        problem = "is not a file" if os.path.lexists(file) else "is missing"
        raise DamageError(f"{plain(file, 1000)} {problem}; {MADE_ANEW}")
    content = file.read_bytes()
    try:
        rows = [json.loads(line) for line in content.splitlines()]
    except (ValueError, RecursionError):
        rows = []
    if not rows or not content.endswith(b"\n") or not all(map(_is_row, rows)):
        raise DamageError(f"{plain(file, 1000)} is corrupt; {MADE_ANEW}")
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    if not all(isinstance(row.get(key), kind) for key, kind in _ROW.items()):
        return False
    path = PurePosixPath(row["file"])
    # A row must not make a reader open a file outside of the run's images
    return path.parts[:1] == ("images",) and ".." not in path.parts
