"""Image classifiers.

Torchvision architectures, an option for small images, and their pretrained initialisation.
"""

import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from torch.nn import functional as F

from osfl.config import ClassifierConfig, ConfigError
from osfl.kit.backbones import build_backbone, is_backbone
from osfl.kit.folder import KitError
from osfl.kit.headers import check_header
from osfl.kit.initial_weights import initial_weights
from osfl.util.files import PUBLIC, DamageError, placeholder, write_atomically
from osfl.util.pixels import Pixels, to_float
from osfl.util.seeds import seed_of
from osfl.util.text import plain

# Mean and standard deviation of torchvision's ImageNet weights; the kit's initialisations keep to
# them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


# What a file of weights need not have: the head, and a counter that older ones lack.
_HEADS = ("fc.", "classifier.", "head.", "heads.")
_COUNTERS = "num_batches_tracked"
# Torchvision's DenseNets were saved when a layer's name could have a dot: norm.1 for norm1.
_DENSENET_LEGACY = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


class ClassifierError(ValueError):
    """An architecture or an initialisation that cannot be used; the message says what to do."""


def build_classifier(architecture: str, num_classes: int, small_stem: bool = False) -> nn.Module:
    """A classifier with random weights, of torchvision or timm.

    Input [B, 3, H, W] as `normalise` makes it, output logits [B, C].

    Args:
        architecture: a torchvision model name, e.g. `resnet18`; or as `osfl.kit.backbones`.
        num_classes: C.
        small_stem: for images of about 32 px, halve the reduction of the first layers
            (`_shrink_stem`).

    Raises:
        ClassifierError: unknown architecture, or a small stem for a family that has none.
    """
    if is_backbone(architecture):
        return _build_backbone(architecture, num_classes, small_stem)
    import torchvision.models  # seconds to import, and not every client builds a classifier

    if architecture not in torchvision.models.list_models(module=torchvision.models):
        raise ClassifierError(
            f"architecture = {architecture!r} is not a torchvision model; for example resnet18, "
            "resnet50, vgg16_bn; or timm:NAME, or hf-hub:OWNER/NAME"
        )
    if architecture in ("googlenet", "inception_v3"):
        raise ClassifierError(
            f"architecture = {architecture!r} has auxiliary outputs, which are not supported; take "
            "a resnet"
        )
    # Its stem's shape depends on metadata that only a pickled state dict has
    if architecture.startswith("mnasnet"):
        raise ClassifierError(
            f"architecture = {architecture!r} cannot be rebuilt from its tensors alone; take "
            "mobilenet_v2"
        )
    model = torchvision.models.get_model(architecture, weights=None, num_classes=num_classes)
    if small_stem:
        _shrink_stem(model, architecture, num_classes)
    return model


def _build_backbone(architecture: str, num_classes: int, small_stem: bool) -> nn.Module:
    if small_stem:
        raise ClassifierError(
            f"architecture = {architecture!r}: small-stem is for ResNet, ShuffleNet, MobileNet and "
            "VGG of torchvision; set it to false"
        )
    try:
        return build_backbone(architecture, num_classes, "architecture")
    except (ConfigError, KitError) as error:
        raise ClassifierError(str(error)) from error


def _shrink_stem(model: Any, architecture: str, num_classes: int) -> None:
    """Fit an architecture for 224 px to about 32, in place.

    ResNet: one 3x3 stride-2 convolution for the 7x7 and the max-pool. ShuffleNet: no max-pool.
    MobileNet: stride 1 in the first
    convolution. VGG: average pooling and one linear layer for the three (as is usual for CIFAR; 15
    M parameters for 134 M).
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
        raise ClassifierError(
            f"architecture = {architecture!r}: small-stem is for ResNet, ShuffleNet, MobileNet and "
            "VGG; set it to false"
        )


def blank_classifier(architecture: str, num_classes: int, small_stem: bool) -> nn.Module:
    """The shapes of `build_classifier`'s model without weights.

    Random ones, which nobody would see, take longer than all else.

    Raises:
        ClassifierError: as `build_classifier`.
    """
    # Some compute numbers that their state does not have
    if is_backbone(architecture):
        return build_classifier(architecture, num_classes, small_stem)
    try:
        with torch.device("meta"):
            return build_classifier(architecture, num_classes, small_stem)
    except NotImplementedError:  # RegNet computes its widths with tensors, and reads them
        return build_classifier(architecture, num_classes, small_stem).to("meta")


def rebuild(
    state: dict[str, torch.Tensor], architecture: str, num_classes: int, small_stem: bool
) -> nn.Module:
    """A trained classifier of its state dict's own tensors, not copies where they have the right
    type, in eval mode.

    Raises:
        ClassifierError: as `build_classifier`.
        RuntimeError: the state dict is another architecture's.
    """
    model = blank_classifier(architecture, num_classes, small_stem)
    blank = model.state_dict()  # averages of models count their batches in fractions
    model.load_state_dict(
        {name: value.to(blank.get(name, value).dtype) for name, value in state.items()}, assign=True
    )
    return model.eval()


def normalise(images: torch.Tensor, model: nn.Module | None = None) -> torch.Tensor:
    """Images [B, 3, H, W] in [-1, 1] to a classifier's input.

    Clamped, resized where the model takes one size alone, then by its mean and standard deviation.

    Args:
        model: whose own mean, deviation and size they are, a backbone's of timm; None, or a model
            of torchvision: ImageNet's, and any size.
    """
    about = getattr(model, "pretrained_cfg", None) or {}
    shares = (images.clamp(-1, 1) + 1) / 2
    side = about["input_size"][-1] if about.get("fixed_input_size") else None
    if side is not None and shares.shape[-2:] != (side, side):
        shares = F.interpolate(shares, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (
        torch.tensor(v, device=images.device, dtype=images.dtype).view(3, 1, 1)
        for v in (about.get("mean", MEAN), about.get("std", STD))
    )
    return (shares - mean) / std


def _state_in(file: Path, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of weights, by their names.

    Raises:
        ClassifierError: it cannot be read, or holds something else.
    """
    about = f"{key} = {str(file)!r}"
    cure = "Fetch it again; 'none' starts from random weights"
    try:
        if file.suffix == ".safetensors":
            check_header(file)
            weights = unpack(load_file(file))
        else:
            weights = _unpickled(file)
    except (DamageError, SafetensorError, OSError) as error:
        raise ClassifierError(f"{about} cannot be read: {plain(error)}. {cure}") from None
    # All that torch and pickle raise for a damaged file; their words tell of unsafe ways to read it
    except Exception as error:
        raise ClassifierError(
            f"{about} cannot be read ({type(error).__name__}): it is cut short, damaged, or no "
            f"file of weights alone. {cure}"
        ) from None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise ClassifierError(f"{about} is not a state dict: it must hold tensors by name")
    return weights


