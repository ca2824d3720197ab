"""Requests that the loopback hub received."""

import socket
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.helpers.loopback_hub import Hub


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let the hub's client library use a server and a cache."""
    constants = huggingface_hub.constants
    pattern = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def unused_address() -> str:
    """Return an address without a server."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return f"http://127.0.0.1:{reserved.getsockname()[1]}"


def weights_of(server: Hub) -> list[str]:
    """Return the weight files that were sent, in order."""
    ends = (".safetensors", ".bin")
    return [name.partition("/")[2] for name in server.fetched if name.endswith(ends)]
