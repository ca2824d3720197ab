"""Whether a part's weights fit the model that its settings describe: all tensors' names and shapes.

A library that loads weights gives random numbers to a tensor that the file lacks. The comparison
needs torch and the library, which take seconds to import, so what fits is remembered by settings
and header; the shipped kits' parts are known.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from typing import Any

from osfl.kit.digests import cache_folder
from osfl.kit.folder import KitError, KitFolder, file_in, inner_settings
from osfl.kit.headers import Shapes
from osfl.methods import LORA, SMALL_DECODER
from osfl.util.files import read_json, write_atomically
from osfl.util.text import plain

MOST_LAYERS = 1000  # of a model that is built; large ones have about 100
MOST_MARKS = 1000  # that are remembered
_COUNTS = re.compile(r"num_.*(layers|blocks)|layers_per_block")
TRANSFORMERS_MODELS = ("text_encoder", "image_encoder", "captioner")
DIFFUSERS_MODELS = ("unet", "vae", SMALL_DECODER, "image_normalizer")
# Of the shipped kits' parts; tests/unit/kit/test_fits.py tells the marks of a kit that is made anew
SHIPPED = frozenset(
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
        "e583318724470f11eaf0bf734f1b7a10542d94093fdcb62b2b571f32f7fbd688",
        "ea89368c33ecc298da80243dbed3e1f34caf37d2568e1d1233fb8d6d42addc09",
    }
)


@dataclass(frozen=True)
class Misfit:
    """What is wrong with a file's tensors.

    Attributes:
        missing: names that the model has and the file lacks.
        mismatched: names, with the file's shape and the model's.
    """

    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def check_fit(folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool) -> None:
    """Check that a file of weights has every tensor of its part's model, in its shape.

    Args:
        part: the folder in the kit; "" for the folder itself.
        kind: which part it is.
        shapes: of the file's tensors.
        sharded: whether they are of several files.

    Raises:
        KitError: a tensor is missing or has another shape, or the settings describe no model.
    """
    mark = fit_mark(folder, part, kind, shapes, sharded)
    if mark in SHIPPED or mark in _remembered():
        return
    _check_counts(folder, part)
    try:
        found = _misfit(folder, part, kind, shapes, sharded)
    # Whatever a library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(
            f"{folder.setting}: {file_in(part, 'config.json')} describes no model that can be "
            f"built: {plain(error) or type(error).__name__}"
        ) from None
    if found.missing or found.mismatched:
        raise KitError(_told(folder, part, kind, shapes, sharded, found))
    _remember(mark)


def check_lora_fit(setting: str, file: str, kit: KitFolder, shapes: Shapes) -> None:
    """Check that every tensor of few-step weights fits a layer of a kit's UNet.

    Args:
        setting: as the user named the weights, for messages.
        file: their file's name.
        shapes: of its tensors.

    Raises:
        KitError: peft is not installed, a tensor fits no layer, or the settings describe no UNet.
    """
    if importlib.util.find_spec("peft") is None:
        raise KitError(f"{setting} needs the package peft: pip install 'osfl[lora]'")
    mark = fit_mark(kit, "unet", LORA, shapes, False)
    if mark in SHIPPED or mark in _remembered():
        return
    _check_counts(kit, "unet")
    begin = f"{setting}: {file} does not fit the UNet of {kit.setting}"
    try:
        found = _misfits_of_lora(kit, shapes)
    # Of the renaming: the other half of a layer
    except KeyError as error:
        raise KitError(f"{begin}: it lacks {plain(error)}") from None
    # Whatever a library raises for names and settings that somebody wrote
    except Exception as error:
        raise KitError(f"{begin}: {plain(error) or type(error).__name__}") from None
    if found:
        raise KitError(f"{begin}: {_told_of_lora(kit, shapes, found)}")
    _remember(mark)


def check_loaded(info: Mapping[str, Any], setting: str, part: str) -> None:
    """Check a library's report on what it loaded.

    Args:
        info: what `output_loading_info` gives.
        setting: as the user named the model, for the message.

    Raises:
        KitError: a tensor was not in the file, or had another shape, and is a random one.
    """
    wrong = sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])])
    if wrong:
        raise KitError(
            f"{setting}: the weights of {part} lack {plain(wrong[0], 200)!r} and "
            f"{len(wrong) - 1} more tensors, or have them in another shape. Fetch them again"
        )


def check_finite(model: Any, setting: str, part: str) -> None:
    """Check the numbers of a model that was loaded.

    Raises:
        KitError: one is NaN or infinite, as it is given or in the model's type.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            cure = "" if kind == "float32" else "set synthesis.dtype to float32, or "
            raise KitError(
                f"{setting}: the weights of {part} have NaN or infinity in {plain(name, 200)!r} as "
                f"{kind}; {cure}fetch or save them again"
            )


