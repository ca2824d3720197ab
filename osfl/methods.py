"""The methods: which client half and which server half a name stands for. Modules are imported late, by name."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from osfl.config import ClassifierConfig, RunConfig, split_names
from osfl.digests import unread_bytes
from osfl.kits import (
    DIFFUSION_PARTS,
    SMALL_DECODER,
    file_digests,
    find_kit,
    initialisation_part,
    loaded_files,
)

TEXT_PARTS = ("text_encoder", "tokenizer")
IMAGE_ENCODER_PARTS = ("image_encoder", "feature_extractor")


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        client: module in `client_app.methods` with `make_payload(job)`; None: clients send nothing.
        server: module in `server_app.methods` with `run(job, payloads)`; of a method with rounds, in `server_app.rounds` with `strategy(job)`.
        payload: class in `osfl.payloads` that clients send; None: nothing.
        client_parts: what a client needs of the kit.
        rounds: whether it is one of those they compare with that send models to and fro.
        samples: whether the server needs the diffusion model.
    """

    client: str | None
    server: str
    payload: str | None
    client_parts: tuple[str, ...] = ()
    rounds: bool = False
    samples: bool = True


METHODS: dict[str, Method] = {
    "prompts-only": Method(client=None, server="prompts_only", payload=None),
    "prompts-domain": Method(client="domain", server="prompts_domain", payload="Domain"),
    "feddeo": Method(
        client="feddeo", server="feddeo", payload="Descriptions", client_parts=DIFFUSION_PARTS
    ),
    "fedlmg": Method(client="classifier", server="fedlmg", payload="Classifier"),
    "fedcado": Method(client="classifier", server="fedcado", payload="Classifier"),
    "oscar": Method(
        client="oscar", server="oscar", payload="Encodings", client_parts=("captioner", *TEXT_PARTS)
    ),
    "oscar-pooled": Method(
        client="oscar", server="oscar", payload="Encodings", client_parts=("captioner", *TEXT_PARTS)
    ),
    "espresso": Method(
        client="espresso",
        server="espresso",
        payload="Mixtures",
        client_parts=(*DIFFUSION_PARTS, *IMAGE_ENCODER_PARTS),
    ),
    "fgl": Method(client="fgl", server="fgl", payload="Captions", client_parts=("captioner",)),
    "feddisc": Method(
        client="feddisc",
        server="feddisc",
        payload="Embeddings",
        client_parts=(*IMAGE_ENCODER_PARTS, "image_normalizer", "image_noising_scheduler"),
    ),
    "fedbip": Method(
        client="fedbip", server="fedbip", payload="Concepts", client_parts=DIFFUSION_PARTS
    ),
    "fedavg": Method(client=None, server="fedavg", payload=None, rounds=True, samples=False),
    "fedprox": Method(client=None, server="fedprox", payload=None, rounds=True, samples=False),
    "feddyn": Method(client=None, server="feddyn", payload=None, rounds=True, samples=False),
    "feddf": Method(client=None, server="feddf", payload=None, rounds=True, samples=False),
    "local": Method(client="classifier", server="local", payload="Classifier", samples=False),
    "ceiling": Method(client=None, server="ceiling", payload=None, samples=False),
}


def kit_parts(config: RunConfig, kit: str = "") -> tuple[str, ...]:
    """The folders and files of the kit that a client needs; () if it needs none.

    Args:
        kit: its folder: what it has decides where a ResNet-34's first weights come from.

    A captioner or image encoder that the run names itself is not the kit's.
    """
    method = METHODS[config.method]
    elsewhere: tuple[str, ...] = ("captioner",) if config.captioner else ()
    if (
        config.image_encoder and config.method != "feddisc"
    ):  # whose UNet knows the embeddings of its own kit's encoder alone
        elsewhere += IMAGE_ENCODER_PARTS
    parts = tuple(part for part in method.client_parts if part not in elsewhere)
    if method.payload == "Classifier" and config.classifier.init == "kit":
        parts += tuple(
            dict.fromkeys(
                initialisation_part(a, kit) for a in split_names(config.classifier.architecture)
            )
        )
    return parts


def sampling_parts(config: RunConfig) -> tuple[str, ...]:
    """The folders of the kit that the server draws with."""
    small = (SMALL_DECODER,) if config.synthesis.small_decoder == "kit" else ()
    return (*DIFFUSION_PARTS, *small)


def used_parts(config: RunConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """(kit, its parts) that each step of a run comes from: the clients' payloads, the images, the global models."""
    method, used = METHODS[config.method], {}
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
    with suppress(FileNotFoundError):
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
    """SHA-256 of every file of a kit that a step of the run comes from; of a hub id, or a kit that is not there, nothing."""
    digests: dict[str, dict[str, str]] = {}
    for step, (kit, parts) in used_parts(config).items():
        digests[step] = {}
        with suppress(FileNotFoundError):
            digests[step] = file_digests(find_kit(kit), parts, progress)
    return digests


def unread_kit_bytes(config: RunConfig) -> int:
    """How many bytes `used_digests` has to read, small files aside."""
    files: set[Path] = set()
    for kit, parts in used_parts(config).values():
        with suppress(FileNotFoundError):
            files.update(loaded_files(find_kit(kit), parts).values())
    return unread_bytes(files)


def client_half(method: str) -> ModuleType:
    """The client module of a method that has one."""
    return importlib.import_module(f"client_app.methods.{METHODS[method].client}")


def server_half(method: str) -> ModuleType:
    """The server module of a method."""
    folder = "rounds" if METHODS[method].rounds else "methods"
    return importlib.import_module(f"server_app.{folder}.{METHODS[method].server}")
