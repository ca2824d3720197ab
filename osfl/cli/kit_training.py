"""`osfl kit train`: train the digits kits, or the kit of a recipe file."""

from pathlib import Path

from rich.progress import Progress

from osfl.config import ConfigError
from osfl.util.devices import pick_device

KITS = Path("runs/kit")


def train(
    arguments: list[str],
    out: Path | None,
    work: Path | None,
    device: str,
    progress: Progress,
    base: Path | None,
    export: bool,
) -> Path:
    """Train a kit, and return its folder.

    Args:
        arguments: a recipe file and `key=value` settings of it; empty for the digits.
        out, work, base, export: as the command's options; without `out` and `work`, folders in
            `KITS`.

    Raises:
        ConfigError: an option is for the other kind of kit, or the recipe is invalid.
    """
    # Seconds to import
    from osfl.kit_training import train_kit
    from osfl.kit_training.photographs import train_photograph_kit
    from osfl.kit_training.photographs.recipe import read_recipe
    from osfl.kit_training.recipe import Recipe

    place = str(pick_device(device))
    if not arguments:
        if export:
            raise ConfigError(
                "--export requires a recipe file, such as configs/kits/photographs.toml"
            )
        out = out or KITS / "digits"
        train_kit(out, work or KITS / "checkpoints", Recipe(), place, progress, base)
        return out
    if base:
        raise ConfigError("--base is for the digits; a recipe file resumes from --work")
    file = Path(arguments[0])
    recipe = read_recipe(file, arguments[1:])
    out = out or KITS / file.stem
    work = work or KITS / f"{file.stem}-checkpoints"
    train_photograph_kit(out, work, recipe, place, progress, export)
    return out
