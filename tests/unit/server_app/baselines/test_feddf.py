"""FedDF: its proxy images, and clients with models of several architectures (algorithm 3)."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from client_app.app import app
from client_app.learning.local_training import train_round
from osfl.config import ConfigError, parse_run_config
from osfl.data.digits import CLASSES
from osfl.kit.used_parts import final_model, initial_models
from osfl.models.classifiers import MEAN, STD, new_classifier
from osfl.payload.messages import pack_state, unpack_state
from osfl.util.seeds import generator_of
from server_app.app import check_server, run_job
from server_app.baselines import feddf
from server_app.baselines import proxy as proxies
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, nodes

CPU = torch.device("cpu")
TWO = "shufflenet_v2_x0_5,mobilenet_v3_small"
SHUFFLE, MOBILE = TWO.split(",")
OWN = "shufflenet_v2_x1_0"  # the server's


# ---- The proxy images ----


def web(folder: Path, classes: int = 5, images: int = 20) -> Path:
    """A folder of pictures, class by class; red says which class it is, green which image."""
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True)
        for index in range(images):
            shade = (10 * label, 10 * index, 0)
            Image.new("RGB", (8, 8), shade).save(folder / f"class {label}" / f"{index:02d}.png")
    return folder


def proxy_job(folder: Path | str, **settings: object) -> SimpleNamespace:
    config = parse_run_config(
        quick(method="feddf", data__image_size=8, rounds__proxy=str(folder), **settings)
    )
    status = SimpleNamespace(phase=lambda *args: None, advance=lambda *args: None)
    return SimpleNamespace(config=config, status=status, device=CPU)


def taken(proxy: proxies.Proxy) -> set[tuple[int, int]]:
    """(class, image) of every proxy image."""
    return {
        (int(p[0, 0, 0]) // 10, int(p[1, 0, 0]) // 10)
        for p in map(proxy.__getitem__, range(len(proxy)))
    }


def test_the_proxy_set_is_a_seeded_sample_of_the_whole_folder(tmp_path: Path) -> None:
    """All classes are in it (the first 25 files are two classes'); another seed, another sample."""
    folder = web(tmp_path / "web")
    samples = [
        taken(proxies.load_proxy(proxy_job(folder, rounds__proxy_images=25, seed=seed)))
        for seed in (0, 0, 1)
    ]
    assert [len(sample) for sample in samples] == [25, 25, 25]
    assert {label for label, _ in samples[0]} == set(range(5))
    assert samples[0] == samples[1] != samples[2]


def test_a_proxy_set_smaller_than_requested_is_used_whole_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = web(tmp_path / "web", 2, 3)
    assert len(taken(proxies.load_proxy(proxy_job(folder, rounds__proxy_images=6)))) == 6
    assert "all are used" not in caplog.text
    assert len(taken(proxies.load_proxy(proxy_job(folder, rounds__proxy_images=500)))) == 6
    assert "rounds.proxy-images = 500: only 6 are available, and all are used" in caplog.text


def test_two_proxy_images_are_enough(tmp_path: Path) -> None:
    assert len(taken(proxies.load_proxy(proxy_job(web(tmp_path / "two", 2, 1))))) == 2
    job = proxy_job(web(tmp_path / "one", 1, 1))
    with pytest.raises(ConfigError, match="at least two images"):
        proxies.load_proxy(job)


def test_files_that_systems_leave_are_no_proxy_images(tmp_path: Path) -> None:
    folder = web(tmp_path / "web", 2, 3)
    (folder / "@eaDir").mkdir()
    for name in ("Thumbs.db", "desktop.ini", "._x.png", "@eaDir/x.png"):
        (folder / name).write_bytes(b"no picture")
    job = proxy_job(folder, rounds__proxy_images=500)
    assert len(taken(proxies.load_proxy(job))) == 6


def test_few_proxy_images_are_decoded_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are checked one; while they teach and are learned from, a batch."""
    job = proxy_job(
        web(tmp_path / "web"),
        rounds__proxy_images=80,
        rounds__distillation_steps=15,
        rounds__distillation_batch_size=6,
    )
    decode = proxies.to_pixels
    alive = weakref.WeakSet()
    peaks = [0]
    counts = [0]

    def decoded(image: Image.Image, size: int) -> torch.Tensor:
        pixels = decode(image, size)
        alive.add(pixels)
        peaks[-1] = max(peaks[-1], len(alive))
        counts[-1] += 1
        return pixels

    monkeypatch.setattr(proxies, "to_pixels", decoded)
    monkeypatch.setattr(feddf, "CHUNK", 10)
    proxy = proxies.load_proxy(job)
    assert counts == [0]
    proxies.check_proxy(job, proxy)
    assert (counts, peaks) == ([80], [1])
    counts = [*counts, 0]
    peaks = [*peaks, 0]
    student, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(192, 10)) for _ in range(2))
    feddf.distill([student], [teacher], proxy, job, 1)
    # Once for the teachers, those of the 15 * 6 draws that differ, and once for every draw
    assert 90 + 40 < counts[1] < 90 + 80
    assert peaks[1] == 10


def test_a_damaged_proxy_image_is_named_before_the_rounds(tmp_path: Path) -> None:
    """One that is cut off, too, whose header can be read."""
    folder = web(tmp_path / "web", 2, 3)
    damaged = folder / "class 1" / "01.png"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"rounds\.proxy: .*class 1/01\.png is not a readable"):
        feddf.strategy(proxy_job(folder))  # type: ignore[arg-type]


# ---- The distillation ----


def linear(size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 10, bias=False))


def test_the_teacher_is_the_softmax_of_the_mean_of_all_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Float64 by hand, for the requested rows, in pieces."""
    torch.manual_seed(0)
    proxy = torch.randint(256, (9, 3, 4, 4), dtype=torch.uint8)
    teachers = [linear(4) for _ in range(3)]
    for teacher, scale in zip(teachers, (1, 5, 20), strict=True):
        teacher[1].weight.data *= scale  # type: ignore[index, operator]
    rows = torch.tensor([1, 2, 4, 7, 8])
    monkeypatch.setattr(feddf, "CHUNK", 2)
    probabilities = feddf.ensemble(teachers, proxy, rows, CPU).double().numpy()
    images = proxy[rows].double().numpy() / 255
    images = (images - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    weights = [t[1].weight.detach().double().numpy() for t in teachers]  # type: ignore[index]
    logits = np.mean([images.reshape(5, -1) @ w.T for w in weights], axis=0)
    expected = np.exp(logits - logits.max(1, keepdims=True))
    assert probabilities == pytest.approx(expected / expected.sum(1, keepdims=True), abs=1e-5)


def test_a_step_goes_down_the_divergence_from_the_teacher() -> None:
    """Drawn images by hand: Adam's first step is lr times the gradient's sign."""
    torch.manual_seed(0)
    proxy = torch.randint(256, (50, 3, 4, 4), dtype=torch.uint8)
    student = linear(4)
    teacher = linear(4)
    before, taught = (
        model[1].weight.detach().double().numpy().copy()  # type: ignore[index]
        for model in (student, teacher)
    )
    job = proxy_job(
        "public",
        rounds__distillation_steps=1,
        rounds__distillation_batch_size=6,
        rounds__distillation_lr=1e-3,
    )
    feddf.distill([student], [teacher], proxy, job, 2)
    drawn = torch.randperm(50, generator=generator_of(0, "feddf", 2))[:6]
    images = proxy[drawn].double().numpy() / 255
    images = ((images - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))).reshape(6, -1)

    def softmax(weight: np.ndarray) -> np.ndarray:
        powers = np.exp(images @ weight.T)
        return powers / powers.sum(1, keepdims=True)

    # d KL(q || p) / d logits = p - q
    gradient = (softmax(before) - softmax(taught)).T @ images / 6
    moved = student[1].weight.detach().double().numpy() - before  # type: ignore[index]
    clear = np.abs(gradient) > 1e-4
    assert clear.mean() > 0.9
    assert moved[clear] == pytest.approx(-1e-3 * np.sign(gradient[clear]), rel=1e-2)


def test_dropout_in_a_student_is_seeded() -> None:
    proxy = torch.randint(256, (10, 3, 4, 4), dtype=torch.uint8)
    job = proxy_job("public", rounds__distillation_steps=2)
    # type: ignore[index]
    teacher = linear(4)
    start = linear(4)[1].state_dict()
    weights = []
    for seed, number in ((1, 1), (2, 1), (2, 2)):
        student = nn.Sequential(nn.Dropout(0.5), *linear(4))
        student[2].load_state_dict(start)
        torch.manual_seed(seed)
        feddf.distill([student], [teacher], proxy, job, number)
        weights.append(student[2].weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_students_learn_side_by_side_what_each_learns_alone() -> None:
    torch.manual_seed(0)
    proxy = torch.randint(256, (40, 3, 4, 4), dtype=torch.uint8)
    teachers = [linear(4) for _ in range(2)]
    job = proxy_job("public", rounds__distillation_steps=5, rounds__distillation_batch_size=8)
    deep = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))

    def learn(*students: nn.Module) -> list[torch.Tensor]:
        feddf.distill(students, teachers, proxy, job, 3)  # type: ignore[arg-type]
        assert not any(student.training for student in students)
        return [value for student in students for value in student.state_dict().values()]

    models = [linear(4), deep]
    copies = [
        linear(4),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)),
    ]
    for copy, model in zip(copies, models, strict=True):
        copy.load_state_dict(model.state_dict())
    before = models[0][1].weight.detach().clone()  # type: ignore[index]
    together = learn(*models)
    alone = learn(copies[0]) + learn(copies[1])
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(before, together[0])


