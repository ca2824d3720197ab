"""Export of a run's synthetic images as WebDataset shards.

Shards are tar files, which a training elsewhere reads sequentially.
"""

import hashlib
import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from osfl.config import ConfigError
from osfl.run_folder.image_store import read_rows
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import check_checksum, image_problem
from osfl.util.files import make_private_folder, open_private, read_json, write_atomically


def write_shards(
    run: Path, out: Path, size: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Write every image of a run's manifest, shuffled with a fixed seed.

    The images are shuffled because shards are read sequentially. A sample is `<number>.png`,
    `<number>.cls` (the label) and `<number>.json` (client, class, seed of the noise). The same run
    gives the same bytes.

    Args:
        run: the run's folder.
        out: the folder for the shards, `00000.tar` and so on, and for `shards.json`, which
            identifies their manifest.
        size: images per shard.
        progress: called with (images written, all images).

    Returns:
        the files of the shards.

    Raises:
        ConfigError: the run has no manifest yet, an image is missing or corrupt, or `out` contains
            other shards.
        CorruptFileError: the manifest or `shards.json` is corrupt.
    """
    manifest = RunFolder(run).manifest_file
    if not os.path.lexists(manifest):
        raise ConfigError(
            f"{manifest} does not exist; the run has not finished its synthesis, or its method "
            "synthesizes no images"
        )
    # Rows alone cannot show if whole lines are missing
    check_checksum(run, manifest.name)
    rows = read_rows(manifest)
    listing = out / "shards.json"
    identity = {"manifest": hashlib.sha256(manifest.read_bytes()).hexdigest(), "size": size}
    hint = "set an empty folder, or remove this file if its shards are not needed"
    existing = read_json(listing, hint=hint) if os.path.lexists(listing) else None
    if existing != identity and (existing or any(out.glob("*.tar"))):
        raise ConfigError(
            f"{out} has shards of another run, or of another size; set an empty folder"
        )
    random.Random(0).shuffle(rows)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    files = [out / f"{number:05d}.tar" for number in range(len(groups))]
    make_private_folder(out)
    write_atomically(listing, json.dumps(identity).encode())
    for number, (file, group) in enumerate(zip(files, groups, strict=True)):
        _write_shard(run, file, group, number * size)
        progress(min((number + 1) * size, len(rows)), len(rows))
    return files


def _write_shard(run: Path, file: Path, rows: Sequence[dict[str, Any]], first: int) -> None:
    with ThreadPoolExecutor() as readers:
        for problem in readers.map(lambda row: image_problem(run, row), rows):
            if problem:
                raise ConfigError(f"{problem}; {HINT_RECREATE}")
    part = file.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        with open_private(part, "wb") as tar, tarfile.open(fileobj=tar, mode="w") as shard:
            for number, row in enumerate(rows, start=first):
                metadata = {key: row[key] for key in ("client", "class", "seed")}
                label = Path(row["file"]).parent.name.partition("-")[0]
                _add(shard, f"{number:08d}.png", (run / row["file"]).read_bytes())
                _add(shard, f"{number:08d}.cls", str(int(label)).encode())
                _add(shard, f"{number:08d}.json", json.dumps(metadata).encode())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    # Without time and owner, so that the same images give the same bytes
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
