"""Which parts of which kit a run uses, and which models it begins with."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from osfl.config import ClassifierConfig, RunConfig, split_names
from osfl.kit.digests import unread_bytes
from osfl.kit.folder import KitError
from osfl.kit.kits import file_digests, find_kit, initialisation_part, loaded_files
from osfl.methods import DIFFUSION_PARTS, IMAGE_ENCODER_PARTS, LORA, METHODS, SMALL_DECODER


def kit_parts(config: RunConfig, kit: str = "") -> tuple[str, ...]:
    """The folders and files of the kit that a client needs; () if it needs none.

    Args:
        kit: its folder: what it has decides where a ResNet-34's first weights come from.

    A captioner or image encoder that the run names itself is not the kit's.
    """
    method = METHODS[config.method]
    elsewhere: tuple[str, ...] = ("captioner",) if config.captioner else ()
    # Whose UNet knows the embeddings of its own kit's encoder alone
    if config.image_encoder and config.method != "feddisc":
        elsewhere += IMAGE_ENCODER_PARTS
    parts = tuple(part for part in method.client_parts if part not in elsewhere)
    if begins_at_clients(config) and config.classifier.init == "kit":
        parts += tuple(
            dict.fromkeys(
                initialisation_part(a, kit) for a in split_names(config.classifier.architecture)
            )
        )
    return parts


@dataclass(frozen=True)
class RunModel:
    """A model that a run loads.

    Attributes:
        key: of the run-config, which names it.
        source: a shipped kit, a folder, a file or a hub id.
        parts: of a kit, the folders and files that are loaded; else the one part that it is.
        loaded_by: "clients" or "server".
        is_kit: whether the source is a kit.
        takes_image: whether a kit's UNet must take an image's embedding; None: either.
        classifier: of initial weights, the settings of the classifier that begins with them.
    """

    key: str
    source: str
    parts: tuple[str, ...]
    loaded_by: str
    is_kit: bool = False
    takes_image: bool | None = None
    classifier: ClassifierConfig | None = None

    @property
    def is_apart(self) -> bool:
        """Whether it is a model that is named apart from the kit."""
        return not self.is_kit and self.classifier is None

    @property
    def is_of_kit(self) -> bool:
        """Whether it is a kit, or initial weights that are in one."""
        return self.is_kit or (self.classifier is not None and self.classifier.init == "kit")


def run_models(config: RunConfig) -> list[RunModel]:
    """Return every model that a run loads: kits, models named apart, classifiers' initial weights.

    Initial weights of a kit come after the kit.
    """
    models = []
    for step, (kit, parts) in used_parts(config).items():
        key = "feddisc.kit" if kit != config.kit else "kit"
        side = "clients" if step == "payloads" else "server"
        takes_image = config.method == "feddisc" if step == "images" else None
        models.append(RunModel(key, kit, parts, side, True, takes_image))
    for key, source, part in models_apart(config):
        models.append(RunModel(key, source, (part,), "clients"))
    for key, source, part in _sampling_models_apart(config):
        models.append(RunModel(key, source, (part,), "server"))
    return [*models, *_initial_weights(config)]


def _sampling_models_apart(config: RunConfig) -> list[tuple[str, str, str]]:
    """(key, folder, file or hub id, part) of what the server draws with beside the kit."""
    named = [
        ("synthesis.small-decoder", config.synthesis.small_decoder, SMALL_DECODER),
        ("synthesis.lora", config.synthesis.lora, LORA),
    ]
    apart = [each for each in named if each[1] not in ("", "kit")]
    return apart if METHODS[config.method].samples else []


def _initial_weights(config: RunConfig) -> list[RunModel]:
    begun = [(*each, "server") for each in initial_models(config)]
    if begins_at_clients(config):
        for name in split_names(config.classifier.architecture):
            settings = replace(config.classifier, architecture=name)
            begun.append(("classifier.init", settings, "clients"))
    models = []
    for key, settings, side in begun:
        if settings.init != "none":
            source = config.kit if settings.init == "kit" else settings.init
            models.append(RunModel(key, source, (), side, classifier=settings))
    return list(dict.fromkeys(models))


def begins_at_clients(config: RunConfig) -> bool:
    """Whether clients load a classifier's initial weights."""
    method = METHODS[config.method]
    return method.payload == "Classifier" or method.features


