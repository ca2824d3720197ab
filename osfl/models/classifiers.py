"""Image classifiers: architectures of torchvision and timm, with their initial weights."""

import math
import re
import warnings
from dataclasses import dataclass
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
from osfl.kit.initial_weights import find_initial_weights
from osfl.models.small_stem import shrink_stem
from osfl.util.files import PUBLIC, CorruptFileError, placeholder_problem, write_atomically
from osfl.util.pixels import Pixels, to_float
from osfl.util.seeds import seed_of
from osfl.util.text import sanitize

# Input statistics of torchvision's ImageNet weights, and of the kit's
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


# A weights file may lack the head, and BatchNorm's counter, which older files do not have
_HEADS = ("fc.", "classifier.", "head.", "heads.")
_COUNTERS = "num_batches_tracked"
# Of an image tower of CLIP, as osfl.models.clip_classifier names it
CLIP_PREFIX = "clip:"
# Torchvision's DenseNet files have dots in some layer names: norm.1 for norm1
_DENSENET_LEGACY = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


class ClassifierError(ValueError):
    """An architecture or initial weights that cannot be used. The message says what to do."""


def build_classifier(architecture: str, num_classes: int, small_stem: bool = False) -> nn.Module:
    """Build a classifier of torchvision or timm with random weights.

    Its input [B, 3, H, W] comes from `normalize`; its output is logits [B, C].

    Args:
        architecture: a torchvision model, such as `resnet18`; a name of `osfl.kit.backbones`; or
            an image tower of CLIP (`osfl.models.clip_classifier`).
        num_classes: C.
        small_stem: reduce images less in the first layers, for images of about 32 px
            (`shrink_stem`).

    Raises:
        ClassifierError: the architecture is unknown, or its family has no small stem.
    """
    if is_backbone(architecture):
        return _build_backbone(architecture, num_classes, small_stem)
    if architecture.startswith(CLIP_PREFIX):
        return _build_clip(architecture, num_classes, small_stem)
    # Seconds to import, and not every client builds a classifier
    import torchvision.models

    if architecture not in torchvision.models.list_models(module=torchvision.models):
        raise ClassifierError(
            f"architecture = {architecture!r} is not a torchvision model; for example resnet18, "
            "resnet50, vgg16_bn; or timm:NAME, or hf-hub:OWNER/NAME"
        )
    if architecture in ("googlenet", "inception_v3"):
        raise ClassifierError(
            f"architecture = {architecture!r} has auxiliary outputs, which are not supported; use "
            "a resnet"
        )
    # Its stem's shape depends on metadata that only a pickled state dict has
    if architecture.startswith("mnasnet"):
        raise ClassifierError(
            f"architecture = {architecture!r} cannot be rebuilt from its tensors alone; use "
            "mobilenet_v2"
        )
    model: nn.Module = torchvision.models.get_model(
        architecture, weights=None, num_classes=num_classes
    )
    if small_stem:
        try:
            shrink_stem(model, architecture, num_classes)
        except ValueError as error:
            raise ClassifierError(f"architecture = {architecture!r}: {error}") from None
    return model


def _build_backbone(architecture: str, num_classes: int, small_stem: bool) -> nn.Module:
    if small_stem:
        raise ClassifierError(
            f"architecture = {architecture!r}: small-stem is for ResNet, ShuffleNet, MobileNet and "
            "VGG of torchvision only; set it to false"
        )
    try:
        return build_backbone(architecture, num_classes, "architecture")
    except (ConfigError, KitError) as error:
        raise ClassifierError(str(error)) from error


def _build_clip(architecture: str, num_classes: int, small_stem: bool) -> nn.Module:
    # Imports transformers, which takes seconds
    from osfl.models.clip_classifier import build_clip_classifier

    try:
        if small_stem:
            raise ValueError("small-stem must be false")
        return build_clip_classifier(architecture, num_classes)
    except ValueError as error:
        raise ClassifierError(f"architecture = {sanitize(architecture, 300)}: {error}") from None


def meta_classifier(architecture: str, num_classes: int, small_stem: bool) -> nn.Module:
    """Build `build_classifier`'s model on the meta device, without weights.

    Random initialization, which would be overwritten, takes most of the time.

    Raises:
        ClassifierError: as `build_classifier`.
    """
    # Some backbones compute numbers that their state dict does not contain
    if is_backbone(architecture):
        return build_classifier(architecture, num_classes, small_stem)
    try:
        with torch.device("meta"):
            return build_classifier(architecture, num_classes, small_stem)
    # RegNet computes its widths with tensors, and reads them
    except NotImplementedError:
        return build_classifier(architecture, num_classes, small_stem).to("meta")


def rebuild_classifier(
    state: dict[str, torch.Tensor], architecture: str, num_classes: int, small_stem: bool
) -> nn.Module:
    """Rebuild a trained classifier from its state dict, in eval mode.

    The model shares the state dict's tensors, except those of another dtype.

    Raises:
        ClassifierError: as `build_classifier`.
        RuntimeError: the state dict is another architecture's.
    """
    model = meta_classifier(architecture, num_classes, small_stem)
    # An average of models has fractional batch counters
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    model.load_state_dict(
        {name: value.to(dtypes.get(name, value.dtype)) for name, value in state.items()},
        assign=True,
    )
    return model.eval()


