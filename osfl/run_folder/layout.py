"""A run's folder: everything that a run leaves behind, and all that a killed server needs to go on.

runs/<job id>/
config.json               the resolved run-config; a job id stands for one
kit.json                  the kit's files that each step comes from, with their SHA-256
payloads/<client>.pb      as received, and opened if it came sealed, but with sealed-store;
                          <client>.json: its digest, what it cost the client, and to which key it is
                          sealed; <client>.decoding, while it is read: how often the server ended
                          in that
synthesis.json            how images are sampled, where the configuration left it to a measurement
images/<client>/<class>/  the synthetic images
units/<unit>.jsonl        a manifest row for every image of a finished unit of work
timings.jsonl             how long each unit took
agreement.json            with robust: what the kit sees of each client's classes
influence/                with influence: done.json, which images the models without each client
                          see; clients.json, what each client gives
rounds/                   of FedAvg and its kin: the last round's model, and done.json, which
                          vouches for it and has the times of all rounds; identity.json, which
                          tells this run from another server's with the same job id
models/<name>.safetensors the global models
tests/<name>.json         their confusion matrices, client by client; <name>.adapted.json, of what
                          each client made of it with its own images
withheld.json             the clients whose sites keep their test results to themselves
status.json               what is going on now, and when each phase began
server.log                of a simulation: what the server and the clients said
manifest.jsonl metrics.json report.html
SHA256SUMS                of a finished run: the digests of its records (osfl/run_folder/verify.py)
"""

import hashlib
import io
import json
import os
import secrets
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
    import torch  # seconds to import, and few readers need it

