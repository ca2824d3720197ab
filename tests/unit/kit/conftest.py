"""Fixtures of a Hugging Face hub on loopback, shared by the tests of kits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.tools import hub_layouts
from tests.helpers.hub_requests import use_hub
from tests.helpers.loopback_hub import Hub, hub


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories of the hub's layouts, with what else lies in them."""
    root = tmp_path_factory.mktemp("hub") / "owner"
    torch.manual_seed(0)
    folder = hub_layouts.sd15(root / "sd15")
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        for name in (f"{stem}.fp16.safetensors", f"{stem}.non_ema.safetensors", f"{stem}.bin"):
            (folder / part / name).write_bytes(b"not for us")
    (folder / "v1-5-pruned.safetensors").write_bytes(b"not for us")
    (folder / "safety_checker" / "model.safetensors").write_bytes(b"not for us")
    hub_layouts.blip(root / "blip")
    hub_layouts.dinov2(root / "dinov2")
    return root.parent


@pytest.fixture
def served(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process asks, with an empty cache."""
    with hub(repositories) as server:
        use_hub(monkeypatch, server.address, tmp_path / "cache")
        yield server