def fit_mark(folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool) -> str:
    """Return the SHA-256 of all that the comparison depends on."""
    settings = folder.settings(file_in(part, "config.json"))
    return _mark_of([kind, sharded, settings, sorted(shapes.items())])


def _misfit(folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool) -> Misfit:
    if kind in TRANSFORMERS_MODELS:
        from osfl.models.encoders import misfit_of_encoder

        return misfit_of_encoder(folder.path / part, kind, shapes)
    from osfl.models.diffusion import misfit_of_network

    return misfit_of_network(folder.path / part, kind, shapes, sharded)


def _check_counts(folder: KitFolder, part: str) -> None:
    """Refuse settings whose model takes minutes to build."""
    file = file_in(part, "config.json")
    for key, value in inner_settings(folder.settings(file)):
        if _COUNTS.fullmatch(key) and isinstance(value, int) and value > MOST_LAYERS:
            raise KitError(
                f"{folder.setting}: {file} says {key} = {value:.3g}; at most {MOST_LAYERS} are "
                "built"
            )


def _told(
    folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool, found: Misfit
) -> str:
    """Return the message: the part, the first tensor, and a prefix that all names share."""
    settings = file_in(part, "config.json")
    begin = f"{folder.setting}: the weights of {kind} do not fit {settings}: "
    if not found.missing:
        name, has, wants = found.mismatched[0]
        return f"{begin}{plain(name, 200)} has the shape {list(has)}; it must be {list(wants)}"
    message = f"{begin}they lack {found.missing[0]!r}"
    if len(found.missing) > 1:
        message += f" and {len(found.missing) - 1} more tensors"
    for prefix in _prefixes(shapes):
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        if len(_misfit(folder, part, kind, bare, sharded).missing) < len(found.missing):
            return f"{message}. {_without(prefix)}"
    return f"{message}. Fetch or save them again"


def _misfits_of_lora(kit: KitFolder, shapes: Shapes) -> list[str]:
    from osfl.models.diffusion import misfits_of_lora

    return misfits_of_lora(kit.path, shapes)


def _told_of_lora(kit: KitFolder, shapes: Shapes, found: Sequence[str]) -> str:
    """Return the message on a LoRA's misfits: the first one, and a prefix that all names share."""
    message = found[0]
    if len(found) > 1:
        message += f", and {len(found) - 1} more tensors do not fit"
    for prefix in _prefixes(shapes):
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        with suppress(ValueError, RuntimeError, KeyError):
            if len(_misfits_of_lora(kit, bare)) < len(found):
                return f"{message}. {_without(prefix)}"
    return f"{message}. Take weights that were made for this kit's UNet"


def _without(prefix: str) -> str:
    return (
        f"All names in the file begin with {plain(prefix, 100)!r}: save the weights without this "
        "prefix"
    )


def _prefixes(names: Collection[str]) -> list[str]:
    """Return what all names begin with, up to each of its dots."""
    # The first and the last name in order share no more than all do
    first, last = min(names), max(names)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    common = "".join(letter for letter, _ in shared)
    return [common[: dot.end()] for dot in re.finditer(r"\.", common)]


# ---- Memory ----


@contextmanager
def remembered(about: Sequence[Any]) -> Iterator[bool]:
    """Yield whether a check of what this is about succeeded before; remember it if it does now."""
    mark = _mark_of(about)
    known = mark in SHIPPED or mark in _remembered()
    yield known
    if not known:
        _remember(mark)


def _mark_of(about: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _remembered() -> list[str]:
    """Return the marks of what fits; none where the file is missing, damaged or of other
    libraries.
    """
    with suppress(OSError):
        known = read_json(cache_folder() / "fits.json")
        marks = known.get("marks")
        if known.get("libraries") == _libraries() and isinstance(marks, list):
            return marks
    return []


def _remember(mark: str) -> None:
    """Keep a mark, where there is a place to write to."""
    marks = [*_remembered(), mark][-MOST_MARKS:]
    content = json.dumps({"libraries": _libraries(), "marks": marks}, indent=1) + "\n"
    with suppress(OSError):
        write_atomically(cache_folder() / "fits.json", content.encode())


def _libraries() -> dict[str, str]:
    return {name: version(name) for name in ("diffusers", "torchvision", "transformers")}
