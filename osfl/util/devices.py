"""The choice of a device to compute on."""

import torch

from osfl.config import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the first CUDA device, or the CPU without one.

    Raises:
        ConfigError: it is not a device, or one that this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device = {name!r}: {error}. Set it to auto, cpu, cuda or cuda:N"
        ) from None
    return device


def uses_checkpointing(checkpointing: str, device: torch.device) -> bool:
    """Return whether a gradient recomputes activations in place of storing them.

    Args:
        checkpointing: off, on, or auto, which is on for a GPU, whose memory is scarcer.
    """
    return device.type == "cuda" if checkpointing == "auto" else checkpointing == "on"
