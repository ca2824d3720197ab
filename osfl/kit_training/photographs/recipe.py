"""The recipe of a photograph kit: a TOML file such as `configs/kits/photographs.toml`.

    data-root = "/data"                 # folder that relative paths start from
    autoencoder = "taesd-diffusers"     # folder of a tiny autoencoder (TAESD)
    image-size = 64
    exclude = ["pacs"]                  # folders of client images; copies of them are dropped
    [sources.NAME]                      # public images: parquet folder, hub id, or image files
    data = "tiny_imagenet"
    templates.photo = ["a photo of a {class}"]   # captions by domain; "": of every other domain
    weight = 1.0                        # relative frequency of the source's images
    [names]                             # words of a class, in place of its stored name
    African_elephant = ["african elephant", "elephant"]
    [emphasis]                          # words whose images are drawn more often
    dog = 4
    [text], [image-encoder], [unet]     # sizes and training of the networks

Paths are relative to `data-root`.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from osfl.config import ConfigError
from osfl.config.toml import parse_toml, read_toml
from osfl.util.markers import Range, markers_of
from osfl.util.text import quote, sanitize

Words = Mapping[str, tuple[str, ...]]
Steps = Annotated[int, Range(0, 10**8)]
Batch = Annotated[int, Range(2, 2**16)]
Rate = Annotated[float, Range(1e-7, 1)]
Factor = Annotated[float, Range(0.01, 1000)]
# Settings that may change between a training and its resumption
NOT_IDENTITY = ("data_root", "autoencoder", "samples")


@dataclass(frozen=True)
class Source:
    """A set of public images.

    Attributes:
        data: a folder of parquet files, a hub id, or a folder of image files.
        templates: captions by domain, in which `{class}` stands for the words of the image's
            class; the domain "" stands for every domain without templates of its own.
        weight: frequency of this source's images relative to the other sources'.
        folders: for a folder of image files, the subfolders to read; empty for all.
        words: for a folder of image files, words that name an image if its path has them, the
            first first; an image without any is named by its folder. Its domain is likewise a key
            of `templates` that its path has; `gray` stands for images without color.
        drop: text files that list images to leave out, by file name.
        per_class: maximum number of images of a class and domain; 0 for all.
    """

    data: str
    templates: Words
    weight: Annotated[float, Range(1e-6, 1e6)] = 1.0
    split: str = "train"
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str = ""
    folders: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    per_class: Annotated[int, Range(0, 10**9)] = 0


@dataclass(frozen=True)
class TextSizes:
    """Sizes of the text encoder."""

    length: int = 16
    width: int = 128
    layers: int = 3
    heads: int = 4


@dataclass(frozen=True)
class ImageEncoderRecipe:
    """Sizes of the image encoder, and the contrastive training of both encoders.

    Attributes:
        more_steps: further steps of the image encoder alone; may grow between two trainings.
        more_lr: learning rate of these steps.
    """

    width: int = 192
    layers: int = 6
    heads: int = 4
    patch: int = 8
    embedding: int = 128
    steps: Steps = 2000
    batch: Batch = 256
    lr: Rate = 1e-3
    more_steps: Steps = 0
    more_lr: Rate = 3e-4


@dataclass(frozen=True)
class UnetRecipe:
    """Sizes of the UNet, and its training.

    `steps` may grow and `lr` may fall between two trainings.
    """

    channels: tuple[int, ...] = (128, 192)
    layers: int = 1
    heads: int = 4
    steps: Steps = 20_000
    batch: Batch = 128
    lr: Rate = 1e-3
    caption_dropout: Annotated[float, Range(0, 1)] = 0.10
    ema_decay: Annotated[float, Range(0, 0.99999)] = 0.999


@dataclass(frozen=True)
class PhotographRecipe:
    """A parsed recipe file; see the module's docstring.

    Attributes:
        held_out: share of the public images that no stage trains on; the card's figures use it.
        samples: number of images that the card's FID compares.
        exclude: folders of client images, whose copies are dropped from the public images.
        copy_above: correlation of thumbnails above which a public image counts as a copy of a
            client's.
    """

    autoencoder: str
    sources: Mapping[str, Source]
    data_root: str = ""
    seed: Annotated[int, Range(0, 2**31)] = 0
    image_size: Annotated[int, Range(16, 1024)] = 64
    held_out: Annotated[float, Range(0.001, 0.5)] = 0.05
    samples: Annotated[int, Range(4, 10**6)] = 1000
    exclude: tuple[str, ...] = ()
    copy_above: Annotated[float, Range(0.5, 1)] = 0.98
    names: Words = field(default_factory=dict[str, Any])
    emphasis: Mapping[str, Annotated[float, Range(0.01, 1000)]] = field(
        default_factory=dict[str, Any]
    )
    text: TextSizes = TextSizes()
    image_encoder: ImageEncoderRecipe = ImageEncoderRecipe()
    unet: UnetRecipe = UnetRecipe()

    def path(self, name: str) -> Path:
        """Return the path of a file or folder that the recipe names."""
        return Path(self.data_root).expanduser() / Path(name).expanduser()

    def identity(self) -> dict[str, Any]:
        """Return what checkpoints depend on: all but paths, and steps and rates that may change."""
        values = {key: value for key, value in asdict(self).items() if key not in NOT_IDENTITY}
        del values["unet"]["steps"], values["unet"]["lr"]
        del values["image_encoder"]["more_steps"], values["image_encoder"]["more_lr"]
        return values


def read_recipe(file: Path, overrides: Iterable[str] = ()) -> PhotographRecipe:
    """Read a recipe file.

    Args:
        overrides: `key=value` with dotted keys, such as `unet.steps=40000`; they override the
            file's.

    Raises:
        ConfigError: a key is unknown or missing, or a value has a wrong type or is out of range.
    """
    content = read_toml(file)
    for override in overrides:
        _set(content, override)
    name = sanitize(file, 1000)
    recipe: PhotographRecipe = _parse(PhotographRecipe, content, f"{name}: ", "")
    if problems := list(_problems(recipe)):
        raise ConfigError(f"{name}: " + f"\n{name}: ".join(problems))
    return recipe


def _set(content: dict[str, Any], override: str) -> None:
    """Set one dotted key of a table to a TOML value, or to the text itself."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{quote(override)}: must be key=value")
    *sections, last = key.split(".")
    table = content
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{quote(override)}: {section} is a value, not a section")
    try:
        table[last] = parse_toml(f"value = {text}", key)["value"]
    except ConfigError:
        table[last] = text


