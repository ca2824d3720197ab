"""Synthesis of a plan's images, work unit by work unit.

Each unit is committed as a whole, so that a killed server resumes where it stopped.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import psutil
import torch
from PIL import Image

from osfl.config import NOT_IDENTITY, flatten
from osfl.data.pictures import to_pixels
from osfl.kit.check import lora_file
from osfl.kit.digests import file_sha256
from osfl.kit.kits import find_model, kit_digest, part_digest
from osfl.kit.used_parts import sampling_parts
from osfl.methods import METHODS, TINY_DECODER
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import image_digest, image_name, read_image, read_rows
from osfl.util.files import CorruptFileError, make_private_folder, open_private, write_atomically
from osfl.util.log import log
from osfl.util.pixels import allocate_pixels
from server_app.context import ServerJob
from server_app.synthesis.plan import ImageJob, Unit, cut_units
from server_app.synthesis.samplers import NotFiniteError, PrecisionError
from server_app.synthesis.workers import MakeSampler, Sample, never, sample_units

WRITERS = min(8, os.cpu_count() or 1)  # threads that write images while others are sampled
MAX_UNWRITTEN_UNITS = WRITERS  # units that may wait for a thread
MEMORY_SHARE = 4  # pixels above this part of the free memory are in a file
ATTEMPTS = 3  # at images that cannot be read after they were written


@dataclass(frozen=True)
class SyntheticSet:
    """The images of a plan, in its order."""

    pixels: torch.Tensor  # [N, 3, S, S] uint8, at the classifiers' size
    labels: torch.Tensor  # [N]
    clients: tuple[str, ...]  # [N]

    def select(self, rows: Sequence[int]) -> "SyntheticSet":
        """Return the images of these rows."""
        owners = tuple(self.clients[row] for row in rows)
        return SyntheticSet(self.pixels[rows], self.labels[rows], owners)

    def rows_by_class(self, clients: Collection[str]) -> dict[tuple[str, int], list[int]]:
        """Return the rows of these clients' images by (client, label), in order."""
        selected = set(clients)
        groups: dict[tuple[str, int], list[int]] = {}
        for row, (client, label) in enumerate(zip(self.clients, self.labels.tolist(), strict=True)):
            if client in selected:
                groups.setdefault((client, label), []).append(row)
        return groups


@dataclass(frozen=True)
class Work:
    """Work units, and how to sample those that do not exist yet.

    Attributes:
        units: in order.
        make_sampler: loads the models; not called if no image is missing.
    """

    units: list[Unit]
    make_sampler: MakeSampler


def plan_work(
    job: ServerJob,
    jobs: list[ImageJob],
    make_sampler: MakeSampler,
    divisible: bool = True,
    others: Mapping[str, str] | None = None,
    in_float32: MakeSampler | None = None,
) -> Work:
    """Return the work of sampling a plan's images.

    Args:
        make_sampler: loads the models.
        divisible: whether a unit may be sampled in batches, which get smaller if one does not fit
            into memory.
        others: owners that are not clients, each with a text that determines its images.
        in_float32: as `make_sampler`, with networks in float32. It resamples an image that is not
            finite, to tell an overflow from a bad payload.
    """
    digests = {client: job.folder.payload_digest(client) for client in job.clients}
    ingredients = {**digests, **(others or {})}
    shaping = _shaping(job)
    size = job.config.synthesis.unit_size
    units = cut_units(jobs, size, ingredients, shaping, _earlier_shapings(job, shaping))
    if job.config.synthesis.dtype != "float32" and in_float32:
        make_sampler = _detect_overflow(make_sampler, in_float32, job.config.synthesis.dtype)
    make_sampler = _attribute_errors(make_sampler, digests)
    if divisible:
        make_sampler = _in_batches(make_sampler, job.config.synthesis.batch_size)
    return Work(units, make_sampler)


