"""Rendering a plan.

Unit by unit, each committed as a whole, so that a killed server goes on where it was.
"""

import json
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from PIL import Image

from osfl.config import NOT_IDENTITY, flatten
from osfl.data.load import to_pixels
from osfl.kit.check import lora_file
from osfl.kit.digests import sha256_of
from osfl.kit.kits import SMALL_DECODER, find_model, kit_digest, part_digest
from osfl.kit.used_parts import sampling_parts
from osfl.methods import METHODS
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import image_name, picture_digest, read_picture, read_rows
from osfl.util.files import DamageError, open_private, private_folder, write_atomically
from osfl.util.log import log
from server_app.context import ServerJob
from server_app.synthesis.plan import ImageJob, Unit, cut_units
from server_app.synthesis.samplers import NotFiniteError, PrecisionError
from server_app.synthesis.workers import MakeSampler, Sample, sample_units

WRITERS = min(8, os.cpu_count() or 1)  # threads that write images while others are sampled
UNWRITTEN = WRITERS  # units that may wait for them
ATTEMPTS = 3  # at images that turn out unreadable once written


@dataclass(frozen=True)
class SyntheticSet:
    """All images of a plan, in its order."""

    pixels: torch.Tensor  # [N, 3, S, S] uint8, at the classifiers' size
    labels: torch.Tensor  # [N]
    clients: tuple[str, ...]  # [N]

    def only(self, rows: Sequence[int]) -> "SyntheticSet":
        """Some of them, by their places."""
        owners = tuple(self.clients[row] for row in rows)
        return SyntheticSet(self.pixels[rows], self.labels[rows], owners)

    def rows_by_class(self, clients: Collection[str]) -> dict[tuple[str, int], list[int]]:
        """Places of these clients' images, in their order, by (client, label)."""
        asked = set(clients)
        found: dict[tuple[str, int], list[int]] = {}
        for row, owner in enumerate(zip(self.clients, self.labels.tolist(), strict=True)):
            if owner[0] in asked:
                found.setdefault(owner, []).append(row)
        return found


def render(
    job: ServerJob,
    jobs: list[ImageJob],
    make_sampler: MakeSampler,
    divisible: bool = True,
    others: Mapping[str, str] | None = None,
    in_float32: MakeSampler | None = None,
) -> SyntheticSet:
    """Make every image of a plan that is not there yet, and load them all.

    Args:
        make_sampler: loads the models; not called when nothing is left to do.
        divisible: whether a unit may be sampled in batches, and in smaller ones where it does not
            fit into memory.
        others: owners of images that are no clients, and what shapes their images.
        in_float32: as `make_sampler`, with networks in float32: an image that is not finite is
            drawn again with it, to tell an overflow from a bad payload.

    Raises:
        PayloadError: sampling with a client's payload is led astray.
        NotFiniteError: it is without one.
        PrecisionError: an image is finite in float32 alone.
        OSError: images cannot be read, however often they are written.
    """
    digests = {client: job.folder.payload_digest(client) for client in job.clients}
    ingredients = {**digests, **(others or {})}
    units = cut_units(jobs, job.config.synthesis.unit_size, ingredients, _shaping(job))
    if job.config.synthesis.dtype != "float32" and in_float32:
        make_sampler = _comparing(make_sampler, in_float32, job.config.synthesis.dtype)
    make_sampler = _blaming(make_sampler, digests)
    if divisible:
        make_sampler = _in_batches(make_sampler, job.config.synthesis.batch_size)
    job.status.phase("synthesis", len(jobs))
    pixels = _made_and_read(job, units, make_sampler)
    _forget_others(job, units)
    manifests = [_manifest(job, unit).read_bytes() for unit in units]
    write_atomically(job.folder.manifest_file, b"".join(manifests))
    ordered = [image for unit in units for image in unit.jobs]
    labels = torch.tensor([image.label for image in ordered])
    return SyntheticSet(pixels, labels, tuple(image.client for image in ordered))


def _shaping(job: ServerJob) -> dict[str, object]:
    """What shapes the images beside their seeds and payloads: it is part of every unit's name.

    Of the run's identity, the synthesis' and the method's own sections, and the classes' names;
    and the weights that sample, which may be other ones in the same folder.
    """
    section = METHODS[job.config.method].server.replace("_", "-")
    shaping: dict[str, object] = {
        key: value
        for key, value in flatten(job.config).items()
        if key.startswith(("synthesis.", f"{section}.")) and key not in NOT_IDENTITY
    }
    shaping["classes"] = job.classes
    if job.config.data.words:
        shaping["words"] = job.config.data.words
    shaping["kit"] = kit_digest(job.kit, sampling_parts(job.config))
    small_decoder = job.config.synthesis.small_decoder
    if small_decoder not in ("", "kit"):
        folder = find_model(small_decoder, SMALL_DECODER, "synthesis.small-decoder")
        shaping["small-decoder"] = part_digest(folder, SMALL_DECODER)
    lora = job.config.synthesis.lora
    if lora not in ("", "kit"):
        shaping["lora"] = sha256_of(lora_file(lora, job.kit))
    return shaping


