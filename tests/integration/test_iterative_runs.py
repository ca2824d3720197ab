"""FedAvg and its kin over real Flower messages and strategies, in this process."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from safetensors.torch import load_file, save_file

from client_app import app as client_app
from client_app.app import app
from client_app.learning import local_training as client_rounds
from osfl.config import ConfigError, parse_run_config
from osfl.models.classifiers import new_classifier
from osfl.payload.messages import pack_bytes, pack_state, unpack_state
from osfl.run_folder import layout, round_store
from server_app.app import run_job
from server_app.baselines import feddf
from server_app.baselines import run as rounds_run
from server_app.federation.exchange import Exchange, RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import Killed, metrics, nodes, start


def model(home: Path, method: str, job: str = "job") -> dict[str, torch.Tensor]:
    return load_file(home / "runs" / job / "models" / f"{method}.safetensors")


def keep_replies(replies: list[dict[str, torch.Tensor]]):  # type: ignore[no-untyped-def]
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            replies.append(unpack_state(reply.content.array_records["model"]))
        return reply

    return tamper


@pytest.mark.slow
def test_fedavg_is_the_mean_of_what_the_clients_sent(home: Path, tiny_kit: Path) -> None:
    """One round of clients with equally many images: BatchNorm statistics too."""
    replies: list[dict[str, torch.Tensor]] = []
    start(quick(method="fedavg", kit=str(tiny_kit), rounds__count=1), tamper=keep_replies(replies))
    sent = replies[:2]
    mean_state = model(home, "fedavg")
    assert not torch.equal(sent[0]["fc.weight"], sent[1]["fc.weight"])
    for name, value in mean_state.items():
        if value.is_floating_point():
            assert torch.allclose(value, (sent[0][name] + sent[1][name]) / 2, atol=1e-6), name


@pytest.mark.slow
def test_fedavg_weights_by_images(home: Path, tiny_kit: Path) -> None:
    """A client that says it has three times as many images counts three times."""
    replies: dict[int, dict[str, torch.Tensor]] = {}  # Flower asks the clients in any order

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            replies[index] = unpack_state(reply.content.array_records["model"])
            metrics = dict(reply.content.metric_records["metrics"])
            reply.content["metrics"] = MetricRecord(
                {**metrics, "num-examples": 30 if index == 1 else 10}
            )
        return reply

    start(quick(method="fedavg", kit=str(tiny_kit), rounds__count=1), tamper=tamper)
    expected = 0.25 * replies[0]["fc.weight"] + 0.75 * replies[1]["fc.weight"]
    assert torch.allclose(model(home, "fedavg")["fc.weight"], expected, atol=1e-6)


@pytest.mark.slow
def test_feddf_distils_the_mean_from_the_clients_models(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round the student begins at the mean, the teachers are what the clients sent, and what
    is learned is what goes on.
    """
    replies = []
    calls = []

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            replies.append(unpack_state(reply.content.array_records["model"])["fc.bias"])
        return reply

    def distil(students, teachers, proxy, job, number) -> None:  # type: ignore[no-untyped-def]
        (student,) = students
        calls.append(
            (
                student.fc.bias.detach().clone(),
                [t.fc.bias.detach().clone() for t in teachers],
                len(proxy),
                number,
            )
        )
        student.fc.bias.data += 1

    monkeypatch.setattr(feddf, "distill", distil)
    start(quick(method="feddf", kit=str(tiny_kit), rounds__count=2), tamper=tamper)
    assert [(count, number) for _, _, count, number in calls] == [(8, 1), (8, 2)]
    for (student, teachers, *_), sent in zip(calls, (replies[:2], replies[2:]), strict=True):
        assert torch.allclose(student, torch.stack(sent).mean(0), atol=1e-6)  # equally many images
        assert {tuple(t.tolist()) for t in teachers} == {tuple(t.tolist()) for t in sent}
    assert torch.allclose(model(home, "feddf")["fc.bias"], calls[1][0] + 1)


