"""The synthetic images of a run, and the rows of their work units and manifest."""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.run_folder.job_files import HINT_RECREATE, JobFiles
from osfl.util.files import CorruptFileError, link_file, remove_empty_folders, write_atomically
from osfl.util.text import safe_name, sanitize

if TYPE_CHECKING:
    # Take seconds to import, and few readers need them
    import torch
    from PIL import Image

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
        return self.units_folder / f"{unit}.jsonl"

    @property
    def units_folder(self) -> Path:
        """The path of the row files' folder, whose time changes with every finished work unit."""
        return self.path / "units"

    def unit_files(self) -> list[Path]:
        """List the row files of all finished work units."""
        return list(self.units_folder.glob("*.jsonl"))

    def link_unit(self, other: "ImageStore", unit: Path) -> None:
        """Store a finished work unit of another run: images as hard links, or copies elsewhere."""
        for row in read_rows(unit):
            link_file(other.path / row["file"], self.path / row["file"])
        write_atomically(self.units_folder / unit.name, unit.read_bytes())

    def remove_unplanned_images(self) -> None:
        """Remove the image files that are in no row of the manifest.

        With `class-balance` another set of clients may have fewer images of a class.
        """
        if not self.manifest_file.is_file():
            return
        planned = {self.path / row["file"] for row in read_rows(self.manifest_file)}
        for image in (self.path / "images").rglob("*"):
            if not image.is_dir() and image not in planned:
                image.unlink()
        remove_empty_folders(self.path / "images")

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
    from torchvision.transforms.v2.functional import pil_to_tensor

    image = load_picture(file)
    if image is None:
        return None
    pixels: torch.Tensor = pil_to_tensor(image)
    return pixels


def load_picture(file: Path) -> "Image.Image | None":
    """Load a synthetic image for Pillow, without torch; None if it is missing or corrupt."""
    from PIL import Image

    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            return None
        content = file.read_bytes()
        if not _is_whole_png(content):
            return None
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.load()
            return image
    # Pillow's plugins raise exceptions of any kind for corrupt files
    except Exception:
        return None


def decode_png(content: bytes, max_side: int) -> "Image.Image | None":
    """Decode a PNG of an untrusted sender; None if it is corrupt, or larger than a square.

    Args:
        content: the file's bytes.
        max_side: the square's side in pixels, checked before the pixels are decoded.
    """
    from PIL import Image

    try:
        if not _is_whole_png(content, max_side):
            return None
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            return image.convert("RGB")
    # Pillow's plugins raise exceptions of any kind for corrupt files
    except Exception:
        return None


def _is_whole_png(content: bytes, max_side: int = MAX_IMAGE_PIXELS) -> bool:
    """Check a PNG's chunks, end and size without decoding its pixels.

    Pillow alone would accept a file that lacks its last 20 bytes, or has other bytes after them.
    """
    from PIL import Image

    stream = io.BytesIO(content)
    with Image.open(stream, formats=["PNG"]) as image:
        if image.width * image.height > MAX_IMAGE_PIXELS or max(image.size) > max_side:
            return False
        # Reads as far as the name of the last chunk
        image.verify()
    return content[stream.tell() - 8 :] == PNG_END


def thumbnail(content: bytes, side: int) -> bytes | None:
    """Fit a PNG into `side` pixels, as a new PNG without metadata; None if it is corrupt.

    A small image is enlarged by a whole factor, so that its pixels stay sharp.

    Args:
        content: the file's bytes.
    """
    from PIL import Image

    try:
        if not _is_whole_png(content):
            return None
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            picture = image.convert("RGB")
        factor = side // max(picture.size)
        if factor > 1:
            width, height = picture.size
            enlarged = (factor * width, factor * height)
            picture = picture.resize(enlarged, Image.Resampling.NEAREST)
        picture.thumbnail((side, side))
        buffer = io.BytesIO()
        picture.save(buffer, "png")
        return buffer.getvalue()
    # Pillow's plugins raise exceptions of any kind for corrupt files
    except Exception:
        return None


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
    rows = parse_rows(file.read_bytes())
    if not rows:
        raise CorruptFileError(f"{sanitize(file, 1000)} is corrupt; {HINT_RECREATE}")
    return rows


def parse_rows(content: bytes) -> list[dict[str, Any]]:
    """Parse a manifest's or a work unit's file, one row per image; [] if it is corrupt."""
    try:
        rows = [json.loads(line) for line in content.decode().splitlines()]
    except (ValueError, RecursionError):
        return []
    return rows if content.endswith(b"\n") and all(map(_is_row, rows)) else []


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    if not all(isinstance(row.get(key), kind) for key, kind in _ROW.items()):
        return False
    return is_image_name(row["file"])


def is_image_name(name: str) -> bool:
    """Return whether a path in the run's folder is below its images, and so no other file's."""
    # For a million images, pathlib would take seconds
    return name.startswith("images/") and ".." not in name.split("/")
