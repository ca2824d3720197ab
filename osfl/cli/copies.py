"""`osfl audit --run`: a run's synthetic images, held against the images of its clients."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from client_app.audit.copies import Embedded, Nearness, nearness
from osfl.cli import display
from osfl.cli.audit import Player, find_players
from osfl.cli.display import Table
from osfl.config import ConfigError, parse_run_config
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names
from osfl.devices import pick_device
from osfl.files import write_atomically
from osfl.models.encoders import ImageEncoder, load_image_encoder
from osfl.pixels import Pixels
from osfl.run_folder.layout import RunFolder, read_picture, read_rows
from osfl.seeds import generator_of


def show_copies(run: Path, node_config: str, out: Path | None) -> None:
    """Print, for each client, how near the run's images of it are to its own.

    Args:
        run: the run's folder.
        node_config: a SuperNode's, as it takes it; empty: the clients of a simulation.
        out: a JSON file for what was found.

    Raises:
        ConfigError, DataError, KitError, DamageError: no such run, or what it needs is missing.
    """
    folder = RunFolder(run)
    settings = folder.stored_config()
    if settings is None:
        raise ConfigError(f"{run} is no run's folder")
    config = parse_run_config(settings)
    encoder = load_image_encoder(config.image_encoder or config.kit, pick_device(config.device))
    found = {}
    table = Table("client", "images", "nearer to training images", "by chance", "closest")
    for player in find_players(config, node_config):
        found[player.name] = one = compared(player, folder, encoder)
        low, high = one.by_chance
        table.add_row(
            display.words(player.name),
            f"{one.images:,}",
            f"{one.nearer:.1%}{' *' if one.copied else ''}",
            f"{low:.1%} to {high:.1%}",
            f"{one.closest:.2f}",
        )
    display.console.print(table)
    display.console.print(
        "*: more than chance brings. closest: distance of the nearest pair, where 1 is that of a "
        "training image and the nearest test image"
    )
    if out is not None:
        write_atomically(out, json.dumps({k: asdict(v) for k, v in found.items()}).encode())


def compared(player: Player, folder: RunFolder, encoder: ImageEncoder) -> Nearness:
    """One client's synthetic images against its training and test images.

    Raises:
        ConfigError: the run has no image of it, or no class with images of all three kinds.
    """
    config, node = player.config, player.node
    train, test = (
        _embedded(load_images(config.data, node, split, config.seed, encoder.fit), encoder)
        for split in ("train", "test")
    )
    drawn = _drawn(player, folder, encoder)
    try:
        return nearness(drawn, train, test, generator_of(config.seed, "copies", player.name))
    except ValueError as error:
        raise ConfigError(f"{player.name}: {error}") from error


def _drawn(player: Player, folder: RunFolder, encoder: ImageEncoder) -> Embedded:
    names = class_names(player.config.data)
    pictures = []
    labels = []
    for row in read_rows(folder.manifest_file):
        if row["client"] != player.name:
            continue
        picture = read_picture(folder.path / row["file"])
        if picture is None:
            raise ConfigError(f"{row['file']} cannot be read; the same `osfl run` makes it anew")
        pictures.append(encoder.fit(picture))
        labels.append(names.index(row["class"]))
    if not pictures:
        raise ConfigError(f"the run has drawn no image for {player.name}")
    pixels: Pixels = torch.stack(pictures)
    return _embedded(Images(pixels, torch.tensor(labels)), encoder)


def _embedded(images: Images, encoder: ImageEncoder) -> Embedded:
    rows = [encoder(pixels) for pixels in images.pixels.split(64)]
    return Embedded(torch.cat(rows), images.labels)
