"""Who samples.

This process on its device, or Ray actors, each with a device of its own, on this machine or on a
cluster.

A worker is given whole units of the plan and gives back their images. Units depend on nothing but
themselves, so who samples which of them, and when, changes nothing.
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
from osfl.util.ray_folder import ray_folder
from server_app.synthesis.plan import ImageJob, Unit
from server_app.synthesis.progress import Watcher, watched

if TYPE_CHECKING:
    from ray import ObjectRef

Sample = Callable[[Sequence[ImageJob]], torch.Tensor]  # jobs -> uint8 [B, 3, H, W]
MakeSampler = Callable[[torch.device], Sample]  # loads the models on a device
Sampled = tuple[Unit, torch.Tensor, float]  # a unit, its images, its seconds

AHEAD = 2  # units that an actor has at a time, so that it does not wait for the next
REACH_SECONDS = 20.0  # for a cluster's answer
DEATHS = 3  # of actors at one unit, before the run gives up


def sample_units(
    make_sampler: MakeSampler,
    units: Sequence[Unit],
    device: torch.device,
    settings: SynthesisConfig,
    watcher: Watcher = lambda done, total: None,
) -> Iterator[Sampled]:
    """Sample every unit once, in any order.

    Args:
        settings: `workers` 0: in this process, on `device`; else so many Ray actors, on that kind
            of device.
        watcher: hears of every step of a unit that is sampled in this process; actors tell of whole
            units alone.

    Raises:
        ConfigError: the Ray cluster cannot be reached, or has too few devices.
        WorkerError: actors keep dying at a unit.
    """
    if not units:
        return iter(())
    if settings.workers == 0:
        return _in_this_process(make_sampler, units, device, settings, watcher)
    return _on_ray(make_sampler, units, device, settings)


class WorkerError(RuntimeError):
    """Actors keep dying at a unit."""


def _in_this_process(
    make_sampler: MakeSampler,
    units: Sequence[Unit],
    device: torch.device,
    settings: SynthesisConfig,
    watcher: Watcher,
) -> Iterator[Sampled]:
    """One unit after the other, or on a CPU several side by side.

    Threads that each sample a unit of their own do not wait for each other at every operation, as
    the threads of one operation do.
    """
    threads = settings.threads
    if settings.units_at_once > 1:
        threads = max(1, (threads or torch.get_num_threads()) // settings.units_at_once)
    with _threads(threads):
        # A sampler each, for a model's hooks and caches are of one forward pass at a time.
        samplers = [
            make_sampler(device) for _ in range(min(settings.units_at_once, len(units)) or 1)
        ]
        if len(samplers) > 1:
            yield from _side_by_side(samplers, units, threads, watcher)
            return
    for unit in units:
        with _threads(threads):
            sampled = _sampled(samplers[0], unit, watcher)
        yield sampled


def _side_by_side(
    samplers: Sequence[Sample], units: Sequence[Unit], threads: int, watcher: Watcher
) -> Iterator[Sampled]:
    """Each sampler in a thread; steps are told of the first one's units."""
    idle: SimpleQueue[Sample] = SimpleQueue()
    for sampler in samplers:
        idle.put(sampler)

    def sample(unit: Unit) -> Sampled:
        sampler = idle.get()
        try:
            told = watcher if sampler is samplers[0] else _nobody
            return _sampled(sampler, unit, told)
        finally:
            idle.put(sampler)

    waiting = deque(units)
    running = set[Future[Sampled]]()
    pool = ThreadPoolExecutor(len(samplers), initializer=torch.set_num_threads, initargs=(threads,))
    try:
        while waiting or running:
            while waiting and len(running) < AHEAD * len(samplers):
                running.add(pool.submit(sample, waiting.popleft()))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _sampled(sample: Sample, unit: Unit, watcher: Watcher) -> Sampled:
    watch = Stopwatch()
    with watched(watcher):
        pixels = sample(unit.jobs)
    return unit, pixels, watch.seconds


