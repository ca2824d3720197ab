"""List the parts of each kit that a run uses, and the models that it starts from."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from osfl.config import ClassifierConfig, RunConfig, all_parts, loads_clip, split_names
from osfl.kit.digests import file_sha256, uncached_bytes
from osfl.kit.folder import KitError
from osfl.kit.kits import file_digests, find_kit, initial_weights_file, loaded_files
from osfl.methods import (
    CLIP,
    DIFFUSION_PARTS,
    EMBEDDING_NOISE_PARTS,
    IMAGE_ENCODER_PARTS,
    LORA,
    METHODS,
    TINY_DECODER,
)
from osfl.util.names import is_absolute


def kit_parts(config: RunConfig, kit: str = "") -> tuple[str, ...]:
    """Return the folders and files of the kit that a client needs; () if it needs none.

    A captioner or image encoder that the run names itself does not come from the kit.

    Args:
        kit: its folder; its files decide where a ResNet-34's initial weights come from.
    """
    method = METHODS[config.method]
    named: tuple[str, ...] = ("captioner",) if config.captioner else ()
    # A UNet with image conditions understands only the embeddings of its own kit's encoder
    if config.image_encoder and not method.image_conditions:
        named += IMAGE_ENCODER_PARTS
    parts = tuple(part for part in method.client_parts if part not in named)
    if method.loads_initial_weights and config.classifier.init == "kit":
        architectures = split_names(config.classifier.architecture)
        parts += tuple(dict.fromkeys(initial_weights_file(name, kit) for name in architectures))
    return parts


def client_kit_parts(config: RunConfig, kit: str) -> tuple[str, ...]:
    """Return the folders and files of the kit that clients need for all kinds of payload.

    Args:
        kit: as `kit_parts`.
    """
    by_part = [
        kit_parts(part, kit) for method, part in all_parts(config).items() if METHODS[method].client
    ]
    return tuple(dict.fromkeys(chain.from_iterable(by_part)))


@dataclass(frozen=True)
class RunModel:
    """A model that a run loads.

    Attributes:
        key: the run-config's key that names it.
        source: a shipped kit, a folder, a file or a hub id.
        parts: a kit's folders and files that are loaded, or the single part that the model is.
        loaded_by: "clients" or "server".
        is_kit: whether the source is a kit.
        takes_image: whether a kit's UNet must take an image embedding; None: either.
        classifier: for initial weights, the settings of the classifier that starts from them.
    """

    key: str
    source: str
    parts: tuple[str, ...]
    loaded_by: str
    is_kit: bool = False
    takes_image: bool | None = None
    classifier: ClassifierConfig | None = None

    @property
    def is_outside_kit(self) -> bool:
        """True if the model is named outside the kit."""
        return not self.is_kit and self.classifier is None

    @property
    def is_in_kit(self) -> bool:
        """True if the model is a kit, or initial weights inside one."""
        return self.is_kit or (self.classifier is not None and self.classifier.init == "kit")


def run_models(config: RunConfig) -> list[RunModel]:
    """Return every model that a run loads: kits, models outside them, classifiers' initial weights.

    Initial weights in a kit come after the kit.
    """
    models = []
    for step, (kit, parts) in parts_by_step(config).items():
        key = config.sampling_kit_key if kit != config.kit else "kit"
        side = "clients" if step == "payloads" else "server"
        takes_image = METHODS[config.method].image_conditions if step == "images" else None
        models.append(RunModel(key, kit, parts, side, True, takes_image))
    outside_kit = [
        model for part in all_parts(config).values() for model in models_outside_kit(part)
    ]
    for key, source, name in dict.fromkeys(outside_kit):
        models.append(RunModel(key, source, (name,), "clients"))
    for key, source, part in _server_models_outside_kit(config):
        models.append(RunModel(key, source, (part,), "server"))
    return [*models, *_initial_weights(config)]


def _server_models_outside_kit(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return (key, source, part) of the server's models that are not in the kit."""
    clip = config.zero_shot.clip if loads_clip(config) else ""
    models = [("zero-shot.clip", clip, CLIP)] if clip else []
    if not METHODS[config.method].samples:
        return models
    models += [
        ("synthesis.tiny-decoder", config.synthesis.tiny_decoder, TINY_DECODER),
        ("synthesis.lora", config.synthesis.lora, LORA),
    ]
    return [(key, source, part) for key, source, part in models if source not in ("", "kit")]


def _initial_weights(config: RunConfig) -> list[RunModel]:
    classifiers = [(key, settings, "server") for key, settings in initial_models(config)]
    if any(METHODS[method].loads_initial_weights for method in all_parts(config)):
        for name in split_names(config.classifier.architecture):
            settings = replace(config.classifier, architecture=name)
            classifiers.append(("classifier.init", settings, "clients"))
    if config.local_baseline:
        classifiers.append((*locally_trained_model(config), "clients"))
    models = []
    for key, settings, side in classifiers:
        if settings.init != "none":
            source = config.kit if settings.init == "kit" else settings.init
            models.append(RunModel(key, source, (), side, classifier=settings))
    return list(dict.fromkeys(models))


