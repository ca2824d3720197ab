"""A run's synthetic images as WebDataset shards.

Tar files that a training elsewhere reads in sequence.
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
from osfl.run_folder.layout import read_rows
from osfl.run_folder.verify import check_sealed, picture_problem
from osfl.util.files import open_private, private_folder, read_json, write_atomically


def write_shards(
    run: Path, out: Path, size: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Write every image of a run's manifest, in a random order that is always the same, since
    shards are read from front to end.

    A sample is `<number>.png`, `<number>.cls` (the label) and `<number>.json` (client, class, seed
    of the noise). The same run gives the same bytes.

    Args:
        run: the run's folder.
        out: folder of the shards, `00000.tar` and so on, and of `shards.json`, which says what they
            are of.
        size: images in a shard.
        progress: called with (images written, images in all).

    Raises:
        ConfigError: the run has no manifest yet, an image is not as it was written, or `out`
            already has shards of something else.
        DamageError: the manifest, or `shards.json`, is not as it was written.
    """
    manifest = run / "manifest.jsonl"
    if not os.path.lexists(manifest):
        raise ConfigError(
            f"{manifest} does not exist; the run has not finished its synthesis, or its method "
            "draws no images"
        )
    check_sealed(run, manifest.name)  # a whole number of lines may be missing
    rows = read_rows(manifest)
    listing = out / "shards.json"
    about = {"manifest": hashlib.sha256(manifest.read_bytes()).hexdigest(), "size": size}
    cure = "name an empty folder, or remove it if its shards are not wanted"
    known = read_json(listing, cure=cure) if os.path.lexists(listing) else None
    if known != about and (known or any(out.glob("*.tar"))):
        raise ConfigError(
            f"{out} has shards of another run, or of another size; name an empty folder"
        )
    random.Random(0).shuffle(rows)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    files = [out / f"{number:05d}.tar" for number in range(len(groups))]
    private_folder(out)
    write_atomically(listing, json.dumps(about).encode())
    for number, (file, group) in enumerate(zip(files, groups, strict=True)):
        _write_shard(run, file, group, number * size)
        progress(min((number + 1) * size, len(rows)), len(rows))
    return files


def _write_shard(run: Path, file: Path, rows: Sequence[dict[str, Any]], first: int) -> None:
    with ThreadPoolExecutor() as readers:
        for problem in readers.map(lambda row: picture_problem(run, row), rows):
            if problem:
                raise ConfigError(f"{problem}; the same `osfl run` again makes it anew")
    part = file.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        with open_private(part, "wb") as tar, tarfile.open(fileobj=tar, mode="w") as shard:
            for number, row in enumerate(rows, start=first):
                about = {key: row[key] for key in ("client", "class", "seed")}
                label = Path(row["file"]).parent.name.partition("-")[0]
                _add(shard, f"{number:08d}.png", (run / row["file"]).read_bytes())
                _add(shard, f"{number:08d}.cls", str(int(label)).encode())
                _add(shard, f"{number:08d}.json", json.dumps(about).encode())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # without a time or an owner
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
