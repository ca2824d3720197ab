"""`osfl data check`: what a run's clients hold, before anybody trains on it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import typer
from PIL import Image
from rich.progress import track

from osfl.cli import display, launch
from osfl.cli.display import Table
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import open_images
from osfl.data.partition import DataError
from osfl.data.parts import check_clients, class_names, client_name
from osfl.util.text import sanitize

SIDE = 16  # of the grid of a picture's hash, which has 256 bits
NEAR = 16  # bits in which the hashes of two pictures that look alike may differ
SHOWN = 10  # of the files that cannot be read, and of the pairs that look alike
AT_ONCE = 200  # hashes that are compared with all others at a time


@dataclass
class Pictures:
    """What one client holds of one split.

    Attributes:
        counts: of images, by class.
        sizes: of images, by (width, height).
        hashes: of images that can be read, each with what its place is called.
        broken: why those that cannot be read cannot.
        many_frames: those of several frames, with their number.
        dark: those of 16 bits that are nearly black.
    """

    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    hashes: dict[str, np.ndarray] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    many_frames: list[str] = field(default_factory=list)
    dark: list[str] = field(default_factory=list)


def show_check(settings: list[str]) -> None:
    """Open every image of every client, print what is there, and exit with 1 if any is broken.

    Raises:
        ConfigError: the settings, or data that they do not fit.
        DataError: likewise, before the first image is opened.
        typer.Exit: an image is broken.
    """
    # Nothing that asks for a kit: this looks at images alone.
    weights = ("classifier.init=none", "global-model.init=none")
    config, _ = launch.resolve_config([*settings, "method=local", *weights])
    notes = check_clients(config.data, config.num_clients, config.seed)
    train: dict[str, Pictures] = {}
    test: dict[str, Pictures] = {}
    for part in track(range(config.num_clients), "clients", console=display.console):
        node = NodeConfig(partition_id=part, num_partitions=config.num_clients)
        client = client_name(config.data, node, config.seed)
        train[client] = look(config, node, "train")
        test[client] = look(config, node, "test")
    _show_clients(config, train, test)
    everything = [*train.values(), *test.values()]
    broken = _of_all(everything, "broken")
    _show_some("cannot be read", broken)
    alike = near_duplicates(_hashes(train), _hashes(test))
    _show_some("of the test images look like one of the training images", alike)
    _show_notes(notes, train, test)
    if broken:
        raise typer.Exit(1)


def look(config: RunConfig, node: NodeConfig, split: str) -> Pictures:
    """Open one client's images, one after the other.

    Raises:
        DataError: it has none.
    """
    names = class_names(config.data)
    opened = open_images(config.data, node, split, config.seed)
    found = Pictures()
    for number, label in enumerate(opened.labels):
        found.counts[names[label]] += 1
        name = opened.name(number)
        try:
            pixels = opened.pixels(_as_it_is, number)
            traits = opened.file_traits(number)
        except DataError as error:
            found.broken.append(str(error))
            continue
        found.sizes[pixels.shape[2], pixels.shape[1]] += 1
        found.hashes[name] = difference_hash(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
        if traits.frames > 1:
            found.many_frames.append(f"{name}: {traits.frames:,} frames")
        if traits.is_dark:
            found.dark.append(name)
    return found


def _as_it_is(pixels: torch.Tensor) -> torch.Tensor:
    return pixels


def difference_hash(image: Image.Image) -> np.ndarray:
    """Where a picture, shrunk and grey, is lighter than on its left: 256 bits, as [4] uint64.

    Pictures that look alike have hashes that differ in few bits, whatever their sizes.
    """
    grey = image.convert("L").resize((SIDE + 1, SIDE), Image.Resampling.LANCZOS)
    levels = np.asarray(grey).astype(int)
    return np.packbits(levels[:, 1:] > levels[:, :-1]).view(np.uint64)


def near_duplicates(train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> list[str]:
    """The pairs of test and training images that look alike, in words; for each test image one."""
    if not train or not test:
        return []
    known = np.stack(list(train.values()))
    asked = np.stack(list(test.values()))
    known_names = list(train)
    asked_names = list(test)
    found = []
    for first in range(0, len(asked), AT_ONCE):
        chunk = asked[first : first + AT_ONCE]
        bits = np.bitwise_count(chunk[:, None] ^ known).sum(axis=-1, dtype=int)
        nearest = bits.argmin(axis=1)
        for row in np.flatnonzero(bits.min(axis=1) <= NEAR):
            found.append(f"{asked_names[first + row]} and {known_names[nearest[row]]}")
    return found


def _of_all(clients: Iterable[Pictures], attribute: str) -> list[str]:
    lists = [getattr(pictures, attribute) for pictures in clients]
    return list(chain.from_iterable(lists))


def _hashes(clients: dict[str, Pictures]) -> dict[str, np.ndarray]:
    merged = {}
    for client, pictures in clients.items():
        merged.update({f"{client}: {name}": value for name, value in pictures.hashes.items()})
    return merged


def _show_clients(config: RunConfig, train: dict[str, Pictures], test: dict[str, Pictures]) -> None:
    table = Table("client", "train", "test", "classes", "fewest", "most", "sizes (px)")
    for client, pictures in train.items():
        counts = pictures.counts.values()
        table.add_row(
            client,
            f"{sum(counts):,}",
            f"{sum(test[client].counts.values()):,}",
            f"{len(counts)} of {len(class_names(config.data))}",
            f"{min(counts):,}",
            f"{max(counts):,}",
            _sizes(pictures.sizes),
        )
    display.console.print(table)


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    if len(sizes) <= 1:
        return ", ".join(f"{width} x {height}" for width, height in sizes)
    shorter = [min(size) for size in sizes]
    longer = [max(size) for size in sizes]
    return f"{len(sizes)} sizes, {min(shorter)} to {max(longer)}"


def _show_notes(notes: list[str], train: dict[str, Pictures], test: dict[str, Pictures]) -> None:
    """What a run takes otherwise than its user may think; nothing where there is nothing."""
    for note in notes:
        display.console.print(sanitize(note, 1000), markup=False, soft_wrap=True)
    everything = [*train.values(), *test.values()]
    if frames := _of_all(everything, "many_frames"):
        _show_some("have several frames; a run reads the first alone", frames)
    if dark := _of_all(everything, "dark"):
        _show_some("have 16 bits and less than a sixteenth of their brightness: rescale them", dark)


def _show_some(what: str, found: list[str]) -> None:
    display.console.print(f"{len(found):,} {what}")
    for line in found[:SHOWN]:
        display.console.print(f"  {sanitize(line, 1000)}", markup=False, soft_wrap=True)
    if len(found) > SHOWN:
        display.console.print(f"  and {len(found) - SHOWN:,} more")