def _parse(kind: Any, table: Any, place: str, prefix: str) -> Any:
    """Build a dataclass from a TOML table.

    Args:
        place: the beginning of error messages, such as `FILE: `.
        prefix: the beginning of the table's keys, such as `unet.`.

    Raises:
        ConfigError: as `read_recipe`.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{place}{prefix.rstrip('.')} = {quote(table)}: must be a section")
    hints = get_type_hints(kind, include_extras=True)
    kinds = {name.replace("_", "-"): hint for name, hint in hints.items()}
    if unknown := sorted(set(table) - set(kinds)):
        keys = ", ".join(kinds)
        raise ConfigError(
            f"{place}{prefix}{sanitize(unknown[0], 100)}: unknown key; must be one of {keys}"
        )
    for item in fields(kind):
        is_required = item.default is MISSING and item.default_factory is MISSING
        key = item.name.replace("_", "-")
        if is_required and key not in table:
            raise ConfigError(f"{place}{prefix}{key}: missing; set {prefix}{key}")
    values = {
        key.replace("-", "_"): _value(kinds[key], value, place, prefix + key)
        for key, value in table.items()
    }
    return kind(**values)


def _value(kind: Any, value: Any, place: str, key: str) -> Any:
    """Convert one TOML value to an annotated type, and check its range."""
    origin = get_origin(kind)
    if origin is Annotated:
        number = _value(kind.__origin__, value, place, key)
        for rule in markers_of(kind, Range):
            if not rule.low <= number <= rule.high:
                raise ConfigError(
                    f"{place}{key} = {number:g}: must be between {rule.low:g} and {rule.high:g}"
                )
        return number
    if origin is tuple:
        element = get_args(kind)[0]
        if not isinstance(value, list):
            raise ConfigError(f"{place}{key} = {quote(value)}: must be a list")
        return tuple(_value(element, item, place, key) for item in value)
    if origin is not None and origin is not types.UnionType:
        element = get_args(kind)[1]
        if not isinstance(value, dict):
            raise ConfigError(f"{place}{key} = {quote(value)}: must be a section")
        return {name: _value(element, item, place, f"{key}.{name}") for name, item in value.items()}
    if kind in (int, float, str):
        accepted = (int, float) if kind is float else kind
        if isinstance(value, bool) or not isinstance(value, accepted):
            names = {int: "a whole number", float: "a number", str: "a text"}
            raise ConfigError(f"{place}{key} = {quote(value)}: must be {names[kind]}")
        return kind(value)
    return _parse(kind, value, place, f"{key}.")


def _problems(recipe: PhotographRecipe) -> Iterator[str]:
    """Yield an error message for each contradiction between values."""
    if not recipe.sources:
        yield "sources: must have at least one section, such as [sources.cifar10]"
    if recipe.image_size % recipe.image_encoder.patch:
        yield (
            f"image-encoder.patch = {recipe.image_encoder.patch}: must divide image-size = "
            f"{recipe.image_size}"
        )
    for name, source in recipe.sources.items():
        if not source.templates:
            yield f"sources.{name}.templates: must have captions; set templates.photo to a list"
        for domain, templates in source.templates.items():
            key = f"sources.{name}.templates." + (domain or '""')
            if not templates:
                yield f"{key}: must have at least one caption"
            for text in templates:
                if text.count("{class}") != 1:
                    yield f"{key} = {quote(text)}: must contain {{class}} once"
    for name, words in recipe.names.items():
        if not words:
            yield f"names.{sanitize(name, 100)}: must have at least one text"
