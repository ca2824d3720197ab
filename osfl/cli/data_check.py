"""`osfl data check`: check the images of a run's clients before training."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
import typer
from PIL import Image
from rich.progress import track
from rich.table import Table

from osfl.cli import display
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import open_images
from osfl.data.near_duplicates import MIN_CORRELATION, SIDE, most_similar, thumbnails
from osfl.data.partition import DataError
from osfl.data.parts import check_clients, class_names, client_name
from osfl.data.pictures import to_pixels
from osfl.settings import resolve_config
from osfl.util.text import sanitize

# Maximum number of files or pairs that are printed
MAX_PRINTED = 10


@dataclass
class SplitStatistics:
    """Statistics of one client's images of one split.

    Attributes:
        counts: number of images by class.
        sizes: number of images by (width, height).
        thumbnails: [768] of each readable image, by name.
        broken: error messages of the unreadable images.
        many_frames: names of images with several frames, with the number of frames.
        dark: names of 16-bit images that are nearly black.
    """

    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    thumbnails: dict[str, torch.Tensor] = field(default_factory=dict)
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
    for part in track(range(config.num_clients), "clients", console=display.error_console):
        node = NodeConfig(partition_id=part, num_partitions=config.num_clients)
        client = client_name(config.data, node, config.seed)
        train[client] = inspect_split(config, node, "train")
        test[client] = inspect_split(config, node, "test")
    _show_clients(config, train, test)
    broken = _of_all([*train.values(), *test.values()], "broken")
    _show_some("unreadable images", broken)
    duplicates = near_duplicates(_thumbnails(train), _thumbnails(test))
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
    images = open_images(config.data, node, split, config.seed)
    pictures = SplitStatistics()
    for number, label in enumerate(images.labels):
        pictures.counts[names[label]] += 1
        name = images.name(number)
        try:
            pixels = images.pixels(_identity, number)
            traits = images.file_traits(number)
        except DataError as error:
            pictures.broken.append(str(error))
            continue
        pictures.sizes[pixels.shape[2], pixels.shape[1]] += 1
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        pictures.thumbnails[name] = thumbnails(to_pixels(picture, SIDE)[None])[0]
        if traits.frames > 1:
            pictures.many_frames.append(f"{name}: {traits.frames:,} frames")
        if traits.is_dark:
            pictures.dark.append(name)
    return pictures


def _identity(pixels: torch.Tensor) -> torch.Tensor:
    return pixels


def near_duplicates(train: dict[str, torch.Tensor], test: dict[str, torch.Tensor]) -> list[str]:
    """Describe each test image that looks like a training image, with the most similar one.

    Args:
        train, test: thumbnails [768] by the images' names.
    """
    if not train or not test:
        return []
    highest, nearest = most_similar(
        torch.stack(list(test.values())), torch.stack(list(train.values()))
    )
    test_names = list(test)
    train_names = list(train)
    return [
        f"{test_names[row]} and {train_names[nearest[row]]}"
        for row in (highest > MIN_CORRELATION).nonzero().flatten().tolist()
    ]


def _of_all(clients: Iterable[SplitStatistics], attribute: str) -> list[str]:
    lists = [getattr(pictures, attribute) for pictures in clients]
    return list(chain.from_iterable(lists))


def _thumbnails(clients: dict[str, SplitStatistics]) -> dict[str, torch.Tensor]:
    merged = {}
    for client, pictures in clients.items():
        merged.update({f"{client}: {name}": row for name, row in pictures.thumbnails.items()})
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
