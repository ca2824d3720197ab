"""Byzantine-robust aggregation: numbers worked out by hand, and a label-flipping client."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from osfl.config import ConfigError, RoundsConfig, parse_run_config
from osfl.payload.messages import unpack_state
from server_app.baselines import fedavg, fedprox
from server_app.baselines import run as rounds_run
from server_app.baselines.aggregation import with_aggregation
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import begin_task
from tests.helpers.settings import quick
from tests.helpers.whole_runs import Killed, start

# Seven models of one weight each; at most one is malicious
VALUES = (13, 1, 100, 3, 10, 2, 17)
# A model's squared distances to the others, of which Krum adds the 7 - 1 - 2 = 4 smallest:
#   1:   1 + 4 + 81 + 144 = 230     2:   1 + 1 + 64 + 121 = 187     3:   1 + 4 + 49 + 100 = 154
#  10:   9 + 49 + 49 + 64 = 171    13:  9 + 16 + 100 + 121 = 246   17: 16 + 49 + 196 + 225 = 486
# 100:  83^2 + 87^2 + 90^2 + 97^2 = 31,967
EXPECTED = {
    # The middle of 1 2 3 10 13 17 100
    "median": 10,
    # 0.3 of seven is two dropped at each end: (3 + 10 + 13) / 3
    "trimmed-mean": 26 / 3,
    "krum": 3,
    # The 7 - 1 - 2 = 4 best: (3 + 10 + 2 + 1) / 4
    "multi-krum": 4,
    # The 5 best are 3 10 2 1 13, their median is 3, and the 3 nearest to it are 3 2 1
    "bulyan": 2,
}
AGGREGATIONS = tuple(EXPECTED)


def settings_of(aggregation: str, clients: int = 7, method: str = "fedavg") -> dict[str, Any]:
    """Return a run's settings with what the aggregation needs."""
    settings: dict[str, Any] = {"method": method, "num_clients": clients}
    settings["rounds__aggregation"] = aggregation
    if aggregation in ("krum", "multi-krum", "bulyan"):
        settings["rounds__malicious_clients"] = 1
    if aggregation == "trimmed-mean":
        settings["rounds__trim"] = 0.3
    return settings


def rounds_of(aggregation: str) -> RoundsConfig:
    return parse_run_config(quick(**settings_of(aggregation))).rounds


def reply(state: dict[str, Any], images: float = 1) -> Message:
    """Return what the strategy sees of a client's reply."""
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(np.asarray(state[name])) for name in state}),
            "metrics": MetricRecord({"num-examples": images, "clients": 1}),
            "model": ConfigRecord({"architecture": "any"}),
        }
    )
    return Message(content, dst_node_id=1, message_type="train")


def aggregate(aggregation: str, replies: list[Message]) -> dict[str, np.ndarray]:
    strategy = with_aggregation(FedAvg(), rounds_of(aggregation))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    return {name: array.numpy() for name, array in arrays.items()}


@pytest.fixture(autouse=True)
def task() -> None:
    begin_task()


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_seven_models_by_hand(aggregation: str) -> None:
    """No image count matters, nor does BatchNorm's number of batches, of which the median stays."""
    images = (1, 1000, 1, 1, 50, 1, 1)
    batches = (900, 0, 500, 700, 20, 30, 40)
    replies = [
        reply({"weight": np.full((1, 1), value, np.float32), "batches": np.int64(batch)}, count)
        for value, batch, count in zip(VALUES, batches, images, strict=True)
    ]
    result = aggregate(aggregation, replies)
    assert list(result) == ["weight", "batches"]
    assert (result["weight"].dtype, result["batches"].dtype) == (np.float32, np.int64)
    assert result["weight"].shape == (1, 1)
    assert result["weight"].item() == pytest.approx(EXPECTED[aggregation])
    assert result["batches"].item() == 40


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["krum", "multi-krum", "bulyan"])
def test_close_models_far_from_zero_are_told_apart(aggregation: str) -> None:
    """In float32, the squared distance of 10,001 and 10,004 would be a multiple of 16."""
    replies = [reply({"weight": np.full(1, 10_000 + value, np.float32)}) for value in VALUES]
    result = aggregate(aggregation, replies)["weight"].item()
    assert result == pytest.approx(10_000 + EXPECTED[aggregation], rel=1e-7)


