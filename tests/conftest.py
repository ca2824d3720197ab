"""Fixtures shared by all tests."""

import gc
import os

# A process for each core: threads of one process would only wait for those of another
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Clients in tests are on the user's own machine, as in a simulation
os.environ.setdefault("OSFL_ALLOWED_DIRS", "/")

import subprocess
import sys
from collections.abc import Callable, Generator, Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.helpers.loop_grid import begin_task
from tests.helpers.settings import ROOT
from tests.helpers.small_digits import few_digits
from tests.helpers.tiny_kits import (
    make_once,
    make_tiny_autoencoder_kit,
    make_tiny_kit,
    make_tiny_pair,
    make_tiny_unclip,
)

# An example's seconds say more about the machine than about the code
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores if there are system tests.

    They wait for half of their time, for processes to start and to notice. Two more took as long.
    """
    cores = os.cpu_count() or 1
    return cores if "not system" in config.option.markexpr else cores + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """System tests between the others of the first half, the longest first, and a group that shares
    a cluster: nothing should wait for them at last.

    Tests that run the command are slow: each process imports torch.
    """
    for item in items:
        if {"osfl", "federation"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    system = sorted(
        (i for i in items if i.get_closest_marker("system")),
        key=lambda i: "test_faults" not in i.nodeid,
    )
    plain_items = [item for item in items if not item.get_closest_marker("system")]
    plain_items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    step = len(plain_items) // (2 * len(system)) if system else 0
    items[:] = [
        item
        for start, system_item in enumerate(system)
        for item in (system_item, *plain_items[start * step : (start + 1) * step])
    ]
    items += plain_items[len(system) * step :]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import the tests without collecting garbage, and leave their modules out of it afterwards.

    A run collects several times, and would walk through a million objects of libraries each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_frozen_modules = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leave modules out of garbage collections that tests before this one imported.

    Each message of a run ends with a collection, which took a third of a small run's time.
    """
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


def pytest_unconfigure() -> None:
    """Let modules end with their process: triton complains of those that stay."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OSFL_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def task() -> None:
    """No test waits for another one to begin it."""
    begin_task()


@pytest.fixture
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """Runs and caches of a test go below its own folder.

    Clients have 30 images to train on and 20 to test on.

    FLOPs are counted where a test is marked `flops`: counting takes a quarter of a small run's
    time. A caption of random weights never ends by itself, and has few tokens.
    """
    from osfl.data import digits, load
    from osfl.methods import oscar
    from osfl.util.costs import FlopMeter

    def not_counted(meter: FlopMeter, kind: Hashable, step: Callable[[], Any]) -> Any:
        meter._flops[kind] = 0
        return step()

    if not request.node.get_closest_marker("flops"):
        monkeypatch.setattr(FlopMeter, "_count", not_counted)
    monkeypatch.setattr(oscar, "CAPTION_TOKENS", 6)
    monkeypatch.setattr(digits, "load_split", partial(few_digits, digits.load_split))
    monkeypatch.setenv("OSFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OSFL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 0.01)
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.0)
    load._digits_partition.cache_clear()
    yield tmp_path
    load._digits_partition.cache_clear()


@pytest.fixture(scope="session")
def tiny_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of the digits kit's shape with random weights.

    For tests of mathematics and plumbing, not of quality.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    return make_once(folder, lambda: make_tiny_kit(folder))


@pytest.fixture(scope="session")
def tiny_unclip(tiny_kit: Path) -> Path:
    """The tiny kit in Stable unCLIP's format."""
    folder = tiny_kit.with_name("tiny-unclip")
    return make_once(folder, lambda: make_tiny_unclip(tiny_kit, folder))


@pytest.fixture(scope="session")
def tiny_pair(tiny_kit: Path) -> Path:
    """The tiny kit with two text encoders and a pooled vector, as SDXL has."""
    folder = tiny_kit.with_name("tiny-pair")
    return make_once(folder, lambda: make_tiny_pair(tiny_kit, folder))


@pytest.fixture(scope="session")
def tiny_autoencoder_kit(tiny_kit: Path) -> Path:
    """The tiny kit with a tiny autoencoder (TAESD)."""
    folder = tiny_kit.with_name("tiny-autoencoder")
    return make_once(folder, lambda: make_tiny_autoencoder_kit(tiny_kit, folder))


@pytest.fixture(scope="session")
def shipped_kit() -> Path:
    return ROOT / "kits" / "digits"


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[Any]]]:
    """(c0, branches) of every call of `compose`, which predicts no noise.

    c0 is states; a branch has the states `c`, the `image` and the `scale`.
    """
    from types import SimpleNamespace

    import torch

    from server_app.methods import (
        espresso,
        fedbip,
        feddeo,
        feddisc,
        fedlmg,
        latent_gaussian,
        prompts_only,
    )

    calls: list[tuple[Any, list[Any]]] = []

    def record(kit, z, t, c0, conditions):  # type: ignore[no-untyped-def]
        branches = [
            SimpleNamespace(c=part.c.states, image=part.c.image, scale=part.scale)
            for part in conditions
        ]
        calls.append((c0.states, branches))
        return torch.zeros_like(z)

    for module in (prompts_only, feddeo, fedlmg, feddisc, fedbip, espresso, latent_gaussian):
        monkeypatch.setattr(module, "compose", record)
    return calls


@pytest.fixture
def osfl(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run the `osfl` command as a user does, from a folder of its own.

    Returns the finished process.
    """

    from osfl.launch.flower import MALLOC_SETTINGS
    from tests.helpers.fork_server import start_fork_server

    terminal = {"COLUMNS": "200", "TERM": "dumb"}

    def call(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess:
        commands, _ = start_fork_server(**terminal)
        environment = {**MALLOC_SETTINGS, **os.environ, **terminal}
        command = [str(commands / "osfl"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout
        )

    return call


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Any]:
    """A `system_tools.Federation` in the test's own folder."""
    from tests.helpers.system_tools import new_federation

    with new_federation(tmp_path) as deployment:
        yield deployment
