"""Trained models: whole runs of FedAvg and its kin, and the global model with its teachers.

All with a classifier that NumPy trains alongside (tests/helpers/analytic_classifier.py); the
messages, strategies and loops are the real ones.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from PIL import Image
from safetensors.torch import load_file

from client_app.context import ClientJob
from client_app.learning.local_training import train_round
from osfl.config import NodeConfig, RunConfig, parse_run_config
from osfl.data.load import Images, load_images
from osfl.models import classifiers
from osfl.payload.kinds import Classifier
from osfl.payload.messages import pack_state, unpack_state
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.seeds import seed_of
from server_app import pipeline
from server_app.baselines.feddyn import FedDyn
from server_app.methods import fedcado, fedlmg
from tests.helpers import analytic_classifier
from tests.helpers.analytic import CLASSES, Adam, random_pixels, softmax
from tests.helpers.analytic_classifier import (
    PARAMETERS,
    State,
    Training,
    features,
    in_numbers,
    in_use,
    sgd,
)
from tests.helpers.analytic_training import assert_same, order
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start

CPU = torch.device("cpu")
TRAINING = {
    "classifier__init": "none",
    "classifier__lr": 0.1,
    "classifier__weight_decay": 0.01,
    "classifier__batch_size": 11,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "build_classifier", analytic_classifier.build)


@pytest.fixture
def root(home: Path) -> Path:
    """Two clients' folders: one has 12 images, of which `fit` leaves one out each epoch, the other
    24. A run of theirs takes no digits and no kit.
    """
    for number, count in enumerate((12, 24)):
        for split in ("train", "test"):
            for row, pixels in enumerate(random_pixels(count, 16, seed=number)):
                folder = home / "root" / f"client-{number}" / split / CLASSES[(row + number) % 4]
                folder.mkdir(parents=True, exist_ok=True)
                picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
                picture.save(folder / f"{row:02d}.png")
    return home / "root"


def begin() -> State:
    return in_numbers(analytic_classifier.build("", len(CLASSES)).state_dict())


# ---- Rounds ----


class Party:
    """A client of the run, with NumPy: its images, and FedDyn's gradient."""

    def __init__(self, config: RunConfig, number: int):
        node = NodeConfig(partition_id=number, num_partitions=config.num_clients)
        images = load_images(config.data, node, "train", config.seed)
        self.config = config
        self.name = f"client-{number}"
        self.x = features(images.pixels)
        self.labels = images.labels.numpy()
        self.gradient = {name: np.zeros_like(value) for name, value in begin().items()}

    def train(self, model: State, number: int) -> State:
        """theta_k of a round: the local objective and what the method adds to it."""
        config = self.config
        settings = self.config.classifier
        seed = seed_of(config.seed, config.method, self.name, number)
        batches = order(len(self.labels), settings.batch_size, config.rounds.local_epochs, seed)

        def pull(name: str, value: np.ndarray) -> np.ndarray | float:
            if config.method == "fedprox":  # of mu / 2 ||theta - theta^(t-1)||^2
                return config.rounds.proximal_mu * (value - model[name])
            if config.method == "feddyn":  # of alpha / 2 ||theta - theta^(t-1)||^2 - <g_k, theta>
                return config.rounds.dyn_alpha * (value - model[name]) - self.gradient[name]
            return 0.0

        trained = sgd(model, self.x, self.labels, batches, settings, pull=pull)
        for name in PARAMETERS:  # g_k <- g_k - alpha (theta_k - theta^(t-1))
            way = trained[name] - model[name]
            self.gradient[name] = self.gradient[name] - config.rounds.dyn_alpha * way
        return trained


def mean_of(models: list[State], images: tuple[int, ...]) -> State:
    """The mean by numbers of images."""
    return {name: np.average([m[name] for m in models], 0, images) for name in models[0]}


def config_of(root: Path, **overrides: object) -> dict[str, Any]:
    return quick(
        data__name="folder",
        data__root=str(root),
        data__classes=",".join(CLASSES),
        rounds__local_epochs=2,
        **TRAINING,
        **overrides,
    )


def run(root: Path, tamper: Any = None, **overrides: object) -> tuple[RunConfig, dict[str, Any]]:
    """A whole run over Flower's messages, and its model."""
    config = config_of(root, **overrides)
    start(config, tamper=tamper)
    models = root.parent / "runs" / "job" / "models"
    return parse_run_config(config), load_file(models / f"{config['method']}.safetensors")


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_fedavg_and_fedprox_over_two_rounds(root: Path, method: str) -> None:
    config, result = run(root, method=method, rounds__count=2, rounds__proximal_mu=2.0)
    model = begin()
    parties = [Party(config, number) for number in range(2)]
    for number in (1, 2):
        model = mean_of([party.train(model, number) for party in parties], (12, 24))
    assert_same(result, model)