def models_apart(config: RunConfig) -> list[tuple[str, str, str]]:
    """(key, folder or hub id, part) of each of the clients' models that is no part of the kit."""
    needed = METHODS[config.method].client_parts
    given = kit_parts(config)
    models = []
    if "captioner" in needed and "captioner" not in given:
        models.append(("captioner", config.captioner, "captioner"))
    if "image_encoder" in needed and "image_encoder" not in given:
        models.append(("image-encoder", config.image_encoder, "image_encoder"))
    return models


def sampling_parts(config: RunConfig) -> tuple[str, ...]:
    """The folders of the kit that the server draws with."""
    small = (SMALL_DECODER,) if config.synthesis.small_decoder == "kit" else ()
    lora = (LORA,) if config.synthesis.lora == "kit" else ()
    return (*DIFFUSION_PARTS, *small, *lora)


def used_parts(config: RunConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """(kit, its parts) that each step of a run comes from.

    The clients' payloads, the images, the global models.
    """
    method = METHODS[config.method]
    used = {}
    if method.client and (parts := kit_parts(config, _folder(config.sampling_kit))):
        used["payloads"] = (config.sampling_kit, parts)
    if method.samples:
        used["images"] = (config.sampling_kit, sampling_parts(config))
    begun = [settings for _, settings in initial_models(config) if settings.init == "kit"]
    if begun:
        kit = _folder(config.kit)
        files = dict.fromkeys(initialisation_part(each.architecture, kit) for each in begun)
        used["models"] = (config.kit, tuple(files))
    return used


def _folder(kit: str) -> str:
    """Where a kit is; nowhere, which `used_digests` bears, where it is not there."""
    with suppress(FileNotFoundError, KitError):
        return find_kit(kit)
    return ""


def final_model(config: RunConfig) -> ClassifierConfig:
    """The settings of the model that a method's rounds end with.

    The clients' only architecture; of FedDF, `global-model.architecture`, which may be one of the
    clients' (it is then trained as theirs) or none of them.
    """
    clients = split_names(config.classifier.architecture)
    wanted = config.global_model.architecture
    if config.method != "feddf":
        return replace(config.classifier, architecture=clients[0])
    if wanted in clients:
        return replace(config.classifier, architecture=wanted)
    return config.global_model


def initial_models(config: RunConfig) -> list[tuple[str, ClassifierConfig]]:
    """Every model that the server begins with: the key of its `init`, and its settings."""
    if config.method == "local":
        return []
    # Whose head alone is replaced
    if METHODS[config.method].features:
        return [("classifier.init", config.classifier)]
    if not METHODS[config.method].rounds:
        return [("global-model.init", config.global_model)]
    models = [
        ("classifier.init", replace(config.classifier, architecture=name))
        for name in split_names(config.classifier.architecture)
    ]
    if final_model(config) not in [settings for _, settings in models]:
        models.append(("global-model.init", final_model(config)))
    return models


def used_digests(
    config: RunConfig, progress: Callable[[int], None] = lambda read: None
) -> dict[str, dict[str, str]]:
    """SHA-256 of every file of a kit that a step of the run comes from.

    Of a kit that is not there, nothing.
    """
    digests: dict[str, dict[str, str]] = {}
    for step, (kit, parts) in used_parts(config).items():
        digests[step] = {}
        with suppress(FileNotFoundError, KitError):
            digests[step] = file_digests(find_kit(kit), parts, progress)
    return digests


def unread_kit_bytes(config: RunConfig) -> int:
    """How many bytes `used_digests` has to read, small files aside."""
    files: set[Path] = set()
    for kit, parts in used_parts(config).values():
        with suppress(FileNotFoundError, KitError):
            files.update(loaded_files(find_kit(kit), parts).values())
    return unread_bytes(files)
