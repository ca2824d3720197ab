"""Units of images on Ray actors: a real Ray, real processes."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch

from osfl.config import ConfigError, SynthesisConfig, parse_run_config
from osfl.payload.wire import PayloadError
from server_app.synthesis.plan import ImageJob, cut_units, plan_images
from server_app.synthesis.workers import (
    UNITS_PER_ACTOR,
    MakeSampler,
    Sample,
    WorkerError,
    _hand_out,
    check_workers,
    sample_units,
)
from tests.helpers.settings import quick
from tests.helpers.whole_runs import files, start

# One cluster, not one for every process that runs tests
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
CPU = torch.device("cpu")
# Twelve units of two
UNITS = cut_units(plan_images("feddeo", 0, {"a": [0, 1], "b": [0, 1]}, 6), 2, {}, {})


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One for all tests, as within Flower's simulation; it has no GPU."""
    ray.init(address="local", include_dashboard=False, num_gpus=0, num_cpus=1, log_to_driver=False)
    yield
    ray.shutdown()


def workers(count: int) -> SynthesisConfig:
    return replace(parse_run_config(quick()).synthesis, workers=count, threads=1)


def that(act: Callable[[Sequence[ImageJob]], None]) -> MakeSampler:
    """A sampler that does something before every unit; each image's first pixel is its index."""

    def make(device: torch.device) -> Sample:
        def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
            act(jobs)
            return (
                torch.tensor([job.index for job in jobs], dtype=torch.uint8)
                .view(-1, 1, 1, 1)
                .expand(-1, 3, 4, 4)
                .contiguous()
            )

        return sample

    return make


def test_models_are_loaded_with_the_threads_that_sample() -> None:
    """The choice of `auto`, measured while models are loaded, depends on them."""
    thread_counts = []
    before = torch.get_num_threads()

    def make(device: torch.device) -> Sample:
        thread_counts.append(torch.get_num_threads())
        return lambda jobs: (
            thread_counts.append(torch.get_num_threads()) or torch.zeros(len(jobs), 3, 4, 4)
        )

    three = replace(workers(0), threads=3)
    list(sample_units(make, UNITS[:1], CPU, three))
    assert (thread_counts, torch.get_num_threads()) == ([3, 3], before)


def names_of_sampled(make_sampler: MakeSampler, settings: SynthesisConfig) -> list[str]:
    names = []
    for unit, pixels, _ in sample_units(make_sampler, UNITS, CPU, settings):
        assert pixels[:, 0, 0, 0].tolist() == [job.index for job in unit.jobs]
        names.append(unit.name)
    return names


def test_images_do_not_depend_on_who_samples_them(home: Path, tiny_kit: Path) -> None:
    """With classifier guidance, whose gradients differ in the last bit where another number of
    threads adds them up.
    """
    image_files = {}
    for count in (0, 3):
        start(
            quick(
                method="fedlmg", kit=str(tiny_kit), synthesis__workers=count, synthesis__threads=1
            ),
            f"by-{count}",
        )
        image_files[count] = files(home / "runs" / f"by-{count}", "images", "manifest.jsonl")
    assert image_files[0] == image_files[3]
    assert len((home / "runs" / "by-3" / "manifest.jsonl").read_text().splitlines()) == 20
    units = files(home / "runs" / "by-0", "units")
    goes_on = {"workers": 5, "threads": 1, "checkpointing": "on"}  # and has all
    start(
        quick(
            method="fedlmg",
            kit=str(tiny_kit),
            **{f"synthesis__{key}": value for key, value in goes_on.items()},
        ),
        "by-0",
    )
    assert files(home / "runs" / "by-0", "units") == units


@pytest.mark.parametrize("count", [0, 1])
def test_threads_are_those_of_the_config(count: int) -> None:
    def make(device: torch.device) -> Sample:
        return lambda jobs: torch.full(
            (len(jobs), 3, 4, 4), torch.get_num_threads(), dtype=torch.uint8
        )

    before = torch.get_num_threads()
    sampled = list(sample_units(make, UNITS[:2], CPU, replace(workers(count), threads=before + 2)))
    assert [pixels.unique().tolist() for _, pixels, _ in sampled] == [[before + 2]] * 2
    assert torch.get_num_threads() == before


