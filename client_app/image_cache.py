"""A client's decoded images, kept between the rounds of a job.

Each message is a process of its own, which would decode them again.
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


def load_once(folder: Path, key: str, load: Callable[[], Images]) -> Images:
    """The images that were kept under this key, their pixels mapped into memory.

    Else those that `load` decodes.

    Args:
        folder: of the job, on this machine; what is kept there is forgotten with it.
        key: of everything that the pixels come from.
    """
    pixels = folder / "pixels.npy"
    about = folder / "pixels.json"
    if (kept := _kept(pixels, about, key)) is not None:
        return kept
    images = load()
    if isinstance(images.pixels, torch.Tensor):
        # A full disk: then they are decoded each time, as those are that memory does not hold
        with suppress(OSError):
            _keep(pixels, about, key, images.pixels, images.labels)
    return images


def files_key(config: DataConfig, node: NodeConfig, split: str, size: int) -> str:
    """Of an image folder's files: their paths, sizes, times and labels.

    Of the digits, which are drawn, of the settings alone.
    """
    files: list[Any] = []
    if node.data_dir and has_rows(config, node):
        files = sorted((str(file), file.stat().st_mtime_ns) for file in _files(node.data_dir))
    if config.name != "digits" and not has_rows(config, node):
        for file, label in list_folder(config, node, split):
            stat = file.stat()
            files.append([str(file), stat.st_size, stat.st_mtime_ns, label])
    about = [files, repr(config), node.partition_id, node.num_partitions, split, size]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _files(folder: str) -> Iterator[Path]:
    return (file for file in Path(folder).rglob("*") if file.is_file())


def _keep(pixels: Path, about: Path, key: str, decoded: torch.Tensor, labels: torch.Tensor) -> None:
    """Readable by their owner alone; `about` comes last, and vouches for the pixels."""
    content = io.BytesIO()
    np.save(content, decoded.numpy(), allow_pickle=False)
    about.unlink(missing_ok=True)
    write_atomically(pixels, content.getvalue())
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    write_record(about, {"key": key, "pixels": digest, "labels": labels.tolist()})


def _kept(pixels: Path, about: Path, key: str) -> Images | None:
    """The images that were kept; None: there are none under this key, or they are damaged."""
    try:
        header = read_record(about)
        if header["key"] != key or header["pixels"] != _digest_of(pixels):
            return None
        # A copy on writing: nobody changes the file by way of the tensor
        mapped = np.load(pixels, mmap_mode="c", allow_pickle=False)
        return Images(torch.from_numpy(mapped), torch.tensor(header["labels"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
