"""Rendering a plan: unit by unit, each committed as a whole, so that a killed server goes on where it was."""

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from PIL import Image

from osfl.config import flatten
from osfl.data.load import to_pixels
from osfl.files import DamageError, open_private, private_folder, write_atomically
from osfl.log import log
from osfl.models.kits import SMALL_DECODER, kit_digest, part_digest
from osfl.models.used_parts import sampling_parts
from osfl.run_folder.layout import image_name, picture_digest, read_picture, read_rows
from osfl.wire import PayloadError
from server_app.job import ServerJob
from server_app.synthesis.plan import ImageJob, Unit, cut_units
from server_app.synthesis.samplers import NotFiniteError
from server_app.synthesis.workers import MakeSampler, Sample, sample_units

WRITERS = min(8, os.cpu_count() or 1)  # threads that write images while others are sampled
UNWRITTEN = WRITERS  # units that may wait for them
ATTEMPTS = 3  # at images that turn out unreadable once written
NOT_SHAPING = (
    "workers",
    "ray-address",
    "checkpointing",
)  # settings of the synthesis that say who samples and how, not what


@dataclass(frozen=True)
class SyntheticSet:
    """All images of a plan, in its order."""

    pixels: torch.Tensor  # [N, 3, S, S] uint8, at the classifiers' size
    labels: torch.Tensor  # [N]
    clients: tuple[str, ...]  # [N]


def render(
    job: ServerJob,
    jobs: list[ImageJob],
    make_sampler: MakeSampler,
    settings: Mapping[str, object],
    divisible: bool = True,
) -> SyntheticSet:
    """Make every image of a plan that is not there yet, and load them all.

    Args:
        make_sampler: loads the models; not called when nothing is left to do.
        settings: of the method's sampler; they are part of a unit's name.
        divisible: whether a unit that does not fit into memory may be sampled in parts.

    Raises:
        PayloadError: sampling with a client's payload is led astray.
        NotFiniteError: it is without one.
    """
    ingredients = {client: job.folder.payload_digest(client) for client in job.clients}
    shaping = {
        key: value for key, value in flatten(job.config.synthesis).items() if key not in NOT_SHAPING
    }
    shaping |= {"kit": kit_digest(job.kit, sampling_parts(job.config))}
    if (small := job.config.synthesis.small_decoder) not in ("", "kit"):
        shaping |= {"small-decoder": part_digest(small, SMALL_DECODER)}
    units = cut_units(jobs, job.config.synthesis.unit_size, ingredients, {**settings, **shaping})
    checked = _blaming(make_sampler, ingredients)
    if divisible:
        checked = _in_batches(checked, job.config.synthesis.batch_size)
    job.status.phase("synthesis", len(jobs))
    size, firsts = job.config.data.image_size, [0, *accumulate(len(unit.jobs) for unit in units)]
    pixels = torch.empty(len(jobs), 3, size, size, dtype=torch.uint8)
    for left in reversed(range(ATTEMPTS)):
        _make(job, units, checked, len(jobs))
        job.status.phase("reading the images", len(jobs))
        with ThreadPoolExecutor(WRITERS) as readers:
            good = list(
                readers.map(lambda unit, first: _read(job, unit, pixels[first:]), units, firsts)
            )
        if not (
            damaged := [unit for unit, is_good in zip(units, good, strict=True) if not is_good]
        ):
            break
        if not left:
            raise OSError(
                f"{job.folder.path}: images cannot be read that were written {ATTEMPTS} times; is the disk sound?"
            )
        log.info(
            "%d units have images that cannot be read, or are others; they are made again",
            len(damaged),
        )
        for unit in damaged:
            _manifest(job, unit).unlink()
    for stranger in set(job.folder.unit_files()) - {_manifest(job, unit) for unit in units}:
        stranger.unlink()  # of a payload that was replaced; its images are
    write_atomically(
        job.folder.manifest_file,
        b"".join(_manifest(job, unit).read_bytes() for unit in units),
    )
    ordered = [image for unit in units for image in unit.jobs]
    labels, clients = (
        torch.tensor([image.label for image in ordered]),
        tuple(image.client for image in ordered),
    )
    return SyntheticSet(pixels, labels, clients)


