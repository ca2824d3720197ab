"""The synthetic images of a run, and the rows of their work units and manifest."""

import hashlib
import io
import json
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from osfl.run_folder.job_files import HINT_RECREATE, JobFiles
from osfl.util.files import CorruptFileError
from osfl.util.text import safe_name, sanitize

if TYPE_CHECKING:
    # Takes seconds to import, and few readers need it
    import torch

_ROW = {"file": str, "client": str, "class": str, "seed": int, "sha256": str}
# Stable Diffusion's images have a million pixels; several are read in parallel
MAX_IMAGE_PIXELS = 4096 * 4096
MAX_IMAGE_BYTES = 4 * MAX_IMAGE_PIXELS
# A PNG's last chunk: length, name, checksum
PNG_END = b"\0\0\0\0IEND" + bytes.fromhex("ae426082")


class ImageStore(JobFiles):
    """Owner of `images/`, `units/`, `manifest.jsonl` and `timings.jsonl`."""

    def unit_file(self, unit: str) -> Path:
        """Return the path of a work unit's rows, which exists if and only if the unit is done."""
        return self.path / "units" / f"{unit}.jsonl"

    def unit_files(self) -> list[Path]:
        """List the row files of all finished work units."""
        return list((self.path / "units").glob("*.jsonl"))

    @property
    def manifest_file(self) -> Path:
        """The path of the rows of all images, in the plan's order."""
        return self.path / "manifest.jsonl"

    @property
    def timings_file(self) -> Path:
        """The path of the work units' times: name, number of images and seconds per line."""
        return self.path / "timings.jsonl"


def image_name(client: str, label: int, class_name: str, index: int) -> str:
    """Return an image's path in the run's folder. The class name is made safe for a disk."""
    return f"images/{client}/{label:03d}-{safe_name(class_name)}/{index:05d}.png"


def read_image(file: Path) -> "torch.Tensor | None":
    """Read a synthetic image as uint8 [3, H, W]; None if the file is missing or corrupt."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            return None
        content = file.read_bytes()
        if not _is_whole_png(content):
            return None
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            return pil_to_tensor(image)
    # Pillow's plugins raise exceptions of any kind for corrupt files
    except Exception:
        return None


def _is_whole_png(content: bytes) -> bool:
    """Check a PNG's chunks, end and size without decoding its pixels.

    Pillow alone would accept a file that lacks its last 20 bytes, or has other bytes after them.
    """
    from PIL import Image

    stream = io.BytesIO(content)
    with Image.open(stream, formats=["PNG"]) as image:
        if image.width * image.height > MAX_IMAGE_PIXELS:
            return False
        # Reads as far as the name of the last chunk
        image.verify()
    return content[stream.tell() - 8 :] == PNG_END


def image_digest(picture: "torch.Tensor") -> str:
    """Return the SHA-256 of an image's pixels."""
    return hashlib.sha256(picture.contiguous().numpy().tobytes()).hexdigest()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a manifest or of a work unit, one per image.

    Raises:
        CorruptFileError: the file is missing or corrupt.
        PermissionError: this user may not read it.
    """
    if not os.path.isfile(file):
        problem = "is not a file" if os.path.lexists(file) else "is missing"
        raise CorruptFileError(f"{sanitize(file, 1000)} {problem}; {HINT_RECREATE}")
    content = file.read_bytes()
    try:
        rows = [json.loads(line) for line in content.splitlines()]
    except (ValueError, RecursionError):
        rows = []
    if not rows or not content.endswith(b"\n") or not all(map(_is_row, rows)):
        raise CorruptFileError(f"{sanitize(file, 1000)} is corrupt; {HINT_RECREATE}")
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    if not all(isinstance(row.get(key), kind) for key, kind in _ROW.items()):
        return False
    path = PurePosixPath(row["file"])
    # A row must not make a reader open a file outside of the run's images
    return path.parts[:1] == ("images",) and ".." not in path.parts