def synthesize(
    job: ServerJob,
    jobs: list[ImageJob],
    make_sampler: MakeSampler,
    divisible: bool = True,
    others: Mapping[str, str] | None = None,
    in_float32: MakeSampler | None = None,
) -> SyntheticSet:
    """Sample every image of a plan that does not exist yet, and load them all.

    Args and errors are those of `plan_work` and `finish_work`.
    """
    return finish_work(job, [plan_work(job, jobs, make_sampler, divisible, others, in_float32)])


def finish_work(job: ServerJob, works: Sequence[Work]) -> SyntheticSet:
    """Sample every image that does not exist yet, and load them all.

    Raises:
        PayloadError: sampling with a client's payload diverges.
        NotFiniteError: sampling diverges without a payload.
        PrecisionError: an image is finite in float32 only.
        OSError: images remain unreadable after `ATTEMPTS` attempts.
    """
    units = [unit for work in works for unit in work.units]
    job.status.phase("synthesis", sum(len(unit.jobs) for unit in units))
    pixels = _make_and_read(job, works, units)
    _delete_stale_manifests(job, units)
    rows = (_manifest(job, unit).read_bytes() for unit in units)
    write_atomically(job.folder.manifest_file, rows)
    ordered = [image for unit in units for image in unit.jobs]
    labels = torch.tensor([image.label for image in ordered])
    return SyntheticSet(pixels, labels, tuple(image.client for image in ordered))


def _shaping(job: ServerJob) -> dict[str, object]:
    """Return everything besides seeds and payloads that determines the images.

    It is part of every unit's name: the config keys of the synthesis and of the method that belong
    to the run's identity, the class names, and digests of the weights, which may change in place.
    """
    section = METHODS[job.config.method].section
    shaping: dict[str, object] = {
        key: value
        for key, value in flatten(job.config).items()
        if key.startswith(("synthesis.", f"{section}.")) and key not in NOT_IDENTITY
    }
    shaping["classes"] = job.classes
    if job.config.data.words:
        shaping["words"] = job.config.data.words
    shaping["kit"] = kit_digest(job.kit, sampling_parts(job.config))
    tiny_decoder = job.config.synthesis.tiny_decoder
    if tiny_decoder not in ("", "kit"):
        folder = find_model(tiny_decoder, TINY_DECODER, "synthesis.tiny-decoder")
        shaping["small-decoder"] = part_digest(folder, TINY_DECODER)
    lora = job.config.synthesis.lora
    if lora not in ("", "kit"):
        shaping["lora"] = file_sha256(lora_file(lora, job.kit))
    return shaping