def _nobody(done: int, total: int) -> None:
    """Hears of no step."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads of the CPU; 0: as many as before.

    Sums of another number of threads differ in the last bit.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SynthesisWorker:
    """An actor: it loads the models with its first unit and keeps them."""

    def __init__(self, make_sampler: MakeSampler, device: str, threads: int):
        self._make_sampler = make_sampler
        self._device = device
        self._sample: Sample | None = None
        torch.set_num_threads(threads)

    def sample(self, jobs: tuple[ImageJob, ...]) -> tuple[Any, float]:
        """(the images as an array, seconds)."""
        sample = self._sample = self._sample or self._make_sampler(torch.device(self._device))
        watch = Stopwatch()
        return sample(jobs).numpy(), watch.seconds


def _on_ray(
    make_sampler: MakeSampler,
    units: Sequence[Unit],
    device: torch.device,
    settings: SynthesisConfig,
) -> Iterator[Sampled]:
    """On Ray's cluster, which ends with the sampling where it was begun for it."""
    import ray

    begun_here = _begin_ray(settings)
    try:
        gpus = _gpus_each(ray, device, settings)
        start = _starter(make_sampler, device, settings, gpus, begun_here)
        pool = ActorPool(start, settings.workers, units)
        try:
            yield from pool.sampled()
        finally:
            pool.end()
    finally:
        if begun_here:
            ray.shutdown()


def _starter(
    make_sampler: MakeSampler,
    device: torch.device,
    settings: SynthesisConfig,
    gpus: int,
    begun_here: bool,
) -> Callable[[], Any]:
    """What starts an actor."""
    import ray

    shared = ray.put(make_sampler)
    threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.workers)
    # In a cluster that others began, actors find the package by themselves.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    remote = ray.remote(SynthesisWorker).options(
        num_cpus=0, num_gpus=gpus, runtime_env=environment if begun_here else {}
    )
    return partial(remote.remote, shared, device.type, threads)


class ActorPool:
    """Ray actors, and the units that each of them has.

    Units go to whoever has none. When none is left, an idle actor repeats one that another has not
    finished, so that nobody waits for a slow machine; the first result counts. An actor that died
    is replaced, and its units are given out again, the first of them alone: a result on its way
    when its actor died is lost with it, so that unit may be blamed for the death at the next one.

    Args:
        start: starts an actor.
        count: of actors.
        units: to sample.
    """

    def __init__(self, start: Callable[[], Any], count: int, units: Sequence[Unit]):
        self._start = start
        self._waiting = deque(units)
        self._open = {unit.name: unit for unit in units}  # those without a result, by name
        self._deaths = Counter[str]()  # of actors, by the name of the unit
        # What each actor has, in the order it was given.
        self._held: dict[Any, list[tuple[ObjectRef, Unit]]] = {}
        for _ in range(count):
            self._held[start()] = []

    def sampled(self) -> Iterator[Sampled]:
        """Every unit once.

        Raises:
            WorkerError: actors keep dying at a unit.
        """
        import ray
        from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

        while self._open:
            _hand_out(self._waiting, self._held, self._open, self._deaths)
            references = [ref for given in self._held.values() for ref, _ in given]
            (ready,), _ = ray.wait(references, num_returns=1)
            actor = self._holder(ready)
            try:
                array, seconds = ray.get(ready)
            # Out of memory: Ray itself ended it, before the kernel would. Lost: its machine went
            # with a result that was not fetched yet.
            except (RayActorError, OutOfMemoryError, ObjectLostError) as error:
                self._replace(actor, error)
                continue
            except RayTaskError as error:
                raise error.cause from error
            unit = dict(self._held[actor])[ready]
            self._held[actor].remove((ready, unit))
            if self._open.pop(unit.name, None):
                yield unit, torch.from_numpy(array.copy()), seconds

    def _holder(self, reference: "ObjectRef") -> Any:
        """The actor that a result comes from."""
        for actor, given in self._held.items():
            if reference in dict(given):
                return actor
        raise KeyError(reference)

    def _replace(self, actor: Any, error: Exception) -> None:
        """Start another in the place of an actor that died.

        Its units wait again, the first ones.
        """
        import ray

        ray.kill(actor)
        lost = [unit for _, unit in self._held.pop(actor)]
        at = lost[0]
        self._deaths[at.name] += 1
        if self._deaths[at.name] == DEATHS:
            raise WorkerError(
                f"{DEATHS} workers died at unit {at.name}, of {at.jobs[0].client}. "
                "If memory ran out, lower synthesis.unit-size or synthesis.workers. "
                f"The last: {error}"
            ) from error
        for unit in reversed(lost):
            if unit.name in self._open and unit not in self._waiting:
                self._waiting.appendleft(unit)
        self._held[self._start()] = []

    def end(self) -> None:
        """End all actors."""
        import ray

        for actor in self._held:
            ray.kill(actor)