SUMS = "SHA256SUMS"
NOT_A_RECORD = frozenset({"status.json", "server.log"})  # they change when nobody is at work
MADE_ANEW = "the same `osfl run` again makes it anew"
_ROW = {"file": str, "client": str, "class": str, "seed": int, "sha256": str}
# Stable Diffusion's images have a million pixels; several are read at once
MOST_PICTURE_PIXELS = 4096 * 4096
MOST_PICTURE_BYTES = 4 * MOST_PICTURE_PIXELS
# The last chunk: length, name, checksum
PNG_END = b"\0\0\0\0IEND" + bytes.fromhex("ae426082")
LOCK_SECONDS = 5.0  # for a server that is just ending
# How often the server may end while it reads what a client sent: once may be another's doing.
MOST_ENDS = 2
OTHER_JOB = "put it back from a copy, or use another job-id"
DRAW_ANEW = "remove it, and the images are drawn anew"
BEGIN_AGAIN = "move the folder rounds away, and the same `osfl run` begins with the first round"
# No identifier has a dot
ADAPTED = ".adapted"
# of a round
_MODEL = ".safetensors"
_MEMORY = ".memory.safetensors"
_ROUND = {"round": int, "seconds": int | float, "costs": dict, "sha256": dict}
# What each step of a job leaves on the disk
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
        """Store a small result, whole or not at all."""
        write_atomically(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(
        self, name: str, kinds: Mapping[str, Any] | None = None, cure: str = OTHER_JOB
    ) -> Any:
        """A stored result, or None.

        Args:
            kinds: of an object, which values it must have.

        Raises:
            DamageError: it is there, and not as it was written; the message ends with `cure`.
        """
        if not os.path.lexists(self.path / name):
            return None
        value = read_json(self.path / name, object if kinds is None else dict, cure)
        if not all(isinstance(value.get(key), kind) for key, kind in (kinds or {}).items()):
            raise DamageError(f"{self.path / name} is not as it was written; {cure}")
        return value

    def write_weights(self, name: str, state: "Mapping[str, torch.Tensor]") -> str:
        """Store tensors in safetensors' format; returns the file's SHA-256."""
        from safetensors.torch import save

        weights = save({n: t.contiguous() for n, t in state.items()})
        write_atomically(self.path / name, weights)
        return hashlib.sha256(weights).hexdigest()

    def read_weights(self, name: str, sha256: object, cure: str) -> "dict[str, torch.Tensor]":
        """The tensors of `write_weights`.

        Raises:
            DamageError: they are missing, or others.
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
        state = "is not as it was written" if file.exists() else "is missing"
        raise DamageError(f"{file} {state}; {cure}")

    # ---- What a job comes from ----

    def stored_config(self) -> dict[str, Any] | None:
        """The resolved run-config, flat; None: nobody has begun the run.

        Raises:
            DamageError: it is not as it was written.
        """
        config: dict[str, Any] | None = self.read_json("config.json", {})
        return config

    def kit_digests(self) -> dict[str, dict[str, str]]:
        """SHA-256 of the kit's files by step of the job; empty before the first step.

        Raises:
            DamageError: `kit.json` is damaged.
        """
        return self.read_json("kit.json") or {}

    def store_kit_digests(self, digests: Mapping[str, Mapping[str, str]]) -> None:
        """Remember which files of the kit each step comes from."""
        self.write_json("kit.json", digests)

    def has_begun(self, step: str) -> bool:
        """Whether a step of the job, `payloads`, `images` or `models`, has left anything."""
        return any(any(self.path.glob(pattern)) for pattern in _STEPS[step])

    def sampling_choice(self, kinds: Mapping[str, Any]) -> dict[str, Any] | None:
        """How images are sampled, where that was measured before.

        Args:
            kinds: which values it must have.

        Raises:
            DamageError: `synthesis.json` is damaged.
        """
        return self.read_json("synthesis.json", kinds, DRAW_ANEW)

    def store_sampling_choice(self, choice: Mapping[str, Any]) -> None:
        """Keep a measurement's choice; the job goes on with it."""
        self.write_json("synthesis.json", choice)

    # ---- Payloads ----

    def store_payload(self, client: str, blob: bytes, about: dict[str, Any]) -> None:
        """Put a payload on the disk; when this returns, the client may forget it."""
        self.write_json(f"payloads/{client}.json", about)
        write_atomically(self.path / "payloads" / f"{client}.pb", blob)

    def stored_payload(self, client: str) -> bytes:
        """A payload as it was received."""
        return (self.path / "payloads" / f"{client}.pb").read_bytes()

    def sealed_to(self, client: str) -> str:
        """The fingerprint of the key that opens it; empty if it is open."""
        about = self.read_json(f"payloads/{client}.json") or {}
        return str(about.get("sealed-to", ""))

    def payload_size(self, client: str) -> int:
        """In bytes."""
        return (self.path / "payloads" / f"{client}.pb").stat().st_size

    def payload_digest(self, client: str) -> str:
        """Its SHA-256 as recorded; empty for a client without a payload."""
        about = self.read_json(f"payloads/{client}.json") or {}
        return str(about.get("sha256", ""))

    def stored_clients(self) -> list[str]:
        """Whose payloads are there, with their records.

        Others are set aside, and asked for again.
        """
        clients = sorted(file.stem for file in (self.path / "payloads").glob("*.pb"))
        for client in clients:
            if problem := self._payload_problem(client):
                log.error("%s; the payload is set aside, and %s is asked again", problem, client)
                self.refuse_payload(client)
        return [client for client in clients if (self.path / "payloads" / f"{client}.pb").is_file()]

    def _payload_problem(self, client: str) -> str:
        """What is wrong with a payload's record; empty: nothing. The payload itself is not read."""
        file = self.path / "payloads" / f"{client}.json"
        try:
            about = read_json(file)
        except DamageError as error:
            return str(error)
        if not file.with_suffix(".pb").is_file():
            return f"{file.with_suffix('.pb')} is not a file"
        figures = about.get("costs")
        good = (
            isinstance(about.get("sha256"), str)
            and isinstance(about.get("bytes"), int)
            and isinstance(figures, dict)
            and all(isinstance(value, int | float) for value in figures.values())
        )
        return "" if good else f"{file} is damaged (it lacks sha256, bytes or costs)"

    @contextmanager
    def decoding(self, client: str) -> Iterator[None]:
        """Remember on the disk whose payload is being read, for as long as that takes.

        A payload that ends the process is stored by then, and would end each that resumes the run.
        It is refused instead. What its client sends then is read; if the server ends again, no
        more.

        Raises:
            PayloadError: the server ended while it read this payload, or too often while it read
                what this client sent; or there is not enough memory to read it.
        """
        from osfl.payload.wire import PayloadError

        marker = f"payloads/{client}.decoding"
        if self.read_json(marker) is not None:
            raise PayloadError(client, "message", "the server ended while it read this payload")
        ended = self.read_json(f"{marker}.refused") or 0
        if ended >= MOST_ENDS:
            problem = f"the server ended {ended} times while it read what this client sent"
            raise PayloadError(client, "message", f"{problem}; it is read no more in this job")
        self.write_json(marker, ended + 1)
        try:
            yield
        except MemoryError as error:
            raise PayloadError(client, "message", "there is no memory to read it") from error
        finally:
            (self.path / marker).unlink()

    def refuse_payload(self, client: str) -> None:
        """Set an invalid payload aside, as `<client>.pb.refused`."""
        for ending in ("pb", "json", "decoding"):
            file = self.path / "payloads" / f"{client}.{ending}"
            if os.path.lexists(file):
                _set_aside(file)

    # ---- Images: their units of work, manifest and times ----

    def unit_file(self, unit: str) -> Path:
        """The rows of a unit's images; it is there when, and only when, the unit is done."""
        return self.path / "units" / f"{unit}.jsonl"

    def unit_files(self) -> list[Path]:
        """Those of all units that are done."""
        return list((self.path / "units").glob("*.jsonl"))

    @property
    def manifest_file(self) -> Path:
        """The rows of all images, in the plan's order."""
        return self.path / "manifest.jsonl"

    @property
    def timings_file(self) -> Path:
        """A line for every unit: its name, its number of images, its seconds."""
        return self.path / "timings.jsonl"

    # ---- Rounds of FedAvg and its kin ----

    def rounds_identity(self) -> str:
        """Return random digits that stay the same for all rounds of this run, also when it resumes.

        "" for rounds that an older version began, whose clients know them by the job id alone.

        Raises:
            DamageError: `identity.json` or the last round is not as it was written.
        """
        name = "rounds/identity.json"
        stored = self.read_json(name, {"identity": str}, BEGIN_AGAIN)
        if stored is None and self.last_round() is not None:
            return ""
        if stored is None:
            stored = {"identity": secrets.token_hex(16)}
            self.write_json(name, stored)
        return str(stored["identity"])

    def store_round(
        self,
        number: int,
        seconds: float,
        costs: Mapping[str, Any],
        model: "Mapping[str, torch.Tensor]",
        memory: "Mapping[str, torch.Tensor]",
    ) -> None:
        """Keep a finished round: its weights, then the number, which vouches for them.

        Args:
            seconds: since the first round began.
            costs: of each client, of all rounds so far.
            memory: what the strategy remembers between rounds.
        """
        digests = {
            "model": self.write_weights(f"rounds/{number:06d}{_MODEL}", model),
            "memory": self.write_weights(f"rounds/{number:06d}{_MEMORY}", memory),
        }
        earlier = self.last_round() or {}
        times = [*earlier.get("times", []), {"round": number, "seconds": seconds}]
        done = {"round": number, "seconds": seconds, "costs": costs, "sha256": digests}
        self.write_json("rounds/done.json", {**done, "times": times})
        for old in (self.path / "rounds").glob("*.safetensors"):
            if not old.name.startswith(f"{number:06d}"):
                old.unlink()

    def last_round(self) -> dict[str, Any] | None:
        """`round`, its number; `seconds`, `costs` and `times` of all rounds so far; None: no round.

        Raises:
            DamageError: it is not as it was written.
        """
        return self.read_json("rounds/done.json", _ROUND, BEGIN_AGAIN)

    def round_model(self, done: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """The model after the last round.

        Args:
            done: what `last_round` gives.

        Raises:
            DamageError: it is missing, or not as it was written.
        """
        name = f"rounds/{done['round']:06d}{_MODEL}"
        return self.read_weights(name, done["sha256"].get("model"), BEGIN_AGAIN)

    def round_memory(self, done: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """What the strategy remembered after the last round; as `round_model`."""
        name = f"rounds/{done['round']:06d}{_MEMORY}"
        return self.read_weights(name, done["sha256"].get("memory"), BEGIN_AGAIN)

    # ---- Global models and their tests ----

    def store_model(
        self, name: str, state: "Mapping[str, torch.Tensor]", about: dict[str, Any]
    ) -> None:
        """Put a global model on the disk, then what vouches for it."""
        (self.path / "models" / f"{name}.json").unlink(missing_ok=True)
        digest = self.write_weights(f"models/{name}.safetensors", state)
        self.write_json(f"models/{name}.json", {**about, "sha256": digest})

    def stored_model(self, name: str, inputs: str) -> "dict[str, torch.Tensor] | None":
        """The model that was trained on just these inputs, if it is there as it was written."""
        file = self.path / "models" / f"{name}.safetensors"
        try:
            about = read_json(file.with_suffix(".json"))
        except DamageError:  # or missing: it is trained again
            return None
        if about.get("inputs") != inputs or not file.is_file():
            return None
        weights = file.read_bytes()
        sound = hashlib.sha256(weights).hexdigest() == about.get("sha256")
        if not sound or not isinstance(about.get("seconds"), int | float):
            return None
        from safetensors.torch import load

        return load(weights)

    def store_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """Confusion matrices of a global model by client: counts of [true class, predicted]."""
        # That of an earlier test is of an earlier one's settings
        (self.path / "tests" / f"{name}{ADAPTED}.json").unlink(missing_ok=True)
        self.write_json(f"tests/{name}.json", dict(sorted(matrices.items())))

    def store_adapted_test(self, name: str, matrices: Mapping[str, list[list[int]]]) -> None:
        """As `store_test`, of what each client made of the model with its own images."""
        self.write_json(f"tests/{name}{ADAPTED}.json", dict(sorted(matrices.items())))

    def store_withheld(self, clients: Iterable[str]) -> None:
        """Keep the names of the clients whose sites do not tell their test results."""
        self.write_json("withheld.json", {"clients": sorted(clients)})

    def store_agreements(self, inputs: str, clients: Mapping[str, Any]) -> None:
        """What the kit sees of every client's classes in its images, which `inputs` stands for."""
        self.write_json("agreement.json", {"inputs": inputs, "clients": clients})

    def stored_agreements(self, inputs: str) -> dict[str, dict[str, float]]:
        """The agreement of every client's class by its name; empty if it is of other images."""
        try:
            found = self.read_json("agreement.json", {"inputs": str, "clients": dict}) or {}
        except DamageError:
            # It is made anew
            return {}
        if found.get("inputs") != inputs:
            return {}
        try:
            return {client: dict(about["classes"]) for client, about in found["clients"].items()}
        except (KeyError, TypeError, ValueError):
            return {}

    def store_hits(self, inputs: str, hits: Mapping[str, list[bool]]) -> None:
        """Keep which images models without a client saw, until all clients were left out."""
        self.write_json("influence/done.json", {"inputs": inputs, "hits": hits})

    def stored_hits(self, inputs: str) -> dict[str, list[bool]]:
        """By the client that was left out; empty if they are of other images."""
        try:
            found = self.read_json("influence/done.json", {"inputs": str, "hits": dict}) or {}
        except DamageError:
            # They are made anew
            return {}
        good = all(isinstance(hits, list) for hits in found.get("hits", {}).values())
        return dict(found["hits"]) if good and found.get("inputs") == inputs else {}

    def store_influences(self, clients: Mapping[str, Any]) -> None:
        """What each client gives the global model."""
        self.write_json("influence/clients.json", clients)

    # ---- What the `osfl` command looks at ----

    @property
    def metrics_file(self) -> Path:
        """The figures of a run that has finished."""
        return self.path / "metrics.json"

    @property
    def report_file(self) -> Path:
        """The same as a page."""
        return self.path / "report.html"

    def forget_status(self) -> None:
        """A run begins: what the one before was doing is no news."""
        (self.path / "status.json").unlink(missing_ok=True)

    def take_log(self, log_file: Path) -> Path:
        """Move a simulation's log into the folder; returns where it is then.

        A log that is not there was taken by another start of the same job.
        """
        kept = self.path / "server.log"
        with suppress(FileNotFoundError):
            log_file.replace(kept)
        return kept

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other servers out of the folder.

        A lock that ends with this process, however it ends.

        Raises:
            ConfigError: a server is at work in it.
        """
        lock = FileLock(self.path / ".lock", mode=OWNER_ONLY)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise ConfigError(
                f"job-id = {self.path.name!r}: another server is at work on it; wait, end it, or "
                "use another job-id"
            ) from None
        try:
            yield
        finally:
            lock.release()


def runs_root(config: RunConfig) -> Path:
    """Where runs are kept: `runs-dir`, else $OSFL_RUNS, else ~/.osfl/runs."""
    return Path(config.runs_dir or os.environ.get("OSFL_RUNS", "~/.osfl/runs")).expanduser()


def open_run_folder(config: RunConfig, job_id: str, needed_bytes: int) -> RunFolder:
    """Make or reopen the folder of a job; what is in it changes only while no server is at work.

    Raises:
        ConfigError: the job id belongs to a run with another configuration or of an older version,
            or a server is at work on it; the disk cannot hold the run; results are there, but no
            config.json; another user could have prepared the folder (`own_folder`).
        DamageError: config.json cannot be read.
    """
    root = runs_root(config)
    folder = RunFolder(root / job_id)
    private_folder(root)
    is_new = not (folder.path / "config.json").exists()
    if is_new and (free := shutil.disk_usage(root).free) < needed_bytes:
        raise ConfigError(
            f"runs-dir = {str(root)!r}: {free / 1e6:,.0f} MB free, this run needs about "
            f"{needed_bytes / 1e6:,.0f} MB"
        )
    try:
        own_folder(folder.path)
    except OSError as error:
        raise ConfigError(f"job-id = {job_id!r}: {error}, or use another job-id") from None
    with folder.alone():
        _bind(folder, flatten(config))
    return folder


def _bind(folder: RunFolder, now: dict[str, Any]) -> None:
    """The folder is of this configuration and of no other from here on."""
    check_same_run(folder, now)
    (folder.path / SUMS).unlink(missing_ok=True)  # the run is not finished any more
    folder.write_json("config.json", now)


def check_same_run(folder: RunFolder, now: dict[str, Any]) -> None:
    """Check that a job's folder, where it is there, belongs to a run with these settings.

    Args:
        now: the flat run-config.

    Raises:
        ConfigError: it belongs to a run with other settings or of an older version, or its
            config.json is gone.
        DamageError: config.json cannot be read.
    """
    if not folder.path.is_dir():
        return
    job_id = folder.path.name
    earlier = folder.stored_config()
    if earlier is None and (found := _results(folder.path)):
        raise ConfigError(
            f"job-id = {job_id!r}: {folder.path / 'config.json'} is missing, so nobody knows what "
            f"{found[0]} is of. Put it back from a copy, or use another job-id"
        )
    if earlier is not None and "kit-sha256" in earlier and not (folder.path / "kit.json").exists():
        raise ConfigError(
            f"job-id = {job_id!r} was begun by an older version of OSFL, which knew the kit by all "
            "files of its folder. Finish it with that version, or take another job-id"
        )
    if earlier is not None:
        identity = {key: value for key, value in now.items() if key not in NOT_IDENTITY}
        before = {key: value for key, value in earlier.items() if key not in NOT_IDENTITY}
        if differing := [key for key in identity | before if identity.get(key) != before.get(key)]:
            key = differing[0]
            raise ConfigError(
                f"job-id = {job_id!r} was started with {key} = {before.get(key)!r}; this run has "
                f"{identity.get(key)!r}. "
                "Give the same configuration to resume it, or another job-id"
            )


def _results(folder: Path) -> list[str]:
    """What a run has left in a folder, but for what may be there before it begins."""
    names = sorted(entry.name for entry in folder.iterdir())
    return [name for name in names if name not in NOT_A_RECORD and not name.startswith(".")]


def _set_aside(file: Path) -> None:
    """As `<name>.refused`, in place of what was set aside before."""
    aside = file.with_name(file.name + ".refused")
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    file.replace(aside)


# ---- Images and their rows ----


def image_name(client: str, label: int, class_name: str, index: int) -> str:
    """Where an image lies, relative to the run's folder. Class names are made safe for a disk."""
    return f"images/{client}/{label:03d}-{safe_name(class_name)}/{index:05d}.png"


def read_picture(file: Path) -> "torch.Tensor | None":
    """Return a synthetic image as uint8 [3, H, W], or None if the file is missing or damaged."""
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
    except Exception:  # what Pillow raises at a damaged file is its plugins' choice
        return None


def _is_whole_png(content: bytes) -> bool:
    """Check every chunk, the end and the size of a PNG, without its pixels.

    Pillow decodes the pixels of a file that lacks its last 20 bytes, or has others behind them.
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
    """SHA-256 of an image's pixels."""
    return hashlib.sha256(picture.contiguous().numpy().tobytes()).hexdigest()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a manifest or of a unit, an image each.

    Raises:
        DamageError: it is missing, or not as it was written.
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
        raise DamageError(f"{plain(file, 1000)} is damaged; {MADE_ANEW}")
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    if not all(isinstance(row.get(key), kind) for key, kind in _ROW.items()):
        return False
    path = PurePosixPath(row["file"])
    # Nothing outside of the run's folder is opened, whatever a row says
    return path.parts[:1] == ("images",) and ".." not in path.parts
