"""The methods: which client half and which server half a name stands for. Modules are imported late, by name."""

import importlib
from dataclasses import dataclass
from types import ModuleType

from osfl.config import RunConfig
from osfl.kits import DIFFUSION_PARTS


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        client: module in `client_app.methods` with `make_payload(job)`; None: clients send nothing.
        server: module in `server_app.methods` with `run(job, payloads)`.
        payload: class in `osfl.payloads` that clients send; None: nothing.
        client_needs_kit: whether a client downloads the diffusion model.
    """

    client: str | None
    server: str
    payload: str | None
    client_needs_kit: bool = False


METHODS: dict[str, Method] = {
    "prompts-only": Method(client=None, server="prompts_only", payload=None),
    "feddeo": Method(client="feddeo", server="feddeo", payload="Descriptions", client_needs_kit=True),
    "fedlmg": Method(client="classifier", server="fedlmg", payload="Classifier"),
    "local": Method(client="classifier", server="local", payload="Classifier"),
    "ceiling": Method(client=None, server="ceiling", payload=None),
}


def kit_parts(config: RunConfig) -> tuple[str, ...]:
    """The folders and files of the kit that every client needs; () if it needs none."""
    method = METHODS[config.method]
    parts: tuple[str, ...] = DIFFUSION_PARTS if method.client_needs_kit else ()
    if method.payload == "Classifier" and config.classifier.init == "kit":
        parts += (f"classifiers/{config.classifier.architecture}.safetensors",)
    return parts


def client_half(method: str) -> ModuleType:
    """The client module of a method that has one."""
    return importlib.import_module(f"client_app.methods.{METHODS[method].client}")


def server_half(method: str) -> ModuleType:
    """The server module of a method."""
    return importlib.import_module(f"server_app.methods.{METHODS[method].server}")
