"""Measure the server with a million images: plan, work units, resume, and pixels for training.

python -m benchmarks.speed.many_images             # 10,000 to 1,000,000 images
python -m benchmarks.speed.many_images 100,000     # one row

The sampler draws noise in place of denoising, so that what is measured is everything else. Each row
has two processes: one makes the images, and one resumes the finished run.
"""

import argparse
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import Experiment, Line, last_line_of, some_of
from osfl.config import RunConfig, Scalar, parse_run_config
from osfl.data.parts import class_names
from osfl.models.training import fit
from osfl.payload.kinds import Domain
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.settings import default_config
from osfl.util.files import make_private_folder
from osfl.util.pixels import allocate_pixels
from server_app.context import ServerJob
from server_app.pipeline import plan_held_classes
from server_app.synthesis.images import finish_work, make_units, plan_work
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample
from tests.helpers.tiny_kits import make_tiny_kit

JOB = "many"
SIZES = {"10,000": 10_000, "100,000": 100_000, "1,000,000": 1_000_000}
CLIENTS = 100
SIDE = 64  # pixels
MOST_COPIED_BYTES = 3e9  # for a training from memory and from a file
STEPS = 300  # of a training
REPEATS = 3
EXPERIMENT = Experiment(
    __file__,
    SIZES,
    caption=f"The server's work for N images of {SIDE} pixels, of {CLIENTS} clients and 10 "
    "classes, in work units of 100, with a sampler that draws noise. CPU-seconds of making all "
    "units (PNG files, digests, rows); then in a new process, as when a run resumes, of planning, "
    "of finding that all units are there, and of reading all images. Memory: the peak of that "
    "process without file pages, which the system can drop. Training: images per second of a "
    f"linear model, of which reading is a large part, in {STEPS} steps of 128 on one core, from a "
    f"mapped file and from memory in turn; the best of {REPEATS}.",
)


class MemoryWatch:
    """The peak of this process's memory that is not a file's."""

    def __init__(self) -> None:
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            (anonymous,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
            self.peak = max(self.peak, 1024 * int(anonymous))
            time.sleep(0.1)


def noise_sampler(device: torch.device) -> Sample:
    """Return a sampler of noise in blocks of four pixels."""
    generator = torch.Generator(device)

    def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
        generator.manual_seed(jobs[0].noise_seed)
        shape = (len(jobs), 3, SIDE // 4, SIDE // 4)
        blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)

    return sample


def configured(images: int, folder: Path) -> RunConfig:
    """Return the run-config of a run with this number of images."""
    if not (folder / "kit").is_dir():
        make_tiny_kit(folder / "kit")
    settings: dict[str, Scalar] = {
        "method": "prompts-domain",
        "num-clients": CLIENTS,
        "job-id": JOB,
        "runs-dir": str(folder),
        "kit": str(folder / "kit"),
        "device": "cpu",
        "data.image-size": SIDE,
        "synthesis.images-per-class": images // (CLIENTS * 10),
        "synthesis.unit-size": 100,
        "global-model.steps": STEPS,
        "global-model.batch-size": 128,
        "global-model.augmentation": "none",
        "global-model.small-stem": True,
    }
    return parse_run_config({**default_config(), **settings})


@contextmanager
def timed(figures: dict[str, float], name: str) -> Iterator[None]:
    """Measure the context's CPU-seconds."""
    start = time.process_time()
    yield
    figures[name] = time.process_time() - start


def measure(images: int, folder: Path) -> dict[str, float]:
    """Make the units that are missing, read all images and train; return the figures."""
    config = configured(images, folder)
    run = open_run_folder(config, JOB, 0)
    payloads = {
        f"client-{n:03d}": Domain(class_names(config.data), "photo") for n in range(CLIENTS)
    }
    job = ServerJob(config, run, Status(run.path), tuple(payloads))
    figures: dict[str, float] = {}
    memory = MemoryWatch()
    with timed(figures, "plan"):
        work = plan_work(job, plan_held_classes(job, payloads), noise_sampler)
    with timed(figures, "units"):
        make_units(job, work, lambda unit: None)
    with timed(figures, "images"):
        synthetic = finish_work(job, [work])
    figures["memory"] = memory.peak
    pixels = {"file": synthetic.pixels}
    if synthetic.pixels.nbytes < MOST_COPIED_BYTES:
        pixels["memory"] = synthetic.pixels
        pixels["file"] = allocate_pixels(synthetic.pixels.shape, 0, run.path)
        pixels["file"][:] = synthetic.pixels
    for _ in range(REPEATS):
        for place, rows in pixels.items():
            rate = training_rate(job, rows, synthetic.labels)
            figures[f"from {place}"] = max(rate, figures.get(f"from {place}", 0.0))
    return figures


def training_rate(job: ServerJob, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the images per second of the training of a linear model."""
    settings = job.config.global_model
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, len(job.classes)))
    began = time.monotonic()
    fit(model, pixels, labels, settings, 0, job.device)
    return STEPS * settings.batch_size / (time.monotonic() - began)


def line_of(row: str, seeds: object = ()) -> Line:
    """Make the images in one process and resume in another; return the table's line."""
    shutil.rmtree(EXPERIMENT.work / JOB, ignore_errors=True)
    command = ("benchmarks.speed.many_images", "--images", str(SIZES[row]))
    made = json.loads(last_line_of(*command))
    resumed = json.loads(last_line_of(*command))
    shutil.rmtree(EXPERIMENT.work / JOB)
    return {
        "": row,
        "making, CPU-s": f"{made['units']:.0f}",
        "planning": f"{resumed['plan']:.1f}",
        "finding units": f"{resumed['units']:.1f}",
        "reading": f"{resumed['images']:.0f}",
        "memory, GB": f"{resumed['memory'] / 1e9:.2f}",
        "training from a file, images/s": f"{resumed['from file']:,.0f}",
        "from memory": f"{resumed['from memory']:,.0f}" if "from memory" in resumed else "-",
    }


def main() -> None:
    """Make some rows of the table, or one process's figures."""
    parser = EXPERIMENT.parser(__doc__)
    parser.add_argument("--images", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    make_private_folder(EXPERIMENT.work)
    if arguments.images:
        # Threads that share an operation wait for each other, and the more so on a busy machine
        torch.set_num_threads(1)
        print(json.dumps(measure(arguments.images, EXPERIMENT.work)))
        return
    EXPERIMENT.write(some_of(arguments.rows, EXPERIMENT.rows, parser), line_of)


if __name__ == "__main__":
    main()
