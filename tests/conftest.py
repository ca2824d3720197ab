"""Fixtures shared by all tests."""

import itertools
import os

# A process for each core: threads of one process would only wait for those of another
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Clients in tests are on the user's own machine, as in a simulation
os.environ.setdefault("OSFL_ALLOWED_DIRS", "/")

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import settings

# An example's seconds say more about the machine than about the code
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
ROOT = Path(__file__).resolve().parent.parent


def defaults() -> dict[str, Any]:
    """The run-config of pyproject.toml, flat."""
    from flwr.common.config import flatten_dict

    return flatten_dict(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    )


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores.

    A system test waits for half of its time, for processes to start and to notice. Two more took as
    long.
    """
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """System tests between the others of the first half, the longest first, and a group that shares
    a cluster: nothing should wait for them at last.
    """
    system = sorted(
        (i for i in items if i.get_closest_marker("system")),
        key=lambda i: "test_faults" not in i.nodeid,
    )
    others = [item for item in items if not item.get_closest_marker("system")]
    others.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    step = len(others) // (2 * len(system)) if system else 0
    items[:] = [
        item
        for start, one in enumerate(system)
        for item in (one, *others[start * step : (start + 1) * step])
    ]
    items += others[len(system) * step :]


class LoopGrid:
    """A Grid whose nodes are ClientApps called in this process.

    Real messages, real apps, no network.

    Args:
        app: the ClientApp.
        run_config: what every client sees.
        nodes: node-config of every node.
        tamper: may change or replace a reply (node index, message type, reply) -> reply or None
            (lost).
    """

    def __init__(
        self,
        app: ClientApp,
        run_config: dict,
        nodes: list[dict],
        tamper: Callable[[int, str, Message], Message | None] | None = None,
    ):
        self.app = app
        self.run_config = run_config
        self.nodes = nodes
        self.tamper = tamper
        self.sent: list[tuple[int, str]] = []
        self._ids = itertools.count(1)
        self._replies = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=100 + i, last_activated_at="then") for i in range(len(self.nodes))]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message_id = str(next(self._ids))
            index = message.metadata.dst_node_id - 100
            message.metadata.__dict__["_message_id"] = message_id  # what the SuperLink does
            self.sent.append((index, message.metadata.message_type))
            context = Context(1, 100 + index, self.nodes[index], RecordDict(), self.run_config)
            try:
                reply = self.app(message, context)
            except Exception as error:  # what Flower does
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
            if self.tamper:
                reply = self.tamper(index, message.metadata.message_type, reply)
            self._replies[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for i in message_ids if (reply := self._replies.pop(i, None)) is not None]


@cache
def public_digits(load_split: Any, count: int = 2500) -> Any:
    """A public corpus drawn as the whole is, but smaller.

    Every process that needs one would draw 12,000 images.
    """
    from osfl.data import digits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "PUBLIC_IMAGES", count)
        return load_split.__wrapped__("public")


@cache
def few_digits(load_split: Callable[[str], Any], split: str) -> Any:
    """Three images of every class and domain of a split, two of the test's; a small public one."""
    if split == "public":
        return public_digits(load_split)
    whole = load_split(split)
    seen: Counter = Counter()
    rows = []
    for i, kind in enumerate(zip(whole["label"], whole["domain"], strict=True)):
        seen[kind] += 1
        if seen[kind] <= (2 if split == "test" else 3):
            rows.append(i)
    return whole.select(rows)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OSFL_STATE", str(tmp_path_factory.mktemp("state")))
        yield


