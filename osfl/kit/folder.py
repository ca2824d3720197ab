"""A folder in the format of a kit, and the files in it that are loaded."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.methods import CLIP, LORA, TINY_DECODER
from osfl.util.files import parse_json, read_bounded
from osfl.util.text import sanitize

# Stem of a part's weights file, as diffusers or transformers names it
WEIGHTS: Mapping[str, str] = {
    "vae": "diffusion_pytorch_model",
    "unet": "diffusion_pytorch_model",
    "image_normalizer": "diffusion_pytorch_model",
    TINY_DECODER: "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
    "image_encoder": "model",
    "captioner": "model",
    CLIP: "model",
    "backbone": "model",
    LORA: "pytorch_lora_weights",
}
# Folders of a second text encoder, which belong to the parts of the first
SECOND_FOLDERS: Mapping[str, str] = {"text_encoder": "text_encoder_2", "tokenizer": "tokenizer_2"}
# Half-precision weights are used only if there are no others
VARIANTS = ("", ".fp16")
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
MAX_SETTINGS_BYTES = 2**23  # CLIP's tokenizer has 2.2 MB
# Files of a part that the loaders read besides the weights
SETTINGS: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "scheduler_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


class KitError(ValueError):
    """A kit that cannot be used. The message says what to do."""


def part_path(part: str, name: str) -> str:
    """Return the path of a part's file in its kit; "" is the kit's folder itself."""
    return f"{part}/{name}" if part else name


def walk_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, those of nested objects too."""
    for key, value in settings.items():
        yield key, value
        if isinstance(value, dict):
            yield from walk_settings(value)


def _is_shard(name: object) -> bool:
    """Check that an index names a plain file of its own folder."""
    return isinstance(name, str) and bool(_SHARD.fullmatch(name))


@dataclass(frozen=True)
class KitFolder:
    """A kit's files: those in a folder, and those that are still on the hub."""

    setting: str  # as the user wrote it, for messages: kit = '/a/folder'
    path: Path
    on_hub: frozenset[str] = frozenset()

    def has(self, file: str) -> bool:
        """Return whether the file exists, here or on the hub."""
        return (self.path / file).is_file() or file in self.on_hub

    def names(self, part: str) -> list[str]:
        """Return the names of a part's files, here or on the hub."""
        local = [file.name for file in (self.path / part).glob("*") if file.is_file()]
        remote = [Path(name) for name in self.on_hub]
        return sorted({*local, *(file.name for file in remote if file.parent == Path(part))})

    def settings(self, file: str) -> dict[str, Any]:
        """Read a JSON file of settings.

        Raises:
            KitError: it is missing, not a JSON object, too large or nested too deep.
        """
        try:
            content = parse_json(read_bounded(self.path / file, MAX_SETTINGS_BYTES))
        except (OSError, ValueError) as error:
            raise KitError(f"{self.setting}: {file} cannot be loaded: {sanitize(error)}") from None
        if not isinstance(content, dict):
            raise KitError(f"{self.setting}: {file} cannot be loaded: it is not a JSON object")
        return content

    def weights(self, part: str, kind: str = "") -> list[str]:
        """Return the weights file that a part's loader reads, or the index and its shards.

        [] if there is neither.

        Args:
            part: a folder of the kit; "" for the folder itself.
            kind: the part's kind, if the folder's name does not say it.

        Raises:
            KitError: the index is corrupt.
        """
        stem = WEIGHTS.get(kind or part)
        if stem is None:
            return []
        for variant in VARIANTS:
            single = part_path(part, f"{stem}{variant}.safetensors")
            index = part_path(part, f"{stem}.safetensors.index{variant}.json")
            # If both exist, diffusers reads the index, transformers the single file
            order = (index, single) if stem.startswith("diffusion") else (single, index)
            chosen = next((file for file in order if self.has(file)), "")
            if chosen == index:
                return [index, *self._shards(part, index)]
            if chosen:
                return [chosen]
        return []

    def _shards(self, part: str, index: str) -> list[str]:
        """Return the files that an index names."""
        content = self.settings(index)
        shards = content.get("weight_map")
        if not isinstance(shards, dict) or "metadata" not in content:
            raise KitError(
                f"{self.setting}: {index} cannot be loaded: it lacks weight_map or metadata"
            )
        if invalid := [name for name in shards.values() if not _is_shard(name)]:
            raise KitError(
                f"{self.setting}: {index} names {sanitize(repr(invalid[0]), 100)}; it must name "
                "safetensors files beside it, with letters, digits, '.', '_' and '-' only"
            )
        return [part_path(part, shard) for shard in sorted(set(shards.values()))]

    def variant(self, part: str, kind: str = "") -> str | None:
        """Return `from_pretrained`'s `variant` for a part's weights: "fp16" or None."""
        weights = self.weights(part, kind)
        return "fp16" if weights and ".fp16." in Path(weights[0]).name else None

    def part_folder(self, kind: str) -> str:
        """Return the folder of a part in a kit; "" if the model is that part alone."""
        return kind if self.has(part_path(kind, "config.json")) else ""

    def loaded_files(self, part: str, kind: str = "") -> list[str]:
        """Return every file of a part that is loaded, those of a second text encoder too.

        Variants, other formats and examples beside them are left out.
        """
        if self.has(part):
            return [part]
        names = [part_path(part, name) for name in SETTINGS] + self.weights(part, kind)
        files = sorted(file for file in names if self.has(file))
        if part in SECOND_FOLDERS and self.has_second_encoder:
            files += self.loaded_files(SECOND_FOLDERS[part])
        return files

    @property
    def has_second_encoder(self) -> bool:
        """True if the kit has a second text encoder, as SDXL has."""
        return self.has("text_encoder_2/config.json")

    def with_second_encoder(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Add the folders of a second text encoder, if the kit has one, to some of its parts."""
        if not self.has_second_encoder:
            return parts
        return (*parts, *(SECOND_FOLDERS[part] for part in parts if part in SECOND_FOLDERS))
