"""Removal of a client from a run (`osfl forget`): what it sent, and everything derived from it.

Only files that cannot depend on the client stay: the job's inputs, the other clients' payloads, and
the other clients' work units with their images, because a unit depends on its own client's payload
alone (`cut_units`). The folder is then that of a run in which the client never took part, and the
results are computed again from it.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import osfl
from osfl.config import ConfigError, split_names
from osfl.methods import METHODS
from osfl.methods.mixed import MixedConfig
from osfl.run_folder.forgotten_store import (
    RECOMPUTED,
    REMOVED,
    REMOVING,
    Removal,
    name_digest,
)
from osfl.run_folder.image_store import read_rows
from osfl.run_folder.layout import CHECKSUMS, RunFolder
from osfl.run_folder.listing import is_locked
from osfl.run_folder.payload_store import PayloadSource
from osfl.run_folder.status import read_status
from osfl.run_folder.verify import write_checksums
from osfl.util.files import CorruptFileError, read_json, remove_empty_folders, write_atomically
from osfl.util.names import is_identifier
from osfl.util.text import quote

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# The job's inputs, which do not depend on payloads
INPUTS = frozenset({".lock", "config.json", "kit.json", "synthesis.json", "timings.jsonl"})
# The records of the runs that payloads are from; the client is removed from their content
SOURCES = frozenset({"payloads-from.json", "continued-from.json"})
# Stands for the client's name in the paths of a record
HIDDEN = "[client]"
NOT_REACHED = (
    "models, images, reports and predictions that were handed out or exported to other folders",
    "backups and snapshots, and blocks of deleted files that the disk has not overwritten yet",
    "files that sites keep: the client's cache and privacy ledger (of a simulation, in "
    ".client-cache and .client-state beside the run), and every site's models-dir and "
    "predictions-dir",
)


def remove_client(
    folder: RunFolder,
    client: str,
    names_client: bool = False,
    key: "Ed25519PrivateKey | None" = None,
) -> Path:
    """Remove a client from a run's folder, or continue an interrupted removal; return its record.

    The run has no results afterwards: `server_app.recompute` makes them again. A removal that is
    complete stays as it is, so that a command killed at its very end can be repeated.

    Args:
        names_client: whether the record has the client's name, not only its SHA-256.
        key: signs the record; None for an unsigned one.

    Raises:
        ConfigError: the run has no such client, has no other client, or its method cannot forget
            one; the removal of another client was interrupted; or a server is at work on the run.
        CorruptFileError: a record is corrupt.
    """
    with folder.lock():
        file, removal = _record_of(folder, client, names_client)
        if removal.state == REMOVING:
            # From here on no run starts in this folder until the removal is complete
            folder.store_removal(file, removal, key)
            _bind_to_others(folder, client)
            files = sorted(stale_files(folder, client))
            removal = replace(removal, files=_with_digests(folder, client, removal, files))
            folder.store_removal(file, removal, key)
            for stale in files:
                stale.unlink()
            remove_empty_folders(folder.path)
            _filter_timings(folder)
            removal = replace(removal, state=REMOVED, removed=_now())
            folder.store_removal(file, removal, key)
        elif removal.state == RECOMPUTED and _lacks_checksums(folder):
            write_checksums(folder.path)
    return file


def finish_removal(
    folder: RunFolder,
    file: Path,
    images: int,
    seconds: float,
    key: "Ed25519PrivateKey | None" = None,
) -> Removal:
    """Record that the run has its results again, and remove images outside its plan.

    Args:
        file: the record.
        images: the number of images that were synthesized again.
        seconds: the time that it took to compute the results.
    """
    with folder.lock():
        folder.remove_unplanned_images()
        # With class-balance, units of other clients are replaced
        _filter_timings(folder)
        removal = folder.removals()[file]
        results = {"images": images, "seconds": round(seconds, 2)}
        removal = replace(removal, state=RECOMPUTED, recomputed=results)
        # They do not have the new record's checksum
        (folder.path / CHECKSUMS).unlink(missing_ok=True)
        folder.store_removal(file, removal, key)
        write_checksums(folder.path)
    return removal


def _lacks_checksums(folder: RunFolder) -> bool:
    """Return whether a finished run has no checksums, as if `finish_removal` was killed."""
    is_finished = read_status(folder.path).get("phase") == "finished"
    return is_finished and not (folder.path / CHECKSUMS).exists()


# ---- The record ----


def _record_of(folder: RunFolder, client: str, names_client: bool) -> tuple[Path, Removal]:
    """Return the record of a client's removal, or a new one if the run has traces of it.

    Raises:
        ConfigError: as `remove_client`.
    """
    digest = name_digest(client)
    complete = None
    for file, removal in folder.removals().items():
        if removal.client_sha256 == digest:
            if removal.state != RECOMPUTED:
                return file, replace(removal, client=client if names_client else removal.client)
            complete = file, removal
        if removal.state == REMOVING:
            raise ConfigError(
                f"forgotten/{file.name}: the removal of another client was interrupted; repeat "
                "`osfl forget` for that client first"
            )
    if complete is not None and not _has_trace(folder, client):
        return complete
    had_payload = _check_client(folder, client)
    removal = Removal(
        job=folder.job_id,
        client_sha256=digest,
        client=client if names_client else "",
        state=REMOVING,
        had_payload=had_payload,
        osfl=osfl.__version__,
        began=_now(),
        not_reached=(*NOT_REACHED, *_tracked_data(folder), *_copies_in_other_runs(folder, client)),
    )
    return folder.new_forgotten_file(), removal


def _check_client(folder: RunFolder, client: str) -> bool:
    """Check that a run can forget a client, and return whether it has sent a payload.

    Raises:
        ConfigError: as `remove_client`.
    """
    config = folder.stored_config()
    if config is None:
        raise ConfigError(f"{folder.path} is not the folder of a run; set it to one")
    name = str(config["method"])
    method = METHODS[name]
    hint = "remove the folder, and run again without the client under another job-id"
    if method.rounds:
        raise ConfigError(
            f"method = {name!r}: every round of an iterative method starts from models that all "
            f"clients have shaped, so it cannot forget one; {hint}"
        )
    if config.get("secure-sum"):
        raise ConfigError(
            "secure-sum = true: the server knows only the sum of all payloads, from which no "
            f"client's can be subtracted; {hint}"
        )
    # A mixed run has no client half of its own: its payloads are those of other methods
    if method.client is None and method.settings is not MixedConfig:
        raise ConfigError(
            f"method = {name!r}: its server stores nothing that a client has sent; {hint}"
        )
    if client in split_names(str(config.get("held-out", ""))):
        raise ConfigError(
            f"--client {client}: held-out = {quote(config['held-out'])} names it as a tester in "
            f"the run's settings; {hint}"
        )
    senders = {file.stem for file in folder.payload_files()} - {client}
    if not _has_trace(folder, client):
        raise ConfigError(
            f"--client {quote(client)}: {folder.path} has no trace of it; its clients are "
            f"{', '.join(sorted(senders)) or 'none'}"
        )
    if not senders:
        raise ConfigError(
            f"--client {client}: no other client has a payload in {folder.path}, so nothing would "
            "remain; remove the folder"
        )
    return _has_payload(folder, client)


def _has_payload(folder: RunFolder, client: str) -> bool:
    return is_identifier(client) and any((folder.path / "payloads").glob(f"{client}.*"))


def _has_trace(folder: RunFolder, client: str) -> bool:
    return _has_payload(folder, client) or client in _clients_without_payload(folder)


def _clients_without_payload(folder: RunFolder) -> set[str]:
    """Return the clients that the status or a test names, such as test-only clients."""
    clients = set(read_status(folder.path).get("clients", {}))
    record = folder.continuation()
    if record is not None:
        # With `continue-from-model`, clients that shaped only the model that training started from
        clients |= set(record.model_clients)
    for file in folder.test_files():
        clients |= read_json(file).keys()
    return clients


def _tracked_data(folder: RunFolder) -> Iterator[str]:
    """Yield a text if the run was logged to MLflow."""
    config = folder.stored_config() or {}
    if "mlflow" in split_names(str(config.get("tracking", ""))):
        yield "earlier figures and files of this run at MLflow"


def _copies_in_other_runs(folder: RunFolder, client: str) -> Iterator[str]:
    """Yield a text for each run beside this one that holds a payload of the client.

    Runs with `payloads-from` or `continue-from` have the same payload, as a link or a copy.
    """
    digest = _payload_digest(folder, client)
    for path in sorted(folder.path.parent.iterdir()):
        run = RunFolder(path)
        if path.name == folder.path.name or not any((path / "payloads").glob(f"{client}.*")):
            continue
        payload = "this payload" if digest == _payload_digest(run, client) else "another payload"
        advice = "; `osfl forget` it there too"
        if _is_untrained_continuation(run, folder):
            advice = ", and drops it before its training"
            # A server that is at work does so until it has all payloads
            if is_locked(path):
                advice = ", and drops it unless it is synthesizing; then `osfl forget` it there too"
        yield f"the run {quote(path.name)} has {payload} of the client{advice}"


def _is_untrained_continuation(run: RunFolder, folder: RunFolder) -> bool:
    """Return whether a run continues another one and has no model yet (`drop_departed`)."""
    try:
        record = run.continuation()
    except CorruptFileError:
        return False
    continues = record is not None and record.run == str(folder.path.resolve())
    is_bound = run.payload_source_file.exists()
    return continues and not is_bound and not run.has_started("models")


def _payload_digest(folder: RunFolder, client: str) -> str:
    try:
        return folder.payload_digest(client)
    # The record beside the payload is corrupt
    except CorruptFileError:
        return ""


# ---- The files ----


def _bind_to_others(folder: RunFolder, client: str) -> None:
    """Bind the run to the other clients' payloads, so that it never asks for one again."""
    source = folder.payload_source()
    if source is None:
        files = [file for file in folder.payload_files() if file.stem != client]
        digests = {file.stem: _payload_digest(folder, file.stem) for file in files}
        # No run can use a payload without a record
        payloads = {name: digest for name, digest in digests.items() if digest}
        source = PayloadSource(str(folder.path.resolve()), folder.job_id, payloads)
    record = folder.continuation()
    if record is not None:
        folder.store_continuation(record.without(client))
        _remove_from_settings(folder, client)
    payloads = {name: digest for name, digest in source.payloads.items() if name != client}
    jobs = {name: job for name, job in source.jobs.items() if name != client}
    folder.store_payload_source(replace(source, payloads=payloads, jobs=jobs))


