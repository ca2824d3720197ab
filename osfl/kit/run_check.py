"""Check that all models that a run loads exist and fit.

`osfl doctor`, `osfl run` and its `--dry-run`, the server and the clients run these checks before
any work begins. Successful checks are cached, so that a client can join without importing torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from osfl.config import ClassifierConfig, RunConfig
from osfl.kit.check import (
    check_captioner,
    check_clip,
    check_image_encoder,
    check_kit,
    check_lora,
    check_steps,
    check_tiny_decoder,
)
from osfl.kit.digests import file_sha256
from osfl.kit.fits import cached_check
from osfl.kit.folder import KitFolder
from osfl.kit.initial_weights import find_initial_weights, weights_need_fetch
from osfl.kit.kits import find_kit, initial_weights_file, is_hub_id
from osfl.kit.used_parts import RunModel, run_models
from osfl.methods import CLIP, LORA, TINY_DECODER

GB = 1e9
# Checks of models outside the kit, by part
_CHECKS: dict[str, Callable[[str], None]] = {
    "captioner": check_captioner,
    "image_encoder": check_image_encoder,
    TINY_DECODER: check_tiny_decoder,
    CLIP: check_clip,
}


@dataclass(frozen=True)
class ModelLocation:
    """The location of one of a run's models.

    Attributes:
        model: the model.
        folder: its folder, or its name.
        to_fetch: how much of it a run will fetch, as text; "": the model is local and checked.
    """

    model: RunModel
    folder: str
    to_fetch: str = ""

    def __str__(self) -> str:
        """Return the location, and how much of the model a run will fetch."""
        if self.to_fetch:
            return f"{self.folder}, of which a run will fetch {self.to_fetch}"
        return self.folder


def check_run_models(
    config: RunConfig, models: Iterable[RunModel] | None = None
) -> list[ModelLocation]:
    """Check every model that a run loads; fetch at most its settings.

    Args:
        models: check only these; None: all.

    Raises:
        ClassifierError, ConfigError, FileNotFoundError, KitError: one is missing or does not fit.
    """
    return [
        _check_local(model, config)
        for model in run_models(config)
        if models is None or model in models
    ]


def check_models_outside_kit(config: RunConfig, loaded_by: str) -> None:
    """Check the models that are named outside the kit; fetch those that are missing.

    Args:
        loaded_by: "clients" or "server".

    Raises:
        KitError: one is missing or does not fit.
    """
    for model in run_models(config):
        if model.loaded_by == loaded_by and model.is_outside_kit:
            _check_outside_kit(model, config)


def _check_outside_kit(model: RunModel, config: RunConfig) -> None:
    (part,) = model.parts
    if part == LORA:
        check_lora(model.source, find_kit(config.sampling_kit))
    else:
        _CHECKS[part](model.source)


def check_initial_weights(config: ClassifierConfig, kit: str, key: str) -> None:
    """Check that a classifier's initial weights fit it; fetch them if they are missing.

    Args:
        config: settings with a single architecture.
        kit: the kit's folder, for `init = "kit"`.
        key: the name of `init` in the run-config.

    Raises:
        ClassifierError: they do not fit, or there is no such architecture.
        ConfigError, KitError: there is no such file, or it cannot be fetched.
    """
    file = find_initial_weights(config, kit, key)
    if file is not None:
        _check_weights_file(config, file, key)


def check_noise_schedule(kit: str, steps: int) -> None:
    """Check that a kit's noise schedule supports sampling in this number of steps.

    Args:
        kit: a folder.

    Raises:
        KitError: its settings cannot be read, it ends at pure noise, or it has fewer timesteps.
    """
    check_kit(kit, ("scheduler",))
    settings = KitFolder(f"kit = {kit!r}", Path(kit)).settings("scheduler/scheduler_config.json")
    with cached_check(["noise schedule", settings]) as is_cached:
        if not is_cached:
            # Seconds to import
            from osfl.models.diffusion import load_noise_schedule

            load_noise_schedule(kit)
    check_steps(settings, steps)


def _check_weights_file(config: ClassifierConfig, file: Path, key: str) -> None:
    subject = [config.architecture, config.small_stem, config.init == "kit"]
    # The loader reports a missing file
    digest = file_sha256(file) if file.is_file() else ""
    with cached_check(["initial weights", *subject, digest]) as is_cached:
        if not is_cached:
            # Seconds to import
            from osfl.models.classifiers import check_weights_file

            check_weights_file(config, file, key)


def _check_local(model: RunModel, config: RunConfig) -> ModelLocation:
    if model.classifier is not None:
        return _check_local_weights(model, model.classifier)
    if missing := _missing_bytes(model):
        return ModelLocation(model, model.source, f"{missing / GB:.2f} GB")
    if not model.is_kit:
        _check_outside_kit(model, config)
        return ModelLocation(model, model.source)
    folder = find_kit(model.source, model.parts)
    check_kit(folder, model.parts, model.key, model.takes_image)
    return ModelLocation(model, folder)


def _missing_bytes(model: RunModel) -> int:
    """Return how many bytes of a model a run will fetch from the hub."""
    if not is_hub_id(model.source):
        return 0
    # The import stays here so that a client without a hub model stays small
    from osfl.kit.hub import missing_bytes, missing_model_bytes

    if model.is_kit:
        return missing_bytes(model.source, model.parts)
    return missing_model_bytes(model.source, model.parts[0], model.key)


def _check_local_weights(model: RunModel, settings: ClassifierConfig) -> ModelLocation:
    kit = find_kit(model.source) if settings.init == "kit" else ""
    name = kit or f"{settings.init}: {settings.architecture}"
    # A hub's kit is listed as a model of its own
    is_absent = (
        is_hub_id(model.source)
        and not Path(kit, initial_weights_file(settings.architecture, kit)).is_file()
    )
    if is_absent or weights_need_fetch(settings, model.key):
        return ModelLocation(model, name, "the weights")
    check_initial_weights(settings, kit, model.key)
    return ModelLocation(model, name)