def _hand_out(
    waiting: deque[Unit],
    held: dict[Any, list[tuple["ObjectRef", Unit]]],
    open_units: dict[str, Unit],
    deaths: Mapping[str, int],
) -> None:
    for depth in range(AHEAD):  # everybody has one before anybody has two
        for actor, given in held.items():
            if len(given) > depth:
                continue
            while waiting and waiting[0].name not in open_units:
                waiting.popleft()
            # An actor died at one of these: each alone, so that another death has one cause.
            neighbours = [unit for _, unit in given] + list(waiting)[:1]
            if given and any(unit.name in deaths for unit in neighbours):
                continue
            if waiting:
                unit = waiting.popleft()
            elif not given:
                copies = Counter(
                    unit.name
                    for others in held.values()
                    for _, unit in others
                    if unit.name in open_units
                )
                if not copies or min(copies.values()) > 1:
                    continue
                unit = open_units[min(copies, key=lambda name: copies[name])]
            else:
                continue
            given.append((actor.sample.remote(unit.jobs), unit))


def check_workers(settings: SynthesisConfig, device: torch.device) -> None:
    """Whether there is Ray, a cluster where one is named, and else a GPU for each.

    Raises:
        ConfigError: there is not.
    """
    if not settings.workers:
        return
    if device.index is not None:
        raise ConfigError(
            f"device = '{device}' with synthesis.workers: Ray gives each worker a GPU of its own; "
            "device = 'cuda'"
        )
    if (
        device.type == "cuda"
        and not settings.ray_address
        and settings.workers > (here := torch.cuda.device_count())
    ):
        raise ConfigError(
            f"synthesis.workers = {settings.workers}: this machine has {here} GPU(s), and each "
            "worker takes one"
        )
    if find_spec("ray") is None:
        raise ConfigError(
            f"synthesis.workers = {settings.workers}: Ray is not installed; pip install -c "
            "requirements.txt -e '.[server]', or 0 workers"
        )
    _reach(settings.ray_address)


def _reach(address: str) -> None:
    """A look before Ray's own, which would wait for hours."""
    if address not in ("", "auto"):
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        except (OSError, ValueError) as error:
            raise _not_reached(address, error) from error


def _not_reached(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"synthesis.ray-address = {address!r}: {error}. It is ray://HOST:10001, HOST:6379, auto or "
        "empty"
    )


def _begin_ray(settings: SynthesisConfig) -> bool:
    """Join a cluster, or begin one on this machine; whether it is ours to end.

    Within Flower's simulation there is one already.

    Raises:
        ConfigError: the cluster cannot be reached, or is another than the simulation's.
    """
    import ray

    if ray.is_initialized():
        if settings.ray_address not in ("", "auto"):
            raise ConfigError(
                f"synthesis.ray-address = {settings.ray_address!r}: a simulation has a Ray cluster "
                "of its own; leave it empty"
            )
        return False
    if not (address := settings.ray_address):
        os.environ.update(ray_folder(os.environ))
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
            f"synthesis.workers = {settings.workers}: {free} GPU(s) free in the Ray cluster; each "
            "worker takes one"
        )
    return 1