@pytest.mark.slow
def test_the_methods_differ_in_their_penalty_alone(home: Path, tiny_kit: Path) -> None:
    """FedProx with a large mu stays near the start, with mu = 0 it is FedAvg."""
    common = {"kit": str(tiny_kit), "rounds__count": 1, "classifier__batch_size": 5}
    for job, method, settings in (
        ("avg", "fedavg", {}),
        ("prox-0", "fedprox", {"rounds__proximal_mu": 0.0}),
        ("prox", "fedprox", {"rounds__proximal_mu": 50.0}),
    ):
        start(quick(method=method, **common, **settings), job)
    plain = model(home, "fedavg", "avg")
    zero = model(home, "fedprox", "prox-0")
    near = model(home, "fedprox", "prox")
    begin = new_classifier(parse_run_config(quick()).classifier, 10, str(tiny_kit), 0).state_dict()
    way = (plain["fc.weight"] - begin["fc.weight"]).norm()
    assert (near["fc.weight"] - begin["fc.weight"]).norm() < 0.7 * way
    # the same objective, but each method has its own order of images, so they agree in size and not
    # in bits
    assert (zero["fc.weight"] - begin["fc.weight"]).norm() == pytest.approx(way.item(), rel=0.2)


@pytest.mark.slow
def test_a_rounds_model_is_packed_once_for_all_clients(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And held once until they have answered, however many they are."""
    packed = []
    pack = rounds_run.pack_state
    monkeypatch.setattr(rounds_run, "pack_state", lambda state: packed.append(1) or pack(state))
    start(quick(method="fedavg", kit=str(tiny_kit), num_clients=3, rounds__count=2))
    assert len(packed) == 2


@pytest.mark.slow
@pytest.mark.flops
def test_every_client_trains_in_every_round_and_all_is_counted(home: Path, tiny_kit: Path) -> None:
    grid = start(quick(method="fedavg", kit=str(tiny_kit), rounds__count=3, min_clients=1))
    assert [kind for _, kind in grid.sent].count("train") == 6
    size = sum(t.numel() * t.element_size() for t in model(home, "fedavg").values())
    for costs in metrics(home)["clients"].values():
        assert 3 * size < costs["upload_bytes"] < 3 * size + 3 * 200 * len(model(home, "fedavg"))
        assert costs["download_bytes"] > 3.9 * size  # three times to train, once to test
        assert costs["flops"] > 0
    assert metrics(home)["rounds"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "architectures"),
    [
        ("feddyn", "shufflenet_v2_x1_0"),  # with memory
        # With a second training, whose dropout is the same too; both clients' models and the
        # server's
        ("feddf", "shufflenet_v2_x0_5,mobilenet_v3_small"),
    ],
)
def test_a_killed_server_goes_on_after_the_last_round(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, method: str, architectures: str
) -> None:
    """Killed after the first round was kept.

    Resumed: what the quiet run makes, bit for bit, and only the rounds that were left.
    """
    config = quick(
        method=method,
        kit=str(tiny_kit),
        rounds__count=3,
        classifier__architecture=architectures,
        classifier__init="none",
    )
    start(config, "quiet")
    keep = rounds_run._keep
    calls = []

    def keep_then_die(*args) -> None:  # type: ignore[no-untyped-def]
        keep(*args)
        calls.append(1)
        raise Killed

    monkeypatch.setattr(rounds_run, "_keep", keep_then_die)
    for rounds_left in (3, 2, 1):
        grid = LoopGrid(app, config, nodes(2))
        with pytest.raises(Killed):
            run_job(grid, parse_run_config(config), "rough")
        assert [kind for _, kind in grid.sent].count("train") == 2
        assert len(calls) == 4 - rounds_left
    monkeypatch.setattr(rounds_run, "_keep", keep)
    grid = start(config, "rough")
    assert "train" not in [kind for _, kind in grid.sent]
    quiet = model(home, method, "quiet")
    rough = model(home, method, "rough")
    assert all(torch.equal(quiet[name], rough[name]) for name in quiet)
    quiet_costs, rough_costs = (
        metrics(home, job)["clients"]["client-0"] for job in ("quiet", "rough")
    )
    assert quiet_costs["upload_bytes"] == rough_costs["upload_bytes"]


@pytest.mark.slow
def test_feddyn_remembers_each_clients_gradient(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After round 1 it is -alpha (theta_k - theta), and round 2 uses it.

    What an earlier run of the job left does not count; at the end it goes.
    """
    config = quick(method="feddyn", kit=str(tiny_kit), rounds__count=3, rounds__dyn_alpha=0.5)
    begin = new_classifier(parse_run_config(config).classifier, 10, str(tiny_kit), 0)
    replies: list[dict[str, torch.Tensor]] = []
    states: list[dict[str, dict[str, torch.Tensor]]] = []
    context = SimpleNamespace(run_config=config, node_config=nodes(2)[0], node_id=100)
    monkeypatch.setattr(round_store.secrets, "token_hex", lambda size: "0" * 2 * size)
    client_config, node, _ = client_app._settings(context)  # type: ignore[arg-type]
    folder = (
        home
        / "cache"
        / "job"
        / f"client-0-{client_app.cache_key(client_config, node, '', '0' * 32)}"
    )
    folder.mkdir(parents=True)
    for number in (19, 20):
        ones = {name: torch.ones_like(p) for name, p in begin.named_parameters()}
        save_file(ones, folder / f"feddyn-{number:06d}.safetensors")

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 0:
            replies.append(unpack_state(reply.content.array_records["model"]))
            states.append(
                {file.stem: load_file(file) for file in folder.glob("feddyn-*.safetensors")}
            )
        return reply

    start(config, tamper=tamper)
    assert [sorted(files) for files in states] == [
        ["feddyn-000001"],
        ["feddyn-000001", "feddyn-000002"],
        ["feddyn-000002", "feddyn-000003"],
    ]
    first = states[0]["feddyn-000001"]
    assert torch.allclose(
        first["fc.weight"],
        -0.5 * (replies[0]["fc.weight"] - begin.state_dict()["fc.weight"]),
        atol=1e-6,
    )
    assert "conv1.1.running_mean" not in first
    assert not folder.exists()  # released
    remembering = model(home, "feddyn")
    monkeypatch.setattr(
        client_rounds,
        "_load_correction",
        lambda folder, like: {n: torch.zeros_like(p) for n, p in like.items()},
    )
    start(config, "forgetful")
    assert not torch.allclose(
        remembering["fc.weight"], model(home, "feddyn", "forgetful")["fc.weight"], atol=1e-5
    )


@pytest.mark.slow
def test_two_servers_with_one_job_id_share_no_state_of_feddyn(home: Path, tiny_kit: Path) -> None:
    """The other server's run takes place between this one's rounds, with the same settings."""
    config = quick(method="feddyn", kit=str(tiny_kit), rounds__count=3, rounds__dyn_alpha=0.5)
    start(config, "alone")
    elsewhere = {**config, "runs-dir": str(home / "elsewhere")}
    trained: list[int] = []

    def change(index: int, kind: str, reply: Message) -> Message:
        """Give the other server other models, and its clients another state."""
        if kind == "train":
            state = unpack_state(reply.content.array_records["model"])
            reply.content["model"] = pack_state({**state, "fc.bias": state["fc.bias"] + 1})
        return reply

    def run_the_other(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            trained.append(index)
        if len(trained) == 4 and kind == "train":
            start(elsewhere, tamper=change)
        return reply

    start(config, tamper=run_the_other)
    alone = model(home, "feddyn", "alone")
    peer = load_file(home / "elsewhere" / "job" / "models" / "feddyn.safetensors")
    assert not torch.equal(peer["fc.bias"], alone["fc.bias"])
    for name, value in model(home, "feddyn").items():
        assert torch.equal(value, alone[name]), name
    assert not list((home / "cache" / "job").rglob("feddyn-*"))


def test_rounds_that_an_older_version_began_keep_their_state(tmp_path: Path) -> None:
    """The clients know such rounds by the job id alone."""
    folder = layout.RunFolder(tmp_path / "new")
    assert len(folder.rounds_identity()) == 32
    assert folder.rounds_identity() == folder.rounds_identity()
    folder.store_round(1, 1.0, {}, {}, {})
    assert len(folder.rounds_identity()) == 32
    old = layout.RunFolder(tmp_path / "old")
    old.store_round(1, 1.0, {}, {}, {})
    assert old.rounds_identity() == ""


def test_a_model_in_another_memory_format_arrives_with_its_numbers() -> None:
    weight = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    assert torch.equal(unpack_state(pack_state({"weight": weight}))["weight"], weight)


def safetensors(**about: object) -> bytes:
    """A file whose header says this of one tensor, `fc.bias`, and whose data are four bytes."""
    header = json.dumps({"fc.bias": about}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


HUGE = safetensors(dtype="F32", shape=[10**12], data_offsets=[0, 4])
BEYOND = safetensors(dtype="F32", shape=[10], data_offsets=[0, 40])
UNKNOWN = safetensors(dtype="PICKLE", shape=[1], data_offsets=[0, 4])


def one_of(size: int, value: float) -> torch.Tensor:
    """A single number that is wrong, among ones."""
    return torch.tensor([1.0] * (size - 1) + [value])


# A header of 1 MB: with as many empty tensors as it has room for, it took 24 MB and a second
MANY = (10**6).to_bytes(8, "little") + b"{" + b" " * (10**6 - 2) + b"}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fc.bias": one_of(10, float("nan"))}, "fc.bias contains NaN or infinity"),
        ({"fc.bias": torch.zeros(11)}, r"fc.bias has shape \[11\]"),
        ({"extra": torch.zeros(1)}, "other arrays than the run's"),
        (
            {"fc.bias": torch.zeros(10, dtype=torch.float64)},
            "fc.bias has shape .* and dtype torch.float64",
        ),
        ({"fc.bias": one_of(10, 3e38)}, "fc.bias contains a value beyond"),
        (
            {"conv1.1.running_var": one_of(24, -1.0)},
            "conv1.1.running_var contains a negative variance",
        ),
        *(
            ({"model": wrong}, "not in safetensors' format")
            for wrong in (b"", b"PK\x03\x04 a zip file", HUGE, BEYOND, UNKNOWN)
        ),
        (
            {"model": ArrayRecord({"fc.bias": Array(np.zeros(10))})},
            "not in safetensors' format: '0000'",
        ),
        ({"model": MANY}, "its header is longer than 338 tensors require"),
        ({"num-examples": -5}, "images = -5 cannot be true"),
        ({"num-examples": float("nan")}, "images = nan cannot be true"),
        ({"num-examples": 2**40}, r"images = 1.09951e\+12 cannot be true; expected 0 to 1e\+09"),
        ({"num-examples": 0}, "trained on at least one image"),
        ({"num-examples": 1.5}, "must be a whole number"),
        ({"seconds": float("inf")}, "seconds = inf cannot be true"),
        ({"seconds": 1e308}, "seconds = .* cannot be true"),
        ({"flops": 1e308}, "flops = .* cannot be true"),
        ({"peak_memory_mb": 1e308}, "peak_memory_mb = .* cannot be true"),
        ({"model": bytes(2**26)}, "its model has 67,108,864 bytes, more than the run's"),
        ({"second model": ArrayRecord()}, "must have one model"),
    ],
)
def test_a_reply_that_is_wrong_is_refused(tiny_kit: Path, wrong: dict, message: str) -> None:
    config = parse_run_config(quick(method="fedavg", kit=str(tiny_kit)))
    like = new_classifier(config.classifier, 10, str(tiny_kit), 0).state_dict()
    figures = {"num-examples": 30, "seconds": 1.0, "flops": 1e9, "peak_memory_mb": 500.0}
    reply = RecordDict({"model": pack_state(like), "metrics": MetricRecord(figures)})
    architecture = config.classifier.architecture
    members = SimpleNamespace(
        architectures={"client-0": architecture, "client-1": architecture}, declared={}
    )
    grid = rounds_run.CheckedGrid(
        LoopGrid(app, {}, []),
        members,  # type: ignore[arg-type]
        config,
        "job",
        0,
        {architecture: like},
    )
    assert set(grid._checked("client-0", reply).array_records["arrays"]) == set(like)
    spoil(reply, wrong)
    with pytest.raises(ValueError, match=message):
        grid._checked("client-1", reply)


