"""The report's pictures as data URLs, few and small enough for a page that opens anywhere."""

import base64
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MAX_CLASSES = 12
MAX_CLIENTS = 12
# Images per class in the grid that opens on a click
MAX_IMAGES_PER_CLASS = 8
# Side of the first images in pixels; smaller if there are many
SIDE = 128
GRID_SIDE = 64
# A PNG of noise has 3 bytes per pixel, and 4 as base64, so that these are at most 1.6 MB
FIRST_PIXELS = 24 * SIDE * SIDE
MAX_GRID_BYTES = 1_800_000
BLUE = (36, 99, 194)

# Files or data URLs by client, then class
Grid = dict[str, dict[str, list[str]]]


@dataclass
class Gallery:
    """The images of a run that the page shows.

    Attributes:
        classes: the classes shown, in the run's order.
        first: data URL of the first image by client, then class.
        grid: several images of each class, for a grid that opens on a click; {} if no class has
            two images.
        per_class: the largest number of images of a class in `grid`.
        small: whether the images are smaller than they are shown.
        excerpt: text that says how many clients and classes are shown; "" if all are.
    """

    classes: list[str] = field(default_factory=list)
    first: dict[str, dict[str, str]] = field(default_factory=dict)
    grid: Grid = field(default_factory=dict)
    per_class: int = 0
    small: bool = False
    excerpt: str = ""

    @property
    def has_public_domains(self) -> bool:
        """Return whether a row shows a public domain, whose name has a dot unlike a client's."""
        return any("." in owner for owner in self.first)


def gallery_of(folder: Path, manifest: Iterable[str], classes: Sequence[str]) -> Gallery:
    """Select and encode the pictures of a run.

    Args:
        folder: the run's folder.
        manifest: the lines of its manifest.
        classes: the run's class names.
    """
    files, class_count = _files(manifest)
    if not files:
        return Gallery()
    clients = sorted(files)[:MAX_CLIENTS]
    names = {name for client in clients for name in files[client]}
    shown_classes = [name for name in classes if name in names][:MAX_CLASSES]
    shown_files = {}
    for client in clients:
        by_class = files[client]
        shown_files[client] = {name: by_class[name] for name in shown_classes if name in by_class}
    with ThreadPoolExecutor() as readers:
        first = _first(folder, shown_files, readers)
        grid = _grid(folder, shown_files, readers)
    gallery = Gallery(shown_classes, first, grid)
    gallery.per_class = max(
        (len(urls) for row in grid.values() for urls in row.values()), default=0
    )
    gallery.small = _is_small(folder / next(iter(shown_files[clients[0]].values()))[0])
    if len(files) > len(clients) or class_count > len(shown_classes):
        gallery.excerpt = (
            f"{len(clients)} of {len(files)} clients and {len(shown_classes)} of {class_count} "
            "classes"
        )
    return gallery


def _files(manifest: Iterable[str]) -> tuple[Grid, int]:
    """Return the first files of every client and class, and the number of classes."""
    files: Grid = defaultdict(lambda: defaultdict(list))
    names = set()
    for line in manifest:
        row = json.loads(line)
        names.add(row["class"])
        class_files = files[row["client"]][row["class"]]
        if len(class_files) < MAX_IMAGES_PER_CLASS:
            class_files.append(row["file"])
    return files, len(names)


def _first(folder: Path, files: Grid, readers: ThreadPoolExecutor) -> dict[str, dict[str, str]]:
    cells = [(client, name, row[name][0]) for client, row in files.items() for name in row]
    side = min(SIDE, math.isqrt(FIRST_PIXELS // max(1, len(cells))))
    urls = readers.map(lambda cell: data_url(folder / cell[2], side, "png"), cells)
    first: dict[str, dict[str, str]] = {client: {} for client in files}
    for (client, name, _), url in zip(cells, urls, strict=True):
        first[client][name] = url
    return first


def _grid(folder: Path, files: Grid, readers: ThreadPoolExecutor) -> Grid:
    """Add one image of every class at a time, as long as all of them fit."""
    grid: Grid = {}
    for client, row in files.items():
        grid[client] = {name: [] for name in row}
    size = 0
    for number in range(MAX_IMAGES_PER_CLASS):
        cells = [
            (client, name, row[name][number])
            for client, row in files.items()
            for name in row
            if len(row[name]) > number
        ]
        urls = list(readers.map(lambda cell: data_url(folder / cell[2], GRID_SIDE, "jpeg"), cells))
        size += sum(map(len, urls))
        if size > MAX_GRID_BYTES or not urls:
            break
        for (client, name, _), url in zip(cells, urls, strict=True):
            grid[client][name].append(url)
    several = any(len(urls) > 1 for row in grid.values() for urls in row.values())
    return grid if several else {}


def data_url(file: Path, side: int, kind: str) -> str:
    """Encode an image file, shrunk to at most `side` pixels, as a data URL that is safe in HTML."""
    from PIL import Image

    with Image.open(file) as image:
        image.thumbnail((side, side))
        return image_url(image if kind == "png" else image.convert("RGB"), kind)


def matrix_url(shares: np.ndarray) -> str:
    """Encode a confusion matrix as a picture, one pixel per cell.

    The pixels are transparent, so that they suit a light and a dark page.

    Args:
        shares: [C, C] percent of the row.
    """
    from PIL import Image

    # A single image among many would be invisible
    opacity = np.where(shares > 0, np.maximum(shares, 30), 0)
    pixels = np.empty((*shares.shape, 4), dtype=np.uint8)
    pixels[..., :3] = BLUE
    pixels[..., 3] = np.round(2.55 * opacity)
    return image_url(Image.fromarray(pixels, "RGBA"), "png")


def image_url(image: "object", kind: str) -> str:
    """Encode an image as a data URL that is safe in HTML."""
    from markupsafe import Markup
    from PIL.Image import Image

    assert isinstance(image, Image)
    settings: Mapping[str, int] = {"quality": 80, "subsampling": 0} if kind == "jpeg" else {}
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **settings)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Markup(f"data:image/{kind};base64,{encoded}")


def _is_small(file: Path) -> bool:
    from PIL import Image

    with Image.open(file) as image:
        return max(image.size) < GRID_SIDE
