"""Checks of the server's kit: it can be used, and a resumed job still has the same one."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from osfl.config import ConfigError, RunConfig, loads_clip, parts_of
from osfl.config.problems import DIGITS_KITS, digits_kit_problem
from osfl.kit.check import check_kit
from osfl.kit.folder import KitError
from osfl.kit.kits import download_bytes, find_kit, is_hub_id, weights_digests
from osfl.kit.run_check import check_models_outside_kit
from osfl.kit.used_parts import (
    client_kit_parts,
    digests_by_step,
    kit_parts,
    parts_by_step,
    sampling_parts,
    uncached_kit_bytes,
)
from osfl.methods import CLIP, METHODS
from osfl.payload.kinds import Classifier, Joint, Payload, Sent
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.files import CorruptFileError, read_json

MB = 10**6
FETCHING = "fetching the kit (MB)"


def fetch_kits(config: RunConfig, status: Status) -> None:
    """Download the parts of hub kits that the run uses, unless they are cached.

    This includes the clients' parts, whose digests the clients' own must equal.

    Raises:
        KitError, FileNotFoundError: the kit does not exist, is of another kind, or the hub cannot
            be reached.
    """

    def progress(fetched: int, total: int) -> None:
        if status.state["phase"] != FETCHING:
            status.phase(FETCHING, total // MB)
        status.advance(fetched // MB, total // MB)

    for kit, parts in parts_by_step(config).values():
        if is_hub_id(kit):
            find_kit(kit, parts, progress)


def check_subject(config: RunConfig) -> None:
    """Check that the digits' kit, or a copy of it, is not used for other images.

    Raises:
        KitError: it is; the message says how to proceed.
        FileNotFoundError: the kit does not exist.
    """
    if config.data.name == "digits":
        return
    for kit, _ in parts_by_step(config).values():
        if not is_hub_id(kit) and _is_of_digits(Path(find_kit(kit))):
            key = "kit" if kit == config.kit else config.sampling_kit_key
            raise KitError(digits_kit_problem(key, kit, config.data.name))


def _is_of_digits(folder: Path) -> bool:
    """Check whether a folder is a shipped kit, or was made by `osfl kit train`."""
    with suppress(FileNotFoundError):
        if folder.resolve() in [Path(find_kit(name)).resolve() for name in DIGITS_KITS]:
            return True
    with suppress(CorruptFileError):
        recipe = read_json(folder / "training.json").get("recipe")
        return isinstance(recipe, dict) and "denoiser_steps" in recipe
    return False


def check_sampling_kit(config: RunConfig) -> None:
    """Check the files, settings and headers of the parts that sample images, without loading them.

    Check the CLIP of a zero-shot model or teacher, too.

    Raises:
        KitError, FileNotFoundError: the kit does not exist, is of another kind, or is corrupt.
    """
    method = METHODS[config.method]
    if loads_clip(config) and not config.zero_shot.clip:
        check_kit(find_kit(config.kit), (CLIP,))
    if method.samples:
        kit = find_kit(config.sampling_kit)
        check_kit(kit, sampling_parts(config), image_condition=method.image_conditions)
    check_models_outside_kit(config, "server")


def bind_job_to_kit(config: RunConfig, folder: RunFolder, status: Status) -> None:
    """Bind every step of the job that has begun to the kit files it began with.

    A step without results may begin with another kit, such as a repaired one. `kit.json` holds each
    step's files and their SHA-256. Digests that are not cached are computed in a phase of their
    own.

    Raises:
        ConfigError: a step began with other files.
    """
    total = uncached_kit_bytes(config) // MB
    read = 0
    if total:
        status.phase("reading the kit", total)

    def progress(count: int) -> None:
        nonlocal read
        read += count
        status.advance(min(read // MB, total), total)

    digests = digests_by_step(config, progress)
    stored = folder.kit_digests()
    for step in digests:
        if folder.has_started(step) and digests[step] != stored.get(step, digests[step]):
            file = _first_difference(digests[step], stored[step])
            raise ConfigError(
                f"job-id = {folder.path.name!r}: its {step} were made with another {file} than the "
                "kit has now. Restore the former kit to resume the job, or set another job-id"
            )
    folder.store_kit_digests(digests)


def _first_difference(digests: Mapping[str, str], stored: Mapping[str, str]) -> str:
    names = sorted({*digests, *stored})
    return next(name for name in names if digests.get(name) != stored.get(name))


def client_kit_digests(config: RunConfig) -> dict[str, str]:
    """Return digests of the kit weights that clients need; {} if the server has no kit."""
    # check_server raises this error if the method needs the kit
    with suppress(FileNotFoundError, KitError):
        kit = find_kit(config.sampling_kit)
        return weights_digests(kit, client_kit_parts(config, kit))
    return {}


def client_download_bytes(config: RunConfig, payload: Sent | None, kind: str = "") -> int | None:
    """Return the bytes of the kit that a client must download before it can begin.

    None if a part is configured separately from the kit, so its size is unknown.

    Args:
        payload: the client's, if it sent one; a classifier's architecture decides.
        kind: of the payload, in a mixed run.
    """
    files: dict[str, None] = {}
    for method, run in parts_of(config, kind or config.method).items():
        part = payload.parts[method] if isinstance(payload, Joint) else payload
        parts = _downloaded_parts(run, part)
        if parts is None:
            return None
        files.update(dict.fromkeys(parts))
    # A kit without needed parts may be missing
    return download_bytes(find_kit(config.sampling_kit), files) if files else 0


def _downloaded_parts(config: RunConfig, payload: Payload | None) -> tuple[str, ...] | None:
    """Return the parts of the kit that a method's client downloads; None if some are elsewhere."""
    method = METHODS[config.method]
    if method.loads_initial_weights and config.classifier.init not in ("kit", "none"):
        return None
    # The client needs the initial weights of its own architecture only
    if isinstance(payload, Classifier):
        config = replace(
            config, classifier=replace(config.classifier, architecture=payload.architecture)
        )
    parts = kit_parts(config)
    if set(method.client_parts) - set(parts):
        return None
    return kit_parts(config, find_kit(config.sampling_kit)) if parts else ()
