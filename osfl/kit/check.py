"""Check that a kit can be used, before any work begins.

The checks read file names, settings and the headers of the weights; they load no weights.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from osfl.kit.compatibility import check_compatibility, check_each_part
from osfl.kit.fits import check_lora_fit
from osfl.kit.folder import KitError, KitFolder
from osfl.kit.kits import find_model
from osfl.kit.part_check import (
    SCHEDULE_CHOICES,
    SCHEDULER_TIMESTEPS,
    check_part,
    check_tensors,
    check_weights,
    lora_shapes,
    require_one_of,
)
from osfl.methods import CLIP, LORA, TINY_DECODER


def check_kit(
    kit: str, parts: Iterable[str], key: str = "kit", image_condition: bool | None = None
) -> None:
    """Check that some of a kit's parts can be loaded, and fit each other.

    Args:
        kit: a folder.
        parts: folders and files of it.
        key: of the configuration, for messages.
        image_condition: whether its UNet must take an image embedding, as Stable unCLIP's does, or
            must not; None: either.

    Raises:
        KitError: the kit is missing or unsupported, or a file is missing, corrupt or of the wrong
            size.
    """
    parts = tuple(parts)
    if not parts:
        return
    folder = open_kit(kit, key)
    parts = folder.with_second_encoder(parts)
    check_each_part(folder, parts)
    shapes = {part: check_weights(folder, part, part) for part in parts}
    check_compatibility(folder, parts, image_condition)
    for part in parts:
        check_tensors(folder, part, part, shapes[part])


def check_steps(settings: Mapping[str, Any], steps: int) -> None:
    """Check that a noise schedule has timesteps for this number of steps.

    Args:
        settings: of its scheduler, already checked by `check_kit`.

    Raises:
        KitError: it has fewer, or its `steps_offset` moves the first one beyond them.
    """
    count = settings.get("num_train_timesteps", SCHEDULER_TIMESTEPS)
    offset = settings.get("steps_offset", 0)
    spacing = settings.get("timestep_spacing", SCHEDULE_CHOICES["timestep_spacing"][0])
    # The other spacings begin at the last timestep
    first = (steps - 1) * (count // steps) + offset if spacing == "leading" else count - 1
    if steps > count or first >= count:
        raise KitError(
            f"synthesis.steps = {steps}: the kit's schedule has {count} timesteps, and its "
            f"steps_offset is {offset}; set synthesis.steps to fewer"
        )


def check_captioner(source: str) -> None:
    """Check that the folder or hub id in `captioner` is a BLIP or BLIP-2 that can be loaded.

    Raises:
        KitError: as `check_kit`.
    """
    folder = open_kit(find_model(source, "captioner", "captioner"), "captioner")
    part = folder.part_folder("captioner")
    check_part(folder, part, "captioner")
    check_tensors(folder, part, "captioner", check_weights(folder, part, "captioner"))


def check_image_encoder(source: str) -> None:
    """Check that the folder or hub id in `image-encoder` is a CLIP or DINOv2 that can be loaded.

    Raises:
        KitError: as `check_kit`.
    """
    folder = open_kit(find_model(source, "image_encoder", "image-encoder"), "image-encoder")
    part = folder.part_folder("image_encoder")
    check_part(folder, part, "image_encoder")
    shapes = check_weights(folder, part, "image_encoder")
    settings = "feature_extractor" if part else ""
    require_one_of(folder, settings, ("preprocessor_config.json", "processor_config.json"))
    check_tensors(folder, part, "image_encoder", shapes)


def check_clip(source: str) -> None:
    """Check that the folder or hub id in `zero-shot.clip` is a whole CLIP that can be loaded.

    Raises:
        KitError: as `check_kit`.
    """
    folder = open_kit(find_model(source, CLIP, "zero-shot.clip"), "zero-shot.clip")
    part = folder.part_folder(CLIP)
    check_part(folder, part, CLIP)
    check_tensors(folder, part, CLIP, check_weights(folder, part, CLIP))


def check_tiny_decoder(source: str) -> None:
    """Check that the folder or hub id in `synthesis.tiny-decoder` is a TAESD that can be loaded.

    Raises:
        KitError: as `check_kit`.
    """
    check_tiny_autoencoder(source, "synthesis.tiny-decoder")


def check_tiny_autoencoder(source: str, key: str) -> None:
    """Check that a folder or hub id is a TAESD that can be loaded.

    Args:
        key: of the configuration, for messages.

    Raises:
        KitError: as `check_kit`.
    """
    folder = open_kit(find_model(source, TINY_DECODER, key), key)
    check_part(folder, "", TINY_DECODER)
    check_tensors(folder, "", TINY_DECODER, check_weights(folder, "", TINY_DECODER))


def check_lora(source: str, kit: str) -> None:
    """Check that the weights in `synthesis.lora` fit a kit's UNet, and that peft is installed.

    Args:
        kit: the folder of the sampling kit, which the word `kit` stands for.

    Raises:
        KitError: as `check_kit`.
    """
    file = lora_file(source, kit)
    folder = KitFolder(f"synthesis.lora = {source!r}", file.parent)
    check_lora_fit(folder.setting, file.name, open_kit(kit), lora_shapes(folder, file.name))


def lora_file(source: str, kit: str) -> Path:
    """Return the file of a distilled LoRA: a file itself, or that of a folder, hub id or the kit.

    Args:
        kit: the folder of the sampling kit, which the word `kit` stands for.

    Raises:
        KitError: it is missing, or not safetensors.
    """
    key = f"synthesis.lora = {source!r}"
    if Path(source).is_file():
        if not source.endswith(".safetensors"):
            raise KitError(f"{key}: must be a safetensors file; a pickle could run code")
        return Path(source)
    if source == "kit":
        folder = open_kit(kit)
        check_each_part(folder, (LORA,))
        return folder.path / folder.weights(LORA)[0]
    folder = open_kit(find_model(source, LORA, "synthesis.lora"), "synthesis.lora")
    check_part(folder, "", LORA)
    return folder.path / folder.weights("", LORA)[0]


def open_kit(name: str, key: str = "kit") -> KitFolder:
    """Return a model's folder.

    Raises:
        KitError: there is no such folder.
    """
    setting = f"{key} = {name!r}"
    if not Path(name).is_dir():
        raise KitError(f"{setting}: no such folder. Give an absolute path or a hub id (owner/name)")
    return KitFolder(setting, Path(name))
