"""The kit as the server samples with it: precision, memory format, compilation, solver.

*Exact* are float32 and checkpointing; *equivalent* are the memory formats, the 16-bit types and compilation, which differ by rounding;
*approximate* are another solver than DDIM, a guidance interval, feature caching and a small decoder for the guidance.
"""

import json
import os
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import torch
from filelock import FileLock

from osfl.config import SynthesisConfig
from osfl.devices import saves_memory
from osfl.diffusion import Kit, Sampling, load_kit, load_small_decoder
from osfl.files import write_atomically
from osfl.kits import SMALL_DECODER, kit_digest
from server_app.synthesis.caching import cache_features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS = 5  # passes that are timed, after two that are not


def load_engine(source: str, device: torch.device, settings: SynthesisConfig) -> Kit:
    """Load a kit for sampling.

    Where the config says `auto`, the faster one of what there is, by a measurement that is made once for a device, kit, type and batch and kept in
    `calibration.json` in the cache folder ($OSFL_CACHE, else ~/.osfl/cache).

    Raises:
        KitError: as `load_kit`.
    """
    kit = load_kit(source, device, DTYPES[settings.dtype])
    kit = replace(kit, sampling=Sampling(settings.solver, settings.guided_from, settings.guided_to))
    if settings.small_decoder:
        where = (source, kit, SMALL_DECODER) if settings.small_decoder == "kit" else (settings.small_decoder, kit)
        kit = replace(kit, small_decoder=load_small_decoder(*where))
    if saves_memory(settings.checkpointing, device):
        kit.checkpointed()
    if settings.cache_interval > 1:
        cache_features(kit, settings.cache_interval)
    formats = ("contiguous", "channels-last") if settings.memory_format == "auto" else (settings.memory_format,)
    # Compilation on a CPU wants a C++ compiler, and minutes.
    compiled = (
        ("off", "on") if settings.compile == "auto" and device.type == "cuda" else (settings.compile.replace("auto", "off"),)
    )
    candidates = list(product(formats, compiled))
    if len(candidates) == 1:
        return _prepare(kit, *candidates[0])
    key = f"{kit_digest(source)} {_device_name(device)} {settings.dtype} {settings.unit_size} torch {torch.__version__} {candidates}"
    return _prepare(kit, *_calibrated(kit, candidates, 2 * settings.unit_size, key))


def _calibrated(kit: Kit, candidates: list[tuple[str, str]], batch: int, key: str) -> tuple[str, str]:
    file = Path(os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser() / "calibration.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # of several workers, one measures
        known = json.loads(file.read_text()) if file.is_file() else {}
        if key not in known:
            seconds = {" ".join(candidate): _seconds(_prepare(kit, *candidate), batch) for candidate in candidates}
            known[key] = {"seconds a pass": seconds, "choice": min(seconds, key=lambda name: seconds[name]).split()}
            write_atomically(file, (json.dumps(known, indent=1) + "\n").encode())
    memory_format, compiled = known[key]["choice"]
    return memory_format, compiled


def _prepare(kit: Kit, memory_format: str, compiled: str) -> Kit:
    layout = torch.channels_last if memory_format == "channels-last" else torch.contiguous_format
    for network in (kit.unet, kit.vae):
        network.to(memory_format=layout)
    return replace(kit, unet=torch.compile(kit.unet)) if compiled == "on" else kit


@torch.no_grad()
def _seconds(kit: Kit, batch: int) -> float:
    """The median of a UNet pass."""
    z, c = torch.randn(batch, *kit.latent_shape, device=kit.device), kit.text([""]).expand(batch, -1, -1)
    width = kit.unet.config.get("projection_class_embeddings_input_dim")
    image = torch.randn(batch, width, device=kit.device) if width else None
    taken = []
    for number in range(2 + REPEATS):
        began = time.perf_counter()
        kit.eps(z, torch.tensor(500, device=kit.device), c, image)
        if kit.device.type == "cuda":
            torch.cuda.synchronize()
        taken += [time.perf_counter() - began] if number >= 2 else []
    return median(taken)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