def test_feddyn_over_three_rounds(root: Path) -> None:
    """Algorithm 1: h <- h - alpha / m sum_k (theta_k - theta); theta <- mean theta_k - h / alpha.

    However many images a client has. BatchNorm's statistics are averaged.
    """
    config, result = run(root, method="feddyn", rounds__count=3, rounds__dyn_alpha=0.7)
    model = begin()
    parties = [Party(config, number) for number in range(2)]
    h = {name: np.zeros_like(model[name]) for name in PARAMETERS}
    for number in (1, 2, 3):
        before = model
        trained = [party.train(before, number) for party in parties]
        model = mean_of(trained, (1, 1))
        for name in PARAMETERS:
            ways = [theta_k[name] - before[name] for theta_k in trained]
            h[name] = h[name] - 0.7 / 2 * np.sum(ways, axis=0)
            model[name] = model[name] - h[name] / 0.7
        assert np.abs(h["3.weight"]).max() > 0.01
        assert np.abs(parties[0].gradient["3.weight"]).max() > 0.01
    assert_same(result, model)


def test_a_round_that_is_asked_for_again_is_trained_once(tmp_path: Path) -> None:
    """A server that was killed asks for its round anew: FedDyn's gradient then has the round's way
    once, and so has the next round's.
    """
    config = parse_run_config(quick(method="feddyn", **TRAINING))
    images = Images(random_pixels(20, 32), torch.arange(20) % 4)
    job = ClientJob(config, "client-0", CLASSES, lambda size: images, "", CPU)
    model = analytic_classifier.build("", len(job.classes)).state_dict()
    replies = {}
    for place, numbers_asked in (("once", (1, 2, 3)), ("again", (1, 2, 2, 3))):
        folder = tmp_path / place
        folder.mkdir()
        for number in numbers_asked:
            request = ConfigRecord({"server-round": number, "dyn-alpha": 0.7})
            request["architecture"] = config.classifier.architecture
            content = RecordDict({"model": pack_state(model), "config": request})
            reply = train_round(content, job, folder)
        replies[place] = unpack_state(reply.array_records["model"])
    assert_same(replies["again"], in_numbers(replies["once"]))


def test_feddyns_server_by_hand_with_one_client_of_three_away() -> None:
    """alpha 0.5, m = 3, theta 1.

    Round 1, replies 2 and 4: h = -0.5 / 3 (1 + 3) = -2/3; theta = 3 + 4/3 = 13/3.

    Round 2, replies 4, 5 and 3: h = -2/3 - 0.5 / 3 (12 - 13) = -1/2; theta = 4 + 1 = 5.

    A statistic is the mean.
    """
    strategy = FedDyn(0.5, 3, frozenset({"theta"}), min_train_nodes=1, min_available_nodes=1)
    grid: Any = SimpleNamespace(get_node_ids=lambda: [1, 2, 3])
    model = arrays(1.0)
    for number, values, expected in ((1, (2.0, 4.0), 13 / 3), (2, (4.0, 5.0, 3.0), 5.0)):
        messages = list(strategy.configure_train(number, model, ConfigRecord(), grid))
        assert all(m.content.config_records["config"]["dyn-alpha"] == 0.5 for m in messages)
        replies = [
            Message(
                RecordDict({"arrays": arrays(value), "metrics": MetricRecord({"clients": 1})}),
                dst_node_id=node,
                message_type="train",
            )
            for node, value in enumerate(values, start=1)
        ]
        aggregate, _ = strategy.aggregate_train(number, replies)
        assert aggregate is not None
        model = aggregate
        assert model["theta"].numpy() == pytest.approx(expected)
        assert model["statistic"].numpy() == pytest.approx(np.mean(values))


def arrays(value: float) -> ArrayRecord:
    array = np.full(2, value, dtype=np.float32)
    return ArrayRecord({"theta": Array(array), "statistic": Array(array)})


# ---- FedDF ----


