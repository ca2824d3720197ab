"""Whether a run's folder holds what was written to it: every payload, image and model against its SHA-256."""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor


@dataclass(frozen=True)
class Finding:
    """Of the files of one kind: how many are as they were written, and what is wrong with the others."""

    kind: str
    good: int
    wrong: tuple[str, ...]


def read_picture(file: Path) -> torch.Tensor | None:
    """uint8 [3, H, W], or None if the file is missing or damaged."""
    try:
        with Image.open(file) as image:
            return pil_to_tensor(image)
    except (OSError, SyntaxError, ValueError):  # PIL raises all three
        return None


def picture_digest(picture: torch.Tensor) -> str:
    """SHA-256 of an image's pixels."""
    return hashlib.sha256(picture.contiguous().numpy().tobytes()).hexdigest()


def verify_run(
    folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Finding]:
    """Read everything that a run has stored.

    Args:
        folder: `runs/<job id>`; the run may be going on.
        progress: called with (images read, images in all).
    """
    pictures, wrong, good = [], [], 0
    for unit in sorted((folder / "units").glob("*.jsonl")):
        try:
            pictures += [json.loads(line) for line in unit.read_text().splitlines()]
        except ValueError:
            wrong.append(f"units/{unit.name} is not as it was written")
    pictures.sort(key=lambda row: row["file"])
    with ThreadPoolExecutor() as readers:
        for done, problem in enumerate(
            readers.map(lambda row: picture_problem(folder, row), pictures), start=1
        ):
            wrong += [problem] if problem else []
            good += not problem
            progress(done, len(pictures))
    images = Finding("images", good, tuple(wrong))
    return [
        _of_files("payloads", folder, ".pb"),
        images,
        _of_manifest(folder, pictures),
        _of_files("models", folder, ".safetensors"),
    ]


def picture_problem(folder: Path, row: dict[str, Any]) -> str:
    """What is wrong with the image of a manifest's row; empty: nothing."""
    if not (folder / row["file"]).is_file():
        return f"{row['file']} is missing"
    picture = read_picture(folder / row["file"])
    if picture is None:
        return f"{row['file']} cannot be read"
    return (
        ""
        if picture_digest(picture) == row["sha256"]
        else f"{row['file']} is another image than the one that was made"
    )


def _of_manifest(folder: Path, pictures: list[dict[str, Any]]) -> Finding:
    """`manifest.jsonl`, which a run has from the end of its synthesis on, names images of its units alone."""
    file = folder / "manifest.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    known = {row["file"]: row for row in pictures}
    wrong = tuple(
        f"manifest.jsonl: {row['file']} is in no unit as it is there"
        for row in rows
        if known.get(row["file"]) != row
    )
    return Finding("manifest rows", len(rows) - len(wrong), wrong)


def _of_files(kind: str, folder: Path, ending: str) -> Finding:
    """Files whose digest stands in a JSON file beside them."""

    def problems() -> Iterator[str]:
        for about in sorted((folder / kind).glob("*.json")):
            file = about.with_suffix(ending)
            if not file.is_file():
                yield f"{kind}/{file.name} is missing"
            elif (
                hashlib.sha256(file.read_bytes()).hexdigest()
                != json.loads(about.read_text())["sha256"]
            ):
                yield f"{kind}/{file.name} is not as it was written"
            else:
                yield ""

    found = list(problems())
    return Finding(kind, found.count(""), tuple(problem for problem in found if problem))