def _earlier_shapings(
    job: ServerJob, shaping: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """Return the shaping of clients whose payloads are from a run with fewer classes.

    Their work units keep their names, and so their images.
    """
    record = job.folder.continuation()
    if record is None:
        return {}
    return {
        client: {**shaping, "classes": names}
        for client, names in record.classes.items()
        if names and names != job.classes
    }


def _make_and_read(job: ServerJob, works: Sequence[Work], units: list[Unit]) -> torch.Tensor:
    """Return the images of units, [N, 3, S, S], and make the missing ones.

    Units with unreadable images are made again.

    Raises:
        OSError: images remain unreadable after `ATTEMPTS` attempts.
    """
    size = job.config.data.image_size
    total = sum(len(unit.jobs) for unit in units)
    pixels = allocate_pixels((total, 3, size, size), memory_for_pixels(), job.folder.path)
    for _ in range(ATTEMPTS):
        count = _Count(job, total)
        for work in works:
            make_units(job, work, count.add)
        corrupt = _read_all(job, units, pixels)
        if not corrupt:
            return pixels
        log.info("%d units have missing or corrupt images and are made again", len(corrupt))
        for unit in corrupt:
            _manifest(job, unit).unlink()
    raise OSError(
        f"{job.folder.path}: images that were written {ATTEMPTS} times cannot be read; check the "
        "disk"
    )


def memory_for_pixels() -> int:
    """Return the bytes of pixels that are held in memory; more of them are in a file."""
    return int(psutil.virtual_memory().available) // MEMORY_SHARE


def _read_all(job: ServerJob, units: list[Unit], pixels: torch.Tensor) -> list[Unit]:
    """Read every unit's images into its rows of `pixels`, and return the corrupt units."""
    job.status.phase("reading the images", len(pixels))
    starts = accumulate((len(unit.jobs) for unit in units), initial=0)
    with ThreadPoolExecutor(WRITERS) as readers:
        results = readers.map(lambda unit, start: _read(job, unit, pixels[start:]), units, starts)
        return [unit for unit, is_intact in zip(units, results, strict=True) if not is_intact]


def _delete_stale_manifests(job: ServerJob, units: list[Unit]) -> None:
    """Delete the manifests of units outside this plan, such as those of a replaced payload."""
    manifests = {_manifest(job, unit) for unit in units}
    for stale in set(job.folder.unit_files()) - manifests:
        stale.unlink()


class _Count:
    """The images that are finished, which the run's status reports.

    Args:
        total: images of all work.
    """

    def __init__(self, job: ServerJob, total: int):
        self._job = job
        self._total = total
        self._finished = 0

    def add(self, unit: Unit) -> None:
        """Add the images of a finished unit."""
        self._finished += len(unit.jobs)
        self._job.status.advance(self._finished, self._total)


def make_units(
    job: ServerJob,
    work: Work,
    made: Callable[[Unit], None],
    is_stopped: Callable[[], bool] = never,
) -> None:
    """Make every unit that is not committed.

    Memory holds only the images that are being written, whatever the plan's size.

    Args:
        made: called with every unit, as soon as it is committed.
        is_stopped: as `sample_units`. Units that have begun are committed.
    """
    missing_units = []
    for unit in work.units:
        if _is_there(job, unit):
            made(unit)
        else:
            missing_units.append(unit)
    with ThreadPoolExecutor(WRITERS) as writers:
        pending: deque[tuple[Unit, float, Future[None]]] = deque()

        def finish() -> None:
            unit, seconds, commit = pending.popleft()
            commit.result()
            timing = {"unit": unit.name, "images": len(unit.jobs), "seconds": seconds}
            with open_private(job.folder.timings_file, "a") as file:
                file.write(json.dumps(timing) + "\n")
            made(unit)

        for unit, pixels, seconds in sample_units(
            work.make_sampler,
            missing_units,
            job.device,
            job.config.synthesis,
            job.status.step,
            is_stopped,
        ):
            pending.append((unit, seconds, writers.submit(_commit, job, unit, pixels)))
            while pending and (pending[0][2].done() or len(pending) > MAX_UNWRITTEN_UNITS):
                finish()
        while pending:
            finish()


def _attribute_errors(make_sampler: MakeSampler, digests: Mapping[str, str]) -> MakeSampler:
    """Wrap a sampler factory to name the client whose payload makes sampling diverge.

    Args:
        digests: of each client's payload; "" if it sends none.
    """

    def make(device: torch.device) -> Sample:
        sample = make_sampler(device)

        def checked(jobs: Sequence[ImageJob]) -> torch.Tensor:
            try:
                return sample(jobs)
            except NotFiniteError as error:
                client = jobs[error.rows[0]].client
                if digests.get(client):
                    raise PayloadError(
                        client, "payload", f"{error}, or this payload cannot be used"
                    ) from error
                raise

        return checked

    return make


def _detect_overflow(make_sampler: MakeSampler, in_float32: MakeSampler, dtype: str) -> MakeSampler:
    """Wrap a sampler factory to raise PrecisionError if an image is finite in float32 only."""

    def make(device: torch.device) -> Sample:
        sample = make_sampler(device)

        def checked(jobs: Sequence[ImageJob]) -> torch.Tensor:
            try:
                return sample(jobs)
            except NotFiniteError as error:
                try:
                    in_float32(device)([jobs[error.rows[0]]])
                # Raise the first error, whose rows are those of the batch
                except NotFiniteError:
                    raise error from None
                raise PrecisionError(
                    f"synthesis.dtype = {dtype!r}: the kit's networks overflow in this number "
                    "format, but not in float32; set synthesis.dtype to 'float32'"
                ) from error

        return checked

    return make


def image_file(job: ServerJob, image: ImageJob) -> str:
    """Return an image's path relative to the run's folder, with a sanitized class name."""
    return image_name(image.client, image.label, job.classes[image.label], image.index)


def _in_batches(make_sampler: MakeSampler, batch_size: int) -> MakeSampler:
    """Wrap a sampler factory to sample in batches, which are halved when GPU memory runs out.

    Args:
        batch_size: images; 0: a whole unit.
    """

    def make(device: torch.device) -> Sample:
        sample = make_sampler(device)
        max_size = batch_size

        def in_batches(jobs: Sequence[ImageJob]) -> torch.Tensor:
            nonlocal max_size
            while True:
                size = max_size or len(jobs)
                starts = range(0, len(jobs), size)
                try:
                    return torch.cat([sample(jobs[start : start + size]) for start in starts])
                except torch.OutOfMemoryError:
                    if size == 1:
                        raise
                    max_size = (min(size, len(jobs)) + 1) // 2
                log.info(
                    "a batch of %d does not fit into memory; sampling %d at a time", size, max_size
                )
                torch.cuda.empty_cache()

        return in_batches

    return make


def _manifest(job: ServerJob, unit: Unit) -> Path:
    return job.folder.unit_file(unit.name)


def _commit(job: ServerJob, unit: Unit, pixels: torch.Tensor) -> None:
    """Write a unit's images, then its manifest, whose existence commits the unit."""
    rows = []
    for image, picture in zip(unit.jobs, pixels, strict=True):
        file = image_file(job, image)
        path = job.folder.path / file
        make_private_folder(path.parent)
        # A link to the image of a continued run, whose image stays
        path.unlink(missing_ok=True)
        with open_private(path, "wb") as png:
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(png, "png")
        rows.append(
            {
                "file": file,
                "client": image.client,
                "class": job.classes[image.label],
                "seed": image.noise_seed,
                "sha256": image_digest(picture),
            }
        )
    write_atomically(_manifest(job, unit), "".join(json.dumps(row) + "\n" for row in rows).encode())


def _is_there(job: ServerJob, unit: Unit) -> bool:
    """Check whether a unit is committed and its image files exist. `_read` checks their content."""
    try:
        files = [row["file"] for row in read_rows(_manifest(job, unit))]
    # Missing, or truncated by a power failure
    except CorruptFileError:
        return False
    # For 100,000 images, pathlib would take most of the time
    root = str(job.folder.path)
    return len(files) == len(unit.jobs) and all(os.path.isfile(f"{root}/{file}") for file in files)


def _read(job: ServerJob, unit: Unit, into: torch.Tensor) -> bool:
    """Read a committed unit's images, resized for the classifiers, into the first rows of `into`.

    Returns:
        False if an image is missing or differs from its digest.
    """
    for number, row in enumerate(read_rows(_manifest(job, unit))):
        picture = read_image(job.folder.path / row["file"])
        if picture is None or image_digest(picture) != row["sha256"]:
            return False
        into[number] = resize(picture, into.shape[-1])
    return True


def resize(picture: torch.Tensor, size: int) -> torch.Tensor:
    """Resize an image [3, H, W] for the classifiers, unless it has their size."""
    return (
        picture
        if picture.shape[-1] == size
        else to_pixels(Image.fromarray(picture.permute(1, 2, 0).numpy()), size)
    )
