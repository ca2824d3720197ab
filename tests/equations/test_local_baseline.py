"""Local-only models of clients and their gains: by NumPy, and over whole runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from safetensors.torch import load_file

from client_app.app import app
from client_app.learning import local_baseline
from osfl.config import LOCAL_BASELINE, ConfigError, NodeConfig, RunConfig, parse_run_config
from osfl.data.load import Images, load_images
from osfl.models import classifiers
from osfl.payload.messages import WITHHELD, SentModel, pack_model
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.gain import mean_gain
from osfl.run_folder.status import Status
from osfl.util.seeds import seed_of
from server_app.federation.local_baseline import compare_with_local_models
from tests.helpers import analytic_classifier
from tests.helpers.analytic import CLASSES
from tests.helpers.analytic_classifier import State, features, in_numbers, in_use, sgd
from tests.helpers.analytic_training import order
from tests.helpers.random_folders import folder_settings, save_clients
from tests.helpers.settings import quick
from tests.helpers.whole_runs import nodes, start


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "build_classifier", analytic_classifier.build)


@pytest.fixture
def root(home: Path) -> Path:
    """Two clients' folders, of 12 and 23 images, and 24 to test on."""
    return save_clients(home / "root", 12, 23)


def settings(root: Path, **overrides: object) -> dict[str, Any]:
    defaults = {
        **folder_settings(root),
        "global_model__epochs": 4,
        "global_model__lr": 0.2,
        "global_model__momentum": 0.5,
        "global_model__weight_decay": 0.02,
        "global_model__batch_size": 5,
        "local_baseline": True,
    }
    return quick(**{**defaults, **overrides})


def of_run(home: Path, file: str) -> Any:
    return json.loads((home / "runs" / "job" / file).read_text())


def images_of(config: RunConfig, number: int, split: str) -> Images:
    node = NodeConfig(partition_id=number, num_partitions=2)
    return load_images(config.data, node, split, config.seed)


def trained_alone(config: RunConfig, number: int, epochs: int, recipe: Any) -> State:
    """SGD by hand from the initial weights, on the client's own images in its own order."""
    images = images_of(config, number, "train")
    seed = seed_of(config.seed, "local-baseline", f"client-{number}")
    batches = order(len(images), recipe.batch_size, epochs, seed)
    begin = in_numbers(analytic_classifier.build("", 4).state_dict())
    return sgd(begin, features(images.pixels), images.labels.numpy(), batches, recipe)


def check(home: Path, config: RunConfig, epochs: int, recipe: Any, model: str) -> None:
    """Compare a run's local-only results to those of models trained by hand."""
    stored = of_run(home, "local-baseline.json")
    assert stored["model"] == model
    shared = in_numbers(load_file(home / "runs" / "job" / "models" / f"{model}.safetensors"))
    for number in range(2):
        tests = images_of(config, number, "test")
        labels = tests.labels.numpy()
        x = features(tests.pixels)
        alone = in_use(trained_alone(config, number, epochs, recipe), x).argmax(axis=1)
        together = in_use(shared, x).argmax(axis=1) == labels
        local_hits = alone == labels
        cells = np.zeros((4, 4), dtype=int)
        np.add.at(cells, (labels, alone), 1)
        pairs = [
            int(sum(together[row] == a and local_hits[row] == b for row in range(24)))
            for a, b in ((True, True), (True, False), (False, True), (False, False))
        ]
        assert stored["clients"][f"client-{number}"] == {
            "confusion": cells.tolist(),
            "pairs": pairs,
        }


