"""Measure the synthesis engine and the clients' description training on this machine's CPU.

python -m benchmarks.speed.cpu sampling      # against diffusers' pipeline; parity
python -m benchmarks.speed.cpu descriptions  # ten classes in parallel, or a loop of batch 1
python -m benchmarks.speed.cpu choices       # precision, attention, memory format, compilation
python -m benchmarks.speed.cpu workers       # two real ones; 40 that sleep; a slow one
python -m benchmarks.speed.cpu memory        # of a server that makes 2,000 and 20,000 gray images

Ratios are of pairs A B A B in one process; with seven pairs, their median lies between the least
and the largest with 98 % (sign test).
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch
from torch.nn import functional as F

from benchmarks.federation import CPU
from benchmarks.harness import Experiment, command_line, last_line_of
from client_app.context import ClientJob
from client_app.learning.conditions import posteriors, train_conditions
from osfl.config import NodeConfig, RunConfig, SynthesisConfig, parse_run_config
from osfl.data.load import load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.launch.flower import MALLOC_SETTINGS
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, forward_noise, load_kit, load_pipeline
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.settings import default_config
from osfl.util.costs import Stopwatch
from osfl.util.pixels import to_float
from server_app.context import ServerJob
from server_app.methods import prompts_only
from server_app.synthesis import images
from server_app.synthesis.engine import DTYPES, load_engine, resolve_auto
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, Unit, cut_units, initial_noise, plan_images
from server_app.synthesis.samplers import ddim
from server_app.synthesis.workers import Sample, _threads, sample_units

EXPERIMENT = Experiment(__file__)
WORK = EXPERIMENT.work
PAIRS = 7
WORKER_TURNS = 3
Rows = list[dict[str, Any]]


def config_with(**settings: object) -> RunConfig:
    """Return the defaults with settings that are named as in Python (`synthesis__workers`)."""
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
    return parse_run_config({**default_config(), "kit": "kits/digits", **named})


def paired(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, object]:
    """Return the seconds of both, and how many times as fast ours is."""
    ours(), theirs()  # warm-up
    seconds: list[tuple[float, float]] = []
    for _ in range(PAIRS):
        pair = []
        for act in (ours, theirs):
            watch = Stopwatch()
            act()
            pair.append(watch.seconds)
        seconds.append((pair[0], pair[1]))
    ratios = sorted(b / a for a, b in seconds)
    return {
        "ours s": round(median(a for a, _ in seconds), 2),
        "theirs s": round(median(b for _, b in seconds), 2),
        "ratio": round(median(ratios), 2),
        "from": round(ratios[0], 2),
        "to": round(ratios[-1], 2),
    }


def sampling() -> Rows:
    """Sample 120 images of all classes: 20 DDIM steps, guidance 3, the same noise.

    Ours has its best settings: two units of 60, in parallel and in batches as measured. Theirs has
    every batch size, in the same precision, compiled where ours is.
    """
    plan = plan_images("prompts-only", 0, {"a": range(10)}, 12)
    modes: dict[str, dict[str, object]] = {
        "float32, exact": {},
        "bfloat16": {"dtype": "bfloat16"},
        "float32, compiled": {"compile": "on"},
    }
    sizes = {1: "one at a time", 10: "batches of 10", 30: "batches of 30", 60: "batches of 60"}
    rows: Rows = []
    for mode, choice in modes.items():
        settings = replace(config_with().synthesis, **choice)
        settings = resolve_auto(find_kit("kits/digits"), CPU, settings)
        ours = our_sampling(plan, settings)
        difference = latents_differ(plan, settings)
        best = f"{settings.parallel_units} x {settings.batch_size}"
        for size, description in sizes.items():
            # Otherwise the last sizes exceed the limit of recompilations, and run eagerly
            torch.compiler.reset()
            theirs = their_sampling(plan, settings, size)
            figures = paired(ours, theirs)
            row = {"mode": mode, "ours: units x batch": best, "diffusers' pipeline": description}
            rows.append({**row, **figures, "latents differ": f"{difference:.1e}"})
    return rows


def our_sampling(plan: list[ImageJob], settings: SynthesisConfig) -> Callable[[], object]:
    """Return an act that samples a plan as a run does; the models are loaded once."""
    source = find_kit("kits/digits")
    kits = [load_engine(source, CPU, settings) for _ in range(settings.parallel_units)]
    free = list(kits)
    names = class_names(config_with().data)
    prompts = kits[0].text(settings.prompts(names))

    def make(device: torch.device) -> Sample:
        kit = free.pop()

        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            of_jobs = prompts[[job.label for job in jobs]]
            return prompts_only.sample(kit, jobs, of_jobs, 3.0, 20)

        return sample

    def act() -> None:
        free[:] = kits
        units = cut_units(plan, settings.unit_size, {}, {})
        list(sample_units(images._in_batches(make, settings.batch_size), units, CPU, settings))

    return act


def their_pipeline(settings: SynthesisConfig) -> Any:
    """Return diffusers' pipeline with the precision and compilation of `settings`."""
    pipe = load_pipeline(find_kit("kits/digits")).to(DTYPES[settings.dtype])
    if settings.compile == "on":
        pipe.unet = torch.compile(pipe.unet)
    return pipe


