"""Folders with tiny encoders of the hub's layouts, and what their networks are given."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BitImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
)

from osfl.kit_training.untrained import new_captioner, new_text_encoder
from osfl.models.encoders import Captioner, ImageEncoder
from osfl.util.prompts import DIGITS

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_clip(folder: Path) -> Path:
    """224 px, as CLIP ViT-L/14."""
    config = CLIPVisionConfig(**SMALL, projection_dim=4, image_size=224, patch_size=56)
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)
    return folder


def save_whole_clip(folder: Path, side: int = 32, words: tuple[str, ...] = DIGITS) -> Path:
    """Both towers with a tokenizer of some words, in the layout of openai/clip-vit-base-patch16."""
    text = new_text_encoder([f"a photo of a {word}." for word in words], length=12, width=8)
    settings = {**text.model.config.to_dict(), "projection_dim": 6}
    vision = {**SMALL, "image_size": side, "patch_size": side // 4, "projection_dim": 6}
    config = CLIPConfig(text_config=settings, vision_config=vision, projection_dim=6)
    CLIPModel(config).save_pretrained(folder)
    text.tokenizer.save_pretrained(folder)
    edge = {"height": side, "width": side}
    CLIPImageProcessor(size=edge, crop_size=edge).save_pretrained(folder)
    return folder


def save_dinov2(folder: Path) -> Path:
    """Preprocessing like dinov2-base's: short side 256, bicubic, center 224, ImageNet's mean and
    deviation.
    """
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
    captioner = new_captioner(["a picture"], size=48, width=8)
    captioner.model.save_pretrained(folder)
    captioner.processor.save_pretrained(folder)
    return folder


def seen(network: ImageEncoder | Captioner, pixels: torch.Tensor) -> torch.Tensor:
    """The vision model's input for uint8 images."""
    inputs: list[torch.Tensor] = []

    def keep(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        inputs.append(arguments[0] if arguments else named["pixel_values"])

    vision = network.model.vision_model if isinstance(network, Captioner) else network.model
    handle = vision.register_forward_pre_hook(keep, with_kwargs=True)
    network(pixels)
    handle.remove()
    return torch.cat(inputs)


def save_contrastive_clip(folder: Path, captions: list[str]) -> Path:
    """Both towers, at 32 px, with a tokenizer trained on the captions."""
    text = new_text_encoder(captions, length=8, width=8)
    vision = CLIPVisionConfig(**SMALL, image_size=32, patch_size=8)
    config = CLIPConfig(
        text_config=text.model.config.to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=4,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    # Else all images have nearly the same embedding
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.5)
    model.save_pretrained(folder)
    text.tokenizer.save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(folder)
    return folder
