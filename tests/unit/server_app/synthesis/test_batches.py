"""Batches within a unit, and units side by side: the same images, and a choice that a run keeps."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from osfl.config import SynthesisConfig, parse_run_config
from osfl.models.diffusion import Kit, load_kit
from osfl.payload.wire import PayloadError
from server_app.synthesis import engine, images
from server_app.synthesis.plan import ImageJob, cut_units, plan_images
from server_app.synthesis.progress import step_done
from server_app.synthesis.workers import Sample, sample_units
from tests.helpers.settings import quick
from tests.helpers.whole_runs import files, start

CPU = torch.device("cpu")
UNITS = cut_units(plan_images("feddeo", 0, {"a": [0, 1], "b": [0, 1]}, 6), 4, {}, {})


def settings(**overrides: object) -> SynthesisConfig:
    return replace(parse_run_config(quick()).synthesis, **overrides)  # type: ignore[arg-type]


@pytest.mark.slow
def test_units_side_by_side_are_the_same_images(home: Path, tiny_kit: Path) -> None:
    """With classifier guidance, whose hooks on the teachers are a sampler's own."""
    made = {}
    for count in (1, 3):
        start(
            quick(
                method="fedlmg",
                kit=str(tiny_kit),
                synthesis__unit_size=5,
                synthesis__units_at_once=count,
                synthesis__threads=count,
            ),
            f"by-{count}",
        )
        made[count] = files(home / "runs" / f"by-{count}", "images")
    assert len(made[1]) == 20
    assert made[1] == made[3]


def test_each_thread_has_a_sampler_and_its_share_of_the_cores() -> None:
    """Two at a time, all units once, and as many threads afterwards as before."""
    made: list[object] = []
    seen: set[tuple[int, int]] = set()
    both = threading.Barrier(2, timeout=30)

    def make(device: torch.device) -> Sample:
        made.append(device)
        number = len(made)
        firsts: list[int] = []

        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            if not firsts:
                firsts.append(1)
                # Neither goes on before the other has begun.
                both.wait()
            seen.add((number, torch.get_num_threads()))
            step_done(number, 10)
            return torch.zeros(len(jobs), 3, 4, 4, dtype=torch.uint8)

        return sample

    before = torch.get_num_threads()
    told: list[tuple[int, int]] = []
    two = settings(units_at_once=2, threads=6)
    sampled = sample_units(make, UNITS, CPU, two, lambda *steps: told.append(steps))
    names = [unit.name for unit, _, _ in sampled]
    assert sorted(names) == sorted(unit.name for unit in UNITS)
    assert seen == {(1, 3), (2, 3)}
    # Steps of two units at once would jump to and fro: one sampler's are told
    assert set(told) == {(1, 10)}
    assert torch.get_num_threads() == before


def test_what_a_thread_raises_is_raised() -> None:
    def make(device: torch.device) -> Sample:
        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            raise PayloadError(jobs[0].client, "payload", "is bad")

        return sample

    with pytest.raises(PayloadError, match="payload of [ab]: payload: is bad"):
        list(sample_units(make, UNITS, CPU, settings(units_at_once=2)))


@pytest.mark.parametrize(("size", "batches"), [(3, [3, 3, 2]), (8, [8]), (50, [8]), (0, [8])])
def test_a_unit_is_sampled_in_batches(size: int, batches: list[int]) -> None:
    seen: list[int] = []

    def make(device: torch.device) -> Sample:
        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            seen.append(len(jobs))
            indices = [job.index for job in jobs]
            return torch.tensor(indices, dtype=torch.uint8).view(-1, 1, 1, 1)

        return sample

    jobs = plan_images("m", 0, {"a": [0]}, 8)
    made = images._in_batches(make, size)(CPU)(jobs)
    assert made.flatten().tolist() == list(range(8))
    assert seen == batches


def test_batches_of_a_unit_are_halves_of_it() -> None:
    assert engine._batches(settings(unit_size=60, batch_size=0)) == [1, 2, 4, 8, 15, 30, 60]
    assert engine._batches(settings(unit_size=60, batch_size=7)) == [7]
    assert engine._batches(settings(unit_size=60, batch_size=90)) == [60]


