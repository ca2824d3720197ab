"""Small stems of torchvision's architectures, for images of about 32 px.

Imports torch alone: an export for transformers contains a copy of this file.
"""

from typing import Any

from torch import nn


def shrink_stem(model: Any, architecture: str, num_classes: int) -> None:
    """Adapt an architecture for 224 px to about 32 px, in place.

    ResNet: one 3x3 convolution of stride 2 replaces the 7x7 one and the max-pooling. ShuffleNet: no
    max-pooling. MobileNet: stride 1 in the first convolution. VGG: average pooling and one linear
    layer replace the three, as is usual for CIFAR (15 M parameters in place of 134 M).

    Raises:
        ValueError: the architecture's family has no small stem.
    """
    if architecture.startswith(("resnet", "resnext", "wide_resnet")):
        model.conv1 = nn.Conv2d(
            3, model.conv1.out_channels, kernel_size=3, stride=2, padding=1, bias=False
        )
        model.maxpool = nn.Identity()
    elif architecture.startswith("shufflenet"):
        model.maxpool = nn.Identity()
    elif architecture.startswith("mobilenet"):
        model.features[0][0].stride = (1, 1)
    elif architecture.startswith("vgg"):
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Sequential(nn.Flatten(), nn.Linear(512, num_classes))
    else:
        raise ValueError("small-stem is for ResNet, ShuffleNet, MobileNet and VGG; set it to false")
