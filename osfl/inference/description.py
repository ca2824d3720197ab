"""The description of a trained model that its safetensors file contains.

Imports no torch. The description is JSON under a single key, because safetensors writes several
keys in random order, and a model's SHA-256 must not depend on it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from osfl.config import ClassifierConfig, RunConfig, all_parts, sends_payloads
from osfl.data.parts import class_names
from osfl.kit.kits import kit_license
from osfl.methods import METHODS
from osfl.util.files import parse_json
from osfl.util.text import name_problem, quote, sanitize

if TYPE_CHECKING:
    from torch import nn

KEY = "osfl"
FORMAT = 1
# Upright by EXIF, on white, the short side resized to the image size (bilinear, antialiased), and
# the center cut out: `osfl.data.pictures.to_pixels`
RESIZE = "short-side-bilinear-center-crop"
MAX_SIDE = 2048
# Upper bound on the number of names that fit into `data.classes`
MAX_CLASSES = 2**15
MAX_TEXT = 1000
MAX_NUMBER = 1e6
# Dividing by a smaller deviation would give inputs that no classifier was trained on
MIN_DEVIATION = 1e-3


@dataclass(frozen=True)
class ModelDescription:
    """All that loading a model needs, and how it was made.

    Attributes:
        format: version of this description.
        architecture: as `build_classifier` reads it.
        small_stem: whether the first layers are those for images of about 32 px.
        classes: the class names, in the order of the outputs.
        image_size: side in pixels to which an image is resized.
        resize: how an image is resized; always `RESIZE`.
        input_size: side to which the resized image is resized once more (bicubic), for an
            architecture of fixed size; 0: not at all.
        mean, std: statistics that normalize RGB values in [0, 1].
        method: the run's method.
        run: the run's job id.
        name: the model's name within the run.
        trained_on: text that names the training data.
        epsilon, delta: the guarantee to each client's images; None without one.
        base_license: license of the weights that training started from, or "unknown".
    """

    format: int
    architecture: str
    small_stem: bool
    classes: tuple[str, ...]
    image_size: int
    resize: str
    input_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    method: str
    run: str
    name: str
    trained_on: str
    epsilon: float | None
    delta: float | None
    base_license: str

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the model's file."""
        return {KEY: json.dumps(asdict(self), sort_keys=True)}


def describe(
    config: RunConfig,
    run: str,
    name: str,
    settings: ClassifierConfig,
    model: "nn.Module | None" = None,
) -> ModelDescription:
    """Describe a global model of a run.

    Args:
        run: the job id.
        name: the model's name.
        settings: the classifier, with a single architecture.
        model: of this architecture; None for one of torchvision.
    """
    # Imports torch
    from osfl.models.classifiers import input_rule

    rule = input_rule(model)
    parts = all_parts(config)
    is_private = bool(config.epsilon and all(METHODS[method].privacy for method in parts))
    delta = max(part.guaranteed_delta for part in parts.values())
    return ModelDescription(
        format=FORMAT,
        architecture=settings.architecture,
        small_stem=settings.small_stem,
        classes=class_names(config.data),
        image_size=config.data.image_size,
        resize=RESIZE,
        input_size=rule.side,
        mean=rule.mean,
        std=rule.std,
        method=config.method,
        run=run,
        name=name,
        trained_on=_training_data(config),
        epsilon=config.epsilon if is_private else None,
        delta=delta if is_private else None,
        base_license=_base_license(settings, config.kit, model),
    )


def _training_data(config: RunConfig) -> str:
    method = METHODS[config.method]
    if method.rounds:
        return f"the clients' images, by federated training in {config.rounds.count} rounds"
    if method.trained_on:
        return method.trained_on
    if method.features:
        return "statistics of the features of the clients' images"
    if not method.samples:
        return "the images of all clients, pooled"
    if not sends_payloads(config):
        return "synthetic images of the classes' names"
    return f"synthetic images from what clients sent ({config.method})"


def _base_license(settings: ClassifierConfig, kit: str, model: "nn.Module | None") -> str:
    if settings.init == "none":
        return "none: random initial weights"
    if settings.init == "kit":
        return kit_license(kit) or "unknown"
    # timm states the license of its own weights
    pretrained = getattr(model, "pretrained_cfg", None) or {}
    is_known = settings.init == "pretrained" and pretrained.get("license")
    return sanitize(pretrained["license"]) if is_known else "unknown"


# ---- Reading ----


def read_description(metadata: Mapping[str, str]) -> ModelDescription | None:
    """Read and check the description in a file's metadata; None if it has none.

    Raises:
        ValueError: it is not one that this version writes. The message names the value.
    """
    if KEY not in metadata:
        return None
    values = parse_json(metadata[KEY])
    if not isinstance(values, dict):
        raise ValueError("its description must be a JSON object")
    if values.get("format") != FORMAT:
        raise ValueError(
            f"format = {quote(values.get('format'))}: this version of OSFL reads format {FORMAT}; "
            "update OSFL"
        )
    names = {field.name for field in fields(ModelDescription)}
    if different := sorted(names ^ values.keys()):
        raise ValueError(f"{quote(different[0])} is missing from its description, or unknown")
    for key, (is_valid, rule) in _RULES.items():
        if not is_valid(values[key]):
            raise ValueError(f"{key} = {quote(values[key], 100)}: must be {rule}")
    if (values["epsilon"] is None) != (values["delta"] is None):
        raise ValueError("epsilon and delta: must both be numbers, or both null")
    lists = {key: tuple(values[key]) for key in ("classes", "mean", "std")}
    return ModelDescription(**{**values, **lists})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and sanitize(value, MAX_TEXT) == value


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # False for NaN, too
    return -MAX_NUMBER <= value <= MAX_NUMBER


def _is_side(value: object, least: int) -> bool:
    return type(value) is int and (value == 0 or least <= value <= MAX_SIDE)


def _are_classes(value: object) -> bool:
    if not isinstance(value, list) or not 2 <= len(value) <= MAX_CLASSES:
        return False
    are_names = all(isinstance(name, str) and not name_problem(name) for name in value)
    return are_names and len(set(value)) == len(value)


def _are_statistics(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))


def _is_budget(value: object) -> bool:
    return value is None or (_is_number(value) and value >= 0)  # type: ignore[operator]


_TEXT = (_is_text, f"a printable text of 1 to {MAX_TEXT} characters")
_BUDGET = (_is_budget, "null, or a number from 0")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "architecture": _TEXT,
    "small_stem": (lambda value: isinstance(value, bool), "true or false"),
    "classes": (_are_classes, f"a list of 2 to {MAX_CLASSES:,} different names"),
    "image_size": (lambda value: bool(value) and _is_side(value, 8), f"from 8 to {MAX_SIDE}"),
    "resize": (lambda value: value == RESIZE, repr(RESIZE)),
    "input_size": (lambda value: _is_side(value, 1), f"0, or from 1 to {MAX_SIDE}"),
    "mean": (_are_statistics, "a list of 3 numbers"),
    "std": (
        lambda value: _are_statistics(value) and min(value) >= MIN_DEVIATION,
        f"a list of 3 numbers from {MIN_DEVIATION:g}",
    ),
    "method": _TEXT,
    "run": _TEXT,
    "name": _TEXT,
    "trained_on": _TEXT,
    "epsilon": _BUDGET,
    "delta": _BUDGET,
    "base_license": _TEXT,
}
