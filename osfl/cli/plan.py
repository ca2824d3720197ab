"""`osfl compare --dry-run`: estimate the costs of a table's runs.

The estimate needs neither data nor weights. Costs that are unknown without them are shown as `?`,
with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from osfl.cli import display
from osfl.cli.estimate import planned_images, upload_bytes
from osfl.cli.run_clients import placeholder_clients
from osfl.config import RunConfig
from osfl.kit.folder import KitError
from osfl.kit.kits import find_kit
from osfl.methods import METHODS
from osfl.models.diffusion import load_noise_schedule, timesteps, unet_flops
from osfl.run_folder.report.page import human_bytes, human_flops
from osfl.settings import resolve_config
from osfl.tables.table_file import TableFile, as_arguments
from server_app.app import estimate_disk_bytes
from server_app.costs import rows_per_image

TERA = 1e12


@dataclass(frozen=True)
class Row:
    """The estimated costs of all runs in a table's row; None for unknown costs.

    Attributes:
        images: number of synthetic images.
        flops: of the UNet passes that synthesize them.
        upload: bytes per client and run, for a client with images of every class.
        disk: upper bound of the run folders' bytes.
        unknown: why a cost is unknown.
    """

    runs: int
    images: int | None = None
    flops: float | None = None
    upload: int | None = None
    disk: int | None = None
    unknown: str = ""


def estimate_rows(table: TableFile) -> dict[str, Row]:
    """Estimate every row of a table."""
    rows = {}
    for name, settings in table.rows.items():
        if reason := table.unavailable.get(name):
            rows[name] = Row(len(table.seeds), unknown=reason)
            continue
        config, _ = resolve_config(as_arguments(settings))
        rows[name] = _row(config, len(table.seeds))
    return rows


def _row(config: RunConfig, runs: int) -> Row:
    clients = placeholder_clients(config)
    name, client = next(iter(clients.items()))
    images = runs * planned_images(config, clients.values())
    disk = runs * estimate_disk_bytes(config)
    try:
        flops = synthesis_flops(config, images) if METHODS[config.method].samples else 0.0
        upload = upload_bytes(name, client)
    except (KitError, FileNotFoundError) as error:
        return Row(runs, images, None, None, disk, str(error))
    rounds = config.rounds.count if METHODS[config.method].rounds else 1
    return Row(runs, images, flops, rounds * upload, disk)


def synthesis_flops(config: RunConfig, images: int) -> float:
    """Return the FLOPs of the UNet passes that synthesize the images, by settings alone.

    Raises:
        FileNotFoundError, KitError: the kit is missing or corrupt.
    """
    kit = find_kit(config.sampling_kit)
    steps = timesteps(load_noise_schedule(kit), config.synthesis.steps)
    return float(images) * rows_per_image(config, steps) * unet_flops(kit)


def show_plan(table: TableFile, tflops: float) -> None:
    """Print the estimated costs of a table's runs.

    Args:
        tflops: the assumed throughput of a GPU during synthesis, in TFLOP/s.
    """
    rows = estimate_rows(table)
    printed = Table("", "runs", "images", "UNet", "GPU h", "upload per client", "disk")
    for name, row in rows.items():
        printed.add_row(display.escape_text(name), *_cells(row, tflops))
    runs, images, flops, hours, _, disk = _cells(_total(rows), tflops)
    # Uploads are per run, and have no total
    printed.add_row("all", runs, images, flops, hours, "", disk)
    display.console.print(printed)
    lines = [
        f"GPU h: the UNet passes alone, at an assumed {tflops:g} TFLOP/s (--tflops)",
        "upload per client: with images of every class, over all rounds",
    ]
    reasons = dict.fromkeys(row.unknown for row in rows.values() if row.unknown)
    lines += [f"?: {reason}" for reason in reasons]
    lines += [f"not in this table: {row}: {reason}" for row, reason in table.lacks.items()]
    for line in lines:
        display.console.print(display.escape_text(line), highlight=False, soft_wrap=True)


def _total(rows: Mapping[str, Row]) -> Row:
    """Add up the rows' costs; a cost that is unknown for a row is unknown in total."""

    def total(key: str) -> float | None:
        values = [getattr(row, key) for row in rows.values()]
        return None if None in values else sum(values)

    images = total("images")
    disk = total("disk")
    return Row(
        sum(row.runs for row in rows.values()),
        None if images is None else int(images),
        total("flops"),
        None,
        None if disk is None else int(disk),
    )


def _cells(row: Row, tflops: float) -> list[str]:
    hours = None if row.flops is None else row.flops / (tflops * TERA) / 3600
    return [
        str(row.runs),
        "?" if row.images is None else f"{row.images:,}",
        "?" if row.flops is None else human_flops(row.flops),
        "?" if hours is None else f"{hours:,.2f}",
        "?" if row.upload is None else human_bytes(row.upload),
        "?" if row.disk is None else human_bytes(row.disk),
    ]
