"""Cache of a client's decoded images between the rounds of a job.

Each message is handled by a new process, which would otherwise decode the images again.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osfl.config import DataConfig, NodeConfig
from osfl.data.load import Images
from osfl.data.parts import has_rows, list_folder
from osfl.util.files import read_record, write_atomically, write_record


def load_cached(folder: Path, key: str, load: Callable[[], Images]) -> Images:
    """Return the images cached under `key` with their pixels memory-mapped, else decode and cache
    them.

    Args:
        folder: the job's, on this machine. The cache is deleted with it.
        key: a digest of everything that determines the pixels.
    """
    pixels = folder / "pixels.npy"
    record = folder / "pixels.json"
    if (cached := _cached(pixels, record, key)) is not None:
        return cached
    images = load()
    if isinstance(images.pixels, torch.Tensor):
        # On a full disk the images are decoded in every round, as those too large for memory are
        with suppress(OSError):
            _store(pixels, record, key, images.pixels, images.labels)
    return images


def files_key(config: DataConfig, node: NodeConfig, split: str, size: int) -> str:
    """Return a digest of an image folder's files: their paths, sizes, mtimes and labels.

    The rendered digits have no files: their digest is of the settings alone.
    """
    files: list[Any] = []
    if node.data_dir and has_rows(config, node):
        files = sorted((str(file), file.stat().st_mtime_ns) for file in _files(node.data_dir))
    if config.name != "digits" and not has_rows(config, node):
        for file, label in list_folder(config, node, split):
            stat = file.stat()
            files.append([str(file), stat.st_size, stat.st_mtime_ns, label])
    inputs = [files, repr(config), node.partition_id, node.num_partitions, split, size]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _files(folder: str) -> Iterator[Path]:
    return (file for file in Path(folder).rglob("*") if file.is_file())


def _store(
    pixels: Path, record: Path, key: str, decoded: torch.Tensor, labels: torch.Tensor
) -> None:
    """Write owner-only files. `record` is written last and holds the pixels' checksum."""
    content = io.BytesIO()
    np.save(content, decoded.numpy(), allow_pickle=False)
    record.unlink(missing_ok=True)
    write_atomically(pixels, content.getvalue())
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    write_record(record, {"key": key, "pixels": digest, "labels": labels.tolist()})


def _cached(pixels: Path, record: Path, key: str) -> Images | None:
    """Return the cached images, or None if there are none under this key or they are corrupt."""
    try:
        header = read_record(record)
        if header["key"] != key or header["pixels"] != _digest_of(pixels):
            return None
        # Copy-on-write, so that writing to the tensor does not change the file
        mapped = np.load(pixels, mmap_mode="c", allow_pickle=False)
        return Images(torch.from_numpy(mapped), torch.tensor(header["labels"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
