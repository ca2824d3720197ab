"""Continuation of a run (`continue-from`): clients that came later, or whose data have grown.

The new run's folder is complete: it has the other run's payloads, images and, for a training that
starts from them, models; `continued-from.json` binds it to them. An image is synthesized again only
if its work unit has another name, and so other inputs.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from osfl.config import NOT_IDENTITY, ConfigError, RunConfig, flatten, split_names
from osfl.methods import METHODS
from osfl.run_folder.continuation_store import Continuation
from osfl.run_folder.forget import stale_files
from osfl.run_folder.forgotten_store import name_digest
from osfl.run_folder.image_store import read_rows
from osfl.run_folder.layout import RunFolder, runs_root
from osfl.run_folder.payload_source import check_settings, find_folder, find_path, restore_payload
from osfl.run_folder.payload_store import are_digests
from osfl.run_folder.verify import read_checksums, sha256_of
from osfl.util.files import CorruptFileError
from osfl.util.log import log
from osfl.util.text import quote

KEY = "continue-from"
# Settings of payloads that may differ, because clients, and perhaps classes, are added
GROWING_KEYS = ("num-clients", "data.classes")
HINT = "set it as it was, or start a run without continue-from"


def continue_run(config: RunConfig, folder: RunFolder) -> Continuation | None:
    """Carry the payloads and images of the run that `continue-from` names into this run.

    A resumed run keeps its own record, and only replaces payloads that are missing or corrupt.

    Returns:
        The run's record; None if it does not continue another run.

    Raises:
        ConfigError: as `find_continuation`; or the run has payloads of its own, or continues
            a different run; or a payload of the other run is missing or corrupt.
        CorruptFileError: a record is corrupt.
    """
    record = folder.continuation()
    if record is None and not config.continue_from:
        return None
    if record is None:
        if folder.has_started("payloads"):
            raise ConfigError(
                f"{KEY} = {quote(config.continue_from)}: job-id = {folder.path.name!r} was started "
                "with its own payloads; use another job-id"
            )
        record = find_continuation(config, continued_folder(config, runs_root(config)))
        folder.store_continuation(record)
    elif config.continue_from:
        _check_same(config, folder, record)
    drop_departed(folder)
    record = folder.continuation() or record
    earlier = RunFolder(Path(record.run))
    for client, sha256 in record.payloads.items():
        restore_payload(earlier, folder, client, sha256, KEY)
    if not record.is_carried:
        _carry(config, earlier, folder, record)
        record = replace(record, is_carried=True)
        folder.store_continuation(record)
    return record


def drop_departed(folder: RunFolder) -> list[str]:
    """Remove the payloads and images of clients that the continued run has forgotten; return them.

    A run that has a model, or has forgotten a client itself, keeps them until `osfl forget` removes
    them from this run, too.

    Raises:
        CorruptFileError: a record is corrupt.
    """
    record = folder.continuation()
    is_bound = folder.payload_source() is not None
    if record is None or is_bound or folder.has_started("models"):
        return []
    departed = RunFolder(Path(record.run)).departed_digests()
    clients = [client for client in record.payloads if name_digest(client) in departed]
    for client in clients:
        # Files first: an interrupted removal is repeated as long as the record has the client
        for file in sorted(stale_files(folder, client)):
            if file.relative_to(folder.path).parts[0] in ("payloads", "units", "images"):
                file.unlink()
        record = replace(
            record.without(client),
            departed=(*record.departed, name_digest(client)),
            dropped=record.dropped + 1,
        )
        if not record.from_model:
            # The client has shaped these models
            shutil.rmtree(folder.previous_folder, ignore_errors=True)
        folder.store_continuation(record)
    return clients


def with_new_clients(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the configuration with the numbers of clients that `new-clients` stands for.

    Only the server knows them: a client may have left the run that this one continues.
    """
    record = folder.continuation()
    if record is None or not config.new_clients:
        return config
    source = folder.payload_source()
    needed = len(record.payloads) + 1
    places = len(record.payloads) + config.new_clients
    # After `osfl forget` a run asks no client
    if source is not None:
        needed = places = len(source.payloads)
    held_out = len(config.held_out_clients)
    return replace(config, num_clients=places + held_out, min_clients=needed)


