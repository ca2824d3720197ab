"""Public images with their captions, decoded once into a folder beside the checkpoints.

The folder holds `images.npy` [N, 3, S, S] uint8, `kinds.npy` [N] and `corpus.json`. A *kind* is a
source, domain and class. All images of a kind have the same captions, one of which is drawn each
time that an image is drawn.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from osfl.config import ConfigError
from osfl.data.near_duplicates import highest_correlation, thumbnails
from osfl.data.pictures import open_image, open_stored_image, to_pixels
from osfl.kit_training.photographs.recipe import PhotographRecipe, Source
from osfl.util.files import read_record, write_atomically, write_record
from osfl.util.prompts import fill_prompt, to_words
from osfl.util.seeds import generator_of
from osfl.util.text import sanitize

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# The domain of images without color, if a source has templates for it
GRAY = "gray"
# An image is gray if the largest and the smallest channel differ by less than this, of 255, on
# average
MAX_GRAY = 4.0
# Number of images that are decoded before their thumbnails are compared
CHUNK = 2048


@dataclass(frozen=True)
class Kind:
    """The images of one source, domain and class.

    Attributes:
        names: words of the class, the most specific first.
        captions: every template filled with every name; for each template, the names in order.
    """

    source: str
    domain: str
    names: tuple[str, ...]
    captions: tuple[str, ...]


@dataclass(frozen=True)
class PublicCorpus:
    """The public images.

    Attributes:
        pixels: [N, 3, S, S] uint8, memory-mapped.
        kind: [N] index into `kinds`.
        kinds: every source, domain and class.
        counts: for each source, the number of images that were read, listed (dropped by a list),
            unreadable, dropped as copies, and kept.
        weights: [N] relative frequency with which an image is drawn; 0 for a held-out one.
        held_out: sorted rows of the images that no stage trains on, a seeded random share.
    """

    pixels: np.ndarray
    kind: torch.Tensor
    kinds: tuple[Kind, ...]
    counts: dict[str, dict[str, int]]
    weights: torch.Tensor
    held_out: torch.Tensor

    @cached_property
    def captions(self) -> tuple[str, ...]:
        """The distinct captions, in alphabetical order; the empty caption is the first."""
        texts = {caption for kind in self.kinds for caption in kind.captions}
        return ("", *sorted(texts - {""}))

    @cached_property
    def _choices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each kind's captions [K, C], as indices, and their number [K]."""
        index = {caption: number for number, caption in enumerate(self.captions)}
        rows = [torch.tensor([index[c] for c in kind.captions]) for kind in self.kinds]
        counts = torch.tensor([len(row) for row in rows])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), counts

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Draw rows [B] of images that are not held out, with replacement, by the weights."""
        return torch.multinomial(self.weights, batch, replacement=True, generator=generator)

    def draw_captions(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw one caption of each image, as indices [B] into `captions`."""
        choices, counts = self._choices
        kinds = self.kind[rows]
        chance = torch.rand(len(rows), generator=generator)
        return choices[kinds, (chance * counts[kinds]).long()]

    def images(self, rows: torch.Tensor) -> torch.Tensor:
        """Return images [B, 3, S, S] uint8."""
        return torch.from_numpy(self.pixels[rows.numpy()])


def load_public_corpus(work: Path, recipe: PhotographRecipe, progress: Progress) -> PublicCorpus:
    """Load the corpus in `work`; read the sources first if it is not there yet.

    Raises:
        ConfigError: a source or a folder of client images is missing or has no images.
    """
    folder = work / "corpus"
    if not (folder / "corpus.json").is_file():
        _write_corpus(folder, recipe, progress)
    description = json.loads((folder / "corpus.json").read_text())
    kinds = tuple(
        Kind(k["source"], k["domain"], tuple(k["names"]), tuple(k["captions"]))
        for k in description["kinds"]
    )
    kind = torch.from_numpy(np.load(folder / "kinds.npy", allow_pickle=False))
    pixels = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
    order = torch.randperm(len(kind), generator=generator_of(recipe.seed, "held-out"))
    held_out = order[: max(1, round(recipe.held_out * len(order)))].sort().values
    weights = _weights(kinds, kind, recipe)
    weights[held_out] = 0
    return PublicCorpus(pixels, kind, kinds, description["counts"], weights, held_out)


def _weights(kinds: Sequence[Kind], kind: torch.Tensor, recipe: PhotographRecipe) -> torch.Tensor:
    """Return each image's relative frequency [N], by its source's weight and its emphasis."""
    names = list(recipe.sources)
    source_of_kind = torch.tensor([names.index(k.source) for k in kinds])
    source = source_of_kind[kind]
    per_source = torch.tensor([recipe.sources[name].weight for name in names])
    sizes = torch.bincount(source, minlength=len(names)).clamp(min=1)
    factors = [
        max((recipe.emphasis.get(name, 1.0) for name in k.names), key=lambda f: abs(f - 1))
        for k in kinds
    ]
    return (per_source / sizes)[source] * torch.tensor(factors)[kind]


