"""Requests that the loopback hub received."""

import socket
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.helpers.loopback_hub import Hub


def asked(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Which hub the client library asks from here on."""
    constants = huggingface_hub.constants
    pattern = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def nobody() -> str:
    """An address at which no server is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def weights_of(server: Hub) -> list[str]:
    """The files of weights that were sent, in their order."""
    ends = (".safetensors", ".bin")
    return [name.partition("/")[2] for name in server.fetched if name.endswith(ends)]
