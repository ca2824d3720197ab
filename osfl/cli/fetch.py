"""`osfl fetch`: the models and first weights that a run takes from the network, ahead of it."""

from collections.abc import Iterable

from osfl.cli import display, launch
from osfl.cli.display import Table
from osfl.config import ClassifierConfig
from osfl.kit.initial_weights import initial_weights
from osfl.kit.kits import download_bytes, find_kit, find_model, model_bytes
from osfl.kit.used_parts import RunModel, run_models
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
    wanted = [m for m in run_models(config) if m.loaded_by == "clients" or not client]
    for name, parts in _kits(wanted).items():
        folder = find_kit(name, parts)
        size = human_bytes(download_bytes(folder, parts))
        table.add_row(name, ", ".join(parts), size, folder)
    for model in wanted:
        if model.is_apart:
            (kind,) = model.parts
            folder = find_model(model.source, kind, model.key)
            table.add_row(model.source, kind, human_bytes(model_bytes(folder, kind)), folder)
    for key, begun in _begun(wanted):
        if file := initial_weights(begun, "", key):
            size = human_bytes(file.stat().st_size)
            table.add_row(f"{begun.init}: {begun.architecture}", key, size, str(file.parent))
    if table.row_count:
        display.console.print(table)
    else:
        display.console.print(f"{config.method} needs no kit")


def _begun(models: Iterable[RunModel]) -> list[tuple[str, ClassifierConfig]]:
    """(key, settings) of each classifier whose first weights come from the network."""
    begun = [(model.key, model.classifier) for model in models if model.classifier is not None]
    return list(dict.fromkeys(each for each in begun if each[1].init in FETCHED))


def _kits(models: Iterable[RunModel]) -> dict[str, tuple[str, ...]]:
    """The parts of each kit."""
    kits: dict[str, tuple[str, ...]] = {}
    for model in models:
        if model.is_kit:
            kits[model.source] = tuple(dict.fromkeys([*kits.get(model.source, ()), *model.parts]))
    return kits