def test_more_workers_than_cores_have_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: torch.device) -> Sample:
        return lambda jobs: torch.full(
            (len(jobs), 3, 4, 4), torch.get_num_threads(), dtype=torch.uint8
        )

    monkeypatch.setattr("server_app.synthesis.workers.os.cpu_count", lambda: 1)
    sampled = list(sample_units(make, UNITS[:2], CPU, replace(workers(2), threads=0)))
    assert [pixels.unique().tolist() for _, pixels, _ in sampled] == [[1]] * 2


def test_a_dead_actor_costs_its_unit_and_a_result_at_most(tmp_path: Path) -> None:
    """Two die, each at its second unit, in the middle of it."""

    def act(jobs: Sequence[ImageJob]) -> None:
        with open(tmp_path / f"{os.getpid()}", "a") as log:
            log.write("x")
        began = [file.name for file in tmp_path.iterdir() if file.read_text() == "xx"]
        if str(os.getpid()) in began and len(began) <= 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert sorted(names_of_sampled(that(act), workers(2))) == sorted(unit.name for unit in UNITS)
    died = [file for file in tmp_path.iterdir() if file.read_text() == "xx"]
    assert len(died) >= 2
    # Again for each death: its unit, and a result that was on its way; and at the end the units
    # of an actor that is slow to begin, by the idle one
    again = 2 * 2 + UNITS_PER_ACTOR
    assert sum(len(file.read_text()) for file in tmp_path.iterdir()) <= 12 + again


def test_a_unit_that_kills_whoever_samples_it_ends_the_run() -> None:
    poison = UNITS[3].jobs[0]

    def act(jobs: Sequence[ImageJob]) -> None:
        if jobs[0] == poison:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        WorkerError,
        match=f"3 workers died at unit {UNITS[3].name}, of a. If memory ran out, set a lower "
        "synthesis.unit-size.*The last error: ",
    ):
        names_of_sampled(that(act), workers(1))


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError(
            "1 worker(s) were killed due to the node running low on memory"
        ),
        ray.exceptions.ObjectLostError("00" * 28, None, "nowhere"),
    ],
    ids=["out of memory", "result lost with its machine"],
)
def test_an_actor_that_ray_ends_or_loses_is_replaced(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    get = ray.get
    ended = []

    def end_once(ref: object) -> object:
        if not ended:
            ended.append(ref)
            raise error
        return get(ref)

    monkeypatch.setattr(ray, "get", end_once)
    assert sorted(names_of_sampled(that(lambda jobs: None), workers(1))) == sorted(
        unit.name for unit in UNITS
    )


def test_no_worker_waits_for_a_slow_one(tmp_path: Path) -> None:
    """One of two takes 200 s for its first.

    The other does its work too, and each unit is there once.
    """

    def act(jobs: Sequence[ImageJob]) -> None:
        slow = tmp_path / "slow"
        try:
            slow.touch(exist_ok=False)
            slow.write_text(str(os.getpid()))
        except FileExistsError:
            pass
        time.sleep(200 if slow.read_text() == str(os.getpid()) else 0.2)

    began = time.monotonic()
    names = names_of_sampled(that(act), workers(2))
    assert sorted(names) == sorted(unit.name for unit in UNITS)
    assert time.monotonic() - began < 150  # the start of two actors, on a busy machine


def test_an_actors_error_is_its_own_here() -> None:
    def act(jobs: Sequence[ImageJob]) -> None:
        raise PayloadError("client-7", "vectors", "led astray")

    with pytest.raises(PayloadError, match="^payload of client-7: vectors: led astray$") as caught:
        names_of_sampled(that(act), workers(1))
    assert caught.value.client == "client-7"


def test_a_cluster_without_enough_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"synthesis.workers = 2: the Ray cluster has 0 free GPU"):
        list(sample_units(that(lambda jobs: None), UNITS, torch.device("cuda"), workers(2)))