def continued_folder(config: RunConfig, runs: Path) -> RunFolder:
    """Return the folder of the run that `continue-from` names.

    Args:
        runs: the folder of all runs, in which a job id is a folder's name.

    Raises:
        ConfigError: there is no such run.
    """
    return find_folder(KEY, config.continue_from, runs)


def find_continuation(config: RunConfig, other: RunFolder) -> Continuation:
    """Check that this run can continue another one, and return the record of the continuation.

    Raises:
        ConfigError: the other run has other settings of the clients, its classes are not the first
            of this run's, a client to replace has no payload there, or its models cannot be
            trained further.
        CorruptFileError: a record of that run, or the name of a payload, is corrupt.
    """
    stored = other.stored_config() or {}
    check_settings(config, other, HINT, ignored=GROWING_KEYS)
    old_classes, is_grown = _old_classes(config, other, stored)
    replaced = split_names(config.replace_clients)
    payloads = {file.stem: other.payload_digest(file.stem) for file in other.payload_files()}
    if unknown := sorted(set(replaced) - payloads.keys()):
        raise ConfigError(
            f"replace-clients: {quote(unknown[0])} has no payload in {other.path}; its clients "
            f"are {', '.join(sorted(payloads)) or 'none'}"
        )
    payloads = {client: digest for client, digest in payloads.items() if client not in replaced}
    if not are_digests(payloads):
        raise CorruptFileError(
            f"{other.path / 'payloads'} is corrupt (a payload without a client's name or SHA-256)"
        )
    if config.continue_from_model:
        _check_models(config, other, stored, is_grown)
    if len(payloads) > config.training_clients and not config.new_clients:
        raise ConfigError(
            f"num-clients = {config.num_clients}: {other.path} has {len(payloads)} payloads; set "
            "num-clients to these and the new clients"
        )
    earlier = other.continuation()
    source = other.payload_source()
    job = other.job_id
    default_job = job if source is None else source.job
    return Continuation(
        run=str(other.path.resolve()),
        job=job,
        version=other.version + 1,
        payloads=payloads,
        jobs={client: other.payload_job(client, default_job) for client in payloads},
        classes={
            client: earlier.classes.get(client, old_classes) if earlier else old_classes
            for client in payloads
        },
        replaced=replaced,
        departed=tuple(sorted(other.departed_digests())),
        from_model=config.continue_from_model,
        model_clients=_model_clients(other) if config.continue_from_model else (),
    )


def _model_clients(other: RunFolder) -> tuple[str, ...]:
    """Return the clients that shaped a run's models, or the models that these started from."""
    earlier = other.continuation()
    clients = {file.stem for file in other.payload_files()}
    return tuple(sorted(clients.union(earlier.model_clients if earlier else ())))


def _old_classes(
    config: RunConfig, other: RunFolder, stored: Mapping[str, Any]
) -> tuple[tuple[str, ...], bool]:
    """Return the other run's class names, and whether this run has more.

    Raises:
        ConfigError: this run's classes do not begin with them, or its method cannot add classes.
    """
    # Empty for the digits, whose classes are their own
    old = split_names(str(stored.get("data.classes", "")))
    new = split_names(config.data.classes)
    if new[: len(old)] != old:
        raise ConfigError(
            f"data.classes = {quote(config.data.classes)}: must begin with those of {other.path}, "
            f"in their order: {quote(','.join(old))}; add new classes at the end"
        )
    is_grown = len(new) > len(old)
    method = METHODS[config.method]
    if is_grown and (method.sends_classifier or method.synthesizes_all_classes(config)):
        reason = "a classifier has a fixed number of classes"
        if not method.sends_classifier:
            reason = "every class is synthesized for every client"
        raise ConfigError(
            f"data.classes: {quote(new[len(old)])} is new, but with method {config.method!r} "
            f"{reason}; start a run without {KEY}"
        )
    return old, is_grown