def _remove_from_settings(folder: RunFolder, client: str) -> None:
    """Remove a client's name from the settings, where `replace-clients` may have it."""
    config = folder.stored_config() or {}
    names = split_names(str(config.get("replace-clients", "")))
    if client in names:
        others = ",".join(name for name in names if name != client)
        folder.write_json(folder.config_file.name, {**config, "replace-clients": others})


def stale_files(folder: RunFolder, client: str) -> Iterator[Path]:
    """Yield every file and link that may depend on a client."""
    record = folder.continuation()
    starts_from_model = record is not None and record.from_model
    units = set(_units_of_others(folder, client))
    images = {folder.path / row["file"] for unit in units for row in read_rows(unit)}
    for root, folders, names in os.walk(folder.path):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        for file in (Path(root) / name for name in (*names, *links)):
            parts = file.relative_to(folder.path).parts
            is_input = len(parts) == 1 and parts[0] in INPUTS | SOURCES
            is_payload = parts[0] == "payloads" and _owner(file) not in ("", client)
            is_start = parts[0] == "previous" and starts_from_model
            is_kept = is_input or is_payload or is_start or parts[0] == "forgotten"
            if not is_kept and file not in units and file not in images:
                yield file


def _owner(file: Path) -> str:
    """Return the client of a payload or its record; "" for a hidden file of a killed write."""
    return file.name.partition(".")[0]


