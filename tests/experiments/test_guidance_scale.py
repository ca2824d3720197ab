"""benchmarks/accuracy/guidance_scale.py: one grid for every method that samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import federation
from benchmarks.accuracy import guidance_scale
from osfl.config import flatten, parse_run_config
from osfl.methods import METHODS
from osfl.payload.kinds import Descriptions
from osfl.settings import default_config
from server_app.methods import feddeo, prompts_only
from tests.helpers.client_jobs import CLASSES
from tests.helpers.settings import quick

DEFAULTS = default_config()


@pytest.fixture
def base(home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    changed = quick(kit=str(tiny_kit), join_timeout=300.0, deadline=300.0)
    return {key: value for key, value in changed.items() if DEFAULTS[key] != value}


def test_every_method_that_samples_has_its_row() -> None:
    methods = {name for name, method in METHODS.items() if method.samples}
    assert {row.method for row in guidance_scale.ROWS.values()} == methods


@pytest.mark.parametrize("name", guidance_scale.ROWS)
def test_a_guidance_is_the_sum_of_a_methods_scales(name: str) -> None:
    """And nothing else of the configuration changes with it.

    The grid's ends are guidances that the method takes.
    """
    row = guidance_scale.ROWS[name]
    for scale in (min(guidance_scale.GRID), max(guidance_scale.GRID)):
        values = flatten(guidance_scale.config_of(row, scale, 3, guidance_scale.COMMON))
        defaults = flatten(parse_run_config(DEFAULTS))
        changed = {key: value for key, value in values.items() if value != defaults[key]}
        assert sum(values[key] for key in row.scales) == pytest.approx(scale)
        assert set(changed) <= {*row.scales, *guidance_scale.COMMON, "method", "seed", "runs-dir"}
    assert all("guidance" in key and key in values for key in row.scales)


def test_a_cell_is_kept_and_scored_on_the_validation_split(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    load = federation.load_images

    def watched(config, node, split, seed):  # type: ignore[no-untyped-def]
        asked.append(split)
        return load(config, node, split, seed)

    monkeypatch.setattr(federation, "load_images", watched)
    one = guidance_scale.cell("prompts-only", 2.0, 0, base, ({}, ""))
    assert asked == ["validation"] * 2
    assert len(one["domains"]) == 2
    assert one["average"] == pytest.approx(sum(one["domains"]) / 2)
    made = list(guidance_scale.EXPERIMENT.work.glob("*/manifest.jsonl"))
    assert [len(file.read_text().splitlines()) for file in made] == [20]
    monkeypatch.setattr(prompts_only, "run", lambda *args: pytest.fail("the cell was done"))
    assert guidance_scale.cell("prompts-only", 2.0, 0, base, ({}, "")) == one


def test_both_branches_share_the_guidance_and_other_payloads_are_other_cells(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    sampler = feddeo.sampler

    def watched(job, device, payloads):  # type: ignore[no-untyped-def]
        settings = job.config.feddeo
        seen.append((settings.guidance_text, settings.guidance_description))
        return sampler(job, device, payloads)

    monkeypatch.setattr(feddeo, "sampler", watched)
    taken = {"client-0": Descriptions(CLASSES[:2], torch.randn(2, 8, 32))}
    for name, sent in (
        ("FedDEO", "a"),
        ("FedDEO", "a"),
        ("FedDEO", "b"),
        ("FedDEO description alone", "a"),
    ):
        guidance_scale.cell(name, 3.0, 0, base, (taken, sent))
    assert seen == [(1.5, 1.5), (1.5, 1.5), (0.0, 3.0)]


def test_a_table_names_the_best(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    averages = {1.0: [40.0, 50.0], 3.0: [60.0, 62.0]}
    monkeypatch.setattr(
        guidance_scale,
        "cell",
        lambda name, scale, seed, **_: {"average": averages[scale][seed], "seconds": 1.0},
    )
    row = guidance_scale.line("prompts-only", [0, 1], base, [1.0, 3.0])
    assert row == {
        "": "prompts-only",
        "1": "45.0 ± 7.1",
        "3": "61.0 ± 1.4",
        "best": "3",
        "default": "3",
    }


@pytest.mark.system
def test_payloads_are_collected_once(base: dict[str, Any]) -> None:
    taken, sent = guidance_scale.collect(guidance_scale.ROWS["prompts-domain"], base)
    assert sorted(taken) == [f"client-{number}" for number in range(2)]
    folder = next(guidance_scale.EXPERIMENT.work.glob("prompts-domain-payloads-*"))
    before = (folder / "metrics.json").stat().st_mtime_ns
    again, digest = guidance_scale.collect(guidance_scale.ROWS["prompts-domain"], base)
    assert (again, digest) == (taken, sent)
    assert (folder / "metrics.json").stat().st_mtime_ns == before
