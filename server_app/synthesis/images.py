"""Rendering a plan: unit by unit, each committed as a whole, so that a killed server goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from osfl.config import flatten
from osfl.costs import Stopwatch
from osfl.data.load import to_pixels
from osfl.files import write_atomically
from osfl.kits import kit_digest
from osfl.wire import PayloadError
from server_app.job import ServerJob
from server_app.synthesis.plan import ImageJob, Unit, cut_units
from server_app.synthesis.samplers import NotFiniteError

Sample = Callable[[Sequence[ImageJob]], torch.Tensor]  # jobs -> uint8 [B, 3, H, W]


@dataclass(frozen=True)
class SyntheticSet:
    """All images of a plan, in its order."""

    pixels: torch.Tensor  # [N, 3, S, S] uint8, at the classifiers' size
    labels: torch.Tensor  # [N]
    clients: tuple[str, ...]  # [N]


def render(
    job: ServerJob, jobs: list[ImageJob], make_sampler: Callable[[], Sample], settings: Mapping[str, object]
) -> SyntheticSet:
    """Make every image of a plan that is not there yet, and load them all.

    Args:
        make_sampler: loads the models; not called when nothing is left to do.
        settings: of the method's sampler; they are part of a unit's name.

    Raises:
        PayloadError: sampling with a client's payload is led astray.
        NotFiniteError: it is without one.
    """
    ingredients = {client: (job.folder.read_json(f"payloads/{client}.json") or {}).get("sha256", "") for client in job.clients}
    settings = {**settings, **flatten(job.config.synthesis), "kit": kit_digest(job.kit)}
    units = cut_units(jobs, job.config.synthesis.unit_size, ingredients, settings)
    size = job.config.data.image_size
    loaded = {unit.name: _load(job, unit) for unit in units}
    left = [unit for unit in units if loaded[unit.name] is None]
    done = len(jobs) - sum(len(unit.jobs) for unit in left)
    job.status.phase("synthesis", len(jobs))
    job.status.advance(done, len(jobs))
    sample = make_sampler() if left else None
    for unit in left:
        assert sample is not None
        watch = Stopwatch()
        pixels = _sample(sample, unit, ingredients)
        _commit(job, unit, pixels)
        loaded[unit.name] = _resize(pixels, size)
        with open(job.folder.path / "timings.jsonl", "a") as file:
            file.write(json.dumps({"unit": unit.name, "images": len(unit.jobs), "seconds": watch.seconds}) + "\n")
        done += len(unit.jobs)
        job.status.advance(done, len(jobs))
    rows = [(job.folder.path / "units" / f"{unit.name}.jsonl").read_bytes() for unit in units]
    write_atomically(job.folder.path / "manifest.jsonl", b"".join(rows))
    pixels = torch.cat([cast(torch.Tensor, loaded[unit.name]) for unit in units])
    ordered = [image for unit in units for image in unit.jobs]
    return SyntheticSet(pixels, torch.tensor([image.label for image in ordered]), tuple(image.client for image in ordered))


def _sample(sample: Sample, unit: Unit, ingredients: Mapping[str, str]) -> torch.Tensor:
    try:
        return sample(unit.jobs)
    except NotFiniteError as error:
        client = unit.jobs[error.rows[0]].client
        if ingredients.get(client):
            raise PayloadError(client, "payload", f"{error}, or this payload cannot be used") from error
        raise


def image_file(job: ServerJob, image: ImageJob) -> str:
    """Where an image lies, relative to the run's folder. Class names are the run's, so they are made safe for a file system."""
    name = "".join(c if c.isalnum() else "_" for c in job.classes[image.label])
    return f"images/{image.client}/{image.label:03d}-{name}/{image.index:05d}.png"


def _commit(job: ServerJob, unit: Unit, pixels: torch.Tensor) -> None:
    """Write the images, then the unit's manifest: the unit is done when, and only when, its manifest is there."""
    rows = []
    for image, picture in zip(unit.jobs, pixels, strict=True):
        file = image_file(job, image)
        path = job.folder.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path)
        rows.append(
            {
                "file": file,
                "client": image.client,
                "class": job.classes[image.label],
                "seed": image.noise_seed,
                "sha256": _digest(picture),
            }
        )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(job.folder.path / "units" / f"{unit.name}.jsonl", text.encode())


def _load(job: ServerJob, unit: Unit) -> torch.Tensor | None:
    """A unit's images at the classifiers' size, if it was committed and every image is as it was then; else None."""
    manifest = job.folder.path / "units" / f"{unit.name}.jsonl"
    if not manifest.is_file():
        return None
    pictures = []
    for line in manifest.read_text().splitlines():
        row = json.loads(line)
        try:
            with Image.open(job.folder.path / row["file"]) as image:
                picture = pil_to_tensor(image)
        except (OSError, SyntaxError):  # PIL raises both for a damaged file
            return None
        if _digest(picture) != row["sha256"]:
            return None
        pictures.append(_resize(picture[None], job.config.data.image_size)[0])
    return torch.stack(pictures) if len(pictures) == len(unit.jobs) else None


def _digest(picture: torch.Tensor) -> str:
    return hashlib.sha256(picture.contiguous().numpy().tobytes()).hexdigest()


def _resize(pixels: torch.Tensor, size: int) -> torch.Tensor:
    if pixels.shape[-1] == size:
        return pixels
    return torch.stack([to_pixels(Image.fromarray(p.permute(1, 2, 0).numpy()), size) for p in pixels])