def _check_models(
    config: RunConfig, other: RunFolder, stored: Mapping[str, Any], is_grown: bool
) -> None:
    """Check that another run's models can be trained further.

    Raises:
        ConfigError: there are none, this run's method trains none on images, or this run's models
            have other classes or another architecture.
    """
    setting = "continue-from-model = true"
    if not METHODS[config.method].trains_on_images:
        raise ConfigError(
            f"{setting}: method {config.method!r} trains no model on images; set it to false"
        )
    if is_grown:
        raise ConfigError(f"{setting}: a model cannot gain new classes; set it to false")
    flat = flatten(config)
    for key in ("global-model.architecture", "global-model.small-stem"):
        if flat[key] != stored.get(key):
            raise ConfigError(
                f"{setting}: {key} = {quote(flat[key])}, but {other.path} has "
                f"{quote(stored.get(key))}; set it to that, or {setting.split()[0]} to false"
            )
    if not other.model_files():
        raise ConfigError(f"{setting}: {other.path} has no model; finish it, or set it to false")
    key = f"{METHODS[config.method].section}.strategies"
    missing = set(split_names(str(flat.get(key, "")))) - set(split_names(str(stored.get(key, ""))))
    if missing:
        raise ConfigError(
            f"{setting}: {key} = {quote(flat[key])}, but {other.path} has no model of "
            f"{', '.join(sorted(missing))}; set it to {quote(stored.get(key))}, or "
            f"{setting.split()[0]} to false"
        )


def _check_same(config: RunConfig, folder: RunFolder, record: Continuation) -> None:
    """Check that the settings of a resumed run are those of its record.

    Raises:
        ConfigError: they continue another run, or have other `continue-from-model` or
            `replace-clients`.
    """
    # The other run may be gone by now
    run = str(find_path(config.continue_from, runs_root(config)).resolve())
    # A client that has left may have shaped the model of the start
    from_model = config.continue_from_model and (record.from_model or not folder.vacant_places())
    settings = (run, from_model, split_names(config.replace_clients))
    if settings != (record.run, record.from_model, record.replaced):
        raise ConfigError(
            f"{KEY} = {quote(config.continue_from)}: job-id = {folder.path.name!r} was started "
            f"with {KEY} = {record.run}, continue-from-model = {str(record.from_model).lower()}, "
            f"replace-clients = {','.join(record.replaced)!r}; use the same, or another job-id"
        )


# ---- What is carried ----


def _carry(config: RunConfig, other: RunFolder, folder: RunFolder, record: Continuation) -> None:
    """Carry the kit's digests, the images of clients whose payloads are carried, and the models."""
    digests = other.kit_digests()
    steps = {"payloads"} & digests.keys()
    if _has_same_synthesis(config, other.stored_config() or {}):
        if (other.path / "synthesis.json").is_file():
            folder.store_sampling_choice(other.sampling_choice({}) or {})
        if _carry_units(other, folder, record):
            steps |= {"images"} & digests.keys()
    else:
        log.info("synthesis settings differ from %s: all images are synthesized again", other.path)
    folder.store_kit_digests({**folder.kit_digests(), **{step: digests[step] for step in steps}})
    for model in other.model_files() if record.from_model else ():
        folder.link_previous_model(model)


def _has_same_synthesis(config: RunConfig, stored: Mapping[str, Any]) -> bool:
    """Return whether another run had the same settings of the synthesis."""
    sections = ("synthesis.", f"{METHODS[config.method].section}.")
    settings = {
        key: value
        for key, value in flatten(config).items()
        if key.startswith(sections) and key not in NOT_IDENTITY
    }
    return all(stored.get(key) == value for key, value in settings.items())


def _carry_units(other: RunFolder, folder: RunFolder, record: Continuation) -> int:
    """Carry the work units of clients whose payloads are carried, and return their number.

    Raises:
        CorruptFileError: a unit's rows are not those that the other run finished with.
    """
    sums = read_checksums(other.path)
    count = 0
    for unit in sorted(other.unit_files()):
        rows = read_rows(unit)
        if not all(_is_carried(row["client"], record) for row in rows):
            continue
        name = unit.relative_to(other.path).as_posix()
        digest = sha256_of(unit)
        if sums.get(name, digest) != digest:
            raise CorruptFileError(
                f"{unit} is corrupt; repeat the `osfl run` of {other.path.name} to recreate it"
            )
        folder.link_unit(other, unit)
        count += 1
    return count


def _is_carried(owner: str, record: Continuation) -> bool:
    """Return whether an image's owner is carried: its payload is, or it is a public domain."""
    # No client's name has a dot
    return owner in record.payloads or "." in owner
