"""Server halves on the tiny kit, and the conditions that they compose."""

from types import SimpleNamespace
from typing import Any

import torch

from osfl.config import RunConfig, parse_run_config
from osfl.models.diffusion import load_kit
from server_app.synthesis.plan import plan_images
from tests.helpers.client_jobs import CLASSES
from tests.helpers.settings import quick

CPU = torch.device("cpu")
# b's only class is a's second, so no row number is a label, and clients' rows differ
HELD = {
    "a": [3, 8],
    "b": [8],
}
NAMES = {client: tuple(CLASSES[label] for label in labels) for client, labels in HELD.items()}
PLAN = plan_images("m", 0, HELD, 1)  # a 3, a 8, b 8
OWN = [103.0, 108.0, 208.0]  # what `marked` says of the three


def config_of(kit, **overrides: object) -> RunConfig:  # type: ignore[no-untyped-def]
    return parse_run_config(quick(kit=str(kit), **overrides))


def server(kit, config: RunConfig) -> Any:  # type: ignore[no-untyped-def]
    return SimpleNamespace(kit=str(kit), device=CPU, classes=CLASSES, config=config, mixing=None)


def prompts_of(kit, *texts: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return load_kit(kit).text.states(texts)
