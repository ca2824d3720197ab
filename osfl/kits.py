"""Where a kit is. Imports no model library, so that a client which needs only a file of it stays small."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

DIFFUSION_PARTS: tuple[str, ...] = ("vae", "unet", "text_encoder", "tokenizer", "scheduler")
SMALL_DECODER = "small_decoder"  # a part that few kits have


def initialisation_part(architecture: str) -> str:
    """The file of a kit that an architecture's initial weights come from; a ResNet-34 grows out of a ResNet-18."""
    return f"classifiers/{'resnet18' if architecture == 'resnet34' else architecture}.safetensors"


class KitError(ValueError):
    """A kit that cannot be used; the message says what to do."""


def find_kit(name: str) -> str:
    """The folder of a shipped kit (`digits`); a path or a hub id is returned as it is."""
    if "/" in name or "\\" in name:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    for root in _kit_roots():
        if (root / name / "model_index.json").is_file():
            return str(root / name)
    shipped = sorted(
        {p.parent.name for root in _kit_roots() for p in root.glob("*/model_index.json")}
    )
    raise FileNotFoundError(
        f"kit = {name!r}: no such kit. Shipped: {', '.join(shipped) or 'none'}; or give an absolute path or a hub id"
    )


def check_kit(kit: str, parts: Iterable[str]) -> None:
    """Whether some of a kit folder's files and sub-folders are there; a hub id is taken on trust.

    Raises:
        KitError: no such folder, or one that lacks a part.
    """
    folder = Path(kit)
    if folder.is_dir():
        if missing := [part for part in parts if not (folder / part).exists()]:
            raise KitError(
                f"kit = {kit!r} lacks {', '.join(missing)}; this run needs it. Use a whole kit, or a hub id"
            )
    elif folder.is_absolute() or kit.startswith((".", "~")) or kit.count("/") != 1:
        raise KitError(
            f"kit = {kit!r}: no such folder. Give a Stable-Diffusion-format folder or a hub id (owner/name)"
        )


def _kit_roots() -> list[Path]:
    """The installed package's kits: not beside this file, which may be the copy in a Flower bundle, where kits are left out."""
    roots = []
    with suppress(
        PackageNotFoundError
    ):  # installed with `pip install -e`: the checkout, before the copy made at installation
        origin = json.loads(distribution("osfl").read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            roots.append(Path(unquote(urlparse(origin["url"]).path)) / "kits")
    if (
        spec := importlib.util.find_spec("osfl_kits")
    ) and spec.submodule_search_locations:  # installed from a wheel
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    roots.append(Path(__file__).resolve().parent.parent / "kits")
    return [root for root in roots if root.is_dir()]


def download_bytes(kit: str, parts: Iterable[str]) -> int:
    """Bytes of some of a kit folder's files and sub-folders."""
    return sum(file.stat().st_size for file in _files(kit, parts))


def weights_digests(kit: str, parts: Iterable[str]) -> dict[str, str]:
    """SHA-256 of every file of weights in some of a kit folder's parts, by its path in the kit; of a hub id's, nothing."""
    return {
        f.relative_to(kit).as_posix(): _sha256(f)
        for f in _files(kit, parts)
        if f.suffix in (".safetensors", ".bin")
    }


def _files(kit: str, parts: Iterable[str]) -> list[Path]:
    places = [Path(kit) / part for part in parts]
    return [
        file
        for place in places
        for file in ([place] if place.is_file() else place.rglob("*"))
        if file.is_file()
    ]


def kit_digest(path: str | Path) -> str:
    """SHA-256 over the names and bytes of a kit folder's weights and settings; a hub id is hashed by its name."""
    folder, digest = Path(path), hashlib.sha256()
    if not folder.is_dir():
        return hashlib.sha256(str(path).encode()).hexdigest()
    for file in sorted(
        p for p in folder.rglob("*") if p.suffix in {".json", ".safetensors", ".txt", ".bin"}
    ):
        digest.update(
            file.relative_to(folder).as_posix().encode() + b"\0" + bytes.fromhex(_sha256(file))
        )
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    about = file.stat()
    return _sha256_once(file, about.st_size, about.st_mtime_ns)


@cache
def _sha256_once(file: Path, size: int, changed: int) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def kits_digest(names: Iterable[str]) -> str:
    """The digest of one kit, or of several together; of one that is not there, nothing: what needs it says so."""
    digests = []
    for name in names:
        with suppress(FileNotFoundError):
            digests.append(kit_digest(find_kit(name)))
    return (
        digests[0]
        if len(digests) == 1
        else hashlib.sha256("".join(digests).encode()).hexdigest()
        if digests
        else ""
    )


def image_size(kit: str) -> int:
    """Pixels on a side of the kit's images; 512, Stable Diffusion 1.5's, for a hub id that is not on this machine."""
    unet, vae = Path(kit) / "unet" / "config.json", Path(kit) / "vae" / "config.json"
    if not (unet.is_file() and vae.is_file()):
        return 512
    return json.loads(unet.read_text())["sample_size"] * 2 ** (
        len(json.loads(vae.read_text())["block_out_channels"]) - 1
    )