@pytest.mark.slow
def test_each_client_trains_alone_by_the_global_recipe(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a job: a server that starts again gets the same figures without a training."""
    config = settings(root)
    grid = start(config)
    assert [node for node, kind in grid.sent if kind == "evaluate"] == [0, 1, 0, 1]
    parsed = parse_run_config(config)
    check(home, parsed, 4, parsed.global_model, "real")
    metrics = of_run(home, "metrics.json")
    gain = metrics["gain"]["clients"]["client-1"]
    assert gain["global"] == pytest.approx(metrics["accuracy"]["real"]["client-1"])
    assert gain["points"] == pytest.approx(gain["global"] - gain["local"])
    size = (home / "runs" / "job" / "models" / "real.safetensors").stat().st_size
    assert metrics["clients"]["client-0"]["download_bytes"] == 2 * size
    page = (home / "runs" / "job" / "report.html").read_text()
    assert page.index("What each client gained") < page.index("<h2>Accuracy</h2>")

    before = of_run(home, "local-baseline.json")
    trainings: list[int] = []
    real = local_baseline.fit
    monkeypatch.setattr(local_baseline, "fit", lambda *a: trainings.append(1) or real(*a))
    start(config)
    assert of_run(home, "local-baseline.json") == before
    assert trainings == []
    # A corrupt record, and images that have changed, cost one training each
    (record,) = (home / "cache").rglob("client-0.local/predictions.json")
    record.write_text(record.read_text().replace("labels", "label"))
    (root / "client-1" / "train" / CLASSES[0] / "new.png").write_bytes(
        next((root / "client-0" / "train" / CLASSES[0]).iterdir()).read_bytes()
    )
    start(config)
    assert trainings == [1, 1]
    # Without the key, the figures of an earlier test are gone
    start({**config, "local-baseline": False})
    assert not (home / "runs" / "job" / "local-baseline.json").exists()
    assert of_run(home, "metrics.json")["gain"] == {}


def test_a_client_of_rounds_trains_alone_for_as_many_epochs(home: Path, root: Path) -> None:
    config = settings(
        root,
        method="fedavg",
        rounds__count=3,
        rounds__local_epochs=2,
        classifier__init="none",
        classifier__batch_size=6,
        classifier__lr=0.1,
    )
    start(config)
    parsed = parse_run_config(config)
    check(home, parsed, 6, parsed.classifier, "fedavg")


def answering(**metrics: object) -> Any:
    """A client 1 that says something else in its second test, of its local-only model."""
    asked = []

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 1:
            asked.append(kind)
            if len(asked) == 2:
                honest: Any = dict(reply.content.metric_records["metrics"])
                figures = {
                    key: value(honest[key]) if callable(value) else value
                    for key, value in metrics.items()
                }
                reply.content["metrics"] = MetricRecord({**honest, **figures})
        return reply

    return tamper


ALL_RIGHT = [6, 0, 0, 0, 0, 6, 0, 0, 0, 0, 6, 0, 0, 0, 0, 6]


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"pairs": [24]}, "not four counts"),
        ({"pairs": [25, -1, 0, 0]}, "not four counts"),
        ({"pairs": [12.0, 12.0, 0.0, 0.0]}, "not four counts"),
        # As many right of either model as its matrix has, but more images
        ({"pairs": lambda pairs: [*pairs[:3], pairs[3] + 1]}, "contradict"),
        ({"confusion": ALL_RIGHT}, "contradict"),
        ({"pairs": [24, 0, 0, 0]}, "contradict"),
        ({"pairs": [0, 0, 0, 24]}, "contradict"),
        ({"confusion": [24, *[0] * 15]}, "other images"),
        ({"confusion": [1] * 15}, "wrong size"),
    ],
)
def test_a_result_that_cannot_be_true_costs_the_gain_alone(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture, figures: Any, reason: str
) -> None:
    start(settings(root), tamper=answering(**figures))
    assert "client-1 could not test its local-only model beside real: " in caplog.text
    assert reason in caplog.text
    metrics = of_run(home, "metrics.json")
    assert set(metrics["gain"]["clients"]) == {"client-0"}
    assert metrics["not_tested"] == []
    assert "at the one client that compared both" in metrics["summary"]


def test_a_client_that_cannot_train_alone_costs_the_gain_alone(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One image is too few; and the report says that no client has a gain."""
    config = settings(root, global_model__lr=0.01)
    start({**config, "local-baseline": False})
    for number in range(2):
        first, *surplus = sorted((root / f"client-{number}" / "train").glob("*/*"))
        for file in surplus:
            file.unlink()
        for folder in first.parents[1].iterdir():
            if not any(folder.iterdir()):
                folder.rmdir()
    start(config)
    assert "1 image(s) to train a classifier on" in caplog.text
    assert of_run(home, "metrics.json")["gain"] == {}
    assert (
        "No client reported a model that it trained alone"
        in (home / "runs" / "job" / "report.html").read_text()
    )


def asks(config: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """A client's reply to a server that asks it for a local-only model."""
    model = analytic_classifier.build("resnet18", 4)
    content = pack_model(SentModel(model.state_dict(), "resnet18", True, "job", "real"))
    content[LOCAL_BASELINE] = ConfigRecord()
    message = Message(content, dst_node_id=7, message_type="evaluate")
    message.metadata.__dict__["_message_id"] = "1"
    reply = app(message, Context(1, 7, node, RecordDict(), config))
    return dict(reply.content.metric_records["metrics"])


@pytest.mark.parametrize(
    "site",
    [
        {"epsilon": 1.0, "test-results": "exact"},
        {"test-results": "off"},
        {"test-results": "confusion"},
        {"role": "test"},
        {},
    ],
)
def test_a_site_with_a_guarantee_or_without_results_trains_nothing(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, site: dict[str, Any]
) -> None:
    """Nor does any site in a run with an epsilon, whose server asks no client."""
    monkeypatch.setattr(local_baseline, "fit", None)
    epsilon = {} if site else {"method": "fedpft", "epsilon": 1.0, "classifier__init": "none"}
    config = settings(root, **epsilon)
    assert asks(config, {**nodes(2)[0], **site}) == {"seconds": 0.0, WITHHELD: 1}
    if epsilon:
        folder = RunFolder(home)
        folder.store_local_tests("FedPFT", {})
        parsed = parse_run_config(config)
        models: Any = {"FedPFT": None}
        status = Status(home)
        compare_with_local_models(None, parsed, {"client-0": 0}, models, folder, status)  # type: ignore[arg-type]
        assert not folder.local_tests_file.exists()


def test_a_run_without_the_key_trains_nothing(root: Path) -> None:
    with pytest.raises(Exception, match="local-baseline = false: the run must set it to true"):
        asks(settings(root, local_baseline=False), nodes(2)[0])


def test_initial_weights_outside_the_allowed_folders_are_not_read(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSFL_ALLOWED_DIRS", str(root))
    with pytest.raises(Exception, match="global-model.init = .* below a folder that this client"):
        asks(settings(root, global_model__init=str(home / "secret.safetensors")), nodes(2)[0])


def test_models_of_the_clients_have_no_gain(root: Path) -> None:
    with pytest.raises(ConfigError, match="local-baseline = true: must be false with method 'lo"):
        parse_run_config(settings(root, method="local"))


# ---- The interval ----


def test_the_interval_is_bonetts_and_prices() -> None:
    """Compare it with its definition, for one client and for the average of four."""
    gain = mean_gain([(70, 20, 5, 5)])
    p12, p21 = 21 / 102, 6 / 102
    half = 1.959964 * ((p12 + p21 - (p12 - p21) ** 2) / 102) ** 0.5
    assert gain.points == pytest.approx(15)
    assert (gain.low, gain.high) == pytest.approx(
        (100 * (p12 - p21 - half), 100 * (p12 - p21 + half)), abs=1e-4
    )
    # Of four clients each has a quarter of the added images
    same = mean_gain([(70, 20, 5, 5)] * 4)
    p12, p21 = 20.25 / 100.5, 5.25 / 100.5
    half = 1.959964 * ((p12 + p21 - (p12 - p21) ** 2) / 100.5 / 4) ** 0.5
    assert same.points == pytest.approx(15)
    assert (same.low, same.high) == pytest.approx(
        (100 * (p12 - p21 - half), 100 * (p12 - p21 + half)), abs=1e-4
    )
    assert mean_gain([(0, 3, 0, 0), (0, 0, 3, 0)]).points == 0
    assert mean_gain([(0, 1, 0, 0)]).high == 100
    certain = mean_gain([(0, 5, 0, 0)] * 100)
    assert 97 < certain.low < certain.points == certain.high == 100


@pytest.mark.parametrize(("clients", "images"), [(1, 50), (100, 20)])
@pytest.mark.parametrize("chances", [(0.6, 0.2, 0.05, 0.15), (0.7, 0.1, 0.15, 0.05)])
def test_the_interval_covers_the_gain(
    clients: int, images: int, chances: tuple[float, ...]
) -> None:
    """In about 95 of 100 samples."""
    tables = np.random.default_rng(0).multinomial(images, chances, (2000, clients))
    truth = 100 * (chances[1] - chances[2])
    gains = [mean_gain(sample.tolist()) for sample in tables]
    share = np.mean([gain.low <= truth <= gain.high for gain in gains])
    assert 0.93 < share < 0.98
