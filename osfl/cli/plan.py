"""`osfl compare --dry-run`: what a table's runs would draw, send and take.

Neither data nor weights are needed, only their settings: what cannot be known without them is
shown as `?`, and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from osfl.cli import display
from osfl.cli.compare import TableFile, as_arguments
from osfl.cli.display import Table
from osfl.cli.estimate import planned_images, rows_an_image, unseen_clients, upload_bytes
from osfl.cli.launch import resolve_config
from osfl.config import RunConfig
from osfl.kit.kits import KitError, find_kit
from osfl.methods import METHODS
from osfl.models.diffusion import check_schedule, timesteps, unet_flops
from osfl.run_folder.report.page import human_bytes, human_flops
from server_app.app import estimate_disk_bytes

TERA = 1e12


@dataclass(frozen=True)
class Row:
    """What all runs of a table's row would take; None: not known.

    Attributes:
        images: that are drawn.
        flops: of the UNet's passes while they are drawn.
        upload: bytes of a client in a run, which has images of every class.
        disk: bytes of all runs' folders, at most.
        unknown: why something is not known.
    """

    runs: int
    images: int | None = None
    flops: float | None = None
    upload: int | None = None
    disk: int | None = None
    unknown: str = ""


def plan_of(table: TableFile) -> dict[str, Row]:
    """Every row's share of the plan."""
    rows = {}
    for name, settings in table.rows.items():
        if why := table.unseen.get(name):
            rows[name] = Row(len(table.seeds), unknown=why)
            continue
        config, _ = resolve_config(as_arguments(settings))
        rows[name] = _row(config, len(table.seeds))
    return rows


def _row(config: RunConfig, runs: int) -> Row:
    clients = unseen_clients(config)
    name, client = next(iter(clients.items()))
    images = runs * planned_images(config, clients.values())
    disk = runs * estimate_disk_bytes(config)
    try:
        flops = _flops(config, images) if METHODS[config.method].samples else 0.0
        upload = upload_bytes(name, client)
    except (KitError, FileNotFoundError) as error:
        return Row(runs, images, None, None, disk, str(error))
    rounds = config.rounds.count if METHODS[config.method].rounds else 1
    return Row(runs, images, flops, rounds * upload, disk)


def _flops(config: RunConfig, images: int) -> float:
    kit = find_kit(config.sampling_kit)
    taken = timesteps(check_schedule(kit), config.synthesis.steps)
    return float(images) * rows_an_image(config, taken) * unet_flops(kit)


def show_plan(table: TableFile, tflops: float) -> None:
    """Print the plan of a table.

    Args:
        tflops: what a GPU is taken to do in a second while it draws, in 10^12.
    """
    rows = plan_of(table)
    shown = Table("", "runs", "images", "UNet", "GPU h", "a client sends", "disk")
    for name, row in rows.items():
        shown.add_row(display.words(name), *_cells(row, tflops))
    runs, images, flops, hours, _, disk = _cells(_total(rows), tflops)
    # What a client sends is of one run
    shown.add_row("all", runs, images, flops, hours, "", disk)
    display.console.print(shown)
    lines = [
        f"GPU hours: the UNet's passes alone, at {tflops:g} TFLOP/s (--tflops), which is assumed",
        "a client sends: with images of every class, in all rounds together",
    ]
    lines += [f"?: {why}" for why in dict.fromkeys(row.unknown for row in rows.values()) if why]
    lines += [f"not in this table: {what}: {why}" for what, why in table.lacks.items()]
    for line in lines:
        display.console.print(display.words(line), highlight=False, soft_wrap=True)


def _total(rows: Mapping[str, Row]) -> Row:
    """Of all rows; what one of them does not know is not known."""

    def added(key: str) -> float | None:
        values = [getattr(row, key) for row in rows.values()]
        return None if None in values else sum(values)

    images = added("images")
    disk = added("disk")
    return Row(
        sum(row.runs for row in rows.values()),
        None if images is None else int(images),
        added("flops"),
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