def _unpickled(file: Path) -> Any:
    with open(file, "rb") as opened:
        problem = placeholder(opened.read(200))
    if problem:
        raise DamageError(problem)
    return torch.load(file, weights_only=True, map_location="cpu")


def load_initialisation(model: nn.Module, file: Path, key: str = "init") -> None:
    """Load every tensor of `file` (safetensors, or a torchvision `.pth`) that fits, in place.

    The head stays random.

    Args:
        key: what the file is called in the run-config, for the errors.

    Raises:
        ClassifierError: the file is missing or damaged, or anything but the head does not fit.
    """
    weights = _state_in(file, key)
    initial = model.state_dict()
    fitting = {}
    for name, tensor in weights.items():
        name = _DENSENET_LEGACY.sub(r"\1\2", name)
        # Names that the model does not have may be older ones, which its layers know (ViT's MLP)
        if name not in initial or initial[name].shape == tensor.shape:
            fitting[name] = tensor
    try:
        absent = model.load_state_dict(fitting, strict=False).missing_keys
    # A tensor of another shape under an older name
    except RuntimeError as error:
        reason = plain(str(error).splitlines()[-1].strip())
        raise ClassifierError(
            f"{key} = {str(file)!r} does not fit this architecture or stem: {reason}"
        ) from error
    missing = [
        name for name in absent if not name.startswith(_HEADS) and not name.endswith(_COUNTERS)
    ]
    if missing:
        raise ClassifierError(
            f"{key} = {str(file)!r} does not fit this architecture or stem: {missing[0]!r} and "
            f"{len(missing) - 1} more"
        )


def save_initialisation(model: nn.Module, file: Path, bits: int = 8) -> None:
    """Write the weights as safetensors, matrices in 8 or 4 bits.

    An initialisation needs no more, a repository likes less.
    """
    write_atomically(file, save(pack(model.state_dict(), bits)), PUBLIC)


def round_weights(model: nn.Module, bits: int) -> None:
    """Round the weights, in place, to what `save_initialisation` will keep of them."""
    model.load_state_dict(unpack(pack(model.state_dict(), bits)))


def pack(state: dict[str, torch.Tensor], bits: int = 8) -> dict[str, torch.Tensor]:
    """Matrices and convolutions as whole numbers with one scale per output channel (`NAME.scale`).

    All else as it is.

    Of 8 bits: int8. Of 4: two in a byte, uint8, with the shape beside them (`NAME.shape`).
    """
    packed = {}
    most = 2 ** (bits - 1) - 1
    for name, tensor in state.items():
        if tensor.ndim < 2:
            packed[name] = tensor.contiguous()
            continue
        scale = tensor.flatten(1).abs().amax(dim=1).clamp_min(1e-12) / most
        rounded = (
            (tensor / scale.view(-1, *[1] * (tensor.ndim - 1))).round().to(torch.int8).contiguous()
        )
        if bits == 4:
            high, low = (
                F.pad(rounded.flatten() + 8, (0, rounded.numel() % 2))
                .to(torch.uint8)
                .view(-1, 2)
                .unbind(1)
            )
            packed[f"{name}.shape"] = torch.tensor(tensor.shape)
            rounded = high * 16 + low
        packed[name] = rounded
        packed[f"{name}.scale"] = scale
    return packed


