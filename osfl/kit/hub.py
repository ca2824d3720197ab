"""Kits of the Hugging Face hub: fetched once, then folders like any other."""

import errno
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import (
    DryRunFileInfo,
    HfApi,
    constants,
    get_cached_repo_tree,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from tqdm.auto import tqdm

from osfl.kit.compatibility import check_settings
from osfl.kit.digests import sha256_of
from osfl.kit.folder import MOST_SETTINGS_BYTES, SETTINGS, KitError, KitFolder
from osfl.util.text import plain

HUB_SECONDS = 10.0  # for the hub's answer
# The small files of every part, by which the others are chosen.
SMALL = (
    "model_index.json",
    *(f"*{name}" for name in SETTINGS),
    "*.safetensors.index.json",
    "*.safetensors.index.fp16.json",
)

Progress = Callable[[int, int], None]  # bytes fetched, of how many

_SHA256 = re.compile(r"^[0-9a-f]{64}$")

log = logging.getLogger(__name__)


def fetch_kit(name: str, parts: Iterable[str], progress: Progress) -> Path:
    """The folder with some parts of a hub's kit, fetched unless they are there.

    Settings come first. The weights follow if those are of a model that OSFL takes: nobody waits
    for gigabytes of another.

    Args:
        name: `owner/name` or `owner/name@revision`; without a revision, the main branch as it was
            when it was first fetched.
        parts: folders and files of it; () for its settings alone.
        progress: called while weights are fetched.

    Raises:
        KitError: the hub is not reached or has nothing of that name; or as `check_settings`.
    """
    with _told("kit", name):
        kit = _settings("kit", name)
        _fetch_parts(kit, name, tuple(parts), "", progress)
    return kit.path


def missing_bytes(name: str, parts: Iterable[str]) -> int:
    """How many bytes of a hub's kit `fetch_kit` would fetch.

    Raises:
        KitError: as `fetch_kit`.
    """
    with _told("kit", name):
        return sum(_missing(_settings("kit", name), name, tuple(parts), "").values())


def missing_model_bytes(name: str, kind: str, key: str) -> int:
    """How many bytes of a model `fetch_model` would fetch.

    Raises:
        KitError: as `fetch_model`.
    """
    with _told(key, name):
        model = _settings(key, name)
        return sum(_missing(model, name, (model.place_of(kind),), kind).values())


def fetch_model(name: str, kind: str, key: str, progress: Progress) -> Path:
    """As `fetch_kit`, of a model that is one part alone, or of that part of a kit.

    Args:
        kind: the part, such as `captioner`; "": the settings alone.
        key: of the configuration, for messages.
    """
    with _told(key, name):
        model = _settings(key, name)
        parts = (model.place_of(kind),) if kind else ()
        _fetch_parts(model, name, parts, kind, progress)
    return model.path


@contextmanager
def _told(key: str, name: str) -> Iterator[None]:
    """What the hub's client raises, in words that name the key and the way out.

    Raises:
        KitError: in place of it.
    """
    setting = f"{key} = {name!r}"
    repository, _, revision = name.partition("@")
    try:
        yield
    except HFValidationError as error:
        raise KitError(f"{setting}: no hub id: {error}") from None
    except (RepositoryNotFoundError, GatedRepoError):
        raise KitError(
            f"{setting}: the hub has no such model, or shows it only to who is logged in and has "
            "accepted its terms (hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise KitError(f"{setting}: the model has no revision {revision!r}") from None
    except KitError:
        raise
    # Such as a file's name that leads out of its folder
    except ValueError as error:
        raise KitError(f"{setting}: the hub's answer cannot be used: {plain(error)}") from None
    except (httpx.HTTPError, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise KitError(
                f"{setting}: cannot be kept in {constants.HF_HUB_CACHE}: {error}. Make room, or "
                "name another place with HF_HOME"
            ) from None
        reason = re.sub(r"\s+", " ", str(error))[:300]
        raise KitError(
            f"{setting}: hub not reached ({reason}), and it was not fetched before. Connect this "
            f"machine, or fetch it elsewhere (hf download {repository}) and give the folder's path"
        ) from None


def _settings(key: str, name: str) -> KitFolder:
    """The folder with the small files, as they were fetched before, else from the hub.

    It knows the names of the other files.
    """
    repository, _, revision = name.partition("@")
    revision = revision or "main"
    found = partial(snapshot_download, repository, revision=revision, allow_patterns=[*SMALL])
    try:
        folder = Path(found(local_files_only=True))
        # Of a copy that an older library made it is not known whether it is whole
        files = get_cached_repo_tree(repository, revision=folder.name)
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError):
        # Without it, `snapshot_download` waits for a silent hub without end
        HfApi().model_info(repository, revision=revision, timeout=HUB_SECONDS)
        seen = snapshot_download(
            repository, revision=revision, allow_patterns=[*SMALL], dry_run=True
        )
        _check_sizes(f"{key} = {name!r}", seen)
        folder = Path(found())
        files = get_cached_repo_tree(repository, revision=folder.name)
    names = frozenset(file.path for file in files)
    return KitFolder(f"{key} = {name!r}", folder, names)


def _check_sizes(setting: str, files: Iterable[DryRunFileInfo]) -> None:
    """Check the sizes of settings that would be fetched, by the hub's answers to HEAD requests.

    Raises:
        KitError: one is larger than any real one.
    """
    for file in files:
        size = file.file_size or 0
        if size > MOST_SETTINGS_BYTES:
            raise KitError(
                f"{setting}: {plain(file.filename, 200)} has {size / 1e6:,.0f} MB; "
                f"settings have at most {MOST_SETTINGS_BYTES / 1e6:,.0f}, and it is not fetched"
            )


def _fetch_parts(
    model: KitFolder, name: str, parts: tuple[str, ...], kind: str, progress: Progress
) -> None:
    """Fetch the files that are loaded of some parts, one after the other.

    A file that was begun goes on where it was.

    Raises:
        KitError: as `check_settings`, or a file is not the one that the hub states.
    """
    sizes = _missing(model, name, parts, kind)
    repository = name.partition("@")[0]
    stated = _stated_digests(model, repository, [*sizes])
    for file in sorted({file for part in parts for file in model.loaded(part, kind)} - {*sizes}):
        _check_digest(model, file, "")
    commit = model.path.name
    total = sum(sizes.values())
    if not sizes:
        return
    log.info("fetching %.1f MB of %s: %s", total / 1e6, name, ", ".join(sizes))
    before = 0
    for file in sizes:
        bar = _bar(partial(_report, progress, before, total))
        hf_hub_download(repository, file, revision=commit, tqdm_class=bar)
        _check_digest(model, file, stated.get(file, ""))
        before += sizes[file]
        progress(before, total)


def _stated_digests(model: KitFolder, repository: str, files: list[str]) -> dict[str, str]:
    """Return the SHA-256 that the hub's listing states of large files."""
    if not files:
        return {}
    paths = HfApi().get_paths_info(repository, files, revision=model.path.name)
    return {path.path: path.lfs.sha256 for path in paths if isinstance(path, RepoFile) and path.lfs}


def _check_digest(model: KitFolder, file: str, stated: str) -> None:
    """Hold a fetched file against the SHA-256 that the hub states.

    The client library names a large file's copy by the hub's `X-Linked-Etag`, its SHA-256, and does
    not compute it.

    Args:
        stated: in the hub's listing; "" where it says none.

    Raises:
        KitError: it is another; the copy is removed.
    """
    link = model.path / file
    copy = link.resolve()
    wanted = {stated.lower(), *_SHA256.findall(copy.name)} - {""}
    if wanted and wanted != {sha256_of(copy)}:
        link.unlink()
        copy.unlink(missing_ok=True)
        raise KitError(
            f"{model.setting}: {plain(file, 200)} as fetched has another SHA-256 than the hub "
            "states; it was damaged or changed on its way, and is removed. Fetch it again"
        )


def _missing(model: KitFolder, name: str, parts: tuple[str, ...], kind: str) -> dict[str, int]:
    """The files of some parts that are not here, and their bytes.

    Raises:
        KitError: as `check_settings`.
    """
    if not parts:
        return {}
    check_settings(model, parts, kind)
    wanted = {file for part in parts for file in model.loaded(part, kind)}
    files = get_cached_repo_tree(name.partition("@")[0], revision=model.path.name)
    sizes = {file.path: file.size for file in files if file.path in wanted}
    return {file: sizes[file] for file in sorted(sizes) if not (model.path / file).is_file()}


def _report(progress: Progress, before: int, total: int, fetched: float) -> None:
    progress(min(before + int(fetched), total), total)


def _bar(report: Callable[[float], None]) -> type[tqdm]:
    """A file's bar of progress that also tells how many bytes were fetched."""

    class Bar(tqdm):
        def __init__(self, *given: Any, **named: Any):
            super().__init__(*given, **named)
            self.fetched = float(named.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self.fetched += n or 0
            report(self.fetched)
            return super().update(n)

    return Bar