@dataclass(frozen=True)
class InputRule:
    """Rule by which a classifier's input is made of an image.

    Attributes:
        mean, std: statistics that normalize RGB values in [0, 1].
        side: the fixed input size in pixels; 0: any size.
    """

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    side: int = 0


def input_rule(model: nn.Module | None = None) -> InputRule:
    """Return the input rule of a model.

    Args:
        model: a timm backbone has a mean, standard deviation and size of its own; a torchvision
            model, or None, has ImageNet's and any size.
    """
    pretrained = getattr(model, "pretrained_cfg", None) or {}
    return InputRule(
        mean=tuple(pretrained.get("mean", MEAN)),
        std=tuple(pretrained.get("std", STD)),
        side=pretrained["input_size"][-1] if pretrained.get("fixed_input_size") else 0,
    )


def normalize(images: torch.Tensor, model: nn.Module | None = None) -> torch.Tensor:
    """Convert images [B, 3, H, W] in [-1, 1] to a classifier's input, by its `input_rule`."""
    return apply_rule(images, input_rule(model))


def apply_rule(images: torch.Tensor, rule: InputRule) -> torch.Tensor:
    """Convert images [B, 3, H, W] in [-1, 1] to a classifier's input.

    They are clamped, resized if the rule has a fixed input size, and normalized.
    """
    scaled = (images.clamp(-1, 1) + 1) / 2
    sides = (rule.side, rule.side)
    if rule.side and scaled.shape[-2:] != sides:
        scaled = F.interpolate(scaled, sides, mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (
        torch.tensor(v, device=images.device, dtype=images.dtype).view(3, 1, 1)
        for v in (rule.mean, rule.std)
    )
    return (scaled - mean) / std


def _read_state(file: Path, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a weights file, by their names.

    Raises:
        ClassifierError: the file cannot be read, or contains something else.
    """
    setting = f"{key} = {str(file)!r}"
    hint = f"Fetch it again, or set {key} to 'none' for random weights"
    try:
        if file.suffix == ".safetensors":
            check_header(file)
            weights = dequantize(load_file(file))
        else:
            weights = _unpickled(file)
    except (CorruptFileError, SafetensorError, OSError) as error:
        raise ClassifierError(f"{setting} cannot be read: {sanitize(error)}. {hint}") from None
    # torch and pickle raise anything for a corrupt file; their messages suggest unsafe loading
    except Exception as error:
        raise ClassifierError(
            f"{setting} cannot be read ({type(error).__name__}): it is cut short, corrupt, or "
            f"contains more than weights. {hint}"
        ) from None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise ClassifierError(f"{setting} is not a state dict: it must map names to tensors")
    return weights


def _unpickled(file: Path) -> Any:
    with open(file, "rb") as stream:
        problem = placeholder_problem(stream.read(200))
    if problem:
        raise CorruptFileError(problem)
    return torch.load(file, weights_only=True, map_location="cpu")


def load_initial_weights(model: nn.Module, file: Path, key: str = "init") -> None:
    """Load every fitting tensor of a file (safetensors, or a torchvision `.pth`), in place.

    The head stays random.

    Args:
        key: the setting's name in the run-config, for the errors.

    Raises:
        ClassifierError: the file is missing or corrupt, or a tensor outside the head does not fit.
    """
    weights = _read_state(file, key)
    initial = model.state_dict()
    fitting = {}
    for name, tensor in weights.items():
        name = _DENSENET_LEGACY.sub(r"\1\2", name)
        # An unknown name may be an older one that the layer itself maps (ViT's MLP)
        if name not in initial or initial[name].shape == tensor.shape:
            fitting[name] = tensor
    try:
        absent = model.load_state_dict(fitting, strict=False).missing_keys
    # A tensor of another shape under an older name
    except RuntimeError as error:
        reason = sanitize(str(error).splitlines()[-1].strip())
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


def save_initial_weights(model: nn.Module, file: Path, bits: int = 8) -> None:
    """Write initial weights as safetensors, with matrices in 8 or 4 bits to keep them small."""
    write_atomically(file, save(quantize(model.state_dict(), bits)), PUBLIC)


def round_weights(model: nn.Module, bits: int) -> None:
    """Round the weights, in place, to the values that `save_initial_weights` stores."""
    model.load_state_dict(dequantize(quantize(model.state_dict(), bits)))


def quantize(state: dict[str, torch.Tensor], bits: int = 8) -> dict[str, torch.Tensor]:
    """Quantize matrices and convolutions, with one scale per output channel (`NAME.scale`).

    8 bits are stored as int8; 4 bits as two numbers per uint8, with their shape (`NAME.shape`).
    Other tensors stay unchanged.
    """
    packed = {}
    max_level = 2 ** (bits - 1) - 1
    for name, tensor in state.items():
        if tensor.ndim < 2:
            packed[name] = tensor.contiguous()
            continue
        scale = tensor.flatten(1).abs().amax(dim=1).clamp_min(1e-12) / max_level
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


def dequantize(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Invert `quantize`, up to rounding.

    The error is at most half a step: 1/254 (8 bits) or 1/14 (4 bits) of the channel's largest
    weight.
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


def grow_resnet(shallow: nn.Module, deep: nn.Module) -> None:
    """Initialize a deeper ResNet with the function of a shallower one of the same blocks, in place
    (Net2DeeperNet, Chen et al. 2016).

    Every stage's additional blocks start as copies of its last block, with a residual branch that
    ends in a BatchNorm of weight 0 (Goyal et al. 2017): they are identities.
    """
    state = deep.state_dict()
    source = shallow.state_dict()
    for name in state:
        stage, _, suffix = name.partition(".")
        if not stage.startswith("layer"):
            # The head stays random
            if stage != "fc":
                state[name] = source[name]
            continue
        block, _, tensor = suffix.partition(".")
        last = len(getattr(shallow, stage)) - 1
        state[name] = source[f"{stage}.{min(int(block), last)}.{tensor}"]
        if int(block) > last and tensor in ("bn2.weight", "bn2.bias"):
            state[name] = torch.zeros_like(state[name])
    deep.load_state_dict(state)


def check_weights_file(config: ClassifierConfig, file: Path, key: str) -> None:
    """Check on the meta device that a file has a classifier's tensors, except the head.

    Raises:
        ClassifierError: as `build_classifier` and `load_initial_weights`.
    """
    # The kit's file for a ResNet-34 may be its ResNet-18
    architecture = file.stem if config.init == "kit" else config.architecture
    model = meta_classifier(architecture, 2, config.small_stem)
    with warnings.catch_warnings():
        # torch warns that copying to the meta device does nothing, which is the intention here
        warnings.filterwarnings("ignore", message=".*no-op")
        load_initial_weights(model, file, key)


def new_classifier(
    config: ClassifierConfig, num_classes: int, kit: str, seed: int, key: str = "init"
) -> nn.Module:
    """Build a classifier with its initial weights (`init`).

    Args:
        config: settings with a single architecture.
        kit: the kit's folder, for `init = "kit"`.
        key: the name of `init` in the run-config, for the errors.

    Raises:
        ClassifierError: as `build_classifier` and `load_initial_weights`.
        ConfigError: as `find_initial_weights`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "classifier"))
        model = build_classifier(config.architecture, num_classes, config.small_stem)
        weights = find_initial_weights(config, kit, key)
        if weights is None:
            return model
        # The kit has no ResNet-34 of its own
        if config.init == "kit" and weights.stem != config.architecture:
            shallow = build_classifier(weights.stem, num_classes, config.small_stem)
            load_initial_weights(shallow, weights, key)
            grow_resnet(shallow, model)
        else:
            load_initial_weights(model, weights, key)
    return model


