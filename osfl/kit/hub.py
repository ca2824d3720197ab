"""Kits on the Hugging Face Hub: fetched once, then used like any local folder."""

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
from osfl.kit.digests import file_sha256
from osfl.kit.folder import MAX_SETTINGS_BYTES, SETTINGS, KitError, KitFolder
from osfl.util.text import sanitize

HUB_TIMEOUT_SECONDS = 10.0  # timeout for the hub's answer
# The small files of every part; the weights are chosen by them
SETTINGS_PATTERNS = (
    "model_index.json",
    *(f"*{name}" for name in SETTINGS),
    "*.safetensors.index.json",
    "*.safetensors.index.fp16.json",
)

Progress = Callable[[int, int], None]  # bytes fetched, total bytes

_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_STORAGE_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT)

log = logging.getLogger(__name__)


def fetch_kit(name: str, parts: Iterable[str], progress: Progress) -> Path:
    """Return the folder with some parts of a hub's kit; fetch what is missing.

    The settings come first. The weights follow only if the settings are those of a supported
    model, so that no gigabytes of an unsupported one are fetched.

    Args:
        name: `owner/name` or `owner/name@revision`; without a revision, the main branch as it was
            at the first fetch.
        parts: folders and files of the kit; () for its settings alone.
        progress: called while weights are fetched.

    Raises:
        KitError: the hub cannot be reached or has no such kit; or as `check_settings`.
    """
    with _kit_errors("kit", name):
        kit = _fetch_settings("kit", name)
        _fetch_parts(kit, name, tuple(parts), "", progress)
    return kit.path


def missing_bytes(name: str, parts: Iterable[str]) -> int:
    """Return how many bytes of a hub's kit `fetch_kit` would fetch.

    Raises:
        KitError: as `fetch_kit`.
    """
    with _kit_errors("kit", name):
        return sum(_missing_files(_fetch_settings("kit", name), name, tuple(parts), "").values())


def missing_model_bytes(name: str, kind: str, key: str) -> int:
    """Return how many bytes of a model `fetch_model` would fetch.

    Raises:
        KitError: as `fetch_model`.
    """
    with _kit_errors(key, name):
        model = _fetch_settings(key, name)
        return sum(_missing_files(model, name, (model.part_folder(kind),), kind).values())


def fetch_model(name: str, kind: str, key: str, progress: Progress) -> Path:
    """Fetch a single-part model, or that part of a kit, as `fetch_kit` does.

    Args:
        kind: the part, such as `captioner`; "" for the settings alone.
        key: of the configuration, for messages.
    """
    with _kit_errors(key, name):
        model = _fetch_settings(key, name)
        parts = (model.part_folder(kind),) if kind else ()
        _fetch_parts(model, name, parts, kind, progress)
    return model.path


@contextmanager
def _kit_errors(key: str, name: str) -> Iterator[None]:
    """Turn the errors of the hub's client into a KitError that names the key and a remedy."""
    setting = f"{key} = {name!r}"
    repository, _, revision = name.partition("@")
    try:
        yield
    except HFValidationError as error:
        raise KitError(f"{setting}: not a hub id: {error}") from None
    except (RepositoryNotFoundError, GatedRepoError):
        raise KitError(
            f"{setting}: the hub has no such model, or requires a login and accepted terms (hf "
            "auth login)"
        ) from None
    except RevisionNotFoundError:
        raise KitError(f"{setting}: the model has no revision {revision!r}") from None
    except KitError:
        raise
    # Such as a file name that points out of its folder
    except ValueError as error:
        raise KitError(f"{setting}: the hub's answer is invalid: {sanitize(error)}") from None
    except (httpx.HTTPError, OSError) as error:
        if getattr(error, "errno", None) in _STORAGE_ERRORS:
            raise KitError(
                f"{setting}: cannot be stored in {constants.HF_HUB_CACHE}: {error}. Free some "
                "space, or set HF_HOME to another folder"
            ) from None
        reason = re.sub(r"\s+", " ", str(error))[:300]
        raise KitError(
            f"{setting}: hub not reached ({reason}), and the model is not cached. Connect this "
            f"machine, or fetch it elsewhere (hf download {repository}) and give the folder's path"
        ) from None


