"""The kit as the server samples with it: precision, attention, memory format, compilation, solver.

*Exact* are float32 and checkpointing; *equivalent* are the 16-bit types, the attention's implementations, the memory formats and compilation, which
differ by rounding; *approximate* are another solver than DDIM, a guidance interval, feature caching and a small decoder for the guidance.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from filelock import FileLock

from osfl.config import SynthesisConfig
from osfl.devices import saves_memory
from osfl.diffusion import Attention, Kit, Sampling, load_kit, load_small_decoder
from osfl.files import write_atomically
from osfl.kits import SMALL_DECODER, kit_digest
from server_app.synthesis.caching import cache_features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS = 5  # passes that are timed, after two that are not


def load_engine(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """Load a kit for sampling.

    Where the config says `auto`, the fastest one of what there is, setting by setting, by a measurement that is made once for a device, kit and batch
    and kept in `calibration.json` in the cache folder ($OSFL_CACHE, else ~/.osfl/cache).

    Raises:
        KitError: as `load_kit`.
    """
    if not (options := _options(device, settings)):
        return _load(source, device, settings)
    given = {
        name: getattr(settings, name) for name in ("dtype", "attention", "memory_format", "compile")
    }
    key = f"{kit_digest(source)} {_device_name(device)} batch {2 * settings.unit_size} torch {torch.__version__} {given}"

    def seconds(chosen: Mapping[str, Any]) -> float:
        try:
            return _seconds(
                _load(source, device, replace(settings, **chosen)), 2 * settings.unit_size
            )
        except (
            torch.OutOfMemoryError
        ):  # plain attention, say; a unit that nothing lets fit is sampled in parts
            torch.cuda.empty_cache()
            return math.inf

    return _load(source, device, replace(settings, **_calibrated(seconds, options, key)))


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
    """The fastest value of one setting after the other, the later ones at their first value meanwhile."""
    file = Path(os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser() / "calibration.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # of several workers, one measures
        known = json.loads(file.read_text()) if file.is_file() else {}
        if key not in known:
            choice, measured = {name: values[0] for name, values in options.items()}, {}
            for name, values in options.items():
                if len(values) > 1:
                    measured[name] = {value: seconds(choice | {name: value}) for value in values}
                    choice[name] = min(values, key=measured[name].__getitem__)
            known[key] = {"seconds a pass": measured, "choice": choice}
            write_atomically(file, (json.dumps(known, indent=1) + "\n").encode())
    return known[key]["choice"]


def _load(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """By settings of which none is `auto`, but that of checkpointing."""
    torch.backends.cudnn.allow_tf32 = (
        settings.dtype != "float32"
    )  # by default, convolutions in float32 would have the products of 10 bits
    kit = load_kit(source, device, DTYPES[settings.dtype])
    kit = replace(kit, sampling=Sampling(settings.solver, settings.guided_from, settings.guided_to))
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
def _seconds(kit: Kit, batch: int) -> float:
    """The median of a UNet pass."""
    z, c = (
        torch.randn(batch, *kit.latent_shape, device=kit.device),
        kit.text([""]).expand(batch, -1, -1),
    )
    width = kit.unet.config.get("projection_class_embeddings_input_dim")
    image = torch.randn(batch, width, device=kit.device) if width else None
    taken = []
    for number in range(2 + REPEATS):
        began = time.perf_counter()
        kit.eps(z, torch.tensor(500, device=kit.device), c, image)
        if kit.device.type == "cuda":
            torch.cuda.synchronize(kit.device)
        taken += [time.perf_counter() - began] if number >= 2 else []
    return median(taken)


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu x{torch.get_num_threads()}"
    )