def remove_head(model: nn.Module) -> tuple[nn.Module, int]:
    """Remove a classifier's last linear layer, in place; return it and its feature width.

    Raises:
        ClassifierError: the classifier does not end with a linear layer.
    """
    name, head = _head(model)
    model.set_submodule(name, nn.Identity())
    return model, head.in_features


def replace_head(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Set a classifier's last linear layer to a weight [C, D] and a bias [C], in place.

    Raises:
        ClassifierError: the classifier does not end with a linear layer.
    """
    _, head = _head(model)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def linear_head(model: nn.Module) -> nn.Linear:
    """Return a classifier's last linear layer.

    Raises:
        ClassifierError: the classifier does not end with a linear layer.
    """
    return _head(model)[1]


def _head(model: nn.Module) -> tuple[str, nn.Linear]:
    name, last = [*model.named_modules()][-1]
    if not isinstance(last, nn.Linear):
        raise ClassifierError(
            f"{type(model).__name__} does not end with a linear layer, which this method replaces; "
            "set classifier.architecture to another one, such as resnet18"
        )
    return name, last


@torch.no_grad()
def compute_logits(model: nn.Module, pixels: Pixels, device: torch.device) -> torch.Tensor:
    """Return logits [N, C] on the CPU for uint8 images [N, 3, S, S]; put the model in eval mode."""
    model = model.to(device).eval()
    return torch.cat(
        [
            model(normalize(to_float(chunk.to(device)), model)).cpu()
            for chunk in pixels.contiguous().split(256)
        ]
    )


def count_confusion(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    num_classes: int,
    device: torch.device,
) -> list[list[int]]:
    """Return the confusion matrix on labeled images: rows are true classes, columns predictions."""
    return confusion_of(compute_logits(model, pixels, device), labels, num_classes)


def confusion_of(logits: torch.Tensor, labels: torch.Tensor, num_classes: int) -> list[list[int]]:
    """Return the confusion matrix of logits [N, C]: rows are true classes, columns predictions."""
    predicted = logits.argmax(dim=1)
    cells = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    rows: list[list[int]] = cells.reshape(num_classes, num_classes).tolist()
    return rows
