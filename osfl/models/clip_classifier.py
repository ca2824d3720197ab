"""CLIP's image tower as a classifier, whose last layer holds encodings of the classes' names.

An export contains a copy of this file, which runs without OSFL.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

# The beginning of an architecture's name
PREFIX = "clip:"
ACTIVATIONS = ("quick_gelu", "gelu")
# Upper bound on every size; a ViT-bigG has a width of 1664
MAX_SIZE = 16_384


@dataclass(frozen=True)
class ImageTower:
    """The sizes of a CLIP image tower (ViT).

    Attributes:
        side: of the input images in pixels.
        patch: side of a patch in pixels.
        width: of the hidden states.
        layers, heads: number of layers, and of attention heads per layer.
        mlp: width of the layers' inner states.
        projection: width of the embedding.
        activation: one of `ACTIVATIONS`.
    """

    side: int
    patch: int
    width: int
    layers: int
    heads: int
    mlp: int
    projection: int
    activation: str

    def __str__(self) -> str:
        """Return the architecture's name: `clip:side=224;patch=16;...`."""
        values = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        return PREFIX + ";".join(values)

    @property
    def config(self) -> CLIPVisionConfig:
        """The settings of transformers' model."""
        return CLIPVisionConfig(
            image_size=self.side,
            patch_size=self.patch,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.mlp,
            projection_dim=self.projection,
            hidden_act=self.activation,
        )


def tower_of(config: CLIPVisionConfig) -> ImageTower:
    """Return the sizes of an image tower with these settings.

    Raises:
        ValueError: a size is out of range, or a setting that the architecture's name lacks is not
            the default.
    """
    tower = ImageTower(
        config.image_size,
        config.patch_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.intermediate_size,
        config.projection_dim,
        config.hidden_act,
    )
    _check(tower)
    defaults = {"num_channels": 3, "layer_norm_eps": 1e-5}
    for key, value in defaults.items():
        if getattr(config, key) != value:
            raise ValueError(f"{key} = {getattr(config, key)!r}: must be {value}")
    return tower


def parse_tower(architecture: str) -> ImageTower:
    """Parse the name of an architecture.

    Raises:
        ValueError: it is not one that `ImageTower` writes, or a size is out of range.
    """
    texts = dict(part.partition("=")[::2] for part in architecture[len(PREFIX) :].split(";"))
    names = [field.name for field in fields(ImageTower)]
    sizes = [texts.get(name, "") for name in names[:-1]]
    if list(texts) != names or not all(text.isascii() and text.isdigit() for text in sizes):
        example = ";".join(f"{name}=..." for name in names)
        raise ValueError(f"must be {PREFIX}{example}, with whole numbers for the sizes")
    # A longer number is out of range
    numbers: dict[str, Any] = {name: int(texts[name][:9]) for name in names[:-1]}
    tower = ImageTower(**numbers, activation=texts["activation"])
    _check(tower)
    return tower


def _check(tower: ImageTower) -> None:
    sizes = {name: value for name, value in vars(tower).items() if name != "activation"}
    for name, value in sizes.items():
        if not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise ValueError(f"{name} = {value!r}: must be a whole number from 1 to {MAX_SIZE:,}")
    if tower.patch > tower.side or tower.width % tower.heads:
        raise ValueError("patch must be at most side, and heads must divide width")
    if tower.activation not in ACTIVATIONS:
        raise ValueError(f"activation = {tower.activation!r}: must be {' or '.join(ACTIVATIONS)}")


class ClipClassifier(nn.Module):
    """A classifier whose logits are scaled cosines of an image's embedding and the classes' own.

    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (arXiv
    2103.00020), section 3.1.2. The head's weight is the classes' encodings times the logit scale.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, tower: ImageTower, num_classes: int):
        super().__init__()
        self.tower = CLIPVisionModelWithProjection(tower.config)
        # Part of the state: a loader may build the model on the meta device, without values
        embeddings = self.tower.vision_model.embeddings
        embeddings.register_buffer("position_ids", embeddings.position_ids, persistent=True)
        # Statistics of the tower's own preprocessing
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.register_buffer("std", torch.ones(3, 1, 1))
        # The last module, as of any classifier
        self.head = nn.Linear(tower.projection, num_classes)
        # Inputs are in [0, 1] and of the tower's size; `forward` normalizes them
        self.pretrained_cfg = {
            "mean": (0.0, 0.0, 0.0),
            "std": (1.0, 1.0, 1.0),
            "input_size": (3, tower.side, tower.side),
            "fixed_input_size": True,
        }

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, C] of images [B, 3, side, side] in [0, 1]."""
        embeddings = self.tower((images - self.mean) / self.std).image_embeds
        # CLIP, section 3.1.2: the cosine of both embeddings, times exp(t)
        logits: torch.Tensor = self.head(F.normalize(embeddings, dim=1))
        return logits


def build_clip_classifier(architecture: str, num_classes: int) -> ClipClassifier:
    """Build a classifier with random weights.

    Raises:
        ValueError: as `parse_tower`.
    """
    return ClipClassifier(parse_tower(architecture), num_classes)
