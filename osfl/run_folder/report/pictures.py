"""The report's pictures, as data URLs: few and small enough for a page that opens anywhere."""

import base64
import io
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MOST_CLASSES = 12  # that are pictured
MOST_CLIENTS = 12
MOST_EACH = 8  # images of a class in the grid that opens
SIDE = 128  # of the first images, in pixels; less where there are many
GRID_SIDE = 64
# A PNG of noise has 3 bytes a pixel, and 4 as base64: this many pixels are at most 1.6 MB.
FIRST_PIXELS = 24 * SIDE * SIDE
MOST_GRID_BYTES = 1_800_000
BLUE = (36, 99, 194)

Grid = dict[str, dict[str, list[str]]]  # files or data URLs by client, then class


@dataclass
class Gallery:
    """What the page shows of a run's images.

    Attributes:
        classes: those that are shown, in the run's order.
        first: a data URL by client, then class.
        more: several of each class, for a grid that opens; empty where no class has two images.
        each: at most so many of a class are in `more`.
        small: the images are smaller than they are shown.
        left_out: how many clients and classes are shown of how many; empty: all.
    """

    classes: list[str] = field(default_factory=list)
    first: dict[str, dict[str, str]] = field(default_factory=dict)
    more: Grid = field(default_factory=dict)
    each: int = 0
    small: bool = False
    left_out: str = ""

    @property
    def has_public_domains(self) -> bool:
        """Whether a row is no client's: clients' names have no point."""
        return any("." in owner for owner in self.first)


def gallery_of(folder: Path, manifest: Sequence[str], classes: Sequence[str]) -> Gallery:
    """The pictures of a run's manifest.

    Args:
        manifest: its lines.
        classes: the run's class names.
    """
    files, counts = _files(manifest)
    if not files:
        return Gallery()
    clients = sorted(files)[:MOST_CLIENTS]
    held = {name for client in clients for name in files[client]}
    shown = [name for name in classes if name in held][:MOST_CLASSES]
    pictured = {}
    for client in clients:
        pictured[client] = {name: files[client][name] for name in shown if name in files[client]}
    with ThreadPoolExecutor() as readers:
        first = _first(folder, pictured, readers)
        more = _grid(folder, pictured, readers)
    gallery = Gallery(shown, first, more)
    gallery.each = max((len(urls) for row in more.values() for urls in row.values()), default=0)
    gallery.small = _is_small(folder / next(iter(pictured[clients[0]].values()))[0])
    if len(files) > len(clients) or counts > len(shown):
        gallery.left_out = (
            f"{len(clients)} of {len(files)} clients and {len(shown)} of {counts} classes"
        )
    return gallery


def _files(manifest: Sequence[str]) -> tuple[Grid, int]:
    """(the first files of every client and class, how many classes there are)."""
    files: Grid = defaultdict(lambda: defaultdict(list))
    names = set()
    for line in manifest:
        row = json.loads(line)
        names.add(row["class"])
        of_class = files[row["client"]][row["class"]]
        if len(of_class) < MOST_EACH:
            of_class.append(row["file"])
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
    """One image more of every class at a time, as long as all of them fit."""
    grid: Grid = {}
    for client, row in files.items():
        grid[client] = {name: [] for name in row}
    size = 0
    for number in range(MOST_EACH):
        cells = [
            (client, name, row[name][number])
            for client, row in files.items()
            for name in row
            if len(row[name]) > number
        ]
        urls = list(readers.map(lambda cell: data_url(folder / cell[2], GRID_SIDE, "jpeg"), cells))
        size += sum(map(len, urls))
        if size > MOST_GRID_BYTES or not urls:
            break
        for (client, name, _), url in zip(cells, urls, strict=True):
            grid[client][name].append(url)
    several = any(len(urls) > 1 for row in grid.values() for urls in row.values())
    return grid if several else {}


def data_url(file: Path, side: int, kind: str) -> str:
    """An image file, shrunken to at most `side` pixels, for an `src`; safe in HTML as it is."""
    from PIL import Image

    with Image.open(file) as image:
        image.thumbnail((side, side))
        return _url(image if kind == "png" else image.convert("RGB"), kind)


def matrix_url(shares: np.ndarray) -> str:
    """A confusion matrix as a picture of a pixel for each cell, which a dark page shows through.

    Args:
        shares: [C, C] percent of the row.
    """
    from PIL import Image

    seen = np.where(shares > 0, np.maximum(shares, 30), 0)
    pixels = np.empty((*shares.shape, 4), dtype=np.uint8)
    pixels[..., :3] = BLUE
    pixels[..., 3] = np.round(2.55 * seen)
    return _url(Image.fromarray(pixels, "RGBA"), "png")


def _url(image: "object", kind: str) -> str:
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
