"""Export of a run's synthetic images as WebDataset shards.

Shards are tar files, which a training elsewhere reads sequentially.
"""

import hashlib
import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.config import ConfigError
from osfl.run_folder.image_store import parse_rows
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import check_checksum, image_problem
from osfl.util.files import (
    CorruptFileError,
    open_private,
    parse_json,
    read_bounded,
    write_atomically,
)
from osfl.util.object_store import Bucket, is_object_store, open_bucket

LISTING = "shards.json"
MAX_LISTING_BYTES = 10_000


def write_shards(
    run: Path,
    out: str | Path,
    size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write every image of a run's manifest, shuffled with a fixed seed.

    The images are shuffled because shards are read sequentially. A sample is `<number>.png`,
    `<number>.cls` (the label) and `<number>.json` (client, class, seed of the noise). The same run
    gives the same bytes. A repeated command writes only the shards that are missing.

    Args:
        run: the run's folder.
        out: the folder or s3:// address for the shards, `00000.tar` and so on, and for
            `shards.json`, which identifies their manifest.
        size: images per shard.
        progress: called with (images that are there, all images).

    Returns:
        the paths or addresses of the shards.

    Raises:
        ConfigError: the run has no manifest yet, an image is missing or corrupt, `out` contains
            other shards, or the object store refuses.
        CorruptFileError: the manifest or `shards.json` is corrupt.
    """
    manifest = RunFolder(run).manifest_file
    content = _read_manifest(run, manifest)
    identity = {"manifest": hashlib.sha256(content).hexdigest(), "size": size}
    # A million parsed rows would take a gigabyte
    lines = content.splitlines(keepends=True)
    # Before anything is written; the others are parsed shard by shard
    _rows(manifest, lines[-1:])
    place = open_bucket(str(out)) if is_object_store(out) else _Folder(Path(out))
    finished = _check_place(place, identity, out)
    random.Random(0).shuffle(lines)
    names = []
    for number, first in enumerate(range(0, len(lines), size)):
        name = f"{number:05d}.tar"
        group = lines[first : first + size]
        if name not in finished:
            _write_shard(run, place, name, _rows(manifest, group), first)
        names.append(f"{str(out).rstrip('/')}/{name}")
        progress(first + len(group), len(lines))
    return names


def _read_manifest(run: Path, manifest: Path) -> bytes:
    """Return a manifest's content.

    Raises:
        ConfigError: the run has none yet.
        CorruptFileError: it is corrupt.
    """
    if not os.path.lexists(manifest):
        raise ConfigError(
            f"{manifest} does not exist; the run has not finished its synthesis, or its method "
            "synthesizes no images"
        )
    # Rows alone cannot show if whole lines are missing
    check_checksum(run, manifest.name)
    return manifest.read_bytes()


@dataclass(frozen=True)
class _Folder:
    """A folder of this machine, used as a `Bucket`."""

    path: Path

    def names(self) -> set[str]:
        return set(os.listdir(self.path)) if self.path.is_dir() else set()

    def read(self, name: str, most_bytes: int) -> bytes:
        return read_bounded(self.path / name, most_bytes)

    def write(self, name: str, content: bytes) -> None:
        write_atomically(self.path / name, content)

    def scratch(self) -> nullcontext[Path]:
        # On the same disk, so that a file can be renamed
        return nullcontext(self.path)

    def upload(self, file: Path, name: str) -> None:
        os.replace(file, self.path / name)


def _check_place(
    place: Bucket | _Folder, identity: Mapping[str, object], out: str | Path
) -> set[str]:
    """Return the names of the shards that are there, after `shards.json` is.

    Raises:
        ConfigError: there are other shards.
        CorruptFileError: `shards.json` is corrupt.
    """
    names = place.names()
    shards = {name for name in names if name.endswith(".tar")}
    existing = None
    if LISTING in names:
        try:
            existing = parse_json(place.read(LISTING, MAX_LISTING_BYTES))
        except ValueError:
            raise CorruptFileError(
                f"{out}/{LISTING} is corrupt; set an empty folder, or remove this file if its "
                "shards are not needed"
            ) from None
    if existing != identity and (existing or shards):
        raise ConfigError(
            f"{out} has shards of another run, or of another size; set an empty folder"
        )
    if existing is None:
        place.write(LISTING, json.dumps(identity).encode())
    return shards


def _rows(manifest: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    rows = parse_rows(b"".join(lines))
    if not rows:
        raise CorruptFileError(f"{manifest} is corrupt; {HINT_RECREATE}")
    return rows


def _write_shard(
    run: Path, place: Bucket | _Folder, name: str, rows: Sequence[dict[str, Any]], first: int
) -> None:
    with ThreadPoolExecutor() as readers:
        for problem in readers.map(lambda row: image_problem(run, row), rows):
            if problem:
                raise ConfigError(f"{problem}; {HINT_RECREATE}")
    with place.scratch() as folder:
        part = Path(folder) / f"{name}.part"
        try:
            with open_private(part, "wb") as tar, tarfile.open(fileobj=tar, mode="w") as shard:
                _add_samples(shard, run, rows, first)
            place.upload(part, name)
        finally:
            part.unlink(missing_ok=True)


def _add_samples(
    shard: tarfile.TarFile, run: Path, rows: Sequence[dict[str, Any]], first: int
) -> None:
    for number, row in enumerate(rows, start=first):
        metadata = {key: row[key] for key in ("client", "class", "seed")}
        label = Path(row["file"]).parent.name.partition("-")[0]
        _add(shard, f"{number:08d}.png", (run / row["file"]).read_bytes())
        _add(shard, f"{number:08d}.cls", str(int(label)).encode())
        _add(shard, f"{number:08d}.json", json.dumps(metadata).encode())


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    # Without time and owner, so that the same images give the same bytes
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
