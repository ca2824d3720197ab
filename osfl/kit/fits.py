"""Check that a part's weights have the tensors, by name and shape, that its settings describe.

A library that loads weights initializes a tensor that the file lacks at random. The comparison
needs torch and the library, which take seconds to import, so successful checks are cached by
settings and header. The shipped kits' parts are known to fit.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import takewhile
from typing import Any

from osfl.kit.digests import cache_folder
from osfl.kit.folder import KitError, KitFolder, part_path, walk_settings
from osfl.kit.headers import Shapes
from osfl.methods import CLIP, LORA, TINY_DECODER
from osfl.util.files import read_json, write_atomically
from osfl.util.text import sanitize

MAX_LAYERS = 1000  # of a model that is built; large ones have about 100
MAX_MARKS = 1000  # in the cache
_LAYER_COUNTS = re.compile(r"num_.*(layers|blocks)|layers_per_block")
TRANSFORMERS_MODELS = ("text_encoder", "text_encoder_2", "image_encoder", "captioner", CLIP)
DIFFUSERS_MODELS = ("unet", "vae", TINY_DECODER, "image_normalizer")
# Marks of the shipped kits' parts; tests/unit/kit/test_fits.py shows those of a retrained kit
SHIPPED_MARKS = frozenset(
    {
        "03a3729e15ed44386b55e4affb957da8a39daf11c35da3546416121a5c37423b",
        "09d34729386b8b1b6566e108a2467c589b5dcad75a076f87d71987ed9df0f849",
        "1ef75010bf3b3cfb5d06e55d5cd75bd80c81fd5f75b34de3d3cf6a8cd4d3b037",
        "35c2de18a8e2189ef5d2d8be4b7ef9d44246c40b3d893d88736507df50d4ce98",
        "3fbb6804e07052e7c985be94f7b31545cab590966e767b4d19d44897f428944c",
        "40afbdba355f64c7b51780d8116172f31ea36b6284bb710474cc896e64c00e05",
        "54d94e9efc89c29d3dd6d21e58eef224e9078a9c1b12991f4ca7721a86f68320",
        "5db08803c67406af60f34b52af291b25bbdc980ccfc41dda23ba02583f52a10b",
        "633316b034c9ed2849804f904f2a91955baea5872ee96f877415b1c94e0ec362",
        "65c555f0bc45019acb42a9a1579b8dfc661effda302d9ca677f0abcace2010a8",
        "7f263e6508c4fe03a49f2720f980f94708589351b70cea87c50e4be84bd436f7",
        "8b7b9d1a3d6ead0fce59a60790f91cecc8b876cc813f857dd3ee874be74eb357",
        "cb9806a874d6ace564009401bbe0ceb9f97fc3ca291556706d8744982fab19e5",
        "cfc8ff532ff510096b9bdfb0563f8bc4ee671125ec4c98ac92ef368254a8b5c8",
        "dd54f76a1d52f5c9f277156763031b1b6aa1658c2c8cebed91976483c5c4b8ca",
        "7b6dd20fab7dc8db7f973fea0d230df08d31f05594a17dc9e2056514018e0c64",
        "ea89368c33ecc298da80243dbed3e1f34caf37d2568e1d1233fb8d6d42addc09",
    }
)


@dataclass(frozen=True)
class Misfit:
    """The differences between a file's tensors and a model's.

    Attributes:
        missing: names of the model's tensors that the file lacks.
        mismatched: names, with the file's shape and the model's.
    """

    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def check_tensor_shapes(
    folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool
) -> None:
    """Check that a weights file has every tensor of its part's model, in its shape.

    Args:
        part: the folder in the kit; "" for the folder itself.
        kind: the part's kind.
        shapes: of the file's tensors.
        sharded: whether the tensors come from several files.

    Raises:
        KitError: a tensor is missing or has another shape, or the settings describe no model.
    """
    mark = fit_mark(folder, part, kind, shapes, sharded)
    if mark in SHIPPED_MARKS or mark in _cached_marks():
        return
    _check_layer_counts(folder, part)
    try:
        misfit = _misfit(folder, part, kind, shapes, sharded)
    # A library raises anything for unexpected settings
    except Exception as error:
        raise KitError(
            f"{folder.setting}: {part_path(part, 'config.json')} describes no model that can be "
            f"built: {sanitize(error) or type(error).__name__}"
        ) from None
    if misfit.missing or misfit.mismatched:
        raise KitError(_misfit_message(folder, part, kind, shapes, sharded, misfit))
    _remember(mark)


def check_lora_fit(setting: str, file: str, kit: KitFolder, shapes: Shapes) -> None:
    """Check that every tensor of a LoRA fits a layer of a kit's UNet.

    Args:
        setting: the weights as the user named them, for messages.
        file: the weights file's name.
        shapes: of its tensors.

    Raises:
        KitError: peft is not installed, a tensor fits no layer, or the settings describe no UNet.
    """
    if importlib.util.find_spec("peft") is None:
        raise KitError(f"{setting} needs the package peft: pip install 'osfl[lora]'")
    mark = fit_mark(kit, "unet", LORA, shapes, False)
    if mark in SHIPPED_MARKS or mark in _cached_marks():
        return
    _check_layer_counts(kit, "unet")
    prefix = f"{setting}: {file} does not fit the UNet of {kit.setting}"
    try:
        problems = _lora_misfits(kit, shapes)
    # The library's renaming misses the other matrix of a layer
    except KeyError as error:
        raise KitError(f"{prefix}: it lacks {sanitize(error)}") from None
    # A library raises anything for unexpected names and settings
    except Exception as error:
        raise KitError(f"{prefix}: {sanitize(error) or type(error).__name__}") from None
    if problems:
        raise KitError(f"{prefix}: {_lora_misfit_message(kit, shapes, problems)}")
    _remember(mark)


def check_loaded(info: Mapping[str, Any], setting: str, part: str) -> None:
    """Check a library's report on the tensors that it loaded.

    Args:
        info: the result of `output_loading_info`.
        setting: the model as the user named it, for the message.

    Raises:
        KitError: a tensor is missing from the file or has another shape, so that the library
            initialized it at random.
    """
    wrong = sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])])
    if wrong:
        raise KitError(
            f"{setting}: the weights of {part} lack {sanitize(wrong[0], 200)!r} and "
            f"{len(wrong) - 1} more tensors, or have them in another shape. Fetch them again"
        )


def check_finite(model: Any, setting: str, part: str) -> None:
    """Check that all numbers of a loaded model are finite.

    Raises:
        KitError: one is NaN or infinite, in the file or in the model's dtype.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            hint = "" if dtype == "float32" else "set synthesis.dtype to float32, or "
            raise KitError(
                f"{setting}: the weights of {part} have NaN or infinity in {sanitize(name, 200)!r} "
                f"as {dtype}; {hint}fetch or save them again"
            )


