"""benchmarks/accuracy/guidance_scale.py: one grid for every method that samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import federation
from benchmarks.accuracy import guidance_scale
from benchmarks.federation import config_of
from osfl.config import flatten, parse_run_config
from osfl.methods import METHODS
from osfl.payload.kinds import Descriptions
from osfl.settings import default_config
from server_app.methods import feddeo, prompts_only
from tests.helpers.client_jobs import CLASSES
from tests.helpers.settings import quick

DEFAULTS = default_config()


@pytest.fixture
def base(home: Path, tiny_kit: Path) -> dict[str, Any]:
    changed = quick(kit=str(tiny_kit))
    return {key: value for key, value in changed.items() if DEFAULTS[key] != value}


def test_every_method_that_samples_has_its_row() -> None:
    methods = {name for name, method in METHODS.items() if method.samples}
    # By default it takes no guided step; a mixed run has the scales of the others
    methods -= {"latent-gaussian", "mixed"}
    assert {row.method for row in guidance_scale.ROWS.values()} == methods


@pytest.mark.parametrize("name", guidance_scale.ROWS)
def test_a_guidance_is_the_sum_of_a_methods_scales(name: str) -> None:
    """Nothing else of the configuration changes with it, and the grid's ends are valid."""
    row = guidance_scale.ROWS[name]
    defaults = flatten(parse_run_config(DEFAULTS))
    for scale in (min(guidance_scale.GRID), max(guidance_scale.GRID)):
        settings = guidance_scale.settings_of(row, scale, 3, guidance_scale.COMMON)
        values = flatten(config_of(settings))
        changed = {key for key, value in values.items() if value != defaults[key]}
        assert sum(values[key] for key in row.scales) == pytest.approx(scale)
        assert changed <= {*row.scales, *guidance_scale.COMMON, "method", "seed", "runs-dir"}
    assert all("guidance" in key for key in row.scales)


@pytest.mark.slow
def test_a_cell_is_computed_once_on_the_validation_split(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[str] = []
    load = federation.load_images

    def load_images(config: Any, node: Any, split: str, seed: int) -> Any:
        splits.append(split)
        return load(config, node, split, seed)

    monkeypatch.setattr(federation, "load_images", load_images)
    cell = guidance_scale.cell("prompts-only", 2.0, 0, base)
    assert splits == ["validation"] * 2
    assert len(cell["domains"]) == 2
    assert cell["average"] == pytest.approx(sum(cell["domains"]) / 2)
    monkeypatch.setattr(prompts_only, "run", lambda *_: pytest.fail("computed again"))
    assert guidance_scale.cell("prompts-only", 2.0, 0, base) == cell


@pytest.mark.slow
def test_branches_share_the_guidance_and_seeds_share_payloads(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[tuple[float, float]] = []
    seeds: list[object] = []
    sampler = feddeo.sampler

    def watched(job: Any, device: Any, payloads: Any) -> Any:
        settings = job.config.feddeo
        scales.append((settings.guidance_text, settings.guidance_description))
        return sampler(job, device, payloads)

    def payloads_of(settings: Any) -> dict[str, Descriptions]:
        seeds.append(settings["seed"])
        return {"client-0": Descriptions(CLASSES[:2], torch.randn(2, 8, 32))}

    monkeypatch.setattr(feddeo, "sampler", watched)
    monkeypatch.setattr(guidance_scale, "payloads_of", payloads_of)
    for name, seed in (("FedDEO", 0), ("FedDEO", 0), ("FedDEO", 1)):
        guidance_scale.cell(name, 3.0, seed, base)
    guidance_scale.cell("FedDEO description alone", 3.0, 0, base)
    assert scales == [(1.5, 1.5), (1.5, 1.5), (0.0, 3.0)]
    assert seeds == [guidance_scale.SEED] * 3


def test_a_line_names_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    averages = {1.0: [40.0, 50.0], 3.0: [60.0, 62.0]}
    monkeypatch.setattr(
        guidance_scale,
        "cell",
        lambda name, scale, seed, base: {"average": averages[scale][seed], "seconds": 1.0},
    )
    line = guidance_scale.line("prompts-only", [0, 1], {}, [1.0, 3.0])
    expected = {"": "prompts-only", "1": "45.0 ± 7.1", "3": "61.0 ± 1.4"}
    assert line == {**expected, "best": "3", "default": "3"}
