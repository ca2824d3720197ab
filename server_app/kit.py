"""What the server knows of its kit.

That it can be used, what it is, which step of the job came from it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from osfl.config import ConfigError, RunConfig
from osfl.config.problems import DIGITS_KITS, kit_of_digits
from osfl.kit.check import check_kit
from osfl.kit.kits import KitError, download_bytes, find_kit, is_hub_id, weights_digests
from osfl.kit.run_check import check_models_apart
from osfl.kit.used_parts import (
    kit_parts,
    sampling_parts,
    unread_kit_bytes,
    used_digests,
    used_parts,
)
from osfl.methods import METHODS
from osfl.payload.kinds import Classifier, Payload
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.files import DamageError, read_json

MB = 10**6
FETCHING = "fetching the kit (MB)"


def fetch_kits(config: RunConfig, status: Status) -> None:
    """Fetch what the run uses of the hub's kits, unless it is there.

    The clients' parts too: their digests must be the clients' own.

    Raises:
        KitError, FileNotFoundError: no such kit, one of another kind, or the hub is not reached.
    """

    def progress(fetched: int, total: int) -> None:
        if status.state["phase"] != FETCHING:
            status.phase(FETCHING, total // MB)
        status.advance(fetched // MB, total // MB)

    for kit, parts in used_parts(config).values():
        if is_hub_id(kit):
            find_kit(kit, parts, progress)


def check_subject(config: RunConfig) -> None:
    """Check that no kit of digits, nor a copy of one, is used for other images.

    Raises:
        KitError: one is; the message names the next step.
        FileNotFoundError: there is no such kit.
    """
    if config.data.name == "digits":
        return
    for kit, _ in used_parts(config).values():
        if not is_hub_id(kit) and _is_of_digits(Path(find_kit(kit))):
            key = "feddisc.kit" if kit == config.feddisc.kit else "kit"
            raise KitError(kit_of_digits(key, kit, config.data.name))


def _is_of_digits(folder: Path) -> bool:
    """Whether a folder is a shipped kit, or one that `osfl kit train` made."""
    with suppress(FileNotFoundError):
        if folder.resolve() in [Path(find_kit(name)).resolve() for name in DIGITS_KITS]:
            return True
    with suppress(DamageError):
        recipe = read_json(folder / "training.json").get("recipe")
        return isinstance(recipe, dict) and "denoiser_steps" in recipe
    return False


def check_sampling_kit(config: RunConfig) -> None:
    """Whether the images can be drawn: the parts' files, settings and headers, in a moment.

    Raises:
        KitError, FileNotFoundError: no such kit, one of another kind, or a damaged one.
    """
    if not METHODS[config.method].samples:
        return
    kit = find_kit(config.sampling_kit)
    check_kit(kit, sampling_parts(config), image_condition=config.method == "feddisc")
    check_models_apart(config, "server")


def bind_to_kit(config: RunConfig, folder: RunFolder, status: Status) -> None:
    """Tie every step of the job to the files of the kit that it comes from, from the moment it has
    begun.

    A step that has left nothing yet may begin with another kit, a repaired one say. `kit.json` has
    each step's files and their SHA-256; computing those is a phase of its own, unless they are
    remembered.

    Raises:
        ConfigError: a step had begun with other files.
    """
    total = unread_kit_bytes(config) // MB
    read = 0
    if total:
        status.phase("reading the kit (MB)", total)

    def progress(count: int) -> None:
        nonlocal read
        read += count
        status.advance(min(read // MB, total), total)

    now = used_digests(config, progress)
    before = folder.kit_digests()
    for step in now:
        if folder.has_begun(step) and now[step] != before.get(step, now[step]):
            file = _differing(now[step], before[step])
            raise ConfigError(
                f"job-id = {folder.path.name!r}: its {step} were made with another {file} than the "
                "kit has now. Give the former kit to resume it, or take another job-id"
            )
    folder.store_kit_digests(now)


def _differing(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    return next(name for name in sorted({*now, *before}) if now.get(name) != before.get(name))


def kit_of_clients(config: RunConfig) -> dict[str, str]:
    """Digests of the weights that the clients need of the kit, where it is here."""
    with suppress(FileNotFoundError, KitError):  # check_server says so where it matters
        kit = find_kit(config.sampling_kit)
        return weights_digests(kit, kit_parts(config, kit))
    return {}


def kit_bytes(config: RunConfig, payload: Payload | None) -> int | None:
    """What a client had to fetch of the kit before it could begin.

    None where a part is named apart from the kit.
    """
    method = METHODS[config.method]
    begins = method.payload == "Classifier" or method.features
    if begins and config.classifier.init not in ("kit", "none"):
        return None
    if isinstance(payload, Classifier):  # one architecture of those that the run allows
        config = replace(
            config, classifier=replace(config.classifier, architecture=payload.architecture)
        )
    parts = kit_parts(config)
    if set(method.client_parts) - set(parts):
        return None
    if not parts:  # a kit that nobody needs may be missing
        return 0
    kit = find_kit(config.sampling_kit)
    return download_bytes(kit, kit_parts(config, kit))
