"""Reuse of another run's payloads (`payloads-from`): a new run that asks no client for one.

The new run's folder is whole: it has the payloads, and `payloads-from.json` binds it to them.
"""

from collections.abc import Collection
from pathlib import Path

from osfl.config import ConfigError, RunConfig, payload_settings
from osfl.run_folder.job_files import HINT_RESTORE
from osfl.run_folder.layout import RunFolder, runs_root
from osfl.run_folder.payload_store import PayloadSource, are_digests
from osfl.util.files import CorruptFileError
from osfl.util.names import is_absolute, is_identifier
from osfl.util.text import quote

# Differing settings that an error lists
MAX_DIFFERENCES = 20


def source_folder(config: RunConfig, runs: Path) -> RunFolder:
    """Return the folder of the run that `payloads-from` names.

    Args:
        runs: the folder of all runs, in which a job id is a folder's name.

    Raises:
        ConfigError: it is neither a job id nor an absolute path, or there is no such run.
    """
    return find_folder("payloads-from", config.payloads_from, runs)


def find_folder(key: str, name: str, runs: Path) -> RunFolder:
    """Return the folder of the run that a key names; see `source_folder`."""
    _check_name(key, name)
    folder = RunFolder(find_path(name, runs))
    if not folder.config_file.is_file():
        raise ConfigError(
            f"{key} = {quote(name)}: {folder.path} is not the folder of a run; set it to one"
        )
    return folder


def check_source_name(config: RunConfig) -> None:
    """Check that `payloads-from` and `continue-from`, if set, can name a run on another machine.

    Raises:
        ConfigError: one is neither a job id nor an absolute path.
    """
    _check_name("payloads-from", config.payloads_from)
    _check_name("continue-from", config.continue_from)


def _check_name(key: str, name: str) -> None:
    if name and not is_identifier(name) and not is_absolute(name):
        raise ConfigError(
            f"{key} = {quote(name)}: must be a job id in the server's runs-dir, or an absolute path"
        )


def source_path(config: RunConfig, runs: Path) -> Path:
    """Return the path that `payloads-from` names: of a job in the folder of all runs, or a path."""
    return find_path(config.payloads_from, runs)


def find_path(name: str, runs: Path) -> Path:
    """Return the path that a name stands for: of a job in the folder of all runs, or a path."""
    return runs / name if is_identifier(name) else Path(name).expanduser()


def find_source(config: RunConfig, other: RunFolder) -> PayloadSource:
    """Return the payloads of a run, after checking that this run's clients would make the same.

    Raises:
        ConfigError: that run has other settings of the clients, or too few payloads.
        CorruptFileError: a record of that run is corrupt, or the name of a payload.
    """
    check_settings(config, other, "remove the key, or ask the clients again without payloads-from")
    payloads = {file.stem: other.payload_digest(file.stem) for file in other.payload_files()}
    if not are_digests(payloads):
        raise CorruptFileError(
            f"{other.path / 'payloads'} is corrupt (a payload without a client's name or SHA-256); "
            f"{HINT_RESTORE}"
        )
    if len(payloads) < config.needed_clients:
        raise ConfigError(
            f"payloads-from = {quote(config.payloads_from)}: {other.path} has {len(payloads)} "
            f"payloads; at least {config.needed_clients} are required (min-clients, num-clients)"
        )
    earlier = other.payload_source()
    job = other.job_id if earlier is None else earlier.job
    jobs = {client: other.payload_job(client, job) for client in payloads}
    jobs = {client: of_client for client, of_client in jobs.items() if of_client != job}
    # The path may be a link
    return PayloadSource(str(other.path.resolve()), job, payloads, jobs)


def check_settings(
    config: RunConfig, other: RunFolder, hint: str, ignored: Collection[str] = ()
) -> None:
    """Check that another run's clients had this run's settings.

    Args:
        hint: the end of the error message.
        ignored: keys that may differ.

    Raises:
        ConfigError: a key differs, or the other run's version of OSFL lacks it.
    """
    differences = []
    stored = other.stored_config() or {}
    # With another method most keys are others, too
    settings = payload_settings(config)
    if stored.get("method") != config.method:
        settings = {"method": config.method}
    for key, value in settings.items():
        made_with = f"{key} = {quote(stored[key])}" if key in stored else f"a version without {key}"
        if key not in ignored and (key not in stored or stored[key] != value):
            differences.append(
                f"{key} = {quote(value)}: payloads of {other.path} were made with {made_with}; "
                f"{hint}"
            )
    if differences:
        raise ConfigError("\n".join(differences[:MAX_DIFFERENCES]))


def reuse_payloads(config: RunConfig, folder: RunFolder) -> PayloadSource | None:
    """Store the payloads that `payloads-from` names, and bind the run to them and to their kit.

    A resumed run keeps its own record, and only replaces payloads that are missing or corrupt.

    Returns:
        None for a run whose clients make the payloads.

    Raises:
        ConfigError: as `source_folder` and `find_source`; or the run has payloads of its own or
            from another run; or a payload of the other run is missing or corrupt.
        CorruptFileError: a record is corrupt.
    """
    source = folder.payload_source()
    if source is None and not config.payloads_from:
        return None
    if source is None:
        if folder.has_started("payloads"):
            raise _other_payloads(config, folder, "its own payloads")
        other = source_folder(config, runs_root(config))
        source = find_source(config, other)
        if "payloads" in (digests := other.kit_digests()):
            folder.store_kit_digests({**folder.kit_digests(), "payloads": digests["payloads"]})
        folder.store_payload_source(source)
    elif config.payloads_from:
        _check_same_source(config, folder, source)
    for client, sha256 in source.payloads.items():
        restore_payload(RunFolder(Path(source.run)), folder, client, sha256, "payloads-from")
    return source


def _check_same_source(config: RunConfig, folder: RunFolder, source: PayloadSource) -> None:
    """Check that `payloads-from` names the run that a resumed run has its payloads from.

    Raises:
        ConfigError: it names another one.
    """
    # The other run may be gone by now
    if str(source_path(config, runs_root(config)).resolve()) != source.run:
        raise _other_payloads(config, folder, f"payloads from {source.run}")


def _other_payloads(config: RunConfig, folder: RunFolder, payloads: str) -> ConfigError:
    return ConfigError(
        f"payloads-from = {quote(config.payloads_from)}: job-id = {folder.path.name!r} was started "
        f"with {payloads}; use another job-id"
    )


def restore_payload(
    other: RunFolder, folder: RunFolder, client: str, sha256: str, key: str
) -> None:
    """Store a payload of another run, unless it is stored.

    Args:
        key: the key that names the other run.

    Raises:
        ConfigError: it is missing or corrupt there, or a link.
    """
    if folder.has_payload(client, sha256) and folder.payload_digest(client) == sha256:
        return
    if not other.has_payload(client, sha256) or other.payload_digest(client) != sha256:
        raise ConfigError(
            f"{key}: the payload of {client} in {other.path} is missing or corrupt, or "
            f"a link; set {key} to another run, or ask the clients again without it"
        )
    folder.link_payload(other, client)
