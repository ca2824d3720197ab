"""Small run folders as a run leaves them, for what observes runs."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from osfl.run_folder.image_store import image_name
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import Status
from tests.helpers.run_folders import run_folder


def draw_unit(folder: Path, unit: str, client: str, classes: tuple[str, ...], each: int) -> None:
    """Images of one color each, and their rows, as a finished work unit leaves them."""
    rows = []
    for label, name in enumerate(classes):
        for index in range(each):
            file = image_name(client, label, name, index)
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8, 3), 20 * label + index, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / file)
            digest = f"{label:02d}{index:02d}" * 16
            row = {"file": file, "client": client, "class": name, "seed": 0, "sha256": digest}
            rows.append(json.dumps(row) + "\n")
    rows_file = RunFolder(folder).unit_file(unit)
    rows_file.parent.mkdir(exist_ok=True)
    rows_file.write_text("".join(rows))


def finished_run(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), **config: object) -> Path:
    """A run of two clients with tests, images and a report."""
    tests = {"FT": {"a": [[3, 1], [1, 3]], "b": [[4, 0], [0, 4]]}}
    run_folder(folder, tests, **config)
    status = Status(folder)
    for client in ("a", "b"):
        status.client(client, "delivered 10 bytes")
        draw_unit(folder, f"unit-{client}", client, classes, 6)
    status.phase("synthesis", 24)
    rows = [file.read_text() for file in sorted(RunFolder(folder).unit_files())]
    RunFolder(folder).manifest_file.write_text("".join(rows))
    write_report(folder, classes)
    status.phase("finished")
    return folder