def _write_corpus(folder: Path, recipe: PhotographRecipe, progress: Progress) -> None:
    """Read all sources, drop copies of client images, and write the corpus.

    Each source is first written to a file of its own, from which an interrupted run continues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clients = _client_thumbnails(folder, recipe, progress)
    for name in recipe.sources:
        if not (folder / f"{name}.json").is_file():
            _write_source(folder, name, recipe, clients, progress)
    records = {name: read_record(folder / f"{name}.json") for name in recipe.sources}
    keys = [
        (name, domain, tuple(words))
        for name, record in records.items()
        for domain, words in record["keys"]
    ]
    distinct = sorted(set(keys))
    number = {key: index for index, key in enumerate(distinct)}
    np.save(folder / "kinds.npy", np.array([number[key] for key in keys]))
    parts = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in recipe.sources]
    np.save(folder / "images.npy", np.concatenate(parts))
    kinds = [asdict(_kind(key, recipe)) for key in distinct]
    description = {"kinds": kinds, "counts": {name: r["counts"] for name, r in records.items()}}
    # Written last: its presence means that the other files are complete
    write_atomically(folder / "corpus.json", (json.dumps(description, indent=1) + "\n").encode())
    for name in recipe.sources:
        (folder / f"{name}.npy").unlink()


def _write_source(
    folder: Path,
    name: str,
    recipe: PhotographRecipe,
    clients: torch.Tensor,
    progress: Progress,
) -> None:
    """Write a source's images without copies of client images, and the domain and words of each.

    Raises:
        ConfigError: no image is left.
    """
    source = recipe.sources[name]
    counts = Counter(read=0, listed=0, unreadable=0, copies=0, kept=0)
    pixels: list[torch.Tensor] = []
    keys: list[tuple[str, tuple[str, ...]]] = []
    bar = progress.add_task(f"read {name}", total=None)
    for chunk, chunk_keys in _chunks(_read_source(name, source, recipe, counts)):
        highest = highest_correlation(thumbnails(chunk), clients)
        is_kept = highest <= recipe.copy_above
        counts["copies"] += int((~is_kept).sum())
        pixels.append(chunk[is_kept])
        keys += [key for key, keep in zip(chunk_keys, is_kept.tolist(), strict=True) if keep]
        progress.update(bar, advance=len(chunk))
    counts["kept"] = len(keys)
    if not keys:
        raise ConfigError(
            f"sources.{name}.data = {sanitize(source.data, 1000)!r}: has no images that can be "
            "used; set it to another folder, or remove the section"
        )
    np.save(folder / f"{name}.npy", torch.cat(pixels).numpy())
    write_record(folder / f"{name}.json", {"keys": keys, "counts": counts})


def _kind(key: tuple[str, str, tuple[str, ...]], recipe: PhotographRecipe) -> Kind:
    source, domain, names = key
    by_domain = recipe.sources[source].templates
    templates = by_domain[domain if domain in by_domain else ""]
    captions = [fill_prompt(template, {"class": name}) for template in templates for name in names]
    return Kind(source, domain, names, tuple(captions))


# An image [3, S, S], and its domain and words
Row = tuple[torch.Tensor, tuple[str, tuple[str, ...]]]


def _chunks(rows: Iterable[Row]) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """Gather rows into chunks of at most `CHUNK` images [B, 3, S, S], with their keys."""
    images: list[torch.Tensor] = []
    keys: list[Any] = []
    for image, key in rows:
        images.append(image)
        keys.append(key)
        if len(images) == CHUNK:
            yield torch.stack(images), keys
            images, keys = [], []
    if images:
        yield torch.stack(images), keys


def _read_source(
    name: str, source: Source, recipe: PhotographRecipe, counts: Counter[str]
) -> Iterator[Row]:
    """Yield a source's images [3, S, S] with their domain and words."""
    dropped = _drop_list(name, source, recipe)
    images_by_kind: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for file, value, class_name, domain in _rows(name, source, recipe):
        if domain not in source.templates and "" not in source.templates:
            continue
        counts["read"] += 1
        if Path(file).name in dropped:
            counts["listed"] += 1
            continue
        words = recipe.names.get(class_name, (to_words(class_name).lower(),))
        images_by_kind[domain, words] += 1
        if source.per_class and images_by_kind[domain, words] > source.per_class:
            continue
        try:
            image = to_pixels(open_stored_image(value), recipe.image_size)
        # Pillow raises exceptions of any type for a corrupt file
        except Exception:
            counts["unreadable"] += 1
            continue
        if GRAY in source.templates and _is_gray(image):
            domain = GRAY
        yield image, (domain, words)