def their_sampling(
    plan: list[ImageJob], settings: SynthesisConfig, size: int
) -> Callable[[], object]:
    """Return an act that draws the same images by diffusers' pipeline, `size` at a time."""
    pipe = their_pipeline(settings)
    names = class_names(config_with().data)
    texts = settings.prompts([names[job.label] for job in plan])
    z = initial_noise(plan, (4, 8, 8), CPU).to(DTYPES[settings.dtype])

    def act() -> None:
        for first in range(0, len(plan), size):
            part = slice(first, first + size)
            pipe(texts[part], latents=z[part], num_inference_steps=20, guidance_scale=3.0)

    return act


@torch.no_grad()
def latents_differ(plan: list[ImageJob], settings: SynthesisConfig) -> float:
    """Return the relative difference of our latents to the pipeline's, of ten images one by one in
    float32.
    """
    jobs = plan[::12]
    names = class_names(config_with().data)
    kit = load_engine(find_kit("kits/digits"), CPU, settings)
    texts = settings.prompts([names[job.label] for job in jobs])
    condition = Condition(kit.text(texts), 3.0)
    c0 = kit.text([""])
    z = initial_noise(jobs, kit.latent_shape, CPU)
    ours = ddim(kit, z, 20, lambda z, t: compose(kit, z, t, c0, [condition]))
    pipe = load_pipeline(find_kit("kits/digits"))
    options = {"num_inference_steps": 20, "guidance_scale": 3.0, "output_type": "latent"}
    expected = torch.cat(
        [pipe([text], latents=z[n : n + 1], **options).images for n, text in enumerate(texts)]
    )
    return float((ours - expected).norm() / expected.norm())


def choices() -> Rows:
    """Time a UNet pass of sixty images with guidance by the choices of `synthesis`, against the
    default: float32, contiguous, eager, torch's own attention.
    """
    tried = {
        "the default again": {},
        "channels-last": {"memory_format": "channels-last"},
        "attention by plain mathematics": {"attention": "math"},
        "bfloat16": {"dtype": "bfloat16"},
        "compiled": {"compile": "on"},
        "one of two threads": {"threads": 1},
    }

    @torch.no_grad()
    def passing(**given: object) -> Callable[[], object]:
        kit = load_engine(find_kit("kits/digits"), CPU, replace(config_with().synthesis, **given))
        z = torch.randn(120, *kit.latent_shape)
        c = kit.text([""]).expand(120)

        def act() -> None:
            with torch.no_grad(), _threads(given.get("threads", 0)):
                kit.eps(z, torch.tensor(500), c)

        return act

    default = passing()
    return [
        {"UNet, 120 rows": description, **paired(passing(**options), default)}
        for description, options in tried.items()
    ]