def _units_of_others(folder: RunFolder, client: str) -> Iterator[Path]:
    """Yield the row files of the work units that have no image of a client."""
    for unit in folder.unit_files():
        try:
            rows = read_rows(unit)
        # A corrupt unit is removed, and synthesized again
        except CorruptFileError:
            continue
        if all(row["client"] != client for row in rows):
            yield unit


def _with_digests(
    folder: RunFolder, client: str, removal: Removal, files: list[Path]
) -> tuple[dict[str, str], ...]:
    """Return the record's files, and those that are about to be removed.

    Args:
        removal: the record, which has the files of an interrupted removal.
    """
    digests = {row["file"]: row["sha256"] for row in removal.files}
    name = re.compile(rf"(?<![\w-]){re.escape(client)}(?![\w-])")
    for file in files:
        path = file.relative_to(folder.path).as_posix()
        digests[path if removal.client else name.sub(HIDDEN, path)] = _sha256(file)
    return tuple({"file": path, "sha256": digests[path]} for path in sorted(digests))


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file; "" for a link, a pipe or a file that cannot be read."""
    if file.is_symlink() or not file.is_file():
        return ""
    try:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return ""


def _filter_timings(folder: RunFolder) -> None:
    """Drop the timings of work units that were removed."""
    file = folder.timings_file
    if not file.is_file():
        return
    units = {unit.stem for unit in folder.unit_files()}
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if _unit(line) in units]
    write_atomically(file, b"".join(lines))


def _unit(line: bytes) -> str:
    """Return the work unit of a line of timings; "" for a line that a crash truncated."""
    try:
        return str(json.loads(line)["unit"])
    except (KeyError, TypeError, ValueError):
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