# ---- Several architectures ----


State = dict[str, torch.Tensor]


class Recording(LoopGrid):
    """Keeps what clients are given to train, by (round, client): the architecture and the model."""

    def push_messages(self, messages):  # type: ignore[no-untyped-def]
        self.given: dict[tuple[int, int], tuple[str, State]] = getattr(self, "given", {})
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train":
                request = message.content.config_records["config"]
                state = unpack_state(message.content.array_records["model"])
                place = (request["server-round"], message.metadata.dst_node_id - 100)
                self.given[place] = (request["architecture"], state)
        return super().push_messages(messages)


def architecture_of(state: State) -> str:
    if "conv5.0.weight" not in state:
        return MOBILE
    return {192: SHUFFLE, 464: OWN}[state["conv5.0.weight"].shape[1]]


def copy_of(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def mixed(kit: Path, **settings: object) -> dict:
    """Three clients of two architectures, and a server with a third."""
    return quick(
        method="feddf",
        kit=str(kit),
        num_clients=3,
        classifier__architecture=f"{MOBILE},{SHUFFLE}",
        classifier__init="none",
        global_model__architecture=OWN,
        **settings,
    )


def mixed_nodes() -> list[dict]:
    """Node-configs where clients 0 and 2 have one architecture, and client 1 the other."""
    architectures = (SHUFFLE, MOBILE, SHUFFLE)
    return [node | {"architecture": a} for node, a in zip(nodes(3), architectures, strict=True)]


@pytest.mark.slow
def test_each_architecture_has_its_own_mean_and_all_clients_teach_it(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start, teachers and destination of each student."""
    config = mixed(tiny_kit, rounds__count=2)
    images = {0: 10, 1: 10, 2: 30}
    replies: list[dict[int, State]] = [{}]
    initial_states: list[dict[str, State]] = []
    taught: list[list[State]] = []
    learned: list[dict[str, State]] = []

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            replies[-1][index] = unpack_state(reply.content.array_records["model"])
            figures = dict(reply.content.metric_records["metrics"])
            reply.content["metrics"] = MetricRecord({**figures, "num-examples": images[index]})
        return reply

    def distil(students, teachers, proxy, job, number) -> None:  # type: ignore[no-untyped-def]
        initial_states.append({architecture_of(s.state_dict()): copy_of(s) for s in students})
        taught.append([copy_of(teacher) for teacher in teachers])
        for student in students:
            for parameter in student.parameters():
                parameter.data += 1
        learned.append({architecture_of(s.state_dict()): copy_of(s) for s in students})
        replies.append({})

    monkeypatch.setattr(feddf, "distill", distil)
    grid = Recording(app, config, mixed_nodes(), tamper)
    run_job(grid, parse_run_config(config), "job")

    settings = parse_run_config(config)
    start = {
        each.architecture: new_classifier(each, 10, str(tiny_kit), 0).state_dict()
        for _, each in initial_models(settings)
    }
    assert set(start) == {SHUFFLE, MOBILE, OWN}
    for number in (1, 2):
        students = initial_states[number - 1]
        sent = replies[number - 1]
        for name, value in students[SHUFFLE].items():
            if value.is_floating_point():
                mean = 0.25 * sent[0][name] + 0.75 * sent[2][name]
                assert torch.allclose(value, mean, atol=1e-6), name
        assert same(students[MOBILE], sent[1])
        assert all(same(*pair) for pair in zip(taught[number - 1], sent.values(), strict=True))
        # The server's own has no clients: it goes on from where it was
        last = start if number == 1 else learned[0]
        assert same(students[OWN], last[OWN])
        for index, architecture in enumerate((SHUFFLE, MOBILE, SHUFFLE)):
            named, state = grid.given[number, index]
            assert named == architecture
            assert same(state, last[architecture])
    model = load_file(home / "runs" / "job" / "models" / "feddf.safetensors")
    assert same(model, learned[1][OWN])
    tested = metrics(home)["accuracy"]["feddf"]
    assert set(tested) == {"client-0", "client-1", "client-2", "average"}


def test_the_global_model_may_be_the_clients_own(tiny_kit: Path) -> None:
    """The model then trains like theirs, not as `global-model` says."""
    stems = {"classifier__small_stem": True, "global_model__small_stem": False}
    two = {"method": "feddf", "classifier__architecture": TWO, **stems}
    config = parse_run_config(quick(**two, global_model__architecture=MOBILE))
    assert final_model(config) == replace(config.classifier, architecture=MOBILE)
    assert [settings.architecture for _, settings in initial_models(config)] == [SHUFFLE, MOBILE]
    vgg_config = parse_run_config(quick(**two, global_model__architecture="vgg16"))
    assert final_model(vgg_config) == vgg_config.global_model
    assert [key for key, _ in initial_models(vgg_config)] == [
        "classifier.init",
        "classifier.init",
        "global-model.init",
    ]
    average = parse_run_config(quick(method="fedavg", global_model__architecture="vgg16"))
    assert final_model(average) == average.classifier


def strategy_of(config: dict, kit: Path) -> tuple[feddf.FedDF, SimpleNamespace]:
    """The strategy of three clients of two architectures, and the grid that it sees."""
    settings = parse_run_config(config)
    architectures = {"client-0": SHUFFLE, "client-1": MOBILE, "client-2": SHUFFLE}
    job = SimpleNamespace(
        config=settings,
        clients=tuple(architectures),
        classes=CLASSES,
        architectures=architectures,
        device=CPU,
    )
    proxy = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    # Flower makes messages within a run alone
    LoopGrid(app, {}, [])
    grid = SimpleNamespace(
        members=SimpleNamespace(nodes={"client-0": 7, "client-1": 8, "client-2": 9})
    )
    return feddf.FedDF(job, proxy), grid  # type: ignore[arg-type]


def reply_of(node: int, architecture: str, record: ArrayRecord, shift: float) -> Message:
    """A client's reply: the model that it was given, its numbers moved."""
    moved = {
        name: Array(np.asarray(value.numpy() + shift, value.numpy().dtype))
        for name, value in record.items()
    }
    figures = MetricRecord({"num-examples": 30, "clients": 1})
    model_config = ConfigRecord({"architecture": architecture})
    content = RecordDict({"arrays": ArrayRecord(moved), "metrics": figures, "model": model_config})
    return Message(content, dst_node_id=node, message_type="train")


def test_an_architecture_that_sent_nothing_goes_on_from_its_last_model(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The architecture learns from the others nevertheless; its clients share one message."""
    strategy, grid = strategy_of(mixed(tiny_kit), tiny_kit)
    initial_states: list[dict[str, State]] = []

    def distil(students, teachers, proxy, job, number) -> None:  # type: ignore[no-untyped-def]
        initial_states.append({architecture_of(s.state_dict()): copy_of(s) for s in students})
        assert len(teachers) == 1

    monkeypatch.setattr(feddf, "distill", distil)
    initial = new_classifier(strategy.settings[OWN], 10, str(tiny_kit), 0).state_dict()
    arrays = ArrayRecord({name: Array(value.numpy()) for name, value in initial.items()})
    messages = {
        m.metadata.dst_node_id: m
        for m in strategy.configure_train(1, arrays, ConfigRecord(), grid)  # type: ignore[arg-type]
    }
    records = {node: m.content.array_records["arrays"] for node, m in messages.items()}
    assert records[7] is records[9]
    assert architecture_of(records[8].to_torch_state_dict()) == MOBILE
    strategy.aggregate_train(1, [reply_of(8, MOBILE, records[8], shift=0.5)])
    assert same(initial_states[0][SHUFFLE], records[7].to_torch_state_dict())
    assert same(initial_states[0][OWN], initial)
    moved = initial_states[0][MOBILE]["features.0.0.weight"]
    sent = records[8].to_torch_state_dict()["features.0.0.weight"]
    assert torch.allclose(moved, sent + 0.5)


@pytest.mark.slow
def test_another_architectures_model_is_refused_by_name(home: Path, tiny_kit: Path) -> None:
    """Client 1, who joined with one architecture, sends the other's; it counts for nobody."""
    config = mixed(tiny_kit, rounds__count=1)
    sent: dict[int, ArrayRecord] = {}

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            sent[index] = reply.content.array_records["model"]
            if index == 1:
                model = new_classifier(final_model(parse_run_config(config)), 10, str(tiny_kit), 0)
                reply.content["model"] = pack_state(model.state_dict())
        return reply

    with pytest.raises(RoundError) as caught:
        run_job(LoopGrid(app, config, mixed_nodes(), tamper), parse_run_config(config), "job")
    assert f"client-1: its model has other arrays than the run's {MOBILE}" in str(caught.value)
    assert "client-0:" not in str(caught.value)


def test_a_client_with_another_architecture_than_the_runs_is_refused(
    home: Path, tiny_kit: Path
) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "query.join" and index == 1:
            reply.content.config_records["join"]["architecture"] = "resnet152"
        return reply

    config = mixed(tiny_kit, rounds__count=1)
    with pytest.raises(RoundError, match="client-1 has architecture 'resnet152': this run allows"):
        run_job(LoopGrid(app, config, mixed_nodes(), tamper), parse_run_config(config), "job")


def test_a_client_whose_architecture_changed_says_so(tmp_path: Path) -> None:
    job = SimpleNamespace(config=parse_run_config(quick(classifier__architecture=MOBILE)))
    request = ConfigRecord({"server-round": 2, "architecture": SHUFFLE})
    with pytest.raises(ConfigError, match=f"'{MOBILE}', but joined the run with '{SHUFFLE}'"):
        train_round(RecordDict({"config": request}), job, tmp_path)  # type: ignore[arg-type]


def test_every_initial_model_is_checked_before_the_clients_work(tiny_kit: Path) -> None:
    for key in ("classifier", "global-model"):
        config = mixed(tiny_kit) | {f"{key}.init": "/nowhere/weights"}
        with pytest.raises(ConfigError, match=f"{key}.init = '/nowhere/weights': no such file"):
            check_server(parse_run_config(config))
