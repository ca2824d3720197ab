"""Workers that sample: this process, or Ray actors on this machine or a cluster, one device each.

A worker gets whole work units of the plan and returns their images. Units are independent, so the
images do not depend on which worker samples a unit, or when.
"""

import logging
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from osfl.config import ConfigError, SynthesisConfig
from osfl.util.costs import Stopwatch
from osfl.util.ray_folder import ray_variables
from server_app.synthesis.plan import ImageJob, Unit
from server_app.synthesis.progress import Watcher, report_steps_to

if TYPE_CHECKING:
    from ray import ObjectRef

Sample = Callable[[Sequence[ImageJob]], torch.Tensor]  # jobs -> uint8 [B, 3, H, W]
MakeSampler = Callable[[torch.device], Sample]  # loads the models on a device
Sampled = tuple[Unit, torch.Tensor, float]  # a unit, its images, its seconds
Assignment = list[tuple["ObjectRef", Unit]]  # an actor's results to come and units, in order

UNITS_PER_ACTOR = 2  # units assigned to an actor at a time, so that it is never idle
CONNECT_SECONDS = 20.0  # to connect to a cluster
MAX_DEATHS = 3  # actors that may die at a unit before the run fails
CLAIMED_CPUS = 0.01  # of an actor: its threads are set, and machines may have more actors than CPUs


def never() -> bool:
    """Return False: all units are sampled."""
    return False


def sample_units(
    make_sampler: MakeSampler,
    units: Sequence[Unit],
    device: torch.device,
    settings: SynthesisConfig,
    watcher: Watcher = lambda done, total: None,
    is_stopped: Callable[[], bool] = never,
) -> Iterator[Sampled]:
    """Sample every unit once, in any order.

    Args:
        make_sampler: loads the models.
        device: the device of this process, or the kind of device of the actors.
        settings: with `workers` 0, units are sampled in this process, else by as many Ray actors.
        watcher: called for every denoising step in this process. Actors report whole units only.
        is_stopped: returns whether to begin no further unit. Actors begin all.

    Raises:
        ConfigError: the Ray cluster cannot be reached, or has too few devices.
        WorkerError: actors keep dying at a unit.
    """
    if not units or is_stopped():
        return iter(())
    if settings.workers == 0:
        return _in_this_process(make_sampler, units, device, settings, watcher, is_stopped)
    return _on_ray(make_sampler, units, device, settings)


class WorkerError(RuntimeError):
    """Actors keep dying at a unit."""


