"""Measure speed and memory with Stable Diffusion v1.5's shapes on a GPU; weights are random.

python -m benchmarks.speed.gpu ceilings  # the limits of the card and of diffusers' pipeline
python -m benchmarks.speed.gpu ours      # the same images by this project's sampler
python -m benchmarks.speed.gpu guided    # guidance, zig-zags, description training

Several kinds in one command use the same card. Each takes two to five minutes. `--small` tests the
script on a CPU in some minutes, with a model of the same kind of 64 px. FLOPs are counted on one
image; a rate is those of all images over the seconds of the whole loop, decoding included. An
interrupted table keeps the rows that were made.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import BENCHMARKS, Experiment, command_line, write_table
from benchmarks.speed.cpu import CPU, config_with, textual_inversion_step
from client_app.context import ClientJob
from client_app.learning.conditions import train_conditions
from osfl.kit_training.untrained import new_scheduler
from osfl.models.classifiers import build_classifier
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Mixtures
from server_app.methods import espresso, fedcado, feddeo, fedlmg, prompts_only
from server_app.synthesis.guidance import as_teacher
from server_app.synthesis.plan import plan_images

CLASSES = tuple(f"class {number}" for number in range(10))
# Timed repeats; fewer once they took so many seconds
REPEATS, ENOUGH = 3, 10
STEPS = {"ceilings": 20, "ours": 20, "guided": 10}
BATCHES = (1, 4, 16, 64)
# For guidance by gradients, 4.9 GB an image without checkpointing
GUIDED_BATCH = 8


class RandomText:
    """A text encoder that returns the same random encoding for every text."""

    def __init__(self, shape: tuple[int, int], device: torch.device, dtype: torch.dtype):
        self.shape = shape
        self._encoding = torch.randn(1, *shape, device=device, dtype=dtype)

    def __call__(self, texts: list[str]) -> Conditioning:
        """Return one row per text."""
        return Conditioning(self._encoding).expand(len(texts))


def random_kit(small: bool) -> Kit:
    """Return Stable Diffusion v1.5's UNet and VAE in bfloat16 on the GPU, or small ones in float32
    on the CPU.
    """
    device, dtype = (CPU, torch.float32) if small else (torch.device("cuda"), torch.bfloat16)
    widths = (32, 64, 64, 64) if small else (320, 640, 1280, 1280)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8 if small else 64,
        block_out_channels=widths,
        cross_attention_dim=64 if small else 768,
        norm_num_groups=8 if small else 32,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32) if small else (128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=8 if small else 32,
        sample_size=64 if small else 512,
    )
    for network in (unet, vae):
        network.to(device, dtype).eval().requires_grad_(False)
    return Kit(
        vae,
        unet,
        RandomText((77, 64 if small else 768), device, dtype),
        new_scheduler(),
        device,
        dtype,
    )


def timed(
    act: Callable[[], object], device: torch.device, warm_up: Callable[[], object] | None = None
) -> tuple[float, float]:
    """Return the median seconds and the peak GB of an act; by default it warms up itself."""
    (warm_up or act)()
    seconds: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while len(seconds) < REPEATS and sum(seconds) < ENOUGH:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(
        seconds
    ), torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0


def tera_flops(act: Callable[[], object]) -> float:
    """Count the TFLOPs of an act."""
    with FlopCounterMode(display=False) as counter:
        act()
    return counter.get_total_flops() / 1e12


def row(
    name: str,
    count: int,
    act: Callable[[], object],
    device: torch.device,
    flops: float,
    warm_up: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Return the row of an act that makes `count` images of `flops` TF each."""
    try:
        seconds, peak = timed(act, device, warm_up)
        figures = {
            "images a s": f"{count / seconds:.3g}",
            "TF/s": f"{flops * count / seconds:.3g}",
            "peak GB": f"{peak:.2f}",
        }
        columns = {"what": name, "batch": count, "s": f"{seconds:.3g}", **figures}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        columns = {"what": name, "batch": count, "s": "out of memory"}
    print(columns, flush=True)
    return columns