def _fetch_settings(key: str, name: str) -> KitFolder:
    """Return the folder with the small files, from the cache or from the hub.

    It knows the names of the other files.
    """
    repository, _, revision = name.partition("@")
    revision = revision or "main"
    download = partial(
        snapshot_download, repository, revision=revision, allow_patterns=[*SETTINGS_PATTERNS]
    )
    try:
        folder = Path(download(local_files_only=True))
        # A copy made by an older library may be incomplete: it has no cached tree
        files = get_cached_repo_tree(repository, revision=folder.name)
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError):
        # `snapshot_download` itself has no timeout for an unresponsive hub
        HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
        listing = snapshot_download(
            repository, revision=revision, allow_patterns=[*SETTINGS_PATTERNS], dry_run=True
        )
        _check_sizes(f"{key} = {name!r}", listing)
        folder = Path(download())
        files = get_cached_repo_tree(repository, revision=folder.name)
    names = frozenset(file.path for file in files)
    return KitFolder(f"{key} = {name!r}", folder, names)


def _check_sizes(setting: str, files: Iterable[DryRunFileInfo]) -> None:
    """Check the sizes of settings files before the fetch, as the hub's HEAD responses state them.

    Raises:
        KitError: a file is larger than any real one.
    """
    for file in files:
        size = file.file_size or 0
        if size > MAX_SETTINGS_BYTES:
            raise KitError(
                f"{setting}: {sanitize(file.filename, 200)} has {size / 1e6:,.0f} MB; settings "
                f"must have at most {MAX_SETTINGS_BYTES / 1e6:,.0f} MB. The model is not fetched"
            )


def _fetch_parts(
    model: KitFolder, name: str, parts: tuple[str, ...], kind: str, progress: Progress
) -> None:
    """Fetch the files that are loaded of some parts, one after the other.

    An interrupted download is resumed.

    Raises:
        KitError: as `check_settings`, or a file's SHA-256 differs from the one that the hub states.
    """
    sizes = _missing_files(model, name, parts, kind)
    repository = name.partition("@")[0]
    stated = _stated_digests(model, repository, [*sizes])
    for file in sorted(
        {file for part in parts for file in model.loaded_files(part, kind)} - {*sizes}
    ):
        _check_digest(model, file, "")
    commit = model.path.name
    total = sum(sizes.values())
    if not sizes:
        return
    log.info("fetching %.1f MB of %s: %s", total / 1e6, name, ", ".join(sizes))
    previous = 0
    for file in sizes:
        bar = _progress_bar(partial(_report, progress, previous, total))
        hf_hub_download(repository, file, revision=commit, tqdm_class=bar)
        _check_digest(model, file, stated.get(file, ""))
        previous += sizes[file]
        progress(previous, total)


def _stated_digests(model: KitFolder, repository: str, files: list[str]) -> dict[str, str]:
    """Return the SHA-256 that the hub's listing states for large files."""
    if not files:
        return {}
    paths = HfApi().get_paths_info(repository, files, revision=model.path.name)
    return {path.path: path.lfs.sha256 for path in paths if isinstance(path, RepoFile) and path.lfs}


def _check_digest(model: KitFolder, file: str, stated: str) -> None:
    """Compare a fetched file with the SHA-256 that the hub states.

    The client library names the cached copy of a large file by the hub's `X-Linked-Etag`, its
    SHA-256, but does not verify it.

    Args:
        stated: the digest in the hub's listing; "" if there is none.

    Raises:
        KitError: the digests differ; the copy is removed.
    """
    link = model.path / file
    copy = link.resolve()
    expected = {stated.lower(), *_SHA256.findall(copy.name)} - {""}
    if expected and expected != {file_sha256(copy)}:
        link.unlink()
        copy.unlink(missing_ok=True)
        raise KitError(
            f"{model.setting}: {sanitize(file, 200)} as fetched has another SHA-256 than the hub "
            "states. It was corrupted or changed in transit, and has been removed. Fetch it again"
        )


def _missing_files(
    model: KitFolder, name: str, parts: tuple[str, ...], kind: str
) -> dict[str, int]:
    """Return the files of some parts that are not cached, with their sizes in bytes.

    Raises:
        KitError: as `check_settings`.
    """
    if not parts:
        return {}
    check_settings(model, parts, kind)
    needed = {file for part in parts for file in model.loaded_files(part, kind)}
    files = get_cached_repo_tree(name.partition("@")[0], revision=model.path.name)
    sizes = {file.path: file.size for file in files if file.path in needed}
    return {file: sizes[file] for file in sorted(sizes) if not (model.path / file).is_file()}


def _report(progress: Progress, previous: int, total: int, fetched: float) -> None:
    progress(min(previous + int(fetched), total), total)


def _progress_bar(report: Callable[[float], None]) -> type[tqdm]:
    """Return a class of progress bars that also report how many bytes were fetched."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.fetched = float(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self.fetched += n or 0
            report(self.fetched)
            is_displayed: bool | None = super().update(n)
            return is_displayed

    return Bar