def begin_task() -> None:
    """Flower makes a Message only within a task."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


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
    time.
    """
    from osfl.data import digits, load
    from osfl.util.costs import FlopMeter

    def not_counted(meter: FlopMeter, kind: Hashable, step: Callable[[], Any]) -> Any:
        meter._flops[kind] = 0
        return step()

    if not request.node.get_closest_marker("flops"):
        monkeypatch.setattr(FlopMeter, "_count", not_counted)
    monkeypatch.setattr(digits, "load_split", partial(few_digits, digits.load_split))
    monkeypatch.setenv("OSFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OSFL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 0.01)
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.0)
    load._digits_partition.cache_clear()
    yield tmp_path
    load._digits_partition.cache_clear()


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether this process is the one to make a folder that all workers of a test run share."""
    done = folder.with_name(f"{folder.name}.done")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def tiny_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of the digits kit's shape with random weights.

    For tests of mathematics and plumbing, not of quality.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    with made_once(folder) as mine:
        if mine:
            make_tiny_kit(folder)
    return folder


def make_tiny_kit(folder: Path) -> None:
    import torch

    from osfl.data.digits import CLASSES
    from osfl.kit_training import untrained
    from osfl.models import classifiers

    torch.manual_seed(0)
    text = untrained.new_text_encoder(
        [f"an image of {name}" for name in CLASSES], length=8, width=32
    )
    untrained.pipeline(untrained.new_vae(), untrained.new_unet(32), text).save_pretrained(folder)
    (folder / "classifiers").mkdir()
    for architecture in ("resnet18", "shufflenet_v2_x1_0"):
        model = classifiers.build_classifier(architecture, 24, small_stem=True)
        classifiers.save_initialisation(
            model, folder / "classifiers" / f"{architecture}.safetensors"
        )
    captioner = untrained.new_captioner([f"a neon of a {name}" for name in CLASSES], 32, 16)
    captioner.model.save_pretrained(folder / "captioner")
    captioner.processor.save_pretrained(folder / "captioner")
    encoder = untrained.new_image_encoder(32, 16, 12)
    encoder.model.save_pretrained(folder / "image_encoder")
    encoder.processor.save_pretrained(folder / "feature_extractor")


@pytest.fixture(scope="session")
def tiny_unclip(tiny_kit: Path) -> Path:
    """The tiny kit in Stable unCLIP's format."""
    folder = tiny_kit.with_name("tiny-unclip")
    with made_once(folder) as mine:
        if mine:
            _make_tiny_unclip(tiny_kit, folder)
    return folder


def _make_tiny_unclip(tiny_kit: Path, folder: Path) -> None:
    import torch

    from osfl.kit_training import untrained
    from osfl.models import diffusion, encoders

    torch.manual_seed(1)
    kit = diffusion.load_kit(tiny_kit)
    encoder = encoders.load_image_encoder(str(tiny_kit), torch.device("cpu"))
    unet = untrained.new_unclip_unet(kit.unet, encoder.width)
    # Else embeddings would do nothing
    torch.nn.init.normal_(unet.class_embedding.linear_2.weight, std=0.1)
    noise = untrained.new_embedding_noise(
        torch.linspace(-1, 1, encoder.width), torch.linspace(0.5, 2, encoder.width)
    )
    untrained.unclip_pipeline(kit, unet, encoder, noise).save_pretrained(folder)


@pytest.fixture(scope="session")
def shipped_kit() -> Path:
    return ROOT / "kits" / "digits"


def plain_classifier(**settings: Any) -> Any:
    """A ResNet-18's settings with random first weights and plain SGD, and some of them changed."""
    from osfl.config import parse_run_config

    plain = {"architecture": "resnet18", "init": "none", "momentum": 0.0, "weight_decay": 0.0}
    return replace(parse_run_config(quick()).classifier, **{**plain, **settings})


def quick(**overrides: Any) -> dict[str, Any]:
    """The defaults with everything that costs time cut down; names as in Python (`feddeo__lr`)."""
    config = {
        **defaults(),
        "num-clients": 2,
        "join-timeout": 5.0,
        "deadline": 60.0,
        "data.image-size": 16,
        "synthesis.images-per-class": 1,
        "synthesis.steps": 2,
        "synthesis.unit-size": 8,
        "synthesis.batch-size": 8,
        "synthesis.units-at-once": 1,
        # an eighth of a ResNet-18, to train and to send
        "classifier.architecture": "shufflenet_v2_x1_0",
        "classifier.epochs": 1,
        "classifier.batch-size": 50,
        "global-model.architecture": "shufflenet_v2_x1_0",
        "global-model.epochs": 1,
        "global-model.batch-size": 50,
        "feddeo.epochs": 1,
        "feddeo.batch-size": 10,
        "fedcado.noise-edits": 1,
        "espresso.epochs": 1,
        "espresso.batch-size": 10,
        "espresso.noise-draws": 2,
        "espresso.clusters": 2,
        "espresso.components": 2,
        "feddisc.clusters": 2,
        "fedbip.epochs": 1,
        "fedbip.batch-size": 50,
        "domain-vector.epochs": 1,
        "domain-vector.batch-size": 50,
        "votes.draws": 2,
        "rounds.count": 2,
        "rounds.proxy-images": 8,
        "rounds.distillation-steps": 1,
    }
    config.update(
        {key.replace("__", ".").replace("_", "-"): value for key, value in overrides.items()}
    )
    unknown = set(config) - set(defaults())
    assert not unknown, unknown
    return config


@pytest.fixture
def osfl(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run the `osfl` command as a user does, from a folder of its own.

    Returns the finished process.
    """

    def call(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess:
        environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
        command = [str(Path(sys.executable).parent / "osfl"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout
        )

    return call


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Any]:
    """A `system_tools.Federation` in the test's own folder."""
    from system_tools import new_federation

    with new_federation(tmp_path) as made:
        yield made