def _make(job: ServerJob, units: list[Unit], make_sampler: MakeSampler, total: int) -> None:
    """Make every unit that is not committed. Images are held until they are written, no longer, whatever the plan's size."""
    left = [unit for unit in units if not _is_there(job, unit)]
    done = total - sum(len(unit.jobs) for unit in left)
    job.status.advance(done, total)
    with ThreadPoolExecutor(WRITERS) as writers:
        pending: deque[tuple[Unit, float, Future[None]]] = deque()

        def finish() -> None:
            nonlocal done
            unit, seconds, written = pending.popleft()
            written.result()
            with open_private(job.folder.timings_file, "a") as file:
                file.write(
                    json.dumps({"unit": unit.name, "images": len(unit.jobs), "seconds": seconds})
                    + "\n"
                )
            done += len(unit.jobs)
            job.status.advance(done, total)

        for unit, pixels, seconds in sample_units(
            make_sampler, left, job.device, job.config.synthesis, job.status.within
        ):
            pending.append((unit, seconds, writers.submit(_commit, job, unit, pixels)))
            while pending and (pending[0][2].done() or len(pending) > UNWRITTEN):
                finish()
        while pending:
            finish()


def _blaming(make_sampler: MakeSampler, ingredients: Mapping[str, str]) -> MakeSampler:
    """The same, but the client whose payload leads the sampling astray is named."""

    def make(device: torch.device) -> Sample:
        sample = make_sampler(device)

        def checked(jobs: Sequence[ImageJob]) -> torch.Tensor:
            try:
                return sample(jobs)
            except NotFiniteError as error:
                client = jobs[error.rows[0]].client
                if ingredients.get(client):
                    raise PayloadError(
                        client, "payload", f"{error}, or this payload cannot be used"
                    ) from error
                raise

        return checked

    return make


def image_file(job: ServerJob, image: ImageJob) -> str:
    """Where an image lies, relative to the run's folder. Class names are the run's, so they are made safe for a file system."""
    return image_name(image.client, image.label, job.classes[image.label], image.index)


def _in_batches(make_sampler: MakeSampler, batch_size: int) -> MakeSampler:
    """The same in batches; in smaller ones from then on, once a GPU's memory has run out.

    Args:
        batch_size: images; 0: a whole unit.
    """

    def make(device: torch.device) -> Sample:
        sample, most = make_sampler(device), batch_size

        def in_parts(jobs: Sequence[ImageJob]) -> torch.Tensor:
            nonlocal most
            while True:
                size = most or len(jobs)
                firsts = range(0, len(jobs), size)
                try:
                    return torch.cat([sample(jobs[first : first + size]) for first in firsts])
                except torch.OutOfMemoryError:
                    if size == 1:
                        raise
                    most = (min(size, len(jobs)) + 1) // 2
                log.info(
                    "a batch of %d does not fit into memory; sampling %d at a time", size, most
                )
                torch.cuda.empty_cache()

        return in_parts

    return make


def _manifest(job: ServerJob, unit: Unit) -> Path:
    return job.folder.unit_file(unit.name)


def _commit(job: ServerJob, unit: Unit, pixels: torch.Tensor) -> None:
    """Write the images, then the unit's manifest: the unit is done when, and only when, its manifest is there."""
    rows = []
    for image, picture in zip(unit.jobs, pixels, strict=True):
        file = image_file(job, image)
        path = job.folder.path / file
        private_folder(path.parent)
        with open_private(path, "wb") as written:
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(written, "png")
        rows.append(
            {
                "file": file,
                "client": image.client,
                "class": job.classes[image.label],
                "seed": image.noise_seed,
                "sha256": picture_digest(picture),
            }
        )
    write_atomically(_manifest(job, unit), "".join(json.dumps(row) + "\n" for row in rows).encode())


def _is_there(job: ServerJob, unit: Unit) -> bool:
    """Whether a unit was committed and its images' files are still there. A look; what is in them is seen when they are read."""
    try:
        files = [row["file"] for row in read_rows(_manifest(job, unit))]
    except DamageError:  # or missing; cut off, with the power perhaps
        return False
    root = str(job.folder.path)  # of 100,000 images, pathlib's paths would take most of the time
    return len(files) == len(unit.jobs) and all(os.path.isfile(f"{root}/{file}") for file in files)


def _read(job: ServerJob, unit: Unit, into: torch.Tensor) -> bool:
    """A committed unit's images at the classifiers' size, into the first rows; False if one of them is not as it was then."""
    for number, row in enumerate(read_rows(_manifest(job, unit))):
        picture = read_picture(job.folder.path / row["file"])
        if picture is None or picture_digest(picture) != row["sha256"]:
            return False
        into[number] = _resize(picture, into.shape[-1])
    return True


def _resize(picture: torch.Tensor, size: int) -> torch.Tensor:
    return (
        picture
        if picture.shape[-1] == size
        else to_pixels(Image.fromarray(picture.permute(1, 2, 0).numpy()), size)
    )
