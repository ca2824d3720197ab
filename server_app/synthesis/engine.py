"""Loading and tuning of the kit for sampling: precision, attention, compilation, batch size.

float32 and checkpointing are *exact*. 16-bit types, the attention implementations, memory formats
and compilation are *equivalent*: they differ by rounding. *Approximations* are solvers other than
DDIM, a guidance interval, feature caching, and a tiny autoencoder (TAESD) for the guidance.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from filelock import FileLock

from osfl.config import SynthesisConfig
from osfl.kit.check import lora_file
from osfl.kit.kits import kit_digest
from osfl.methods import TINY_DECODER
from osfl.models.diffusion import (
    Attention,
    Kit,
    Sampling,
    load_kit,
    load_lora,
    load_tiny_decoder,
)
from osfl.util.costs import Cost, FlopMeter, time_growing_batches
from osfl.util.devices import uses_checkpointing
from osfl.util.files import (
    OWNER_ONLY,
    CorruptFileError,
    make_private_folder,
    read_json,
    write_atomically,
)
from osfl.util.loading import LOADING
from server_app.synthesis.caching import cache_features

# Settings that a measurement may choose: of the networks, and all that a run records
NETWORK_SETTINGS = ("dtype", "attention", "memory_format", "compile")
AUTO_SETTINGS = (*NETWORK_SETTINGS, "batch_size", "parallel_units")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS = 5  # timed passes, after two warm-up passes
MEASURE_SECONDS = 15.0  # spent on measuring a machine's speed for an estimate
FIRST_ROWS = 2  # of the first batch that is timed for it
SHORT_SECONDS = 0.3  # of a pass that is timed several times for it
# The search ends at a batch whose time per image exceeds the best one's by this factor
MAX_SLOWDOWN = 1.1


def load_engine(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """Load a kit for sampling.

    Each setting that is `auto` gets the fastest available value. It is measured once per device,
    kit and batch, and stored in `calibration.json` in the cache folder ($OSFL_CACHE, else
    ~/.osfl/cache).

    Raises:
        KitError: as `load_kit`.
    """
    return _load(source, device, _with_networks(source, device, settings))


def resolve_auto(source: str, device: torch.device, settings: SynthesisConfig) -> SynthesisConfig:
    """Return the settings that a run records, with every `auto` and automatic batch size fixed.

    Choices are measured and stored as in `load_engine`. A run keeps its choice, because results of
    different batch sizes differ in the last bit.

    Raises:
        KitError: as `load_kit`.
    """
    settings = _with_networks(source, device, settings)
    if settings.batch_size and settings.parallel_units:
        return replace(settings, batch_size=min(settings.batch_size, settings.unit_size))
    configured = {name: getattr(settings, name) for name in AUTO_SETTINGS}
    key = f"{_key(source, device, settings)} workers {settings.workers} {configured}"

    def measure() -> dict[str, Any]:
        # Feature caching supports one forward pass at a time, and its gain is the same for any
        # batch
        kit = _load(source, device, replace(settings, cache_interval=1))
        return _measure_batches(kit, settings)

    return replace(settings, **_calibration(key, measure)["choice"])


def _measure_batches(kit: Kit, settings: SynthesisConfig) -> dict[str, Any]:
    """Measure the seconds per image of every batch size and number of parallel units."""
    timings: dict[str, float] = {}
    best = math.inf
    choice = {"batch_size": 1, "parallel_units": 1}
    for units in _parallel_units(kit, settings):
        best_of_units = math.inf
        for batch in _batches(settings):
            try:
                seconds = _seconds_an_image(kit, batch, units, settings.threads)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            timings[f"{units} x {batch}"] = seconds
            if seconds < best:
                best = seconds
                choice = {"batch_size": batch, "parallel_units": units}
            best_of_units = min(best_of_units, seconds)
            if seconds > MAX_SLOWDOWN * best_of_units:
                break
    return {"seconds an image": timings, "choice": choice}


def _batches(settings: SynthesisConfig) -> list[int]:
    """Return the batch sizes to try: a unit and its repeated halves, in ascending order."""
    if settings.batch_size:
        return [min(settings.batch_size, settings.unit_size)]
    sizes = {settings.unit_size}
    while min(sizes) > 1:
        sizes.add((min(sizes) + 1) // 2)
    return sorted(sizes)


def _parallel_units(kit: Kit, settings: SynthesisConfig) -> list[int]:
    """Return the numbers of parallel units to try in this process: on a CPU, 1 and one per thread.

    Only 1 is tried if a setting holds for the whole process (attention, compilation), or if the
    models of all units would take more than a quarter of the free memory.
    """
    if settings.parallel_units:
        return [settings.parallel_units]
    threads = settings.threads or torch.get_num_threads()
    weights = [*kit.unet.parameters(), *kit.vae.parameters(), *kit.text.parameters()]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    is_process_wide = settings.attention != "default" or settings.compile == "on"
    is_sequential = kit.device.type != "cpu" or settings.workers or is_process_wide or threads == 1
    if is_sequential or threads * size > psutil.virtual_memory().available / 4:
        return [1]
    return [1, threads]


def _seconds_an_image(kit: Kit, batch: int, units: int, threads: int) -> float:
    """Return the seconds per image of guided UNet passes over `batch` images in parallel units."""
    default_threads = torch.get_num_threads()
    unit_threads = max(1, (threads or default_threads) // units)
    pool = ThreadPoolExecutor(units, initializer=torch.set_num_threads, initargs=(unit_threads,))
    try:
        with pool:
            seconds = list(pool.map(lambda _: _seconds(kit, 2 * batch), range(units)))
    finally:
        torch.set_num_threads(default_threads)
    return max(seconds) / (units * batch)


def _with_networks(source: str, device: torch.device, settings: SynthesisConfig) -> SynthesisConfig:
    """Replace each `auto` by the fastest precision, attention, memory format or compilation."""
    if not (options := _options(device, settings)):
        return settings

    def seconds(choice: Mapping[str, Any]) -> float:
        try:
            kit = _load(source, device, replace(settings, **choice))
            return _seconds(kit, 2 * settings.unit_size)
        # Another choice may need less memory; a unit that fits with none is sampled in batches
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.inf

    configured = {name: getattr(settings, name) for name in NETWORK_SETTINGS}
    key = f"{_key(source, device, settings)} {configured}"
    return replace(settings, **_calibrated(seconds, options, key))


def _key(source: str, device: torch.device, settings: SynthesisConfig) -> str:
    """Return the key of a measurement."""
    batch = 2 * settings.unit_size
    return f"{kit_digest(source)} {_device_name(device)} batch {batch} torch {torch.__version__}"


def _options(device: torch.device, settings: SynthesisConfig) -> dict[str, tuple[str, ...]]:
    """Return the values to choose from, for every setting that is `auto`."""
    gpu = device.type == "cuda"
    options = {
        "dtype": ("float32", "bfloat16"),
        "attention": ("default", "flash", "cudnn", "efficient") if gpu else ("default", "math"),
        "memory_format": ("contiguous", "channels-last"),
        # On a CPU it needs a C++ compiler and takes minutes
        "compile": ("off", "on") if gpu else ("off",),
    }
    return {name: values for name, values in options.items() if getattr(settings, name) == "auto"}


def _calibrated(
    seconds: Callable[[Mapping[str, Any]], float], options: Mapping[str, tuple[str, ...]], key: str
) -> dict[str, Any]:
    """Return the fastest value of each setting, measured one setting after the other.

    Settings that are not measured yet have their first value.
    """

    def measure() -> dict[str, Any]:
        choice: dict[str, Any] = {name: values[0] for name, values in options.items()}
        timings: dict[str, dict[str, float]] = {}
        for name, values in options.items():
            if len(values) > 1:
                timings[name] = {value: seconds(choice | {name: value}) for value in values}
                choice[name] = min(values, key=timings[name].__getitem__)
        return {"seconds a pass": timings, "choice": choice}

    chosen: dict[str, Any] = _calibration(key, measure)["choice"]
    return chosen


def _calibration(key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return this machine's stored measurement of a key, or measure and store it."""
    file = Path(os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser() / "calibration.json"
    make_private_folder(file.parent)
    # Concurrent processes wait while one measures
    with FileLock(file.with_suffix(".lock"), mode=OWNER_ONLY):
        calibrations: dict[str, dict[str, Any]] = {}
        # A corrupt file is replaced
        with suppress(CorruptFileError):
            calibrations = read_json(file)
        if key not in calibrations:
            calibrations[key] = measure()
            write_atomically(file, (json.dumps(calibrations, indent=1) + "\n").encode())
    return calibrations[key]


def _load(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """Load a kit by settings of which only `checkpointing` may be `auto`."""
    with LOADING:
        return _build(source, device, settings)


def _build(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    # By default, GPUs compute float32 convolutions in TF32, with a mantissa of 10 bits
    torch.backends.cudnn.allow_tf32 = settings.dtype != "float32"
    kit = load_kit(source, device, DTYPES[settings.dtype])
    sampling = Sampling(
        settings.solver, settings.guided_from, settings.guided_to, settings.base_steps
    )
    kit = replace(kit, sampling=sampling)
    if settings.lora:
        load_lora(lora_file(settings.lora, source), kit, fused=settings.base_steps == 0)
    if settings.tiny_decoder:
        arguments = (
            (source, kit, TINY_DECODER)
            if settings.tiny_decoder == "kit"
            else (settings.tiny_decoder, kit)
        )
        kit = replace(kit, tiny_decoder=load_tiny_decoder(*arguments))
    if settings.attention != "default":
        kit.unet.set_attn_processor(Attention(settings.attention))
    if uses_checkpointing(settings.checkpointing, device):
        kit.with_checkpointing()
    if settings.cache_interval > 1:
        cache_features(kit, settings.cache_interval)
    layout = (
        torch.channels_last
        if settings.memory_format == "channels-last"
        else torch.contiguous_format
    )
    for network in (kit.unet, kit.vae):
        network.to(memory_format=layout)
    return replace(kit, unet=torch.compile(kit.unet)) if settings.compile == "on" else kit


@torch.no_grad()
def _seconds(kit: Kit, batch: int, repeats: int = REPEATS) -> float:
    """Return the median seconds of a UNet pass."""
    return median_seconds(unet_pass(kit, batch), kit.device, repeats)


def median_seconds(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of an action, after two that are not timed."""
    timings = []
    for number in range(2 + repeats):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timings += [time.perf_counter() - start] if number >= 2 else []
    return median(timings)


def unet_pass(kit: Kit, batch: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs a UNet pass over random latents, to be counted or timed."""
    z = torch.randn(batch, *kit.latent_shape, device=kit.device)
    c = kit.text([""]).expand(batch)
    if kit.unet.config.get("class_embed_type"):
        width = kit.unet.config.projection_class_embeddings_input_dim
        c = c.with_image(torch.randn(batch, width, device=kit.device))
    return partial(kit.eps, z, torch.tensor(500, device=kit.device), c)


@torch.no_grad()
def unet_cost(kit: Kit, most: int) -> Cost:
    """Measure the cost per row of a UNet pass on this machine, within some seconds.

    Args:
        most: rows of the batch in which images are made.
    """
    return cost_per_row(lambda rows: unet_pass(kit, rows), kit.device, most)


@torch.no_grad()
def decoding_cost(kit: Kit, most: int) -> Cost:
    """Measure the cost of decoding an image, as `unet_cost`."""

    def decode(rows: int) -> Callable[[], torch.Tensor]:
        return partial(kit.decode, torch.randn(rows, *kit.latent_shape, device=kit.device))

    return cost_per_row(decode, kit.device, most)


def cost_per_row(
    pass_of: Callable[[int], Callable[[], object]], device: torch.device, most: int
) -> Cost:
    """Measure the cost per row of a pass, within some seconds.

    Args:
        pass_of: returns a function that runs a pass, by its number of rows.
        most: rows of the largest batch to try.
    """
    first = min(FIRST_ROWS, most)
    meter = FlopMeter()
    meter.run("pass", pass_of(first))
    flops = meter.total / first

    def time_batch(rows: int) -> Cost:
        act = pass_of(rows)
        seconds = median_seconds(act, device, repeats=1)
        # A short pass may have been disturbed
        if seconds < SHORT_SECONDS:
            seconds = median_seconds(act, device, REPEATS)
        return Cost(flops, seconds / rows)

    return time_growing_batches(time_batch, first, most, MEASURE_SECONDS)


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu x{torch.get_num_threads()}"
    )