def _in_this_process(
    make_sampler: MakeSampler,
    units: Sequence[Unit],
    device: torch.device,
    settings: SynthesisConfig,
    watcher: Watcher,
    is_stopped: Callable[[], bool],
) -> Iterator[Sampled]:
    """Sample units sequentially, or on a CPU several in parallel.

    Threads that sample a unit each do not synchronize after every operation, unlike threads that
    share an operation.
    """
    threads = settings.threads
    if settings.parallel_units > 1:
        threads = max(1, (threads or torch.get_num_threads()) // settings.parallel_units)
    with _threads(threads):
        # One sampler per thread: a model's hooks and caches support one forward pass at a time
        samplers = [
            make_sampler(device) for _ in range(min(settings.parallel_units, len(units)) or 1)
        ]
        if len(samplers) > 1:
            yield from _in_parallel(samplers, units, threads, watcher, is_stopped)
            return
    for unit in units:
        if is_stopped():
            return
        with _threads(threads):
            result = _sample_unit(samplers[0], unit, watcher)
        yield result


def _in_parallel(
    samplers: Sequence[Sample],
    units: Sequence[Unit],
    threads: int,
    watcher: Watcher,
    is_stopped: Callable[[], bool],
) -> Iterator[Sampled]:
    """Run each sampler in its own thread; the watcher gets the first one's steps."""
    idle: SimpleQueue[Sample] = SimpleQueue()
    for sampler in samplers:
        idle.put(sampler)

    def sample(unit: Unit) -> Sampled | None:
        if is_stopped():
            return None
        sampler = idle.get()
        try:
            unit_watcher = watcher if sampler is samplers[0] else _ignore_step
            return _sample_unit(sampler, unit, unit_watcher)
        finally:
            idle.put(sampler)

    waiting = deque(units)
    running = set[Future[Sampled | None]]()
    pool = ThreadPoolExecutor(len(samplers), initializer=torch.set_num_threads, initargs=(threads,))
    try:
        while waiting or running:
            if is_stopped():
                waiting.clear()
            while waiting and len(running) < UNITS_PER_ACTOR * len(samplers):
                running.add(pool.submit(sample, waiting.popleft()))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                if result := future.result():
                    yield result
    finally:
        pool.shutdown(cancel_futures=True)


def _sample_unit(sample: Sample, unit: Unit, watcher: Watcher) -> Sampled:
    watch = Stopwatch()
    with report_steps_to(watcher):
        pixels = sample(unit.jobs)
    return unit, pixels, watch.seconds


def _ignore_step(done: int, total: int) -> None:
    """Ignore a denoising step."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's number of CPU threads in the context; 0 leaves it unchanged.

    Sums by another number of threads differ in the last bit.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


class SynthesisWorker:
    """A Ray actor, which loads the models for its first unit and keeps them."""

    def __init__(self, make_sampler: MakeSampler, device: str, threads: int):
        self._make_sampler = make_sampler
        self._device = device
        self._sample: Sample | None = None
        torch.set_num_threads(threads)

    def sample(self, jobs: tuple[ImageJob, ...]) -> tuple[Any, float]:
        """Return the images as an array, and the seconds."""
        sample = self._sample = self._sample or self._make_sampler(torch.device(self._device))
        watch = Stopwatch()
        return sample(jobs).numpy(), watch.seconds


def _on_ray(
    make_sampler: MakeSampler,
    units: Sequence[Unit],
    device: torch.device,
    settings: SynthesisConfig,
) -> Iterator[Sampled]:
    """Sample on a Ray cluster. A cluster or connection that was started for it ends with it."""
    import ray

    owns_ray = _begin_ray(settings)
    try:
        gpus = _gpus_each(ray, device, settings)
        start = _starter(make_sampler, device, settings, gpus, owns_ray)
        pool = ActorPool(start, settings.workers, units)
        try:
            yield from pool.sample()
        finally:
            pool.end()
    finally:
        if owns_ray:
            ray.shutdown()


def _starter(
    make_sampler: MakeSampler,
    device: torch.device,
    settings: SynthesisConfig,
    gpus: int,
    owns_ray: bool,
) -> Callable[[], Any]:
    """Return a function that starts an actor."""
    import ray

    shared = ray.put(make_sampler)
    threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.workers)
    # Actors in a simulation's cluster find the package without it
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    # Ray spreads only what claims something. In a simulation clients have claimed all CPUs
    can_claim = owns_ray and ray.available_resources().get("CPU", 0) >= 1
    remote = ray.remote(SynthesisWorker).options(
        num_cpus=CLAIMED_CPUS if can_claim else 0,
        num_gpus=gpus,
        runtime_env=environment if owns_ray else {},
        scheduling_strategy="SPREAD",
    )
    return partial(remote.remote, shared, device.type, threads)


class ActorPool:
    """Ray actors and the units assigned to them.

    Units go to actors that have none. When no unit is waiting, an idle actor repeats a unit that
    another actor has not finished, so that a slow machine does not delay the run; the first result
    counts. An actor that died is replaced, and its units are assigned again. The unit at which it
    died is assigned alone: a finished result is lost if its actor dies at the next unit before the
    result is fetched, so the wrong unit may be blamed.

    Args:
        start: starts an actor.
        count: number of actors.
        units: the units to sample.
    """

    def __init__(self, start: Callable[[], Any], count: int, units: Sequence[Unit]):
        self._start = start
        self._waiting = deque(units)
        self._unfinished = {unit.name: unit for unit in units}
        self._deaths = Counter[str]()  # of actors, by unit name
        self._assignments: dict[Any, Assignment] = {}
        for _ in range(count):
            self._assignments[start()] = []

    def sample(self) -> Iterator[Sampled]:
        """Yield every unit once with its images.

        Raises:
            WorkerError: actors keep dying at a unit.
        """
        import ray
        from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

        while self._unfinished:
            _hand_out(self._waiting, self._assignments, self._unfinished, self._deaths)
            references = [ref for units in self._assignments.values() for ref, _ in units]
            (ready,), _ = ray.wait(references, num_returns=1)
            actor = self._actor_of(ready)
            try:
                array, seconds = ray.get(ready)
            # OutOfMemoryError: Ray killed the actor before the kernel would. ObjectLostError: the
            # machine was lost with a result that was not fetched yet
            except (RayActorError, OutOfMemoryError, ObjectLostError) as error:
                self._replace(actor, error)
                continue
            except RayTaskError as error:
                raise error.cause from error
            unit = dict(self._assignments[actor])[ready]
            self._assignments[actor].remove((ready, unit))
            if self._unfinished.pop(unit.name, None):
                yield unit, torch.from_numpy(array.copy()), seconds

    def _actor_of(self, reference: "ObjectRef") -> Any:
        """Return the actor that a result comes from."""
        for actor, units in self._assignments.items():
            if reference in dict(units):
                return actor
        raise KeyError(reference)

    def _replace(self, actor: Any, error: Exception) -> None:
        """Replace an actor that died, and put its units at the front of the queue."""
        import ray

        ray.kill(actor)
        lost_units = [unit for _, unit in self._assignments.pop(actor)]
        suspect = lost_units[0]
        self._deaths[suspect.name] += 1
        if self._deaths[suspect.name] == MAX_DEATHS:
            raise WorkerError(
                f"{MAX_DEATHS} workers died at unit {suspect.name}, of {suspect.jobs[0].client}. "
                "If memory ran out, set a lower synthesis.unit-size or synthesis.workers. "
                f"The last error: {error}"
            ) from error
        for unit in reversed(lost_units):
            if unit.name in self._unfinished and unit not in self._waiting:
                self._waiting.appendleft(unit)
        self._assignments[self._start()] = []

    def end(self) -> None:
        """End all actors."""
        import ray

        for actor in self._assignments:
            ray.kill(actor)


def _hand_out(
    waiting: deque[Unit],
    assignments: "dict[Any, Assignment]",
    unfinished: dict[str, Unit],
    deaths: Mapping[str, int],
) -> None:
    # Every actor gets a first unit before any gets a second one
    for depth in range(UNITS_PER_ACTOR):
        for actor, units in assignments.items():
            if len(units) > depth:
                continue
            while waiting and waiting[0].name not in unfinished:
                waiting.popleft()
            # A unit at which an actor died is assigned alone, so that another death has one cause
            neighbors = [unit for _, unit in units] + list(waiting)[:1]
            if units and any(unit.name in deaths for unit in neighbors):
                continue
            if waiting:
                unit = waiting.popleft()
            elif not units:
                copies = Counter(
                    unit.name
                    for assigned_units in assignments.values()
                    for _, unit in assigned_units
                    if unit.name in unfinished
                )
                if not copies or min(copies.values()) > 1:
                    continue
                unit = unfinished[min(copies, key=lambda name: copies[name])]
            else:
                continue
            units.append((actor.sample.remote(unit.jobs), unit))


def check_workers(settings: SynthesisConfig, device: torch.device) -> None:
    """Check that Ray is installed, a configured cluster answers, or there is a GPU per worker.

    Raises:
        ConfigError: one of these does not hold.
    """
    if not settings.workers:
        return
    if device.index is not None:
        raise ConfigError(
            f"device = '{device}' with synthesis.workers: Ray assigns each worker its own GPU; set "
            "device = 'cuda'"
        )
    if (
        device.type == "cuda"
        and not settings.ray_address
        and settings.workers > (count := torch.cuda.device_count())
    ):
        raise ConfigError(
            f"synthesis.workers = {settings.workers}: this machine has {count} GPU(s), and each "
            "worker requires one"
        )
    if find_spec("ray") is None:
        raise ConfigError(
            f"synthesis.workers = {settings.workers}: Ray is not installed; run pip install -c "
            "requirements.txt -e '.[server]', or set synthesis.workers = 0"
        )
    _reach(settings.ray_address)


def _reach(address: str) -> None:
    """Check that a cluster accepts connections, because Ray itself would wait for hours."""
    if address not in ("", "auto"):
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise _not_reached(address, error) from error


def _not_reached(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"synthesis.ray-address = {address!r}: {error}. It must be ray://HOST:10001, HOST:6379, "
        "auto or empty"
    )


def _begin_ray(settings: SynthesisConfig) -> bool:
    """Connect to a cluster, or start one on this machine, unless Flower's simulation has one.

    Returns:
        Whether this process must end it, or the connection to it.

    Raises:
        ConfigError: the cluster cannot be reached, or the run is a simulation, which has its own.
    """
    import ray

    if ray.is_initialized():
        if settings.ray_address not in ("", "auto"):
            raise ConfigError(
                f"synthesis.ray-address = {settings.ray_address!r}: a simulation has its own Ray "
                "cluster; set synthesis.ray-address to ''"
            )
        return False
    if not (address := settings.ray_address):
        os.environ.update(ray_variables(os.environ))
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        return True
    _reach(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_reached(address, error) from error
    return True


def _gpus_each(ray: Any, device: torch.device, settings: SynthesisConfig) -> int:
    if device.type != "cuda":
        return 0
    free = int(ray.available_resources().get("GPU", 0))
    if free < settings.workers:
        raise ConfigError(
            f"synthesis.workers = {settings.workers}: the Ray cluster has {free} free GPU(s), and "
            "each worker requires one"
        )
    return 1