def _is_gray(image: torch.Tensor) -> bool:
    """Return whether an image [3, S, S] uint8 has hardly any color."""
    return (image.amax(0).float() - image.amin(0).float()).mean().item() < MAX_GRAY


def _drop_list(name: str, source: Source, recipe: PhotographRecipe) -> set[str]:
    """Return the names of the files that a source's lists leave out."""
    names: set[str] = set()
    for file in source.drop:
        try:
            lines = recipe.path(file).read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                f"sources.{name}.drop = {sanitize(file, 1000)!r}: cannot be read: "
                f"{sanitize(error.strerror)}"
            ) from None
        names |= {Path(line.strip()).name for line in lines if line.strip()}
    return names


def _rows(
    name: str, source: Source, recipe: PhotographRecipe
) -> Iterator[tuple[str, object, str, str]]:
    """Yield (file name, image, class name, domain) of a source's images."""
    key = f"sources.{name}.data"
    folder = recipe.path(source.data)
    if folder.is_dir() and not _parquet_files(folder):
        for part in source.folders or ("",):
            for file in _image_files(folder / part):
                path = file.relative_to(folder)
                domain = _find_word(path, tuple(source.templates))
                yield file.name, str(file), _name_by_path(path, source.words), domain
        return
    rows = _open_table(key, source.data, folder, source.split)
    columns = {source.image_column, source.label_column} | ({source.domain_column} - {""})
    if missing := sorted(columns - set(rows.column_names)):
        raise ConfigError(
            f"{key} = {sanitize(source.data, 1000)!r}: has no column {missing[0]!r}; its columns "
            f"are {sanitize(', '.join(rows.column_names), 1000)}"
        )
    labels = rows.features[source.label_column]
    for row in rows:
        label = row[source.label_column]
        class_name = labels.int2str(label) if hasattr(labels, "int2str") else str(label)
        image = row[source.image_column]
        domain = str(row[source.domain_column]) if source.domain_column else ""
        yield str(image.get("path") or ""), image, class_name, domain


def _open_table(key: str, data: str, folder: Path, split: str) -> Any:
    """Open a parquet folder or a hub id; images are not decoded."""
    from datasets import Image, load_dataset

    try:
        if folder.is_dir():
            files = [str(file) for file in _parquet_files(folder, split)]
            rows = load_dataset("parquet", data_files=files, split="train")
        else:
            rows = load_dataset(data, split=split)
    # The library raises exceptions of any type
    except Exception as error:
        raise ConfigError(
            f"{key} = {sanitize(data, 1000)!r}: cannot be read: {sanitize(error)}. Set it to a "
            "folder of parquet or image files, or to a hub id"
        ) from None
    for name, feature in rows.features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
    return rows


def _parquet_files(folder: Path, split: str = "") -> list[Path]:
    return sorted(folder.rglob(f"{split}*.parquet"))


def _image_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)


def _name_by_path(path: Path, words: Sequence[str]) -> str:
    """Return the first of `words` that an image's path contains, or else its folder's name."""
    return _find_word(path, words) or path.parent.name or path.stem


def _find_word(path: Path, words: Sequence[str]) -> str:
    """Return the first of `words` that a path contains, in singular or plural; "" without any."""
    tokens = re.findall(r"[a-z]+", path.as_posix().lower())
    text = f" {' '.join(tokens)} "
    return next((w for w in words if f" {w} " in text or f" {w}s " in text), "")


def _client_thumbnails(folder: Path, recipe: PhotographRecipe, progress: Progress) -> torch.Tensor:
    """Return the thumbnails [M, 768] of every image in the recipe's `exclude` folders."""
    file = folder / "clients.npy"
    if file.is_file():
        return torch.from_numpy(np.load(file, allow_pickle=False))
    parts = [torch.empty(0, 768)]
    for name in recipe.exclude:
        images = recipe.path(name)
        if not images.is_dir():
            raise ConfigError(
                f"exclude = {sanitize(name, 1000)!r}: no such folder; set data-root to the folder "
                "that it is in, or remove it from the list"
            )
        bar = progress.add_task(f"client images of {name}", total=None)
        for chunk, _ in _chunks(_client_images(images, recipe.image_size)):
            parts.append(thumbnails(chunk))
            progress.update(bar, advance=len(chunk))
    np.save(file.with_suffix(".tmp.npy"), torch.cat(parts).numpy())
    file.with_suffix(".tmp.npy").replace(file)
    return torch.cat(parts)


def _client_images(folder: Path, side: int) -> Iterator[Row]:
    key = ("", ())
    for file in _image_files(folder):
        yield to_pixels(open_image(file), side), key
    if not _parquet_files(folder):
        return
    for row in _open_table("exclude", str(folder), folder, ""):
        yield to_pixels(open_stored_image(row["image"]), side), key
