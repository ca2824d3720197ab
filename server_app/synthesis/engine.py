"""The kit as the server samples with it: precision, attention, memory format, compilation, solver.

*Exact* are float32 and checkpointing; *equivalent* are the 16-bit types, the attention's
implementations, the memory formats and compilation, which differ by rounding; *approximate* are
another solver than DDIM, a guidance interval, feature caching and a small decoder for the guidance.
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
from osfl.kit.kits import SMALL_DECODER, kit_digest
from osfl.models.diffusion import (
    Attention,
    Kit,
    Sampling,
    load_kit,
    load_lora,
    load_small_decoder,
)
from osfl.util.costs import FlopMeter, Stopwatch
from osfl.util.devices import saves_memory
from osfl.util.files import OWNER_ONLY, DamageError, private_folder, read_json, write_atomically
from server_app.synthesis.caching import cache_features

# What may be chosen by a measurement: of the networks, and with all that a run records.
NETWORKS = ("dtype", "attention", "memory_format", "compile")
CHOSEN = (*NETWORKS, "batch_size", "units_at_once")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS = 5  # passes that are timed, after two that are not
LOOK_SECONDS = 15.0  # at how fast a machine is, for an estimate
# A batch that takes so much longer an image than the best one ends the search for a larger one.
NO_GAIN = 1.1


def load_engine(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """Load a kit for sampling.

    Where the config says `auto`, the fastest one of what there is, setting by setting, by a
    measurement that is made once for a device, kit and batch and kept in `calibration.json` in the
    cache folder ($OSFL_CACHE, else ~/.osfl/cache).

    Raises:
        KitError: as `load_kit`.
    """
    return _load(source, device, _with_networks(source, device, settings))


def settled(source: str, device: torch.device, settings: SynthesisConfig) -> SynthesisConfig:
    """The settings without an `auto` and without a 0 for the batch: what a run records.

    Each choice is by a measurement, remembered as in `load_engine`. Batches of another size differ
    in the last bit, so a run keeps to one choice.

    Raises:
        KitError: as `load_kit`.
    """
    settings = _with_networks(source, device, settings)
    if settings.batch_size and settings.units_at_once:
        return replace(settings, batch_size=min(settings.batch_size, settings.unit_size))
    given = {name: getattr(settings, name) for name in CHOSEN}
    key = f"{_key(source, device, settings)} workers {settings.workers} {given}"
    kit: list[Kit] = []

    def measure() -> dict[str, Any]:
        # Cached features are of one forward pass at a time, and their gain is of any batch.
        kit.append(_load(source, device, replace(settings, cache_interval=1)))
        return _measured_batches(kit[0], settings)

    return replace(settings, **_remembered(key, measure)["choice"])


def _measured_batches(kit: Kit, settings: SynthesisConfig) -> dict[str, Any]:
    """Seconds an image of every batch and number of units at once, and the best of them."""
    seconds: dict[str, float] = {}
    best = math.inf
    choice = {"batch_size": 1, "units_at_once": 1}
    for units in _units_at_once(kit, settings):
        least = math.inf
        for batch in _batches(settings):
            try:
                taken = _seconds_an_image(kit, batch, units, settings.threads)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            seconds[f"{units} x {batch}"] = taken
            if taken < best:
                best = taken
                choice = {"batch_size": batch, "units_at_once": units}
            least = min(least, taken)
            if taken > NO_GAIN * least:
                break
    return {"seconds an image": seconds, "choice": choice}


def _batches(settings: SynthesisConfig) -> list[int]:
    """Batches to choose from: a unit, halves of it and so on, the smallest first."""
    if settings.batch_size:
        return [min(settings.batch_size, settings.unit_size)]
    sizes = {settings.unit_size}
    while min(sizes) > 1:
        sizes.add((min(sizes) + 1) // 2)
    return sorted(sizes)


def _units_at_once(kit: Kit, settings: SynthesisConfig) -> list[int]:
    """How many units this process may sample side by side; on a CPU, one or one a thread.

    Not where torch keeps what is chosen for the whole process (an attention, a compilation), and
    not where the models of all of them would take more than a quarter of the free memory.
    """
    if settings.units_at_once:
        return [settings.units_at_once]
    threads = settings.threads or torch.get_num_threads()
    weights = [*kit.unet.parameters(), *kit.vae.parameters(), *kit.text.model.parameters()]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    global_choice = settings.attention != "default" or settings.compile == "on"
    alone = kit.device.type != "cpu" or settings.workers or global_choice or threads == 1
    if alone or threads * size > psutil.virtual_memory().available / 4:
        return [1]
    return [1, threads]


def _seconds_an_image(kit: Kit, batch: int, units: int, threads: int) -> float:
    """Of a UNet pass with guidance over `batch` images, `units` of them side by side."""
    before = torch.get_num_threads()
    each = max(1, (threads or before) // units)
    try:
        with ThreadPoolExecutor(units, initializer=torch.set_num_threads, initargs=(each,)) as pool:
            taken = list(pool.map(lambda _: _seconds(kit, 2 * batch), range(units)))
    finally:
        torch.set_num_threads(before)
    return max(taken) / (units * batch)


def _with_networks(source: str, device: torch.device, settings: SynthesisConfig) -> SynthesisConfig:
    """With the fastest precision, attention, memory format and compilation for each `auto`."""
    if not (options := _options(device, settings)):
        return settings

    def seconds(chosen: Mapping[str, Any]) -> float:
        try:
            kit = _load(source, device, replace(settings, **chosen))
            return _seconds(kit, 2 * settings.unit_size)
        # Plain attention, say; a unit that nothing lets fit is sampled in parts.
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.inf

    given = {name: getattr(settings, name) for name in NETWORKS}
    return replace(
        settings, **_calibrated(seconds, options, f"{_key(source, device, settings)} {given}")
    )


def _key(source: str, device: torch.device, settings: SynthesisConfig) -> str:
    """What a measurement is of."""
    batch = 2 * settings.unit_size
    return f"{kit_digest(source)} {_device_name(device)} batch {batch} torch {torch.__version__}"


def _options(device: torch.device, settings: SynthesisConfig) -> dict[str, tuple[str, ...]]:
    """What there is to choose from, for every setting that is `auto`."""
    gpu = device.type == "cuda"
    options = {
        "dtype": ("float32", "bfloat16"),
        "attention": ("default", "flash", "cudnn", "efficient") if gpu else ("default", "math"),
        "memory_format": ("contiguous", "channels-last"),
        "compile": ("off", "on")
        if gpu
        else ("off",),  # on a CPU it wants a C++ compiler, and minutes
    }
    return {name: values for name, values in options.items() if getattr(settings, name) == "auto"}


def _calibrated(
    seconds: Callable[[Mapping[str, Any]], float], options: Mapping[str, tuple[str, ...]], key: str
) -> dict[str, Any]:
    """The fastest value of one setting after the other, the later ones at their first value
    meanwhile.
    """

    def measure() -> dict[str, Any]:
        choice: dict[str, Any] = {name: values[0] for name, values in options.items()}
        measured: dict[str, dict[str, float]] = {}
        for name, values in options.items():
            if len(values) > 1:
                measured[name] = {value: seconds(choice | {name: value}) for value in values}
                choice[name] = min(values, key=measured[name].__getitem__)
        return {"seconds a pass": measured, "choice": choice}

    return _remembered(key, measure)["choice"]


def _remembered(key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured under this key on this machine, or is now."""
    file = Path(os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser() / "calibration.json"
    private_folder(file.parent)
    with FileLock(file.with_suffix(".lock"), mode=OWNER_ONLY):  # of several, one measures
        known: dict[str, dict[str, Any]] = {}
        # A damaged one is measured anew.
        with suppress(DamageError):
            known = read_json(file)
        if key not in known:
            known[key] = measure()
            write_atomically(file, (json.dumps(known, indent=1) + "\n").encode())
    return known[key]


def _load(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """By settings of which none is `auto`, but that of checkpointing."""
    # By default, a GPU's convolutions in float32 multiply numbers of 10 bits.
    torch.backends.cudnn.allow_tf32 = settings.dtype != "float32"
    kit = load_kit(source, device, DTYPES[settings.dtype])
    sampling = Sampling(
        settings.solver, settings.guided_from, settings.guided_to, settings.base_steps
    )
    kit = replace(kit, sampling=sampling)
    if settings.lora:
        load_lora(lora_file(settings.lora, source), kit, fused=settings.base_steps == 0)
    if settings.small_decoder:
        where = (
            (source, kit, SMALL_DECODER)
            if settings.small_decoder == "kit"
            else (settings.small_decoder, kit)
        )
        kit = replace(kit, small_decoder=load_small_decoder(*where))
    if settings.attention != "default":
        kit.unet.set_attn_processor(Attention(settings.attention))
    if saves_memory(settings.checkpointing, device):
        kit.checkpointed()
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
    """The median of a UNet pass."""
    one_pass = unet_pass(kit, batch)
    taken = []
    for number in range(2 + repeats):
        began = time.perf_counter()
        one_pass()
        if kit.device.type == "cuda":
            torch.cuda.synchronize(kit.device)
        taken += [time.perf_counter() - began] if number >= 2 else []
    return median(taken)


def unet_pass(kit: Kit, batch: int) -> Callable[[], torch.Tensor]:
    """A UNet pass over random latents, to be counted or timed."""
    z = torch.randn(batch, *kit.latent_shape, device=kit.device)
    c = kit.text([""]).expand(batch, -1, -1)
    width = kit.unet.config.get("projection_class_embeddings_input_dim")
    image = torch.randn(batch, width, device=kit.device) if width else None
    return partial(kit.eps, z, torch.tensor(500, device=kit.device), c, image)


@torch.no_grad()
def seconds_and_flops(kit: Kit, most: int) -> tuple[float, float]:
    """What a row of a UNet pass takes on this machine, by a look of some seconds.

    The best of growing batches: what else the machine does can only slow one down.

    Args:
        most: rows of the largest batch that is tried.
    """
    rows = min(2, most)
    meter = FlopMeter()
    meter.run("pass", unet_pass(kit, rows))
    flops = meter.total / rows
    watch = Stopwatch()
    best = _seconds(kit, rows, repeats=1) / rows
    while rows < most and watch.seconds < LOOK_SECONDS:
        rows = min(2 * rows, most)
        best = min(best, _seconds(kit, rows, repeats=1) / rows)
    return best, flops


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu x{torch.get_num_threads()}"
    )
