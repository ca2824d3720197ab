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
    image_files = {}
    for count in (1, 3):
        start(
            quick(
                method="fedlmg",
                kit=str(tiny_kit),
                synthesis__unit_size=5,
                synthesis__parallel_units=count,
                synthesis__threads=count,
            ),
            f"by-{count}",
        )
        image_files[count] = files(home / "runs" / f"by-{count}", "images")
    assert len(image_files[1]) == 20
    assert image_files[1] == image_files[3]


def test_each_thread_has_a_sampler_and_its_share_of_the_cores() -> None:
    """Two at a time, all units once, and as many threads afterwards as before."""
    devices: list[object] = []
    sampler_threads: set[tuple[int, int]] = set()
    both = threading.Barrier(2, timeout=30)

    def make(device: torch.device) -> Sample:
        devices.append(device)
        number = len(devices)
        firsts: list[int] = []

        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            if not firsts:
                firsts.append(1)
                # Neither goes on before the other has begun.
                both.wait()
            sampler_threads.add((number, torch.get_num_threads()))
            step_done(number, 10)
            return torch.zeros(len(jobs), 3, 4, 4, dtype=torch.uint8)

        return sample

    before = torch.get_num_threads()
    reports: list[tuple[int, int]] = []
    two = settings(parallel_units=2, threads=6)
    sampled = sample_units(make, UNITS, CPU, two, lambda *steps: reports.append(steps))
    names = [unit.name for unit, _, _ in sampled]
    assert sorted(names) == sorted(unit.name for unit in UNITS)
    assert sampler_threads == {(1, 3), (2, 3)}
    # Steps of two units at once would jump to and fro: one sampler's are told
    assert set(reports) == {(1, 10)}
    assert torch.get_num_threads() == before


def test_an_error_of_a_thread_is_raised() -> None:
    def make(device: torch.device) -> Sample:
        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            raise PayloadError(jobs[0].client, "payload", "is bad")

        return sample

    with pytest.raises(PayloadError, match="payload of [ab]: payload: is bad"):
        list(sample_units(make, UNITS, CPU, settings(parallel_units=2)))


@pytest.mark.parametrize(("size", "batches"), [(3, [3, 3, 2]), (8, [8]), (50, [8]), (0, [8])])
def test_a_unit_is_sampled_in_batches(size: int, batches: list[int]) -> None:
    sizes: list[int] = []

    def make(device: torch.device) -> Sample:
        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            sizes.append(len(jobs))
            indices = [job.index for job in jobs]
            return torch.tensor(indices, dtype=torch.uint8).view(-1, 1, 1, 1)

        return sample

    jobs = plan_images("m", 0, {"a": [0]}, 8)
    pixels = images._in_batches(make, size)(CPU)(jobs)
    assert pixels.flatten().tolist() == list(range(8))
    assert sizes == batches


def test_batches_of_a_unit_are_halves_of_it() -> None:
    assert engine._batches(settings(unit_size=60, batch_size=0)) == [1, 2, 4, 8, 15, 30, 60]
    assert engine._batches(settings(unit_size=60, batch_size=7)) == [7]
    assert engine._batches(settings(unit_size=60, batch_size=90)) == [60]


def test_units_side_by_side_are_for_small_kits_on_a_cpu(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = load_kit(tiny_kit)
    open_to_choose = settings(parallel_units=0, threads=4)
    assert engine._parallel_units(kit, open_to_choose) == [1, 4]
    assert engine._parallel_units(kit, replace(open_to_choose, parallel_units=3)) == [3]
    for options in ({"threads": 1}, {"workers": 2}, {"attention": "math"}, {"compile": "on"}):
        assert engine._parallel_units(kit, replace(open_to_choose, **options)) == [1], options
    on_a_gpu = replace(kit, device=torch.device("cuda"))
    assert engine._parallel_units(on_a_gpu, open_to_choose) == [1]
    # Four of its models may take a quarter of what is free, and no byte more
    weights = [*kit.unet.parameters(), *kit.vae.parameters(), *kit.text.model.parameters()]
    size = sum(weight.nbytes for weight in weights)
    for missing, counts in ((0, [1, 4]), (1, [1])):
        memory = SimpleNamespace(available=4 * 4 * size - missing)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert engine._parallel_units(kit, open_to_choose) == counts


def test_the_fastest_is_chosen_measured_once_and_remembered(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are given. Batches grow as long as that pays."""
    measurements: list[tuple[int, int]] = []
    durations = {(1, 1): 9.0, (1, 2): 5.0, (1, 4): 5.4, (1, 8): 6.0}
    durations |= {(3, 1): 8.0, (3, 2): 4.0, (3, 4): 4.8, (3, 8): 1.0}

    def seconds(kit: Kit, batch: int, units: int, threads: int) -> float:
        measurements.append((units, batch))
        return durations[units, batch]

    monkeypatch.setattr(engine, "_seconds_an_image", seconds)
    auto_settings = settings(unit_size=8, batch_size=0, parallel_units=0, threads=3)
    for _ in range(2):
        choice = engine.resolve_auto(str(tiny_kit), CPU, auto_settings)
        assert (choice.batch_size, choice.parallel_units) == (2, 3)
    # 5.4 is within a tenth of 5.0, so 8 is tried; 4.8 is not within a tenth of 4.0.
    assert measurements == [(1, 1), (1, 2), (1, 4), (1, 8), (3, 1), (3, 2), (3, 4)]
    (home / "cache" / "calibration.json").write_text("{cut")
    assert engine.resolve_auto(str(tiny_kit), CPU, auto_settings) == choice
    assert len(measurements) == 14


def test_set_batches_are_not_measured(tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_seconds_an_image", lambda *_: pytest.fail("measured"))
    choice = engine.resolve_auto(str(tiny_kit), CPU, settings(batch_size=50, parallel_units=2))
    assert (choice.batch_size, choice.parallel_units) == (8, 2)


@pytest.mark.slow
def test_a_measurement_is_of_real_passes(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "REPEATS", 1)
    before = torch.get_num_threads()
    auto_settings = settings(unit_size=2, batch_size=0, parallel_units=0, threads=2)
    choice = engine.resolve_auto(str(tiny_kit), CPU, auto_settings)
    ((_, record),) = json.loads((home / "cache" / "calibration.json").read_text()).items()
    durations = record["seconds an image"]
    assert all(seconds > 0 for seconds in durations.values())
    assert f"{choice.parallel_units} x {choice.batch_size}" == min(durations, key=durations.get)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("given", "units", "each"), [(6, 2, 3), (2, 3, 1), (0, 1, 4)])
def test_units_are_measured_with_their_share_of_the_cores(
    given: int, units: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest of them is through after 6 s; without a number of threads, torch's is shared."""
    measurements: list[tuple[int, int]] = []
    took = [4.0, 5.0, 6.0][-units:]
    before = torch.get_num_threads()

    def seconds(kit: Kit, batch: int) -> float:
        measurements.append((batch, torch.get_num_threads()))
        return took.pop()

    monkeypatch.setattr(engine, "_seconds", seconds)
    torch.set_num_threads(4)
    try:
        duration = engine._seconds_an_image(None, 5, units, given)  # type: ignore[arg-type]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert measurements == [(10, each)] * units
    assert duration == 6.0 / (5 * units)


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
    """The machine would now choose otherwise; the choice holds for images that are still to be
    made.
    """
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