@pytest.mark.parametrize("steps", [1, 6])
def test_feddfs_distillation(root: Path, steps: int) -> None:
    """From the clients' mean by images, `steps` steps of Adam on KL(softmax(mean of the teachers'
    logits) || student) over all proxy images.

    At the logits the gradient is (q - p) / N, with q the student's and p the teachers'
    probabilities. The teachers use their running statistics, the student the batch's, and its
    running ones follow.
    """
    web = root.parent / "web"
    web.mkdir()
    colours = [(250, 10, 10), (20, 240, 60), (90, 90, 90), (5, 30, 220), (200, 220, 10)]
    for number, colour in enumerate(colours):
        Image.new("RGB", (16, 16), colour).save(web / f"{number}.png")
    replies: dict[int, dict[str, torch.Tensor]] = {}

    def keep(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            replies[index] = unpack_state(reply.content.array_records["model"])
        return reply

    _, result = run(
        root,
        keep,
        method="feddf",
        rounds__count=1,
        rounds__proxy=str(web),
        rounds__proxy_images=len(colours),
        rounds__distillation_steps=steps,
        rounds__distillation_batch_size=64,  # all of them in every step
        rounds__distillation_lr=0.05,
    )
    teachers = [in_numbers(replies[index]) for index in (0, 1)]
    pixels = torch.tensor(colours, dtype=torch.uint8).view(-1, 3, 1, 1).expand(-1, 3, 16, 16)
    x = features(pixels)
    target = softmax(np.mean([in_use(teacher, x) for teacher in teachers], axis=0))
    alternative = np.mean([softmax(in_use(teacher, x)) for teacher in teachers], axis=0)
    assert np.abs(target - alternative).max() > 1e-2  # a mean of probabilities is seen
    student = Training(mean_of(teachers, (12, 24)))
    steppers = {name: Adam(student.state[name], 0.05) for name in PARAMETERS}
    for _ in range(steps):
        gradient = student.gradient((student.probabilities(x) - target) / len(x))
        for name, adam in steppers.items():
            adam.step(gradient[name])
            student.state[name] = adam.value
    assert_same(result, student.state)


# ---- FedLMG's and FedCADO's strategies ----

HELD = {"a": [0, 1, 3], "b": [1, 2]}


def teacher_state(number: int) -> dict[str, torch.Tensor]:
    state = analytic_classifier.build("", len(CLASSES)).state_dict()
    draw = torch.Generator().manual_seed(number)
    for name, value in state.items():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=draw)
            state[name] = noise.square() + 0.5 if name.endswith("var") else noise
    return state


@pytest.mark.parametrize("method", [fedlmg, fedcado])
@pytest.mark.parametrize("teacher_mean", ["known-classes", "plain"])
def test_the_teachers_weight_reaches_the_global_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, teacher_mean: str
) -> None:
    """FT, MD and SD are SGD on CE + w KL(teacher || student), with w = 2.5: MD's teacher is the
    mean of the clients', SD's the image's own.
    """
    name = method.__name__.rpartition(".")[2]
    config = parse_run_config(
        quick(
            method=name,
            global_model__init="none",
            global_model__lr=0.05,
            global_model__weight_decay=0.01,
            global_model__batch_size=5,
            global_model__epochs=3,
            global_model__precision="float32",
            **{f"{name}__distillation_weight": 2.5, f"{name}__teacher_mean": teacher_mean},
        )
    )
    labels = [0, 1, 3, 3, 1, 2, 2, 1]
    owners = "aaaabbbb"
    images = SimpleNamespace(
        pixels=random_pixels(8, 16), labels=torch.tensor(labels), clients=tuple(owners)
    )
    monkeypatch.setattr(pipeline, "synthesize", lambda *args: images)
    job: Any = SimpleNamespace(
        config=config,
        classes=CLASSES,
        held=lambda payloads: HELD,
        device=CPU,
        init_kit="",
        folder=RunFolder(tmp_path),
        status=Status(tmp_path),
        metadata=lambda name, model: {},
        mixing=None,
    )
    states = {client: teacher_state(number) for number, client in enumerate(HELD)}
    payloads = {
        client: Classifier(tuple(CLASSES[k] for k in HELD[client]), "resnet18", state)
        for client, state in states.items()
    }
    models = method.run(job, payloads)

    x = features(images.pixels)
    p = {client: softmax(in_use(in_numbers(states[client]), x)) for client in HELD}
    md = (p["a"] + p["b"]) / 2
    if teacher_mean == "known-classes":  # a alone knows 0 and 3, b alone 2
        md[:, [0, 3]] = p["a"][:, [0, 3]]
        md[:, 2] = p["b"][:, 2]
        md = md / md.sum(axis=1, keepdims=True)
    sd = np.where(np.array(list(owners))[:, None] == "a", p["a"], p["b"])
    batches = order(8, 5, 3, config.seed)
    results = {}
    for strategy, teacher in (("FT", None), ("MD", md), ("SD", sd)):
        expected = sgd(
            begin(),
            x,
            np.array(labels),
            batches,
            config.global_model,
            teacher=teacher,
            weight=2.5,
        )
        assert_same(models[strategy].model.state_dict(), expected)
        results[strategy] = expected["3.weight"]
    assert np.abs(results["MD"] - results["FT"]).max() > 0.01
    assert np.abs(results["MD"] - results["SD"]).max() > 0.01