def ceilings(kit: Kit, steps: int, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Measure the card's matrix product and copy, and diffusers' pipeline."""
    size = 8192 if kit.device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=kit.device, dtype=kit.dtype) for _ in range(2))
    seconds, _ = timed(lambda: a @ b, kit.device)
    yield {
        "what": f"matrix product of {size}",
        "s": f"{seconds:.3g}",
        "TF/s": f"{2 * size**3 / seconds / 1e12:.3g}",
    }
    block = torch.empty(
        8_000_000_000 if kit.device.type == "cuda" else 8_000_000,
        dtype=torch.uint8,
        device=kit.device,
    )
    seconds, _ = timed(block.clone, kit.device)
    yield {
        "what": "copy, read and written",
        "s": f"{seconds:.3g}",
        "TB/s": f"{2 * len(block) / seconds / 1e12:.3g}",
    }
    del block
    flops = per_image(kit, steps)
    for compiled in (False, True) if kit.device.type == "cuda" else (False,):
        unet = torch.compile(kit.unet) if compiled else kit.unet
        pipe = StableDiffusionPipeline(
            kit.vae, None, None, unet, new_scheduler(), None, None, requires_safety_checker=False
        )
        pipe.set_progress_bar_config(disable=True)
        for batch in (batches[-1],) if compiled else batches:
            c, c0 = (kit.text(["x"] * batch).states for _ in range(2))
            draw = partial(
                pipe,
                prompt_embeds=c,
                negative_prompt_embeds=c0,
                guidance_scale=7.5,
                output_type="pt",
            )
            yield row(
                "diffusers' pipeline" + ", compiled" * compiled,
                batch,
                partial(draw, num_inference_steps=steps),
                kit.device,
                flops,
                partial(draw, num_inference_steps=2),
            )


def sampled(kit: Kit, batch: int, steps: int) -> torch.Tensor:
    """Sample with classifier-free guidance."""
    plan = plan_images("m", 0, {"a": [0]}, batch)
    return prompts_only.sample(kit, plan, kit.text(["x"] * batch), 7.5, steps, kit.text(["x"]))


def per_image(kit: Kit, steps: int) -> float:
    """Return the TFLOPs of an image with classifier-free guidance, extrapolated from two steps."""
    two, three = (tera_flops(partial(sampled, kit, 1, n)) for n in (2, 3))
    return two + (steps - 2) * (three - two)


def ours(kit: Kit, steps: int, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Measure our sampler eager and compiled; the largest batch in both memory formats."""
    flops = per_image(kit, steps)
    for layout in (torch.contiguous_format, torch.channels_last):
        kit.unet.to(memory_format=layout)
        kit.vae.to(memory_format=layout)
        # Compiled code holds for one format
        torch.compiler.reset()
        for compiled in (False, True) if kit.device.type == "cuda" else (False,):
            prepared = replace(kit, unet=torch.compile(kit.unet)) if compiled else kit
            name = f"{str(layout).removeprefix('torch.')}{', compiled' * compiled}"
            every = layout == torch.contiguous_format and not compiled
            for batch in batches if every else (batches[-1],):
                draw = partial(sampled, prepared, batch)
                warm_up = partial(draw, 2)
                yield row(name, batch, partial(draw, steps), kit.device, flops, warm_up)
    kit.unet.to(memory_format=torch.contiguous_format)
    kit.vae.to(memory_format=torch.contiguous_format)


def guided(kit: Kit, steps: int, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Measure the methods' samplers at one batch size, and description training."""
    batch = min(batches[-2], GUIDED_BATCH)
    config = config_with(espresso__clusters=2)
    plan = plan_images("m", 0, {"a": [0]}, batch)
    prompts = kit.text(list(CLASSES))
    teacher = build_classifier("resnet18", 10)
    teachers = {"a": as_teacher(teacher.to(kit.device))}
    mixtures = Mixtures(CLASSES, torch.randn(10, 2, *kit.text.shape), torch.full((10, 2), 0.5))
    settings = replace(config.espresso, gmm=False, inversion_guidance=0.0)
    full = config.fedlmg
    x0 = replace(config.fedlmg, gradient="x0")
    learned = {("a", 0): torch.randn(kit.text.shape, device=kit.device, dtype=kit.dtype)}
    samplers: dict[str, Callable[[list], torch.Tensor]] = {
        "FedDEO, three branches": lambda jobs: feddeo.sample(
            kit, jobs, prompts, learned, (3.0, 3.0), steps
        ),
        "Espresso, zig-zags": lambda jobs: espresso.sample(
            kit, jobs, prompts, [(mixtures, 0)] * len(jobs), settings, steps
        ),
        "FedLMG, gradient at x0": lambda jobs: fedlmg.sample(
            kit, jobs, prompts, teachers, x0, steps, 224
        ),
        "FedLMG": lambda jobs: fedlmg.sample(kit, jobs, prompts, teachers, full, steps, 224),
        "FedCADO, 2 edits": lambda jobs: fedcado.sample(
            kit, jobs, prompts, teachers, replace(config.fedcado, noise_edits=2), steps, 224
        ),
    }
    for name, sample in samplers.items():
        flops = tera_flops(partial(sample, plan[:1]))
        yield row(name, batch, partial(sample, plan), kit.device, flops)
    yield from descriptions(kit, batch)
    kit.with_checkpointing()  # the default on a GPU; last, because it stays on
    for name, sample in samplers.items():
        if name in ("FedLMG", "FedCADO, 2 edits"):
            flops = tera_flops(partial(sample, plan[:1]))
            yield row(f"{name}, checkpointed", batch, partial(sample, plan), kit.device, flops)
    at_once = next(descriptions(kit, batch))
    yield {**at_once, "what": f"{at_once['what']}, checkpointed"}


def descriptions(kit: Kit, at_once: int) -> Iterator[dict[str, Any]]:
    """Measure samples a second: several classes in a UNet batch with each image encoded once, and
    one at a time with the VAE in every step.
    """
    config = config_with(method="feddeo", feddeo__epochs=3, feddeo__conditions_per_batch=at_once)
    job = ClientJob(config, "a", CLASSES, lambda size: None, "", kit.device)
    start = Conditioning(kit.text(["x"] * at_once).states.float())
    names = [f"class {n}" for n in range(at_once)]
    rows_of = [torch.tensor([n]) for n in range(at_once)]
    pictures = torch.zeros(at_once, 3, kit.image_size, kit.image_size)

    def together() -> None:
        mean, logvar = kit.encode(pictures)
        train_conditions(
            kit, start, mean.float(), logvar.float(), rows_of, names, config.feddeo, job
        )

    flops = tera_flops(together) / (3 * at_once)
    picture = torch.zeros(1, 3, kit.image_size, kit.image_size, dtype=torch.uint8)
    c = start.states[:1].clone().requires_grad_()
    optimizer = torch.optim.Adam([c], 0.1)

    def loop() -> None:
        for _ in range(3):
            textual_inversion_step(kit, picture, c, optimizer)

    columns = row("descriptions at once, samples", 3 * at_once, together, kit.device, flops)
    yield {**columns, "batch": at_once}
    columns = row("textual inversion, samples", 3, loop, kit.device, tera_flops(loop) / 3)
    yield {**columns, "batch": 1}


def main() -> None:
    """Make some of the tables."""
    parser = command_line(__doc__)
    kinds = {"ceilings": ceilings, "ours": ours, "guided": guided}
    parser.add_argument("kinds", nargs="+", choices=kinds)
    parser.add_argument(
        "--small", action="store_true", help="test the script on a CPU; keep nothing"
    )
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "speed" / "tables")
    arguments = parser.parse_args()
    out = Path(mkdtemp()) if arguments.small else arguments.out
    kit = random_kit(arguments.small)
    for kind in arguments.kinds:
        steps, batches = (5, (1, 1, 2)) if arguments.small else (STEPS[kind], BATCHES)
        experiment = Experiment(
            __file__,
            caption="Stable Diffusion v1.5's shapes, random weights, 512 px, classifier-free "
            f"guidance; {steps} steps.",
            options=" ".join(arguments.kinds),
        )
        rows: list[dict[str, Any]] = []
        end = " Stopped before its last rows."
        try:
            for columns in kinds[kind](kit, steps, batches):
                rows.append(columns)
            end = ""
        finally:
            if rows:
                write_table(out / f"gpu-{kind}", rows, f"{experiment.about()}{end}")


if __name__ == "__main__":
    main()
