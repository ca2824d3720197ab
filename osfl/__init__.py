"""OSFL: one-shot federated learning with diffusion models, on Flower.

This package holds the code that clients (`client_app`) and server (`server_app`) share. Only its
command line (`osfl/cli`) imports either of them. Its names for Python are in osfl/api.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from osfl.util.deferred_imports import defer_imports

if TYPE_CHECKING:
    from osfl.api import Run, open_run, run, submit
    from osfl.config import ConfigError
    from osfl.data.partition import DataError
    from osfl.inference.loading import load_model
    from osfl.launch.flower import LaunchError
    from osfl.run_folder.listing import list_runs

__all__ = [
    "ConfigError",
    "DataError",
    "LaunchError",
    "Run",
    "__version__",
    "list_runs",
    "load_model",
    "open_run",
    "run",
    "submit",
]
__version__ = "0.2.0"

# Before any module that imports torch
defer_imports()

# Imported at their first use: some import torch, which the command line's help does without
_MODULES = {
    "ConfigError": "osfl.config",
    "DataError": "osfl.data.partition",
    "LaunchError": "osfl.launch.flower",
    "Run": "osfl.api",
    "list_runs": "osfl.run_folder.listing",
    "load_model": "osfl.inference.loading",
    "open_run": "osfl.api",
    "run": "osfl.api",
    "submit": "osfl.api",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'osfl' has no attribute {name!r}")