def test_the_mean_is_flowers_own() -> None:
    strategy = FedAvg()
    assert with_aggregation(strategy, rounds_of("mean")) is strategy


@pytest.mark.slow
@pytest.mark.parametrize(("aggregation", "least"), [("median", 3), ("krum", 5), ("bulyan", 7)])
def test_too_few_models_are_not_aggregated(aggregation: str, least: int) -> None:
    """Models may be fewer than arrived, if a defense drops some."""
    replies = [reply({"weight": np.zeros(1, np.float32)}) for _ in range(least)]
    assert aggregate(aggregation, replies)["weight"].item() == 0
    with pytest.raises(RoundError, match=f"requires {least} models in a round, and got"):
        aggregate(aggregation, replies[1:])


def test_fedprox_keeps_its_penalty() -> None:
    config = parse_run_config(quick(**settings_of("median", 3, "fedprox"), rounds__proximal_mu=0.5))
    job: Any = SimpleNamespace(config=config, clients=("a", "b", "c"))
    grid: Any = SimpleNamespace(get_node_ids=lambda: [1, 2, 3])
    strategy = fedprox.strategy(job)
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    sent = [message.content.config_records["config"]["proximal-mu"] for message in messages]
    assert sent == [0.5] * 3
    states = [{"weight": np.full(1, value, np.float32)} for value in (1, 2, 9)]
    arrays, _ = strategy.aggregate_train(1, [reply(state) for state in states])
    assert arrays is not None
    assert arrays["weight"].numpy().item() == 2
    plain = fedavg.strategy(job).configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    assert "proximal-mu" not in next(iter(plain)).content.config_records["config"]


# ---- A label-flipping client ----

CLIENTS = 6
ROUNDS = 8


def softmax_steps(weight: np.ndarray, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the weight [D, 10] after 20 gradient steps of softmax regression."""
    targets = np.eye(10)[labels]
    for _ in range(20):
        logits = features @ weight
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        weight = weight - 0.5 * features.T @ (shares - targets) / len(features)
    return weight


def accuracy(aggregation: str, flipping: int) -> float:
    """Return the accuracy (%) of six clients' model on the digits.

    The first `flipping` clients call each digit d 9 - d, and send their change ten times as large.
    """
    features, labels = load_digits(return_X_y=True)
    features = np.hstack([features / 16, np.ones((len(features), 1))])
    strategy = with_aggregation(FedAvg(), rounds_of(aggregation))
    weight = np.zeros((65, 10))
    for number in range(1, ROUNDS + 1):
        replies = []
        for client in range(CLIENTS):
            rows = slice(client, 1200, CLIENTS)
            lies = client < flipping
            sent = softmax_steps(weight, features[rows], 9 - labels[rows] if lies else labels[rows])
            sent = weight + 10 * (sent - weight) if lies else sent
            replies.append(reply({"weight": sent.astype(np.float32)}))
        arrays, _ = strategy.aggregate_train(number, replies)
        assert arrays is not None
        weight = arrays["weight"].numpy().astype(np.float64)
    predictions = (features[1200:] @ weight).argmax(axis=1)
    return 100 * float((predictions == labels[1200:]).mean())


@pytest.mark.parametrize("aggregation", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_a_label_flipping_client_harms_the_mean_alone(aggregation: str) -> None:
    assert accuracy("mean", 0) > 85
    assert accuracy("mean", 1) < 60
    assert accuracy(aggregation, 1) > 80


# ---- Runs ----


@pytest.mark.slow
def test_a_run_aggregates_by_the_median(home: Path, tiny_kit: Path) -> None:
    """Also where the clients state different numbers of images."""
    replies: list[dict[str, torch.Tensor]] = []

    def tamper(index: int, kind: str, message: Message) -> Message:
        if kind == "train":
            replies.append(unpack_state(message.content.array_records["model"]))
            metrics = dict(message.content.metric_records["metrics"])
            metrics["num-examples"] = 10 * (index + 1)
            message.content["metrics"] = MetricRecord(metrics)
        return message

    settings = settings_of("median", 3)
    start(quick(**settings, kit=str(tiny_kit), rounds__count=1), tamper=tamper)
    model = load_file(home / "runs" / "job" / "models" / "fedavg.safetensors")
    for name in ("fc.weight", "conv1.1.running_mean"):
        expected = torch.stack([state[name] for state in replies]).median(dim=0).values
        assert torch.equal(model[name], expected), name


@pytest.mark.slow
def test_a_killed_server_goes_on_after_the_last_round(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed, it makes the same model, bit for bit."""
    settings = settings_of("trimmed-mean", 5)
    config = quick(**settings, kit=str(tiny_kit), rounds__count=2, classifier__init="none")
    start(config, "quiet")
    keep = rounds_run._keep

    def keep_then_die(*given: Any) -> None:
        keep(*given)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rounds_run, "_keep", keep_then_die)
        with pytest.raises(Killed):
            start(config, "rough")
    start(config, "rough")
    quiet, rough = (
        load_file(home / "runs" / job / "models" / "fedavg.safetensors")
        for job in ("quiet", "rough")
    )
    assert all(torch.equal(quiet[name], rough[name]) for name in quiet)


