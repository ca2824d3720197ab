"""`osfl audit --run`: test whether a run's synthetic images memorize training images."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from client_app.audit.copies import Embeddings, Memorization, measure_memorization
from osfl.cli import display
from osfl.cli.audit import find_nodes
from osfl.config import ConfigError, NodeConfig, RunConfig, parse_run_config
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names, client_name
from osfl.models.encoders import ImageEncoder, load_image_encoder
from osfl.run_folder.layout import RunFolder, read_image, read_rows
from osfl.util.devices import pick_device
from osfl.util.files import write_atomically
from osfl.util.pixels import LazyPixels
from osfl.util.seeds import generator_of


def show_memorization(run: Path, node_config: str, out: Path | None) -> None:
    """Print the memorization test of each client.

    Args:
        run: the run's folder.
        node_config: a SuperNode's node-config; "" for the clients of a simulation.
        out: JSON file for the findings, or None.

    Raises:
        ConfigError, CorruptFileError, DataError, KitError: the run does not exist, or a file or
            model that it needs is missing or corrupt.
    """
    folder = RunFolder(run)
    settings = folder.stored_config()
    if settings is None:
        raise ConfigError(f"{run} is not the folder of a run")
    config = parse_run_config(settings)
    findings = {}
    table = Table("client", "images", "closer to training images", "by chance", "closest")
    rows = read_rows(folder.manifest_file)
    for node in find_nodes(config, node_config):
        client = node.client_id or client_name(config.data, node, config.seed)
        files = [run / row["file"] for row in rows if row["client"] == client]
        if not files:
            text = f"{display.escape_text(client)}: the run has no synthetic images of this client"
            display.console.print(text)
            continue
        names = [row["class"] for row in rows if row["client"] == client]
        finding = measure_client_memorization(config, node, client, files, names)
        findings[client] = finding
        low, high = finding.by_chance
        table.add_row(
            display.escape_text(client),
            f"{finding.images:,}",
            f"{finding.nearer:.1%}{' *' if finding.copied else ''}",
            f"{low:.1%} to {high:.1%}",
            f"{finding.closest:.2f}",
        )
    if not findings:
        raise ConfigError(f"{run} has no synthetic images of these clients")
    display.console.print(table)
    display.console.print(
        "*: more than by chance. closest: the smallest distance of a synthetic and a training "
        "image, where 1 is the distance of a training image to the closest test image"
    )
    if out is not None:
        write_atomically(out, json.dumps({k: asdict(v) for k, v in findings.items()}).encode())


def measure_client_memorization(
    config: RunConfig, node: NodeConfig, client: str, files: Sequence[Path], names: Sequence[str]
) -> Memorization:
    """Compare a client's synthetic images with its training and test images.

    Args:
        files: of the synthetic images.
        names: classes of the synthetic images.

    Raises:
        ConfigError: no class has images of all three kinds, or a file is not readable.
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
            raise ConfigError(f"{files[number]} is not readable; `osfl run` recreates it")
        return encoder.fit(picture)

    labels = torch.tensor([classes.index(name) for name in names])
    synthetic = _embedded(Images(LazyPixels(read, len(files)), labels), encoder)
    try:
        return measure_memorization(
            synthetic, train, test, generator_of(config.seed, "copies", client)
        )
    except ValueError as error:
        raise ConfigError(f"{client}: {error}") from error


def _embedded(images: Images, encoder: ImageEncoder) -> Embeddings:
    rows = [encoder(pixels) for pixels in images.pixels.split(64)]
    return Embeddings(torch.cat(rows), images.labels)
