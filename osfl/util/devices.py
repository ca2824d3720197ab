"""Which device to compute on."""

import torch

from osfl.config import ConfigError


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: not a device, or a CUDA device that this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = {name!r}: {error}. Use auto, cpu, cuda or cuda:N") from None
    return device


def saves_memory(checkpointing: str, device: torch.device) -> bool:
    """Whether `checkpointing` (off, on, auto) says that a gradient's activations are computed
    again: auto does on a GPU, whose memory ends sooner.
    """
    return device.type == "cuda" if checkpointing == "auto" else checkpointing == "on"
