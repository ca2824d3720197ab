"""Where a kit is, and which of its files are loaded.

Imports no model library: a client that needs only a file of it stays small.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from osfl.kit.digests import sha256_of
from osfl.kit.folder import KitError, KitFolder
from osfl.methods import DIFFUSION_PARTS

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


def initialisation_part(architecture: str, kit: str) -> str:
    """The file of a kit folder that an architecture's initial weights come from.

    A ResNet-34 grows out of the ResNet-18 where the kit has no weights of its own for it.
    """
    file = f"classifiers/{architecture}.safetensors"
    if architecture == "resnet34" and not (Path(kit) / file).is_file():
        return "classifiers/resnet18.safetensors"
    return file


Progress = Callable[[int, int], None]  # bytes fetched, of how many


def _silent(fetched: int, total: int) -> None:
    pass


def find_kit(name: str, parts: Iterable[str] = (), progress: Progress = _silent) -> str:
    """The folder of a kit.

    Of one of the hub, which is fetched unless it is there.

    Args:
        name: a shipped kit (`digits`), a path, or a hub id (`owner/name@revision`).
        parts: what a hub's kit is needed for beyond its settings: folders and files of it.
        progress: called while a hub's weights are fetched.

    Raises:
        FileNotFoundError: no kit of this name is shipped.
        KitError: the hub is not reached, has no such kit, or one of another kind.
    """
    if is_hub_id(name):
        # A client that needs no kit stays small
        from osfl.kit.hub import fetch_kit

        return str(fetch_kit(name, parts, progress))
    if "/" in name or "\\" in name:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    for root in kit_roots():
        if (root / name / "model_index.json").is_file():
            return str(root / name)
    shipped = sorted(
        {p.parent.name for root in kit_roots() for p in root.glob("*/model_index.json")}
    )
    raise FileNotFoundError(
        f"kit = {name!r}: no such kit. Shipped: {', '.join(shipped) or 'none'}; or give an "
        "absolute path or a hub id"
    )


def find_model(source: str, kind: str, key: str, progress: Progress = _silent) -> str:
    """The folder of a model that is one part alone, such as a captioner, or of a kit with it.

    Args:
        source: a path, or a hub id, which is fetched unless it is there.
        kind: the part; "": the settings alone are fetched.
        key: of the configuration, for messages.

    Raises:
        KitError: as `find_kit`.
    """
    if not is_hub_id(source):
        return source
    from osfl.kit.hub import fetch_model

    return str(fetch_model(source, kind, key, progress))


def is_hub_id(name: str) -> bool:
    """Whether it is `owner/name` or `owner/name@revision`, and no folder here."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def kit_roots() -> list[Path]:
    """The installed package's kits.

    Not beside this file, which may be the copy in a Flower bundle, where kits are left out.
    """
    roots = []
    # Installed with `pip install -e`: the checkout, before the copy made at installation
    with suppress(PackageNotFoundError):
        origin = json.loads(distribution("osfl").read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            roots.append(Path(unquote(urlparse(origin["url"]).path)) / "kits")
    if (
        spec := importlib.util.find_spec("osfl_kits")
    ) and spec.submodule_search_locations:  # installed from a wheel
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    roots.append(Path(__file__).resolve().parents[2] / "kits")
    return [root for root in roots if root.is_dir()]


def loaded_files(kit: str, parts: Iterable[str]) -> dict[str, Path]:
    """The files of some of a kit folder's parts that are loaded, by their paths in it."""
    folder = KitFolder(f"kit = {kit!r}", Path(kit))
    return {file: folder.path / file for part in parts for file in _what_is_there(folder, part)}


def _what_is_there(folder: KitFolder, part: str) -> list[str]:
    """Of a damaged part, nothing: `check_kit` says what is wrong with it."""
    with suppress(KitError):
        return folder.loaded(part)
    return []


def download_bytes(kit: str, parts: Iterable[str]) -> int:
    """Bytes of the files that are loaded of some of a kit folder's parts."""
    return sum(file.stat().st_size for file in loaded_files(kit, parts).values())


def model_bytes(folder: str, kind: str) -> int:
    """Bytes of the files that are loaded of a model that is one part alone, or of that part of a
    kit.
    """
    model = KitFolder(folder, Path(folder))
    files = model.loaded(model.place_of(kind), kind)
    return sum((model.path / file).stat().st_size for file in files)


def file_digests(
    kit: str, parts: Iterable[str], progress: Callable[[int], None] = lambda read: None
) -> dict[str, str]:
    """SHA-256 of every file that is loaded of some of a kit folder's parts, by its path in the kit.

    Args:
        progress: called with the number of bytes that were read since it was last called.
    """
    return {name: sha256_of(file, progress) for name, file in loaded_files(kit, parts).items()}


def weights_digests(kit: str, parts: Iterable[str]) -> dict[str, str]:
    """As `file_digests`, of the weights alone."""
    files = loaded_files(kit, parts).items()
    return {name: sha256_of(file) for name, file in files if file.suffix == ".safetensors"}


def kit_digest(kit: str | Path, parts: Iterable[str] = DIFFUSION_PARTS) -> str:
    """SHA-256 over the names and bytes of the files that are loaded of some parts."""
    return _together(file_digests(str(kit), parts))


def part_digest(source: str, kind: str) -> str:
    """As `kit_digest`, of a folder that is one part alone, such as a small decoder."""
    folder = KitFolder(source, Path(source))
    return _together({file: sha256_of(folder.path / file) for file in folder.loaded("", kind)})


def _together(of_files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, one in sorted(of_files.items()):
        digest.update(name.encode() + b"\0" + bytes.fromhex(one))
    return digest.hexdigest()


def image_size(kit: str) -> int:
    """Pixels on a side of the kit's images.

    Raises:
        KitError: the kit is not there, or its settings do not say so.
    """
    folder = KitFolder(f"kit = {kit!r}", Path(kit))
    side = folder.settings("unet/config.json").get("sample_size")
    blocks = folder.settings("vae/config.json").get("block_out_channels")
    if not isinstance(side, int) or not isinstance(blocks, list):
        raise KitError(
            f"{folder.setting}: sample_size in unet/config.json must be a whole number, and "
            "block_out_channels in vae/config.json a list"
        )
    return int(side * 2 ** (len(blocks) - 1))


def kit_shapes(kit: str) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """(text condition (L, d), latent (c, h, w), width of the image condition or 0) of a kit.

    By its settings alone, as the libraries read them.

    Raises:
        KitError: they are missing, or lack a size.
    """
    folder = KitFolder(f"kit = {kit!r}", Path(kit))
    unet = folder.settings("unet/config.json")
    text = folder.settings("text_encoder/config.json")
    # A whole CLIP's
    text = text["text_config"] if isinstance(text.get("text_config"), dict) else text
    places = text.get("max_position_embeddings", 77)
    file = "tokenizer/tokenizer_config.json"
    tokenizer = folder.settings(file) if folder.has(file) else {}
    # Without a length, a tokenizer makes any number of tokens
    tokens = tokenizer.get("model_max_length") or places
    width = text.get("hidden_size", 512)
    channels = unet.get("in_channels", 4)
    size = unet.get("sample_size")
    image = unet.get("projection_class_embeddings_input_dim") or 0
    try:
        condition = int(min(tokens, places)), int(width)
        return condition, (int(channels), int(size), int(size)), int(image)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise KitError(
            f"{folder.setting} cannot be read: a size in the settings of its unet, text_encoder or "
            "tokenizer must be a whole number"
        ) from None


def variant_of(kit: str, part: str, kind: str = "") -> str | None:
    """What `from_pretrained` must be told to take a part's weights: "fp16", or nothing.

    Raises:
        KitError: its index is damaged.
    """
    return KitFolder(f"kit = {kit!r}", Path(kit)).variant(part, kind)
