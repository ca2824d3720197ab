"""`osfl fetch`: the models and first weights that a run takes from the network, ahead of it."""

from dataclasses import replace

from osfl.cli import display, launch
from osfl.cli.display import Table
from osfl.config import ClassifierConfig, RunConfig, split_names
from osfl.kit.initial_weights import initial_weights
from osfl.kit.kits import download_bytes, find_kit, find_model, model_bytes
from osfl.kit.used_parts import initial_models, models_apart, used_parts
from osfl.methods import LORA, METHODS, SMALL_DECODER
from osfl.run_folder.report.page import human_bytes

# Values of `init` that stand for weights of the network
FETCHED = ("imagenet", "pretrained")


def show_fetch(settings: list[str], client: bool) -> None:
    """Fetch the kits, other models and first weights that a run names, and print where they are.

    Args:
        client: what a client needs alone, not the server.

    Raises:
        ConfigError, KitError, FileNotFoundError: one cannot be had or used.
    """
    config, _ = launch.resolve_config(settings)
    table = Table("model", "parts", "bytes", "folder")
    for name, parts in _kits(config, client).items():
        folder = find_kit(name, parts)
        size = human_bytes(download_bytes(folder, parts))
        table.add_row(name, ", ".join(parts), size, folder)
    for key, source, kind in _others(config, client):
        folder = find_model(source, kind, key)
        table.add_row(source, kind, human_bytes(model_bytes(folder, kind)), folder)
    for key, begun in _begun(config, client):
        if file := initial_weights(begun, "", key):
            size = human_bytes(file.stat().st_size)
            table.add_row(f"{begun.init}: {begun.architecture}", key, size, str(file.parent))
    if table.row_count:
        display.console.print(table)
    else:
        display.console.print(f"{config.method} needs no kit")


def _begun(config: RunConfig, client: bool) -> list[tuple[str, ClassifierConfig]]:
    """(key, settings) of each classifier whose first weights come from the network."""
    method = METHODS[config.method]
    models = [] if client else initial_models(config)
    if method.rounds or method.features or method.payload == "Classifier":
        names = split_names(config.classifier.architecture)
        models += [
            ("classifier.init", replace(config.classifier, architecture=name)) for name in names
        ]
    return list(dict.fromkeys(each for each in models if each[1].init in FETCHED))


def _kits(config: RunConfig, client: bool) -> dict[str, tuple[str, ...]]:
    """The parts of each kit."""
    used = used_parts(config)
    steps = ["payloads"] if client else list(used)
    kits: dict[str, tuple[str, ...]] = {}
    for kit, parts in (used[step] for step in steps if step in used):
        kits[kit] = tuple(dict.fromkeys([*kits.get(kit, ()), *parts]))
    return kits


def _others(config: RunConfig, client: bool) -> list[tuple[str, str, str]]:
    models = models_apart(config)
    small = config.synthesis.small_decoder
    if not client and METHODS[config.method].samples and small not in ("", "kit"):
        models.append(("synthesis.small-decoder", small, SMALL_DECODER))
    lora = config.synthesis.lora
    if not client and METHODS[config.method].samples and lora not in ("", "kit"):
        models.append(("synthesis.lora", lora, LORA))
    return models