def fit_mark(folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool) -> str:
    """Return the SHA-256 of everything that the comparison depends on."""
    settings = folder.settings(part_path(part, "config.json"))
    return _mark_of([kind, sharded, settings, sorted(shapes.items())])


def _misfit(folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool) -> Misfit:
    if kind in TRANSFORMERS_MODELS:
        from osfl.models.encoders import encoder_misfit

        return encoder_misfit(folder.path / part, kind, shapes)
    from osfl.models.diffusion import network_misfit

    return network_misfit(folder.path / part, kind, shapes, sharded)


def _check_layer_counts(folder: KitFolder, part: str) -> None:
    """Refuse settings whose model would take minutes to build."""
    file = part_path(part, "config.json")
    for key, value in walk_settings(folder.settings(file)):
        if _LAYER_COUNTS.fullmatch(key) and isinstance(value, int) and value > MAX_LAYERS:
            raise KitError(
                f"{folder.setting}: {file} says {key} = {value:.3g}; it must be at most "
                f"{MAX_LAYERS}"
            )


def _misfit_message(
    folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool, misfit: Misfit
) -> str:
    """Return a message that names the part, the first tensor, and a prefix common to all names."""
    settings = part_path(part, "config.json")
    start = f"{folder.setting}: the weights of {kind} do not fit {settings}: "
    if not misfit.missing:
        name, shape, required = misfit.mismatched[0]
        return (
            f"{start}{sanitize(name, 200)} has the shape {list(shape)}; it must be {list(required)}"
        )
    message = f"{start}they lack {misfit.missing[0]!r}"
    if len(misfit.missing) > 1:
        message += f" and {len(misfit.missing) - 1} more tensors"
    for prefix in _common_prefixes(shapes):
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        if len(_misfit(folder, part, kind, bare, sharded).missing) < len(misfit.missing):
            return f"{message}. {_prefix_hint(prefix)}"
    return f"{message}. Fetch or save them again"


def _lora_misfits(kit: KitFolder, shapes: Shapes) -> list[str]:
    from osfl.models.diffusion import lora_misfits

    return lora_misfits(kit.path, shapes)


def _lora_misfit_message(kit: KitFolder, shapes: Shapes, problems: Sequence[str]) -> str:
    """Return a message that names the first problem, and a prefix common to all names."""
    message = problems[0]
    if len(problems) > 1:
        message += f", and {len(problems) - 1} more tensors do not fit"
    for prefix in _common_prefixes(shapes):
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        with suppress(ValueError, RuntimeError, KeyError):
            if len(_lora_misfits(kit, bare)) < len(problems):
                return f"{message}. {_prefix_hint(prefix)}"
    return f"{message}. Use weights that were made for this kit's UNet"


def _prefix_hint(prefix: str) -> str:
    return (
        f"All names in the file begin with {sanitize(prefix, 100)!r}: save the weights without "
        "this prefix"
    )


def _common_prefixes(names: Collection[str]) -> list[str]:
    """Return the common prefix of all names, cut after each of its dots."""
    # The first and last names in sorted order share no more than all names do
    first, last = min(names), max(names)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    common = "".join(letter for letter, _ in shared)
    return [common[: dot.end()] for dot in re.finditer(r"\.", common)]


# ---- Cache ----


@contextmanager
def cached_check(subject: Sequence[Any]) -> Iterator[bool]:
    """Yield whether a check of this subject succeeded before; cache it if it succeeds now."""
    mark = _mark_of(subject)
    is_cached = mark in SHIPPED_MARKS or mark in _cached_marks()
    yield is_cached
    if not is_cached:
        _remember(mark)


def _mark_of(subject: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()


def _cached_marks() -> list[str]:
    """Return the cached marks; none if the file is missing, corrupt or from other libraries."""
    with suppress(OSError):
        content = read_json(cache_folder() / "fits.json")
        marks = content.get("marks")
        if content.get("libraries") == _libraries() and isinstance(marks, list):
            return marks
    return []


def _remember(mark: str) -> None:
    """Cache a mark, if the cache can be written."""
    marks = [*_cached_marks(), mark][-MAX_MARKS:]
    content = json.dumps({"libraries": _libraries(), "marks": marks}, indent=1) + "\n"
    with suppress(OSError):
        write_atomically(cache_folder() / "fits.json", content.encode())


@cache
def _libraries() -> dict[str, str]:
    return {name: version(name) for name in ("diffusers", "torchvision", "transformers")}
