"""`osfl audit --run`: a run's synthetic images, held against the images of its clients."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from client_app.audit.copies import Embeddings, Memorization, measure_memorization
from osfl.cli import display
from osfl.cli.audit import find_nodes
from osfl.cli.display import Table
from osfl.config import ConfigError, NodeConfig, RunConfig, parse_run_config
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names, client_name
from osfl.models.encoders import ImageEncoder, load_image_encoder
from osfl.run_folder.layout import RunFolder, read_image, read_rows
from osfl.util.devices import pick_device
from osfl.util.files import write_atomically
from osfl.util.pixels import LazyPixels
from osfl.util.seeds import generator_of


def show_copies(run: Path, node_config: str, out: Path | None) -> None:
    """Print, for each client, how near the run's images of it are to its own.

    Args:
        run: the run's folder.
        node_config: a SuperNode's, as it takes it; empty: the clients of a simulation.
        out: a JSON file for what was found.

    Raises:
        ConfigError, CorruptFileError, DataError, KitError: there is no such run, or what it needs
            is missing.
    """
    folder = RunFolder(run)
    settings = folder.stored_config()
    if settings is None:
        raise ConfigError(f"{run} is no run's folder")
    config = parse_run_config(settings)
    found = {}
    table = Table("client", "images", "nearer to training images", "by chance", "closest")
    rows = read_rows(folder.manifest_file)
    for node in find_nodes(config, node_config):
        client = node.client_id or client_name(config.data, node, config.seed)
        files = [run / row["file"] for row in rows if row["client"] == client]
        if not files:
            display.console.print(f"{display.words(client)}: the run has drawn no image for it")
            continue
        names = [row["class"] for row in rows if row["client"] == client]
        found[client] = one = compared(config, node, client, files, names)
        low, high = one.by_chance
        table.add_row(
            display.words(client),
            f"{one.images:,}",
            f"{one.nearer:.1%}{' *' if one.copied else ''}",
            f"{low:.1%} to {high:.1%}",
            f"{one.closest:.2f}",
        )
    if not found:
        raise ConfigError(f"{run} has images of none of these clients")
    display.console.print(table)
    display.console.print(
        "*: more than chance brings. closest: distance of the nearest pair, where 1 is that of a "
        "training image and the nearest test image"
    )
    if out is not None:
        write_atomically(out, json.dumps({k: asdict(v) for k, v in found.items()}).encode())


def compared(
    config: RunConfig, node: NodeConfig, client: str, files: Sequence[Path], names: Sequence[str]
) -> Memorization:
    """One client's synthetic images against its training and test images.

    Args:
        files: of the synthetic images.
        names: their classes.

    Raises:
        ConfigError: no class has images of all three kinds, or a file cannot be read.
    """
    kit = node.kit or config.kit
    encoder = load_image_encoder(config.image_encoder or kit, pick_device(node.device))
    train, test = (
        _embedded(load_images(config.data, node, split, config.seed, encoder.fit), encoder)
        for split in ("train", "test")
    )
    classes = class_names(config.data)

    def read(number: int) -> torch.Tensor:
        picture = read_image(files[number])
        if picture is None:
            raise ConfigError(f"{files[number]} cannot be read; `osfl run` makes it anew")
        return encoder.fit(picture)

    labels = torch.tensor([classes.index(name) for name in names])
    drawn = _embedded(Images(LazyPixels(read, len(files)), labels), encoder)
    try:
        return measure_memorization(drawn, train, test, generator_of(config.seed, "copies", client))
    except ValueError as error:
        raise ConfigError(f"{client}: {error}") from error


def _embedded(images: Images, encoder: ImageEncoder) -> Embeddings:
    rows = [encoder(pixels) for pixels in images.pixels.split(64)]
    return Embeddings(torch.cat(rows), images.labels)