def test_workers_without_ray_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server_app.synthesis.workers.find_spec", lambda name: None)
    check_workers(workers(0), CPU)
    with pytest.raises(ConfigError, match="synthesis.workers = 2: Ray is not installed"):
        check_workers(workers(2), CPU)


def test_gpus_that_are_not_there_are_missed_before_the_clients_work() -> None:
    with pytest.raises(
        ConfigError,
        match=r"synthesis.workers = 1000: this machine has \d+ GPU\(s\), and each worker requires",
    ):
        check_workers(workers(1000), torch.device("cuda"))
    with pytest.raises(
        ConfigError, match="device = 'cuda:1' with synthesis.workers: .*device = 'cuda'"
    ):
        check_workers(workers(2), torch.device("cuda:1"))


def test_another_cluster_than_the_simulations_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="synthesis.ray-address = 'ray://host:10001': a simulation has its own Ray cluster",
    ):
        list(
            sample_units(
                that(lambda jobs: None),
                UNITS,
                CPU,
                replace(workers(1), ray_address="ray://host:10001"),
            )
        )


def test_every_worker_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    """Ray believes in two; each worker touches a file named after its device and its GPU.

    A worker waits for the other: one that starts late would find every unit sampled.
    """
    ray.shutdown()
    try:
        ray.init(
            address="local", include_dashboard=False, num_gpus=2, num_cpus=1, log_to_driver=False
        )

        def make(device: torch.device) -> Sample:
            gpus = "-".join(map(str, ray.get_gpu_ids()))
            (tmp_path / f"{device.type}-{gpus}").touch()

            def sample(jobs: Sequence[ImageJob]) -> torch.Tensor:
                deadline = time.monotonic() + 120
                while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
                    time.sleep(0.1)
                return torch.zeros(len(jobs), 3, 4, 4, dtype=torch.uint8)

            return sample

        list(sample_units(make, UNITS[:8], torch.device("cuda"), workers(2)))
        assert {file.name for file in tmp_path.iterdir()} == {"cuda-0", "cuda-1"}
    finally:
        ray.shutdown()
        ray.init(
            address="local", include_dashboard=False, num_gpus=0, num_cpus=1, log_to_driver=False
        )


def is_worker(process: psutil.Process) -> bool:
    """Return whether a process belongs to the cluster that these tests began."""
    try:
        ours = any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.Error:
        return False
    return ours and "".join(process.info["cmdline"] or []).startswith("ray::SynthesisWorker")  # type: ignore[attr-defined]


def test_actors_end_with_the_sampling() -> None:
    """Also in a cluster that goes on, as a simulation's does."""

    def alive_now() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if is_worker(process)]

    sampled = sample_units(that(lambda jobs: None), UNITS, CPU, workers(2))
    next(sampled)
    # A process that is changing its title has none for a moment
    deadline = time.monotonic() + 60
    while not alive_now():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    list(sampled)
    deadline = time.monotonic() + 60
    while alive := alive_now():
        assert time.monotonic() < deadline, alive
        time.sleep(0.5)


def test_everybody_has_a_unit_before_anybody_has_two() -> None:
    assignments: list[tuple[str, tuple[ImageJob, ...]]] = []

    class Actor:
        def __init__(self, name: str):
            self.sample = self
            self.remote = lambda jobs: assignments.append((name, jobs))

    queues: dict = {Actor("one"): [], Actor("two"): []}
    _hand_out(deque(UNITS[:3]), queues, {unit.name: unit for unit in UNITS[:3]}, {})
    assert assignments == [("one", UNITS[0].jobs), ("two", UNITS[1].jobs), ("one", UNITS[2].jobs)]


def test_a_cluster_that_is_not_there_is_named() -> None:
    ray.shutdown()
    try:
        with pytest.raises(
            ConfigError,
            match="synthesis.ray-address = '127.0.0.1:1': .*It must be ray://HOST:10001",
        ):
            list(
                sample_units(
                    that(lambda jobs: None),
                    UNITS,
                    CPU,
                    replace(workers(1), ray_address="127.0.0.1:1"),
                )
            )
    finally:
        ray.init(
            address="local", include_dashboard=False, num_gpus=0, num_cpus=1, log_to_driver=False
        )