def _made_and_read(job: ServerJob, units: list[Unit], make_sampler: MakeSampler) -> torch.Tensor:
    """All images [N, 3, S, S] of some units, which are made where they are not there.

    Units whose images turn out unreadable are made again.
    """
    size = job.config.data.image_size
    total = sum(len(unit.jobs) for unit in units)
    pixels = torch.empty(total, 3, size, size, dtype=torch.uint8)
    for _ in range(ATTEMPTS):
        _make(job, units, make_sampler, total)
        damaged = _read_all(job, units, pixels)
        if not damaged:
            return pixels
        log.info(
            "%d units have images that cannot be read, or are others; they are made again",
            len(damaged),
        )
        for unit in damaged:
            _manifest(job, unit).unlink()
    raise OSError(
        f"{job.folder.path}: images cannot be read that were written {ATTEMPTS} times; "
        "is the disk sound?"
    )


def _read_all(job: ServerJob, units: list[Unit], pixels: torch.Tensor) -> list[Unit]:
    """Read every unit's images into its rows of `pixels`; the units that cannot be read."""
    job.status.phase("reading the images", len(pixels))
    firsts = accumulate((len(unit.jobs) for unit in units), initial=0)
    with ThreadPoolExecutor(WRITERS) as readers:
        good = readers.map(lambda unit, first: _read(job, unit, pixels[first:]), units, firsts)
        return [unit for unit, is_good in zip(units, good, strict=True) if not is_good]


def _forget_others(job: ServerJob, units: list[Unit]) -> None:
    """Remove the lists of units that are not of this plan: of a payload that was replaced, say."""
    planned = {_manifest(job, unit) for unit in units}
    for other in set(job.folder.unit_files()) - planned:
        other.unlink()


def _make(job: ServerJob, units: list[Unit], make_sampler: MakeSampler, total: int) -> None:
    """Make every unit that is not committed.

    Images are held until they are written, no longer, whatever the plan's size.
    """
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


def _comparing(make_sampler: MakeSampler, in_float32: MakeSampler, dtype: str) -> MakeSampler:
    """The same, but an image that is finite in float32 alone is no client's fault."""

    def make(device: torch.device) -> Sample:
        sample = make_sampler(device)

        def compared(jobs: Sequence[ImageJob]) -> torch.Tensor:
            try:
                return sample(jobs)
            except NotFiniteError as error:
                try:
                    in_float32(device)([jobs[error.rows[0]]])
                # Of this one image: the first has the rows of the batch
                except NotFiniteError:
                    raise error from None
                raise PrecisionError(
                    f"synthesis.dtype = {dtype!r}: the kit's networks overflow in this number "
                    "format, and not in float32; set synthesis.dtype to 'float32'"
                ) from error

        return compared

    return make


def image_file(job: ServerJob, image: ImageJob) -> str:
    """Where an image lies, relative to the run's folder.

    Class names are the run's, so they are made safe for a file system.
    """
    return image_name(image.client, image.label, job.classes[image.label], image.index)


def _in_batches(make_sampler: MakeSampler, batch_size: int) -> MakeSampler:
    """The same in batches; in smaller ones from then on, once a GPU's memory has run out.

    Args:
        batch_size: images; 0: a whole unit.
    """

    def make(device: torch.device) -> Sample:
        sample = make_sampler(device)
        most = batch_size

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
    """Write the images, then the unit's manifest.

    The unit is done when, and only when, its manifest is there.
    """
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
    """Whether a unit was committed and its images' files are still there.

    A look; what is in them is seen when they are read.
    """
    try:
        files = [row["file"] for row in read_rows(_manifest(job, unit))]
    except DamageError:  # or missing; cut off, with the power perhaps
        return False
    root = str(job.folder.path)  # of 100,000 images, pathlib's paths would take most of the time
    return len(files) == len(unit.jobs) and all(os.path.isfile(f"{root}/{file}") for file in files)


def _read(job: ServerJob, unit: Unit, into: torch.Tensor) -> bool:
    """A committed unit's images at the classifiers' size, into the first rows.

    False if one of them is not as it was then.
    """
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