def descriptions() -> Rows:
    """Train descriptions of ten classes with ten images each for three epochs: samples a second,
    and the similarity to what a class learns alone.
    """
    config = config_with(method="feddeo", feddeo__epochs=3, num_clients=6)
    data = load_images(
        config.data, NodeConfig(partition_id=0, num_partitions=6), "train", 0, size=32
    )
    names = class_names(config.data)
    job = ClientJob(config, "client-0", names, lambda size: data, find_kit("kits/digits"), CPU)
    kit = load_kit(find_kit("kits/digits"))
    rows_of = [(data.labels == label).nonzero().flatten()[:10] for label in range(10)]
    start = kit.text([f"an image of {name}" for name in names])
    steps = 3 * sum(map(len, rows_of))

    def together(at_once: int = 16) -> torch.Tensor:
        mean, logvar = posteriors(kit, data, job)
        return train_conditions(
            kit,
            start,
            mean,
            logvar,
            rows_of,
            list(names),
            replace(config.feddeo, conditions_per_batch=at_once),
            job,
        )

    def loop() -> None:
        for label, rows in enumerate(rows_of):
            c = start.states[label : label + 1].clone().requires_grad_()
            optimizer = torch.optim.Adam([c], config.feddeo.lr)
            for _ in range(3):
                for row in rows:
                    textual_inversion_step(kit, data.pixels[row : row + 1], c, optimizer)

    result = paired(together, loop)
    similarity = F.cosine_similarity(together(16).flatten(1), together(1).flatten(1)).min().item()
    return [{"samples": steps, **result, "least cosine to a class alone": f"{similarity:.6f}"}]


