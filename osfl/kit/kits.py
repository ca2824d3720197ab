"""Find kits (model bundles), list the files that are loaded, and hash them.

Imports no model library, so that a client that needs a single file of a kit stays small.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote, urlparse

from osfl.kit.digests import file_sha256
from osfl.kit.folder import KitError, KitFolder
from osfl.methods import DIFFUSION_PARTS
from osfl.util.files import read_bounded, read_json
from osfl.util.text import sanitize

MAX_CARD_BYTES = 2**20
# Characters
MAX_LICENSE = 100
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


def initial_weights_file(architecture: str, kit: str) -> str:
    """Return the file of a kit that holds an architecture's initial weights.

    A kit without a ResNet-34 uses its ResNet-18, from which the ResNet-34 is grown.
    """
    file = f"classifiers/{architecture}.safetensors"
    if architecture == "resnet34" and not (Path(kit) / file).is_file():
        return "classifiers/resnet18.safetensors"
    return file


Progress = Callable[[int, int], None]  # bytes fetched, total bytes


def _silent(fetched: int, total: int) -> None:
    pass


def find_kit(name: str, parts: Iterable[str] = (), progress: Progress = _silent) -> str:
    """Return the folder of a kit. A hub's kit is fetched unless it is cached.

    Args:
        name: a shipped kit (`digits`), a path, or a hub id (`owner/name@revision`).
        parts: folders and files of a hub's kit that are needed besides its settings.
        progress: called while a hub's weights are fetched.

    Raises:
        FileNotFoundError: no kit of this name is shipped.
        KitError: the hub cannot be reached, has no such kit, or the kit is unsupported.
    """
    if is_hub_id(name):
        # The import stays here so that a client without a kit stays small
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
    """Return the folder of a single-part model, such as a captioner, or of a kit that has the part.

    Args:
        source: a path, or a hub id, which is fetched unless it is cached.
        kind: the part; with "", only the settings are fetched.
        key: of the configuration, for messages.

    Raises:
        KitError: as `find_kit`.
    """
    if not is_hub_id(source):
        return source
    from osfl.kit.hub import fetch_model

    return str(fetch_model(source, kind, key, progress))


def find_clip(kit: str, image_encoder: str) -> str:
    """Return the folder of a whole CLIP: the kit's `clip/`, or `image-encoder`; "" if neither is.

    Raises:
        FileNotFoundError, KitError: as `find_kit` and `find_model`.
    """
    if image_encoder:
        folder = Path(find_model(image_encoder, "image_encoder", "image-encoder"))
    else:
        folder = Path(find_kit(kit)) / "clip"
    settings = folder / "config.json"
    if not settings.is_file() or read_json(settings).get("model_type") != "clip":
        return ""
    return str(folder)


def is_hub_id(name: str) -> bool:
    """Return whether a name is `owner/name` or `owner/name@revision`, and not a local path."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def kit_roots() -> list[Path]:
    """Return the folders that hold shipped kits.

    The installed package comes first: this file may be the copy in a Flower bundle, which has no
    kits beside it.
    """
    roots = []
    # After `pip install -e`, the checkout comes before the copy that the installation made
    with suppress(PackageNotFoundError):
        origin = json.loads(distribution("osfl").read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            roots.append(Path(unquote(urlparse(origin["url"]).path)) / "kits")
    # Installed from a wheel
    spec = importlib.util.find_spec("osfl_kits")
    if spec and spec.submodule_search_locations:
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    roots.append(Path(__file__).resolve().parents[2] / "kits")
    return [root for root in roots if root.is_dir()]


def kit_license(name: str) -> str:
    """Return the license in the front matter of a kit's model card; "" if none is stated here.

    Args:
        name: as of `find_kit`. A hub's kit is not fetched for it.
    """
    if is_hub_id(name):
        return ""
    try:
        card = read_bounded(Path(find_kit(name)) / "README.md", MAX_CARD_BYTES)
    # The model may be a site's, which has no kit
    except (OSError, ValueError):
        return ""
    opening, *lines = card.decode(errors="replace").splitlines() or [""]
    matter = takewhile("---".__ne__, lines) if opening == "---" else ()
    for line in matter:
        key, _, value = line.partition(":")
        if key == "license":
            return sanitize(value.strip(), MAX_LICENSE)
    return ""


def loaded_files(kit: str, parts: Iterable[str]) -> dict[str, Path]:
    """Return the files that are loaded of some parts of a kit folder, by their paths in it."""
    folder = KitFolder(f"kit = {kit!r}", Path(kit))
    return {file: folder.path / file for part in parts for file in _readable_files(folder, part)}


def _readable_files(folder: KitFolder, part: str) -> list[str]:
    """List a part's loaded files; a corrupt part has none, and `check_kit` reports it."""
    with suppress(KitError):
        return folder.loaded_files(part)
    return []


def has_second_encoder(kit: str) -> bool:
    """Return whether a kit folder has a second text encoder."""
    return KitFolder(f"kit = {kit!r}", Path(kit)).has_second_encoder


def download_bytes(kit: str, parts: Iterable[str]) -> int:
    """Return the bytes of the files that are loaded of some parts of a kit folder."""
    return sum(file.stat().st_size for file in loaded_files(kit, parts).values())


def model_bytes(folder: str, kind: str) -> int:
    """Return the bytes of the files that are loaded of a single-part model, or of a kit's part."""
    model = KitFolder(folder, Path(folder))
    files = model.loaded_files(model.part_folder(kind), kind)
    return sum((model.path / file).stat().st_size for file in files)


def file_digests(
    kit: str, parts: Iterable[str], progress: Callable[[int], None] = lambda read: None
) -> dict[str, str]:
    """Return the SHA-256 of every file that is loaded of some parts, by its path in the kit.

    Args:
        progress: called with the bytes read since the last call.
    """
    return {name: file_sha256(file, progress) for name, file in loaded_files(kit, parts).items()}


def weights_digests(kit: str, parts: Iterable[str]) -> dict[str, str]:
    """Return the same as `file_digests`, for weights only."""
    files = loaded_files(kit, parts).items()
    return {name: file_sha256(file) for name, file in files if file.suffix == ".safetensors"}


def kit_digest(kit: str | Path, parts: Iterable[str] = DIFFUSION_PARTS) -> str:
    """Return one SHA-256 over the names and bytes of the files that are loaded of some parts."""
    return _combined_digest(file_digests(str(kit), parts))


def part_digest(source: str, kind: str) -> str:
    """Return one SHA-256 as `kit_digest`, for a single-part model such as a tiny autoencoder."""
    folder = KitFolder(source, Path(source))
    digests = {file: file_sha256(folder.path / file) for file in folder.loaded_files("", kind)}
    return _combined_digest(digests)


def _combined_digest(file_digests: Mapping[str, str]) -> str:
    combined = hashlib.sha256()
    for name, digest in sorted(file_digests.items()):
        combined.update(name.encode() + b"\0" + bytes.fromhex(digest))
    return combined.hexdigest()


def kit_image_size(kit: str) -> int:
    """Return the side of the kit's images in pixels.

    Raises:
        KitError: the kit is missing, or its settings lack the size.
    """
    folder = KitFolder(f"kit = {kit!r}", Path(kit))
    side = folder.settings("unet/config.json").get("sample_size")
    vae = folder.settings("vae/config.json")
    # A tiny autoencoder names its encoder's and its decoder's blocks
    blocks = vae.get("block_out_channels", vae.get("decoder_block_out_channels"))
    if not isinstance(side, int) or not isinstance(blocks, list):
        raise KitError(
            f"{folder.setting}: sample_size in unet/config.json must be a whole number, and "
            "block_out_channels in vae/config.json a list"
        )
    return int(side * 2 ** (len(blocks) - 1))


def weights_variant(kit: str, part: str, kind: str = "") -> str | None:
    """Return `from_pretrained`'s `variant` for a part's weights: "fp16" or None.

    Raises:
        KitError: the part's index is corrupt.
    """
    return KitFolder(f"kit = {kit!r}", Path(kit)).variant(part, kind)