def test_units_side_by_side_are_for_small_kits_on_a_cpu(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = load_kit(tiny_kit)
    open_to_choose = settings(units_at_once=0, threads=4)
    assert engine._units_at_once(kit, open_to_choose) == [1, 4]
    assert engine._units_at_once(kit, replace(open_to_choose, units_at_once=3)) == [3]
    for other in ({"threads": 1}, {"workers": 2}, {"attention": "math"}, {"compile": "on"}):
        assert engine._units_at_once(kit, replace(open_to_choose, **other)) == [1], other
    on_a_gpu = replace(kit, device=torch.device("cuda"))
    assert engine._units_at_once(on_a_gpu, open_to_choose) == [1]
    # Four of its models may take a quarter of what is free, and no byte more
    weights = [*kit.unet.parameters(), *kit.vae.parameters(), *kit.text.model.parameters()]
    size = sum(weight.nbytes for weight in weights)
    for missing, found in ((0, [1, 4]), (1, [1])):
        memory = SimpleNamespace(available=4 * 4 * size - missing)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert engine._units_at_once(kit, open_to_choose) == found


def test_the_fastest_is_chosen_measured_once_and_remembered(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By seconds that are given. Batches grow as long as that pays."""
    seen: list[tuple[int, int]] = []
    given = {(1, 1): 9.0, (1, 2): 5.0, (1, 4): 5.4, (1, 8): 6.0}
    given |= {(3, 1): 8.0, (3, 2): 4.0, (3, 4): 4.8, (3, 8): 1.0}

    def seconds(kit: Kit, batch: int, units: int, threads: int) -> float:
        seen.append((units, batch))
        return given[units, batch]

    monkeypatch.setattr(engine, "_seconds_an_image", seconds)
    wanted = settings(unit_size=8, batch_size=0, units_at_once=0, threads=3)
    for _ in range(2):
        found = engine.resolve_auto(str(tiny_kit), CPU, wanted)
        assert (found.batch_size, found.units_at_once) == (2, 3)
    # 5.4 is within a tenth of 5.0, so 8 is tried; 4.8 is not within a tenth of 4.0.
    assert seen == [(1, 1), (1, 2), (1, 4), (1, 8), (3, 1), (3, 2), (3, 4)]
    (home / "cache" / "calibration.json").write_text("{cut")
    assert engine.resolve_auto(str(tiny_kit), CPU, wanted) == found
    assert len(seen) == 14


def test_what_is_given_is_not_measured(tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_seconds_an_image", lambda *_: pytest.fail("measured"))
    found = engine.resolve_auto(str(tiny_kit), CPU, settings(batch_size=50, units_at_once=2))
    assert (found.batch_size, found.units_at_once) == (8, 2)


def test_a_measurement_is_of_real_passes(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "REPEATS", 1)
    before = torch.get_num_threads()
    wanted = settings(unit_size=2, batch_size=0, units_at_once=0, threads=2)
    found = engine.resolve_auto(str(tiny_kit), CPU, wanted)
    ((_, known),) = json.loads((home / "cache" / "calibration.json").read_text()).items()
    taken = known["seconds an image"]
    assert all(seconds > 0 for seconds in taken.values())
    assert f"{found.units_at_once} x {found.batch_size}" == min(taken, key=taken.get)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("given", "units", "each"), [(6, 2, 3), (2, 3, 1), (0, 1, 4)])
def test_units_are_measured_with_their_share_of_the_cores(
    given: int, units: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest of them is through after 6 s; without a number of threads, torch's is shared."""
    seen: list[tuple[int, int]] = []
    took = [4.0, 5.0, 6.0][-units:]
    before = torch.get_num_threads()

    def seconds(kit: Kit, batch: int) -> float:
        seen.append((batch, torch.get_num_threads()))
        return took.pop()

    monkeypatch.setattr(engine, "_seconds", seconds)
    torch.set_num_threads(4)
    try:
        taken = engine._seconds_an_image(None, 5, units, given)  # type: ignore[arg-type]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert seen == [(10, each)] * units
    assert taken == 6.0 / (5 * units)


def test_a_measurement_is_without_cached_features(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    load = engine._load

    def noted(source: str, device: torch.device, given: SynthesisConfig) -> Kit:
        loaded.append(given.cache_interval)
        return load(source, device, given)

    monkeypatch.setattr(engine, "_load", noted)
    monkeypatch.setattr(engine, "_seconds_an_image", lambda *_: 1.0)
    engine.resolve_auto(str(tiny_kit), CPU, settings(batch_size=0, cache_interval=3))
    assert loaded == [1]


@pytest.mark.slow
def test_a_run_keeps_the_choice_that_it_began_with(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine would now choose otherwise, and for images that are still to be made."""
    config = quick(method="prompts-only", kit=str(tiny_kit), synthesis__batch_size=0)
    sizes: list[int] = []
    chosen: list[SynthesisConfig] = []
    in_batches = images._in_batches

    def noted(make_sampler: images.MakeSampler, size: int) -> images.MakeSampler:
        sizes.append(size)
        return in_batches(make_sampler, size)

    def choose(batch: int) -> None:
        def settle(source: str, device: torch.device, given: SynthesisConfig) -> SynthesisConfig:
            chosen.append(given)
            return replace(given, batch_size=batch)

        monkeypatch.setattr(engine, "resolve_auto", settle)

    monkeypatch.setattr(images, "_in_batches", noted)
    choose(3)
    start(config)
    folder = home / "runs" / "job"
    assert json.loads((folder / "synthesis.json").read_text())["batch_size"] == 3
    units = files(folder, "units")
    next((folder / "units").iterdir()).unlink()
    choose(5)
    start(config)
    assert files(folder, "units") == units
    assert sizes == [3, 3]
    assert len(chosen) == 1
    start(config, "another")
    assert sizes == [3, 3, 5]
    # Another batch is another unit: its images may differ in the last bit.
    assert not files(home / "runs" / "another", "units").keys() & units.keys()