def textual_inversion_step(
    kit: Kit, pixels: torch.Tensor, c: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Train one step as the papers' code does: one image, its latent drawn again by the VAE."""
    mean, logvar = kit.encode(to_float(pixels))
    x0 = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
    t = torch.randint(1000, (1,), device=mean.device)
    noise = torch.randn_like(mean)
    z_t = forward_noise(x0, noise, kit.alphas_cumprod[t])
    loss = F.mse_loss(kit.eps(z_t, t, Conditioning(c)), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def workers() -> Rows:
    """Measure units a second from every worker's first unit until the last ones are handed out.

    Busy: the share of that time in which a worker samples. Of a core: its CPU time in it, which
    does not depend on the machine's speed and shows what Ray's own processes take.
    """
    rows: Rows = []
    job = job_of("workers", per_class=24)
    real = prompts_only.sampler
    measured: dict[int, Rows] = {1: [], 2: []}
    for _ in range(WORKER_TURNS):
        for count, rates in measured.items():
            rates.append(rate(lambda device: stamped(real(job, device)), units_of(job, 10), count))
    for count, rates in measured.items():
        row = {name: round(median(turn[name] for turn in rates), 4) for name in rates[0]}
        rows.append({"workers": count, "what": "digits, one thread each", **row})
    rows[-1]["efficiency"] = round(rows[-1]["units a s"] / 2 / rows[-2]["units a s"], 3)
    alone = 0.0
    for count in (1, 4, 16, 40):  # each loads torch: 64 need more than 24 GB
        units = units_of(job_of(f"sleep-{count}", per_class=30 * count), 10)
        row = {
            "workers": count,
            "what": "sleeping 2 s a unit",
            **rate(lambda device: stamped(sleeping(2.0)), units, count),
        }
        del row["of a core"]
        alone = alone or row["units a s"]
        rows.append({**row, "efficiency": round(row["units a s"] / count / alone, 3)})
    units = units_of(job_of("slow", per_class=400), 10)
    rates = rate(lambda device: stamped(sleeping(0.2, slow=WORK / "who is slow")), units, 4)
    # Three at full speed, one at a tenth
    took = rates["seconds"]
    ideal = rates["units"] * 0.2 / 3.1
    rows.append(
        {
            "workers": 4,
            "what": f"0.2 s a unit, one 2 s: {took:.1f} s, ideal {ideal:.1f} s",
            "efficiency": round(ideal / took, 3),
        }
    )
    return rows


def stamped(sample: Sample) -> Sample:
    """Write the process id into the first pixels of a sampler's first image."""

    def with_pid(jobs: Sequence[ImageJob]) -> torch.Tensor:
        pixels = sample(jobs)
        pixels[0, 0, 0, :4] = torch.tensor([os.getpid() >> shift & 255 for shift in (0, 8, 16, 24)])
        return pixels

    return with_pid


def sleeping(seconds: float, slow: Path | None = None) -> Sample:
    """Return blank images after some seconds; the process that makes the file `slow` takes ten
    times as long.
    """

    def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
        if slow and not slow.exists():
            slow.write_text(str(os.getpid()))
        time.sleep(seconds * (10 if slow and slow.read_text() == str(os.getpid()) else 1))
        return torch.zeros(len(jobs), 3, 8, 8, dtype=torch.uint8)

    return sample


def rate(
    make_sampler: Callable[[torch.device], Sample], units: list[Unit], count: int
) -> dict[str, Any]:
    """Return units a second in the steady state, a worker's share of it, and its seconds."""
    settings = replace(config_with().synthesis, workers=count, threads=1)
    (WORK / "who is slow").unlink(missing_ok=True)
    records: dict[
        int, list[tuple[float, float, float]]
    ] = {}  # by process: when, after how many seconds of sampling, of the CPU's so far
    order: list[tuple[float, int]] = []
    for _, pixels, seconds in sample_units(make_sampler, units, CPU, settings):
        pid = int.from_bytes(bytes(pixels[0, 0, 0, :4].tolist()), "little")
        now = time.monotonic()
        records.setdefault(pid, []).append((now, seconds, sum(psutil.Process(pid).cpu_times()[:2])))
        order += [(now, pid)] if len(records) == count else []
    steady = order[: len(order) - 2 * count]
    (begin, _) = steady[0]
    (end, _) = steady[-1]
    shares = []
    for rows in records.values():
        covered = [row for row in rows if begin <= row[0] <= end]
        if len(covered) > 1:
            lasted = covered[-1][0] - covered[0][0]
            shares.append(
                (
                    sum(seconds for _, seconds, _ in covered[1:]) / lasted,
                    (covered[-1][2] - covered[0][2]) / lasted,
                )
            )
    return {
        "units a s": round((len(steady) - 1) / (end - begin), 3),
        "busy": round(mean(busy for busy, _ in shares), 4),
        "of a core": round(mean(core for _, core in shares), 4),
        "units": len(order) - 1,
        "seconds": round(order[-1][0] - begin, 1),
    }


def job_of(name: str, per_class: int, **settings: object) -> ServerJob:
    """Return a job of prompts-only with one client."""
    config = config_with(
        method="prompts-only",
        num_clients=1,
        synthesis__images_per_class=per_class,
        synthesis__threads=1,
        **settings,
    )
    run_folder = open_run_folder(replace(config, runs_dir=str(WORK)), name, 0)
    return ServerJob(config, run_folder, Status(run_folder.path), ("client-0",))


def plan_of(job: ServerJob) -> list[ImageJob]:
    """Plan ten classes."""
    return plan_images(
        "prompts-only", 0, {"client-0": range(10)}, job.config.synthesis.images_per_class
    )


def units_of(job: ServerJob, size: int) -> list[Unit]:
    """Cut a plan into units of `size` images."""
    return cut_units(plan_of(job), size, {}, {})


def memory() -> Rows:
    """Measure each count in a process of its own with the ServerApp's malloc settings.

    The sampler draws nothing: it returns gray images of 256 pixels.
    """
    rows: Rows = []
    for count in (200, 2000):
        words = last_line_of("benchmarks.speed.cpu", "gray", str(count), **MALLOC_SETTINGS)
        rows.append({"images": 10 * count, "peak MB": round(float(words.split()[-1]))})
    rows[1]["times the memory"] = round(rows[1]["peak MB"] / rows[0]["peak MB"], 3)
    return rows


def gray(count: int) -> None:
    """Print this process's peak memory after it made all units and before it reads them."""
    import resource

    job = job_of(f"gray-{count}", count, synthesis__unit_size=20)
    units = units_of(job, 20)
    work = images.Work(
        units,
        lambda device: lambda jobs: torch.full((len(jobs), 3, 256, 256), 128, dtype=torch.uint8),
    )
    images.make_units(job, work, lambda unit: None)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


def main() -> None:
    """Make one of the tables."""
    parser = command_line(__doc__)
    kinds = {
        "sampling": sampling,
        "choices": choices,
        "descriptions": descriptions,
        "workers": workers,
        "memory": memory,
    }
    parser.add_argument("kind", choices=[*kinds, "gray"])
    parser.add_argument("count", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not MALLOC_SETTINGS.items() <= os.environ.items():
        # As in the ServerApp; malloc reads its settings when a process starts
        again = [sys.executable, "-m", "benchmarks.speed.cpu", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | MALLOC_SETTINGS)
    if arguments.kind == "gray":
        return gray(int(arguments.count))
    subprocess.run(["rm", "-rf", str(WORK)], check=True)
    WORK.mkdir(parents=True)
    rows = kinds[arguments.kind]()
    kind = arguments.kind
    replace(EXPERIMENT, options=kind, table=f"cpu-{kind}").write_all(rows)


if __name__ == "__main__":
    main()
