"""The automatic sampling settings that a run measures once, and keeps."""

from dataclasses import replace

from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.devices import pick_device


def resolve_synthesis(config: RunConfig, folder: RunFolder, status: Status) -> RunConfig:
    """Return the configuration with every automatic sampling setting fixed.

    A new run measures and stores its choices; a resumed run keeps the stored ones.

    Raises:
        KitError: the kit cannot be loaded.
        CorruptFileError: `synthesis.json` is corrupt.
    """
    # The import takes seconds, and only methods that sample need it
    from server_app.synthesis import engine

    kinds = dict.fromkeys(engine.NETWORK_SETTINGS, str) | {"batch_size": int, "parallel_units": int}
    choice = folder.sampling_choice(kinds)
    if choice is None:
        status.phase("choosing how to sample")
        kit = find_kit(config.sampling_kit)
        device = pick_device(config.device)
        settings = engine.resolve_auto(kit, device, config.synthesis)
        choice = {name: getattr(settings, name) for name in engine.AUTO_SETTINGS}
        folder.store_sampling_choice(choice)
    values = {name: choice[name] for name in engine.AUTO_SETTINGS}
    return replace(config, synthesis=replace(config.synthesis, **values))
