"""Classifiers for transformers' `AutoModelForImageClassification`: torchvision's, and CLIP's tower.

An export contains a copy of this file, which runs without OSFL; no module of OSFL imports it.
"""

from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import center_crop
from transformers import BitImageProcessor, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

# Relative, because the copies lie side by side
from .clip_classifier import PREFIX, build_clip_classifier
from .small_stem import shrink_stem


class OsflConfig(PretrainedConfig):
    """The architecture of a classifier.

    Args:
        architecture: a model of torchvision, such as `resnet18`, or a name of `ImageTower`.
        small_stem: whether its first layers are those for images of about 32 px.
    """

    model_type = "osfl"

    def __init__(
        self, architecture: str = "resnet18", small_stem: bool = False, **settings: Any
    ) -> None:
        self.architecture = architecture
        self.small_stem = small_stem
        super().__init__(**settings)


class OsflForImageClassification(PreTrainedModel):
    """A classifier; `forward` returns logits [B, C] for normalized images [B, 3, H, W]."""

    config_class = OsflConfig
    main_input_name = "pixel_values"

    def __init__(self, config: OsflConfig) -> None:
        super().__init__(config)
        # RegNet computes its widths with tensors, which fails on transformers' meta device
        with torch.device("cpu"):
            self.network = _build(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the random weights, which those of the file replace."""

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **settings: Any,
    ) -> Any:
        """Return the logits, and with labels [B] the cross-entropy."""
        logits = self.network(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return ImageClassifierOutput(loss=loss, logits=logits)


class OsflImageProcessor(BitImageProcessor):
    """OSFL's preprocessing: transformers' own center crop can be off by one pixel."""

    def center_crop(self, image: torch.Tensor, size: Any, **settings: Any) -> torch.Tensor:
        """Cut out the center of an image [..., H, W]; half a pixel is rounded to even."""
        center: torch.Tensor = center_crop(image, [size.height, size.width])
        return center


def _build(config: OsflConfig) -> nn.Module:
    if config.architecture.startswith(PREFIX):
        return build_clip_classifier(config.architecture, config.num_labels)
    network: nn.Module = torchvision.models.get_model(
        config.architecture, weights=None, num_classes=config.num_labels
    )
    if config.small_stem:
        shrink_stem(network, config.architecture, config.num_labels)
    return network
