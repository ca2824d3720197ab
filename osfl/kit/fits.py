"""Whether a part's weights fit the model that its settings describe: all tensors' names and shapes.

A library that loads weights gives random numbers to a tensor that the file lacks. The comparison
needs torch and the library, which take seconds to import, so what fits is remembered by settings
and header; the shipped kits' parts are known.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from typing import Any

from osfl.kit.digests import cache_folder
from osfl.kit.headers import Shapes
from osfl.kit.kits import KitError, KitFolder, file_in, inner_settings
from osfl.methods import SMALL_DECODER
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
        "09d34729386b8b1b6566e108a2467c589b5dcad75a076f87d71987ed9df0f849",
        "3fbb6804e07052e7c985be94f7b31545cab590966e767b4d19d44897f428944c",
        "5db08803c67406af60f34b52af291b25bbdc980ccfc41dda23ba02583f52a10b",
        "633316b034c9ed2849804f904f2a91955baea5872ee96f877415b1c94e0ec362",
        "7f263e6508c4fe03a49f2720f980f94708589351b70cea87c50e4be84bd436f7",
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


def fit_mark(folder: KitFolder, part: str, kind: str, shapes: Shapes, sharded: bool) -> str:
    """Return the SHA-256 of all that the comparison depends on."""
    settings = folder.settings(file_in(part, "config.json"))
    about = [kind, sharded, settings, sorted(shapes.items())]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


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
            return (
                f"{message}. All names in the file begin with {plain(prefix, 100)!r}: save the "
                "weights without this prefix"
            )
    return f"{message}. Fetch or save them again"


def _prefixes(names: Collection[str]) -> list[str]:
    """Return what all names begin with, up to each of its dots."""
    # The first and the last name in order share no more than all do
    first, last = min(names), max(names)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    common = "".join(letter for letter, _ in shared)
    return [common[: dot.end()] for dot in re.finditer(r"\.", common)]


# ---- Memory ----


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
    return {name: version(name) for name in ("diffusers", "transformers")}