def models_outside_kit(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return (key, folder or hub id, part) of the clients' models that are not in the kit."""
    needed = METHODS[config.method].client_parts
    in_kit = kit_parts(config)
    models = []
    if "captioner" in needed and "captioner" not in in_kit:
        models.append(("captioner", config.captioner, "captioner"))
    if "image_encoder" in needed and "image_encoder" not in in_kit:
        models.append(("image-encoder", config.image_encoder, "image_encoder"))
    return models


def sampling_parts(config: RunConfig) -> tuple[str, ...]:
    """Return the folders of the kit that the server samples with."""
    decoder = (TINY_DECODER,) if config.synthesis.tiny_decoder == "kit" else ()
    lora = (LORA,) if config.synthesis.lora == "kit" else ()
    # A secure sum has mean embeddings, which the server turns into conditions
    summed = config.secure_sum and METHODS[config.method].image_conditions
    noise = EMBEDDING_NOISE_PARTS if summed else ()
    return (*DIFFUSION_PARTS, *decoder, *lora, *noise)


def parts_by_step(config: RunConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return (kit, its parts) for each step of a run that uses one.

    The steps are `payloads` (the clients' payloads), `images` and `models` (the global models).
    """
    method = METHODS[config.method]
    used = {}
    if parts := client_kit_parts(config, _folder(config.sampling_kit)):
        used["payloads"] = (config.sampling_kit, parts)
    if method.samples:
        used["images"] = (config.sampling_kit, sampling_parts(config))
    names = [model.architecture for _, model in initial_models(config) if model.init == "kit"]
    kit = _folder(config.kit) if names else ""
    files = dict.fromkeys(initial_weights_file(name, kit) for name in names)
    clip = (CLIP,) if loads_clip(config) and not config.zero_shot.clip else ()
    if files or clip:
        used["models"] = (config.kit, (*files, *clip))
    return used


def _folder(kit: str) -> str:
    """Return a kit's folder; "" if the kit is missing."""
    with suppress(FileNotFoundError, KitError):
        return find_kit(kit)
    return ""


def final_model(config: RunConfig) -> ClassifierConfig:
    """Return the settings of the final model of an iterative baseline.

    Its architecture is the clients' only one. A distilled model has `global-model.architecture`: if
    clients use it too, the model is trained with their settings.
    """
    client_architectures = split_names(config.classifier.architecture)
    architecture = config.global_model.architecture
    if not METHODS[config.method].distills:
        return replace(config.classifier, architecture=client_architectures[0])
    if architecture in client_architectures:
        return replace(config.classifier, architecture=architecture)
    return config.global_model


def global_settings(config: RunConfig, clip: str = "") -> ClassifierConfig:
    """Return the settings of a run's global model, with a single architecture.

    Args:
        clip: the architecture of a zero-shot model, which its weights tell.
    """
    method = METHODS[config.method]
    if method.rounds:
        return final_model(config)
    if method.zero_shot:
        return replace(config.global_model, architecture=clip, small_stem=False, init="pretrained")
    return config.classifier if method.features else config.global_model


def locally_trained_model(config: RunConfig) -> tuple[str, ClassifierConfig]:
    """Return the key of the `init`, and the settings, of a local-only baseline's model."""
    is_zero_shot = METHODS[config.method].zero_shot
    settings = config.global_model if is_zero_shot else global_settings(config)
    is_global = settings is config.global_model
    return "global-model.init" if is_global else "classifier.init", settings


def initial_models(config: RunConfig) -> list[tuple[str, ClassifierConfig]]:
    """Return every model that the server starts from: the key of its `init`, and its settings."""
    if not METHODS[config.method].global_model or METHODS[config.method].zero_shot:
        return []
    # The clients' classifier, of which only the head is replaced
    if METHODS[config.method].features:
        return [("classifier.init", config.classifier)]
    if not METHODS[config.method].rounds:
        # A head on features beside the images' model, as of a mixed run's statistics
        has_head = any(METHODS[method].features for method in all_parts(config))
        heads = [("classifier.init", config.classifier)] if has_head else []
        return [("global-model.init", config.global_model), *heads]
    models = [
        ("classifier.init", replace(config.classifier, architecture=name))
        for name in split_names(config.classifier.architecture)
    ]
    if final_model(config) not in [settings for _, settings in models]:
        models.append(("global-model.init", final_model(config)))
    return models


def digests_by_step(
    config: RunConfig, progress: Callable[[int], None] = lambda read: None
) -> dict[str, dict[str, str]]:
    """Return, per step of the run, the SHA-256 of every kit file that it uses.

    A missing kit has no files.
    """
    digests: dict[str, dict[str, str]] = {}
    for step, (kit, parts) in parts_by_step(config).items():
        digests[step] = {}
        with suppress(FileNotFoundError, KitError):
            digests[step] = file_digests(find_kit(kit), parts, progress)
    return digests


def outside_digests(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of every model outside the kits that a run loads from a path, by its key.

    A model of the hub is named with its revision.
    """
    digests = {}
    for model in run_models(config):
        if model.source in (config.kit, config.sampling_kit) or not is_absolute(model.source):
            continue
        path = Path(model.source).expanduser()
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        lines = [
            f"{file_sha256(file)} {file.relative_to(path)}\n" for file in files if file.is_file()
        ]
        digests[model.key] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return digests


def uncached_kit_bytes(config: RunConfig) -> int:
    """Return how many bytes `digests_by_step` has to read, without small files."""
    files: set[Path] = set()
    for kit, parts in parts_by_step(config).values():
        with suppress(FileNotFoundError, KitError):
            files.update(loaded_files(find_kit(kit), parts).values())
    return uncached_bytes(files)
