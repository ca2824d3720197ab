"""`osfl data check`: check the images of a run's clients before training."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import typer
from PIL import Image
from rich.progress import track

from osfl.cli import display
from osfl.cli.display import Table
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import open_images
from osfl.data.partition import DataError
from osfl.data.parts import check_clients, class_names, client_name
from osfl.settings import resolve_config
from osfl.util.text import sanitize

# Side of the grid of an image's hash, which has 256 bits
HASH_SIDE = 16
# Maximum number of bits in which the hashes of near-duplicates differ
MAX_HASH_DISTANCE = 16
# Maximum number of files or pairs that are printed
MAX_PRINTED = 10
# Number of hashes that are compared with all others in one step
CHUNK_SIZE = 200


@dataclass
class SplitStatistics:
    """Statistics of one client's images of one split.

    Attributes:
        counts: number of images by class.
        sizes: number of images by (width, height).
        hashes: of the readable images, by name.
        broken: error messages of the unreadable images.
        many_frames: names of images with several frames, with the number of frames.
        dark: names of 16-bit images that are nearly black.
    """

    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    hashes: dict[str, np.ndarray] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    many_frames: list[str] = field(default_factory=list)
    dark: list[str] = field(default_factory=list)


def show_check(settings: list[str]) -> None:
    """Open every image of every client, print statistics, and exit with 1 if any is unreadable.

    Raises:
        ConfigError, DataError: the settings are invalid, or do not fit the data.
        typer.Exit: an image is unreadable.
    """
    # A method and weights that need no kit
    weights = ("classifier.init=none", "global-model.init=none")
    config, _ = resolve_config([*settings, "method=local", *weights])
    notes = check_clients(config.data, config.num_clients, config.seed)
    train: dict[str, SplitStatistics] = {}
    test: dict[str, SplitStatistics] = {}
    for part in track(range(config.num_clients), "clients", console=display.console):
        node = NodeConfig(partition_id=part, num_partitions=config.num_clients)
        client = client_name(config.data, node, config.seed)
        train[client] = inspect_split(config, node, "train")
        test[client] = inspect_split(config, node, "test")
    _show_clients(config, train, test)
    broken = _of_all([*train.values(), *test.values()], "broken")
    _show_some("unreadable images", broken)
    duplicates = near_duplicates(_hashes(train), _hashes(test))
    _show_some("test images that are near-duplicates of training images", duplicates)
    _show_notes(notes, train, test)
    if broken:
        raise typer.Exit(1)


def inspect_split(config: RunConfig, node: NodeConfig, split: str) -> SplitStatistics:
    """Open one client's images of a split, one after the other.

    Raises:
        DataError: the client has no images.
    """
    names = class_names(config.data)
    opened = open_images(config.data, node, split, config.seed)
    pictures = SplitStatistics()
    for number, label in enumerate(opened.labels):
        pictures.counts[names[label]] += 1
        name = opened.name(number)
        try:
            pixels = opened.pixels(_identity, number)
            traits = opened.file_traits(number)
        except DataError as error:
            pictures.broken.append(str(error))
            continue
        pictures.sizes[pixels.shape[2], pixels.shape[1]] += 1
        pictures.hashes[name] = difference_hash(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
        if traits.frames > 1:
            pictures.many_frames.append(f"{name}: {traits.frames:,} frames")
        if traits.is_dark:
            pictures.dark.append(name)
    return pictures


def _identity(pixels: torch.Tensor) -> torch.Tensor:
    return pixels


def difference_hash(image: Image.Image) -> np.ndarray:
    """Return the difference hash of an image: 256 bits, as [4] uint64.

    A bit is set where the downscaled grayscale image is lighter than to its left. The hashes of
    similar images differ in few bits, whatever their sizes.
    """
    grayscale = image.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), Image.Resampling.LANCZOS)
    levels = np.asarray(grayscale).astype(int)
    return np.packbits(levels[:, 1:] > levels[:, :-1]).view(np.uint64)


def near_duplicates(train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> list[str]:
    """Describe each test image that looks like a training image, with the most similar one.

    Args:
        train, test: hashes by the images' names.
    """
    if not train or not test:
        return []
    train_hashes = np.stack(list(train.values()))
    test_hashes = np.stack(list(test.values()))
    train_names = list(train)
    test_names = list(test)
    pairs = []
    for start in range(0, len(test_hashes), CHUNK_SIZE):
        chunk = test_hashes[start : start + CHUNK_SIZE]
        distances = np.bitwise_count(chunk[:, None] ^ train_hashes).sum(axis=-1, dtype=int)
        nearest = distances.argmin(axis=1)
        for row in np.flatnonzero(distances.min(axis=1) <= MAX_HASH_DISTANCE):
            pairs.append(f"{test_names[start + row]} and {train_names[nearest[row]]}")
    return pairs


def _of_all(clients: Iterable[SplitStatistics], attribute: str) -> list[str]:
    lists = [getattr(pictures, attribute) for pictures in clients]
    return list(chain.from_iterable(lists))


def _hashes(clients: dict[str, SplitStatistics]) -> dict[str, np.ndarray]:
    merged = {}
    for client, pictures in clients.items():
        merged.update({f"{client}: {name}": value for name, value in pictures.hashes.items()})
    return merged


def _show_clients(
    config: RunConfig, train: dict[str, SplitStatistics], test: dict[str, SplitStatistics]
) -> None:
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


def _show_notes(
    notes: list[str], train: dict[str, SplitStatistics], test: dict[str, SplitStatistics]
) -> None:
    """Print what users may not expect of a run with these images."""
    for note in notes:
        display.console.print(sanitize(note, 1000), markup=False, soft_wrap=True)
    pictures = [*train.values(), *test.values()]
    if frames := _of_all(pictures, "many_frames"):
        _show_some("images with several frames, of which a run reads the first", frames)
    if dark := _of_all(pictures, "dark"):
        _show_some(
            "16-bit images that use less than a sixteenth of their range (rescale them)", dark
        )


def _show_some(title: str, lines: list[str]) -> None:
    """Print the number of lines, and the first of them."""
    display.console.print(f"{title}: {len(lines):,}")
    for line in lines[:MAX_PRINTED]:
        display.console.print(f"  {sanitize(line, 1000)}", markup=False, soft_wrap=True)
    if len(lines) > MAX_PRINTED:
        display.console.print(f"  and {len(lines) - MAX_PRINTED:,} more")
