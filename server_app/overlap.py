"""Synthesis of the images of early clients, while other clients still work (`synthesis.overlap`).

A thread makes the work units of accepted payloads. A unit's name is a digest of everything that
determines its images, and nothing of it depends on other clients. So the run, which later plans the
units of all clients, finds these units in its folder, and makes the others. The thread reports no
error: the run meets it again, at the same unit, and handles it.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

from osfl.config import RunConfig, all_parts, is_mixed
from osfl.kit.kits import download_bytes, find_kit
from osfl.kit.used_parts import sampling_parts
from osfl.methods import METHODS
from osfl.payload.kinds import Sent
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import SYNTHESIZED, Status
from osfl.util.imports import without_collection
from osfl.util.log import log
from osfl.util.text import sanitize
from server_app.context import ServerJob
from server_app.defenses.filters import filters_payloads
from server_app.synthesis.choice import resolve_synthesis
from server_app.synthesis.plan import Unit

# For the thread to end when the run fails, which takes a denoising step or the loading of a kit
ABORT_SECONDS = 10.0
# For a thread to end that makes no images
IDLE_SECONDS = 0.5
# Of a ResNet-18, which a client or the server trains
WEIGHTS_BYTES = 50_000_000
# Memory that decoding a payload needs, in times of its size
DECODING = 3
# Memory in which a kit is loaded, in times of its files' size
LOADING = 2


def overlaps(grid: Grid, config: RunConfig) -> bool:
    """Return whether a run synthesizes images while clients still work.

    The clients of a simulation share the server's memory and GPU, so they do not by default. A
    run's settings may also rule it out:

    - `class-balance`: a client's counts depend on all clients.
    - A defense that drops payloads compares them all, and leaves no image of those that it drops.
    - `synthesis.workers`: Ray's actors would be started for each payload, and a shared cluster
      releases their devices too late for the next actors.
    - A method of an installed package: it may do other work than `synthesize_and_train`, which
      would be done for each payload.
    """
    setting = config.synthesis.overlap
    if setting == "off" or (setting == "auto" and not isinstance(grid, HttpGrid)):
        return False
    if config.class_balance or config.secure_sum or config.synthesis.workers:
        return False
    methods = [METHODS[name] for name in (config.method, *all_parts(config))]
    are_built_in = not any("." in method.server for method in methods)
    return METHODS[config.method].samples and are_built_in and not filters_payloads(config)


class Overlap:
    """The thread that makes images, and the payloads that it has yet to use.

    As a context it ends the thread: at the end after the unit that is being made, at an exception
    after the denoising step. The run's status is left to the thread of the run.

    Args:
        config: the run's, whose automatic sampling settings may be open.
        status: the run's.
    """

    def __init__(self, grid: Grid, config: RunConfig, folder: RunFolder, status: Status):
        self._is_possible = overlaps(grid, config)
        self._config = config
        self._folder = folder
        self._status = status
        # Sums by another number of threads differ in the last bit
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="overlap", daemon=True)
        self._changed = threading.Condition()
        self._accepted: set[str] = set()
        self._waiting: dict[str, Sent] = {}
        self._is_ended = False
        self._is_aborted = False
        # By client: the number of images that exist, of all that are planned
        self._images: dict[str, tuple[int, int]] = {}
        self._reported: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> "Overlap":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_aborted = kind is not None
        self._end()
        if self._thread.ident is None:
            return
        try:
            if not self._is_aborted:
                self._thread.join(IDLE_SECONDS)
            if not self._is_aborted and self._thread.is_alive():
                self._status.phase("finishing the images in progress")
                self._thread.join()
        except BaseException:
            self._is_aborted = True
            raise
        finally:
            self._thread.join(ABORT_SECONDS)
            self._report(is_ended=True)

    def draw(self, payloads: Mapping[str, Sent]) -> None:
        """Make the images of further payloads, and report what is made in the run's status.

        Args:
            payloads: all that are accepted, by client.
        """
        if not self._is_possible:
            return
        new = {client: sent for client, sent in payloads.items() if client not in self._accepted}
        self._accepted.update(new)
        with self._changed:
            self._waiting.update(new)
            self._changed.notify()
        if new and self._thread.ident is None:
            self._thread.start()
        self._report()

    def _report(self, is_ended: bool = False) -> None:
        for client, (done, total) in list(self._images.items()):
            if self._reported.get(client) == (done, total):
                continue
            self._reported[client] = (done, total)
            self._status.note(client, f"{done} of {total} images synthesized")
            if done == total:
                self._status.stamp(client, SYNTHESIZED)
        # The others are made after this, with those of all clients
        for client, (done, total) in self._reported.items() if is_ended else ():
            if done < total:
                self._status.note(client, "")

    # ---- In the thread ----

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)
        try:
            while payloads := self._next():
                self._make_usable(payloads)
        except _AbortedError:
            pass
        # The run meets it again
        except Exception as error:
            reason = sanitize(f"{type(error).__name__}: {error}")
            log.info("further images are synthesized after the last payload: %s", reason)

    def _next(self) -> dict[str, Sent]:
        """Wait for payloads, and return those that have no images yet; {} at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ended)
            payloads = {} if self._is_ended else dict(sorted(self._waiting.items()))
            self._waiting.clear()
        return payloads

    def _end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    def _make_usable(self, payloads: dict[str, Sent]) -> None:
        """Make the images of all payloads but those with which sampling diverges."""
        while payloads and not self._is_stopped(has_kit=False):
            try:
                return self._make(payloads)
            except PayloadError as error:
                log.info("%s", sanitize(error))
                del payloads[error.client]
        return None

    def _make(self, payloads: Mapping[str, Sent]) -> None:
        # The import takes seconds
        with without_collection():
            from server_app.synthesis.images import make_units, plan_work

        status = _SilentStatus(self._folder.path, lambda: self._is_aborted)
        self._config = resolve_synthesis(self._config, self._folder, status)
        for recipe in self._recipes(status, payloads):
            work = plan_work(recipe.job, *recipe.inputs(has_public_domains=False))
            clients = {unit.jobs[0].client for unit in work.units}
            for client in clients:
                jobs = [unit.jobs for unit in work.units if unit.jobs[0].client == client]
                self._images[client] = (0, sum(map(len, jobs)))
            make_units(recipe.job, work, self._count, self._is_stopped)

    def _recipes(self, status: Status, payloads: Mapping[str, Sent]) -> list[Any]:
        from server_app.methods import mixed
        from server_app.pipeline import recipe_of

        method = self._config.method
        kinds = {client: self._folder.payload_kind(client) or method for client in payloads}
        job = ServerJob(self._config, self._folder, status, tuple(payloads), {}, kinds)
        return (
            mixed.recipes_of(job, payloads)
            if is_mixed(self._config)
            else [recipe_of(job, payloads)]
        )

    def _count(self, unit: Unit) -> None:
        client = unit.jobs[0].client
        done, total = self._images[client]
        self._images[client] = (done + len(unit.jobs), total)

    def _is_stopped(self, has_kit: bool = True) -> bool:
        """Return whether to begin no further unit."""
        if not self._is_ended and (reason := self._shortage(has_kit)):
            log.info("further images are synthesized after the last payload: %s", reason)
            self._end()
        return self._is_ended

    def _shortage(self, has_kit: bool) -> str:
        """Return what images must leave to payloads that are yet to come, or ""."""
        disk = shutil.disk_usage(self._folder.path).free
        if disk < weights_bytes(self._config):
            return f"{disk / 1e6:,.0f} MB free on the disk"
        needed = DECODING * self._config.max_payload_mb * 1e6
        if not has_kit:
            kit = find_kit(self._config.sampling_kit)
            needed += LOADING * download_bytes(kit, sampling_parts(self._config))
        memory = psutil.virtual_memory().available
        return f"{memory / 1e6:,.0f} MB of memory free" if memory < needed else ""


def weights_bytes(config: RunConfig) -> int:
    """Estimate the bytes of a run's payloads and models: one per client and three global models.

    A training continues without room for its state, which is not counted.
    """
    return WEIGHTS_BYTES * (config.num_clients + 3)


class _AbortedError(Exception):
    """The run has failed, so that images are of no use now."""


class _SilentStatus(Status):
    """A status without a file, whose steps end the thread when the run fails."""

    def __init__(self, folder: Path, is_aborted: Callable[[], bool]):
        super().__init__(folder)
        self._is_aborted = is_aborted

    def phase(self, name: str, total: int = 0) -> None:
        """Ignore a phase."""

    def advance(self, done: int, total: int) -> None:
        """Ignore progress."""

    def step(self, done: int, total: int) -> None:
        """End the thread if the run has failed."""
        if self._is_aborted():
            raise _AbortedError
