"""The diffusion model's parts: their types and shapes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.kit.check import check_kit
from osfl.kit.folder import KitError
from osfl.kit.kits import kit_image_size
from osfl.kit_training.untrained import new_tiny_decoder
from osfl.models import diffusion
from osfl.models.diffusion import load_kit, load_tiny_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_decoder_is_of_the_kits_type(
    tiny_kit: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """The decoder is stored in float32; images have the latents' type, whatever the networks'."""
    new_tiny_decoder(8).save_pretrained(tmp_path)
    kit = load_kit(tiny_kit, dtype=dtype)
    small = load_tiny_decoder(str(tmp_path), kit)
    assert small.dtype == dtype
    assert not small.training
    assert not any(parameter.requires_grad for parameter in small.parameters())
    z = torch.zeros(2, *kit.latent_shape, requires_grad=True)
    images = replace(kit, tiny_decoder=small).decode_for_guidance(z)
    assert (images.dtype, images.shape) == (torch.float32, (2, 3, 32, 32))
    images.sum().backward()
    assert z.grad is not None


def test_a_process_with_a_kit_keeps_freed_memory(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/unit/util/test_costs.py shows the effect."""
    calls: list[str] = []
    monkeypatch.setattr(diffusion, "keep_freed_memory", lambda: calls.append("kept"))
    load_kit(tiny_kit)
    assert calls == ["kept"]


def test_a_tiny_autoencoder_encodes_without_noise(tiny_autoencoder_kit: Path) -> None:
    """Latents are scaled by its factor, here 0.5, and have no spread; decoding undoes the scale."""
    kit = load_kit(tiny_autoencoder_kit)
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    mean, logvar = kit.encode(x)
    with torch.no_grad():
        raw = kit.vae.encode(x).latents
        decoded = kit.vae.decode(raw).sample
    assert torch.equal(mean, raw * 0.5)
    assert torch.equal(logvar, torch.full_like(mean, -30 + 2 * math.log(0.5)))
    assert torch.allclose(kit.decode(mean), decoded)
    assert kit.image_size == kit_image_size(str(tiny_autoencoder_kit)) == 32
    assert kit.with_checkpointing().vae.encoder.gradient_checkpointing


def test_a_tiny_autoencoder_that_lacks_a_tensor_is_refused(
    tiny_autoencoder_kit: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "kit"
    (folder / "vae").mkdir(parents=True)
    source = tiny_autoencoder_kit / "vae"
    (folder / "vae" / "config.json").write_bytes((source / "config.json").read_bytes())
    state = load_file(source / "diffusion_pytorch_model.safetensors")
    del state["encoder.layers.0.bias"]
    save_file(state, folder / "vae" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(KitError, match="the weights of vae do not fit"):
        check_kit(str(folder), ("vae",))
