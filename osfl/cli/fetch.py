"""`osfl fetch`: download a run's models and initial weights ahead of it."""

from collections.abc import Iterable

from rich.table import Table

from osfl.cli import display
from osfl.config import ClassifierConfig
from osfl.kit.initial_weights import find_initial_weights
from osfl.kit.kits import download_bytes, find_kit, find_model, model_bytes
from osfl.kit.used_parts import RunModel, run_models
from osfl.run_folder.report.page import human_bytes
from osfl.settings import resolve_config

# Values of `init` whose weights are downloaded
FETCHED = ("imagenet", "pretrained")


def show_fetch(settings: list[str], client: bool) -> None:
    """Download the kits, other models and initial weights of a run, and print their folders.

    Args:
        settings: TOML files and `key=value` arguments.
        client: only what clients need, not the server.

    Raises:
        ConfigError, KitError, FileNotFoundError: a model is unavailable or unusable.
    """
    config, _ = resolve_config(settings)
    table = Table("model", "parts", "bytes", "folder")
    models = [m for m in run_models(config) if m.loaded_by == "clients" or not client]
    for name, parts in _kits(models).items():
        folder = find_kit(name, parts)
        size = human_bytes(download_bytes(folder, parts))
        table.add_row(name, ", ".join(parts), size, folder)
    for model in models:
        if model.is_outside_kit:
            (kind,) = model.parts
            folder = find_model(model.source, kind, model.key)
            table.add_row(model.source, kind, human_bytes(model_bytes(folder, kind)), folder)
    for key, classifier in _pretrained(models):
        if file := find_initial_weights(classifier, "", key):
            size = human_bytes(file.stat().st_size)
            name = f"{classifier.init}: {classifier.architecture}"
            table.add_row(name, key, size, str(file.parent))
    if table.row_count:
        display.console.print(table)
    else:
        display.console.print(f"{config.method} needs no kit")


def _pretrained(models: Iterable[RunModel]) -> list[tuple[str, ClassifierConfig]]:
    """Return (key, settings) of each classifier whose initial weights are downloaded."""
    classifiers = [
        (model.key, model.classifier)
        for model in models
        if model.classifier is not None and model.classifier.init in FETCHED
    ]
    return list(dict.fromkeys(classifiers))


def _kits(models: Iterable[RunModel]) -> dict[str, tuple[str, ...]]:
    """Return the parts that are used of each kit."""
    kits: dict[str, tuple[str, ...]] = {}
    for model in models:
        if model.is_kit:
            kits[model.source] = tuple(dict.fromkeys([*kits.get(model.source, ()), *model.parts]))
    return kits