# ---- Refusals ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (
                {"method": method, "rounds__aggregation": "median", "num_clients": 6},
                "rounds.aggregation = 'median': requires method fedavg or fedprox, .* with "
                f"'{method}' set it to 'mean'",
            )
            for method in ("feddyn", "feddf", "fedcgs", "oscar", "local")
        ),
        (
            {"rounds__aggregation": "krum", "num_clients": 6},
            "rounds.malicious-clients = 0: must be at least 1 with rounds.aggregation = 'krum'",
        ),
        (
            {**settings_of("multi-krum", 6), "rounds__malicious_clients": 2},
            r"'multi-krum': requires at least 7 models in every round \(2 f \+ 3, with f = "
            r"rounds.malicious-clients = 2\), but a round continues with 6; set num-clients",
        ),
        (settings_of("bulyan", 6), r"at least 7 models in every round \(4 f \+ 3, .* with 6"),
        ({**settings_of("krum", 6), "min_clients": 4}, "at least 5 models .* continues with 4"),
        ({**settings_of("krum", 5), "held_out": "client-0"}, "at least 5 .* continues with 4"),
        (settings_of("median", 2), "at least 3 models in every round, but a round .* with 2"),
        (settings_of("trimmed-mean", 2), "at least 3 models"),
        (
            {**settings_of("trimmed-mean", 6), "rounds__trim": 0.16},
            "rounds.trim = 0.16: drops none of 6 models; must be at least 0.17",
        ),
        ({**settings_of("trimmed-mean", 3), "rounds__trim": 0.0}, "must be at least 0.34"),
        (
            {"rounds__malicious_clients": 1},
            "rounds.malicious-clients = 1: has no effect with rounds.aggregation = 'mean'; set it "
            "to 0",
        ),
        ({**settings_of("median"), "rounds__trim": 0.2}, "rounds.trim = 0.2: has no effect with"),
        ({"rounds__trim": 0.5}, "rounds.trim = 0.5: must be between 0 and 0.49"),
        (
            {"rounds__aggregation": "medain"},
            r"rounds.aggregation = 'medain': must be one of .* \(did you mean median",
        ),
    ],
)
def test_what_cannot_be_aggregated_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_config(quick(**{"method": "fedavg", **settings}))


@pytest.mark.parametrize(
    "settings",
    [
        settings_of("krum", 5),
        settings_of("bulyan", 7),
        settings_of("median", 3, "fedprox"),
        {**settings_of("trimmed-mean", 6), "rounds__trim": 0.17},
        {**settings_of("trimmed-mean", 3), "rounds__trim": 0.34},
        {**settings_of("krum", 6), "min_clients": 5},
    ],
)
def test_the_least_that_can_be_aggregated(settings: dict[str, Any]) -> None:
    assert parse_run_config(quick(**settings)).rounds.aggregation == settings["rounds__aggregation"]