def test_costs_add_up_from_nothing(tiny_kit: Path) -> None:
    """Two rounds' replies: 1 s and 1 GFLOP each, and the larger one of 500 and 400 MB."""
    config = parse_run_config(quick(method="fedavg", kit=str(tiny_kit)))
    like = new_classifier(config.classifier, 10, str(tiny_kit), 0).state_dict()
    architecture = config.classifier.architecture
    grid = rounds_run.CheckedGrid(
        LoopGrid(app, {}, []),
        SimpleNamespace(architectures={"client-0": architecture}, declared={}),  # type: ignore[arg-type]
        config,
        "job",
        0,
        {architecture: like},
    )
    model = pack_state(like)
    for memory in (500.0, 400.0):
        figures = {"num-examples": 30, "seconds": 1.0, "flops": 1e9, "peak_memory_mb": memory}
        grid._checked("client-0", RecordDict({"model": model, "metrics": MetricRecord(figures)}))
    assert grid.costs["client-0"] == {
        "upload_bytes": 2 * rounds_run.size_of(model),
        "seconds": 2.0,
        "flops": 2e9,
        "images": 30,
        "peak_memory_mb": 500.0,
    }


def spoil(reply: RecordDict, wrong: dict) -> None:
    for name, value in wrong.items():
        if isinstance(value, torch.Tensor):
            reply["model"] = pack_state(unpack_state(reply.array_records["model"]) | {name: value})
        elif isinstance(value, bytes):
            reply[name] = pack_bytes(value, "safetensors")
        elif isinstance(value, ArrayRecord):
            reply[name] = value
        else:
            reply["metrics"] = MetricRecord(dict(reply.metric_records["metrics"]) | {name: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [{"fc.bias": torch.full((10,), float("nan"))}, {"num-examples": -5}]
)
def test_the_sender_of_a_wrong_reply_is_excluded_and_named(
    home: Path, tiny_kit: Path, wrong: dict
) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            spoil(reply.content, wrong)
        return reply

    with pytest.raises(
        RoundError, match="(?s)1 of 2 clients sent a usable model.*client-1: .*(NaN|cannot be true)"
    ) as caught:
        start(quick(method="fedavg", kit=str(tiny_kit), rounds__count=1), tamper=tamper)
    assert "client-0:" not in str(caught.value)
    start(
        quick(method="fedavg", kit=str(tiny_kit), rounds__count=1, min_clients=1),
        "fewer",
        tamper=tamper,
    )
    assert torch.isfinite(model(home, "fedavg", "fewer")["fc.bias"]).all()


@pytest.mark.slow
def test_unrequested_figures_are_ignored(home: Path, tiny_kit: Path) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            reply.content["metrics"] = MetricRecord(
                dict(reply.content.metric_records["metrics"]) | {"extra": [1.0, 2.0]}
            )
            reply.content["more"] = MetricRecord({"x": 1})
        return reply

    start(quick(method="fedavg", kit=str(tiny_kit), rounds__count=1), tamper=tamper)
    assert torch.isfinite(model(home, "fedavg")["fc.bias"]).all()


@pytest.mark.slow
def test_a_client_that_missed_a_round_is_awaited_briefly_and_may_return(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """client-1's first two replies are lost.

    Round 1 waits for the deadline, round 2 for test-timeout, round 3 has both again. Each poll
    advances the rounds' clock by a second.
    """
    lost: list[int] = []
    waits: list[float] = []

    class Polls(Exchange):
        def wait(self, until: float = math.inf) -> None:
            waits.append(min(1.0, until - clock.monotonic()))

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waits))
    monkeypatch.setattr(rounds_run, "time", clock)
    monkeypatch.setattr(rounds_run, "Exchange", Polls)

    def tamper(index: int, kind: str, reply: Message) -> Message | None:
        if kind == "train" and index == 1 and len(lost) < 2:
            lost.append(1)
            return None
        return reply

    config = quick(
        method="fedavg",
        kit=str(tiny_kit),
        rounds__count=3,
        min_clients=1,
        deadline=60.0,
        test_timeout=1.0,
    )
    grid = start(config, tamper=tamper)
    assert 30 < sum(waits) < 62  # not twice the deadline
    assert [kind for _, kind in grid.sent].count("train") == 6
    costs = metrics(home)["clients"]
    assert costs["client-0"]["upload_bytes"] == pytest.approx(3 * costs["client-1"]["upload_bytes"])