def unpack(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `pack`, up to rounding (half a step.

    1/254 or 1/14 of the channel's largest weight).
    """
    state = {
        name: tensor for name, tensor in packed.items() if not name.endswith((".scale", ".shape"))
    }
    for name, tensor in state.items():
        if f"{name}.shape" in packed:
            shape = packed[f"{name}.shape"].tolist()
            tensor = (
                torch.stack([tensor >> 4, tensor & 15], dim=1)
                .flatten()[: math.prod(shape)]
                .view(shape)
                .to(torch.int8)
                - 8
            )
        if f"{name}.scale" in packed:
            state[name] = tensor.float() * packed[f"{name}.scale"].view(
                -1, *[1] * (tensor.ndim - 1)
            )
    return state


def deepen(shallow: nn.Module, deep: nn.Module) -> None:
    """Give a deeper ResNet of the same blocks the function of a shallower one, in place
    (Net2DeeperNet, Chen et al. 2016).

    Every stage's further blocks begin as copies of its last one whose residual branch ends in a
    BatchNorm with weight 0 (Goyal et al. 2017), so that they pass their input on.
    """
    state = deep.state_dict()
    source = shallow.state_dict()
    for name in state:
        stage, _, rest = name.partition(".")
        if not stage.startswith("layer"):
            if stage != "fc":  # the head stays random
                state[name] = source[name]
            continue
        block, _, tensor = rest.partition(".")
        last = len(getattr(shallow, stage)) - 1
        state[name] = source[f"{stage}.{min(int(block), last)}.{tensor}"]
        if int(block) > last and tensor in ("bn2.weight", "bn2.bias"):
            state[name] = torch.zeros_like(state[name])
    deep.load_state_dict(state)


def check_initialisation(config: ClassifierConfig, file: Path, key: str) -> None:
    """Check that a file's tensors are those of a classifier, head aside, without its numbers.

    Raises:
        ClassifierError: as `build_classifier` and `load_initialisation`.
    """
    # The kit has none of a ResNet-34's own
    architecture = file.stem if config.init == "kit" else config.architecture
    model = blank_classifier(architecture, 2, config.small_stem)
    with warnings.catch_warnings():
        # Of every tensor: its numbers go nowhere, as they should
        warnings.filterwarnings("ignore", message=".*no-op")
        load_initialisation(model, file, key)


def new_classifier(
    config: ClassifierConfig, num_classes: int, kit: str, seed: int, key: str = "init"
) -> nn.Module:
    """A classifier at its initialisation (`init`): the kit's, torchvision's, a file's, or random.

    Args:
        config: of one architecture.
        kit: the kit's folder, where `init` is `kit`.
        key: what `init` is called in the run-config, for the errors.

    Raises:
        ClassifierError: as `build_classifier` and `load_initialisation`.
        ConfigError: as `initial_weights`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "classifier"))
        model = build_classifier(config.architecture, num_classes, config.small_stem)
        weights = initial_weights(config, kit, key)
        if weights is None:
            return model
        # The kit has none of a ResNet-34's own
        if config.init == "kit" and weights.stem != config.architecture:
            shallow = build_classifier(weights.stem, num_classes, config.small_stem)
            load_initialisation(shallow, weights, key)
            deepen(shallow, model)
        else:
            load_initialisation(model, weights, key)
    return model


def headless(model: nn.Module) -> tuple[nn.Module, int]:
    """A classifier without its last linear layer, in place, and the width of its features.

    Raises:
        ClassifierError: it ends with another layer.
    """
    name, head = _head(model)
    model.set_submodule(name, nn.Identity())
    return model, head.in_features


def replace_head(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Give a classifier's last linear layer these numbers, [C, D] and [C], in place.

    Raises:
        ClassifierError: it ends with another layer.
    """
    _, head = _head(model)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def head_of(model: nn.Module) -> nn.Linear:
    """A classifier's last linear layer.

    Raises:
        ClassifierError: it ends with another layer.
    """
    return _head(model)[1]


def _head(model: nn.Module) -> tuple[str, nn.Linear]:
    name, last = [*model.named_modules()][-1]
    if not isinstance(last, nn.Linear):
        raise ClassifierError(
            f"{type(model).__name__} does not end with a linear layer, which this method replaces; "
            "take another classifier.architecture, such as resnet18"
        )
    return name, last


@torch.no_grad()
def logits_of(model: nn.Module, pixels: Pixels, device: torch.device) -> torch.Tensor:
    """Logits [N, C] on the CPU, of uint8 images [N, 3, S, S]; the model is put in eval mode."""
    model = model.to(device).eval()
    return torch.cat(
        [
            model(normalise(to_float(chunk.to(device)), model)).cpu()
            for chunk in pixels.contiguous().split(256)
        ]
    )


def confusion(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    num_classes: int,
    device: torch.device,
) -> list[list[int]]:
    """The confusion matrix on labelled images: rows are true classes, columns predicted ones."""
    from sklearn.metrics import confusion_matrix  # seconds to import, and only a test needs it

    predicted = logits_of(model, pixels, device).argmax(dim=1)
    return confusion_matrix(labels, predicted, labels=range(num_classes)).tolist()
