"""The diffusion model's parts: their types and shapes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.kit_training.untrained import new_small_decoder
from osfl.models.diffusion import load_kit, load_small_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_decoder_is_of_the_kits_type(
    tiny_kit: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """It is kept in float32; images come in the latents' type, whatever the networks'."""
    new_small_decoder(8).save_pretrained(tmp_path)
    kit = load_kit(tiny_kit, dtype=dtype)
    small = load_small_decoder(str(tmp_path), kit)
    assert small.dtype == dtype
    assert not small.training
    assert not any(parameter.requires_grad for parameter in small.parameters())
    z = torch.zeros(2, *kit.latent_shape, requires_grad=True)
    images = replace(kit, small_decoder=small).decode_for_guidance(z)
    assert (images.dtype, images.shape) == (torch.float32, (2, 3, 32, 32))
    images.sum().backward()
    assert z.grad is not None