@pytest.mark.slow
def test_a_mean_that_is_not_finite_is_not_kept(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server_app.baselines.feddyn import FedDyn

    aggregate = FedDyn.aggregate_train

    def overflow(self, number, replies):  # type: ignore[no-untyped-def]
        arrays, figures = aggregate(self, number, replies)
        if number == 2:
            arrays["fc.bias"] = Array(arrays["fc.bias"].numpy() * float("inf"))
        return arrays, figures

    monkeypatch.setattr(FedDyn, "aggregate_train", overflow)
    config = quick(method="feddyn", kit=str(tiny_kit), rounds__count=2)
    with pytest.raises(RoundError, match="not finite after round 2"):
        start(config)
    assert json.loads((home / "runs" / "job" / "rounds" / "done.json").read_text())["round"] == 1
    monkeypatch.setattr(FedDyn, "aggregate_train", aggregate)
    start(config)
    assert metrics(home)["rounds"] == 2


@pytest.mark.slow
def test_a_client_that_fails_in_a_round_is_named(home: Path, tiny_kit: Path) -> None:
    config = quick(
        method="fedavg",
        kit=str(tiny_kit),
        classifier__lr=100.0,
        classifier__batch_size=5,
        rounds__local_epochs=20,
    )
    with pytest.raises(
        RoundError, match=r"(?s)0 of 2 clients sent a usable model.*\n  client-0: .*diverged"
    ):
        start(config)


def test_rounds_need_one_architecture_and_a_proxy_set_that_is_there(
    home: Path, tiny_kit: Path
) -> None:
    several = {"classifier__architecture": "resnet18,resnet34"}
    for method in ("fedavg", "fedprox", "feddyn"):
        with pytest.raises(ConfigError, match=f"{method} averages models of one architecture"):
            parse_run_config(quick(method=method, **several))
    assert parse_run_config(quick(method="feddf", **several)).method == "feddf"
    with pytest.raises(ConfigError, match="must be 'public' or a folder with at least two images"):
        start(quick(method="feddf", kit=str(tiny_kit), rounds__proxy="/nowhere"))


@pytest.mark.slow
def test_a_folder_of_images_can_be_the_proxy_set(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    from PIL import Image

    web = tmp_path / "web"
    web.mkdir()
    for shade in (10, 200, 90):
        Image.new("RGB", (40, 20), (shade, 0, 0)).save(web / f"{shade}.png")
    start(quick(method="feddf", kit=str(tiny_kit), rounds__proxy=str(web), rounds__count=1))
    assert json.loads((home / "runs" / "job" / "status.json").read_text())["phase"] == "finished"
    (web / "b.png").write_text("no image")
    with pytest.raises(ConfigError, match=r"b\.png is not a readable image"):
        start(quick(method="feddf", kit=str(tiny_kit), rounds__proxy=str(web)), "other")


# ---- Clients of different architectures ----


@pytest.mark.slow
def test_clients_of_different_architectures_make_one_global_model(
    home: Path, tiny_kit: Path
) -> None:
    """FedCADO: a ResNet-18, a ShuffleNet and, by its node-config, a VGG without BatchNorm.

    The global model is a ShuffleNet.
    """
    config = quick(
        method="fedcado",
        kit=str(tiny_kit),
        num_clients=3,
        data__image_size=32,  # a VGG halves it five times
        classifier__architecture="resnet18,shufflenet_v2_x1_0,vgg16",
        classifier__init="none",
        global_model__architecture="shufflenet_v2_x1_0",
    )
    node_configs = [{"partition-id": k, "num-partitions": 3} for k in range(3)]
    node_configs[0] |= {"architecture": "vgg16"}
    node_configs[2] |= {"architecture": "resnet18"}
    grid = LoopGrid(app, config, node_configs)
    with pytest.warns(UserWarning, match="vgg16 has no BatchNorm"):
        run_job(grid, parse_run_config(config), "job")
    result = metrics(home)
    assert set(result["accuracy"]) == {"FT", "MD", "SD"}
    from osfl.payload.v1 import payload_pb2 as pb

    sent = {
        p.stem: pb.Payload.FromString(p.read_bytes()).classifier.architecture
        for p in (home / "runs" / "job" / "payloads").glob("*.pb")
    }
    assert sent == {"client-0": "vgg16", "client-1": "shufflenet_v2_x1_0", "client-2": "resnet18"}
    assert "conv5.0.weight" in load_file(home / "runs" / "job" / "models" / "SD.safetensors")
