"""Folders with tiny encoders of the hub's layouts, and what their networks are given."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BitImageProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
)

from osfl.kit_training.untrained import new_captioner
from osfl.models.encoders import Captioner, ImageEncoder

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_clip(folder: Path) -> Path:
    """224 px, as CLIP ViT-L/14."""
    config = CLIPVisionConfig(**SMALL, projection_dim=4, image_size=224, patch_size=56)
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)
    return folder


def save_dinov2(folder: Path) -> Path:
    """As dinov2-base: short side 256, bicubic, centre 224, ImageNet's mean and deviation."""
    config = Dinov2Config(**SMALL, mlp_ratio=1, image_size=224, patch_size=56)
    Dinov2Model(config).save_pretrained(folder)
    BitImageProcessor(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        resample=3,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)
    return folder


def save_captioner(folder: Path) -> Path:
    """BLIP at 48 px."""
    made = new_captioner(["a picture"], size=48, width=8)
    made.model.save_pretrained(folder)
    made.processor.save_pretrained(folder)
    return folder


def seen(network: ImageEncoder | Captioner, pixels: torch.Tensor) -> torch.Tensor:
    """What the vision model is given, of uint8 images."""
    inputs: list[torch.Tensor] = []

    def keep(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        inputs.append(arguments[0] if arguments else named["pixel_values"])

    vision = network.model.vision_model if isinstance(network, Captioner) else network.model
    handle = vision.register_forward_pre_hook(keep, with_kwargs=True)
    network(pixels)
    handle.remove()
    return torch.cat(inputs)
