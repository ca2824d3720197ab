"""Personalized models of clients: by NumPy, and over whole runs."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord
from safetensors import safe_open
from safetensors.torch import load_file

from client_app import handlers
from client_app.app import app
from osfl.config import ConfigError, NodeConfig, RunConfig, parse_run_config
from osfl.data.load import Images, load_images
from osfl.inference.description import ModelDescription, read_description
from osfl.models import classifiers
from osfl.payload.messages import SentModel, pack_model, unpack_model
from osfl.util.seeds import seed_of
from server_app.app import run_job
from server_app.federation import evaluate
from server_app.federation.exchange import RoundError
from tests.helpers import analytic_classifier
from tests.helpers.analytic import CLASSES
from tests.helpers.analytic_classifier import State, features, in_numbers, in_use, sgd
from tests.helpers.analytic_training import assert_same, order
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.random_folders import folder_settings, save_clients
from tests.helpers.settings import quick
from tests.helpers.whole_runs import nodes

STEPS = 5


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
        "global_model__lr": 0.01,
        "global_model__momentum": 0.5,
        "global_model__weight_decay": 0.02,
        "personalization__steps": STEPS,
        "personalization__lr": 0.3,
        "personalization__batch_size": 5,
    }
    return quick(**{**defaults, **overrides})


def run(
    config: dict[str, Any], sites: list[dict] | None = None, tamper: Any = None
) -> tuple[RunConfig, LoopGrid]:
    grid = LoopGrid(app, config, sites or nodes(2), tamper)
    parsed = parse_run_config(config)
    run_job(grid, parsed, "job")
    return parsed, grid


def of_run(home: Path, file: str) -> Any:
    return json.loads((home / "runs" / "job" / file).read_text())


def images_of(config: RunConfig, number: int, split: str) -> Images:
    node = NodeConfig(partition_id=number, num_partitions=2)
    return load_images(config.data, node, split, config.seed)


def confusion_of(state: State, images: Images) -> list[list[int]]:
    """The confusion matrix: a row for each true class."""
    cells = np.zeros((4, 4), dtype=int)
    predictions = in_use(state, features(images.pixels)).argmax(axis=1)
    np.add.at(cells, (images.labels.numpy(), predictions), 1)
    return cells.tolist()


def adapted(config: RunConfig, number: int, begin: State) -> State:
    """SGD by hand from the global model, on the client's own images in its own order."""
    images = images_of(config, number, "train")
    seed = seed_of(config.seed, "adaptation", f"client-{number}")
    batches = order(len(images), 5, STEPS, seed)[:STEPS]

    class Recipe:
        lr = 0.3
        momentum = 0.5
        weight_decay = 0.02

    return sgd(begin, features(images.pixels), images.labels.numpy(), batches, Recipe)


def described(file: Path) -> ModelDescription:
    with safe_open(file, "pt") as model_file:
        description = read_description(model_file.metadata())
    assert description is not None
    return description


def test_each_client_adapts_the_global_model_to_its_own_images(home: Path, root: Path) -> None:
    """Training has the global model's momentum and weight decay; both are tested, and sites that
    keep models have both, two sites in one folder.
    """
    sites = [{**node, "models-dir": str(home / "kept")} for node in nodes(2)]
    config, grid = run(settings(root), sites)
    assert [node for node, kind in grid.sent if kind == "evaluate"] == [0, 1, 0, 1]
    begin = in_numbers(load_file(home / "runs" / "job" / "models" / "real.safetensors"))
    came = of_run(home, "tests/real.json")
    matrices = of_run(home, "tests/real.adapted.json")
    for number in range(2):
        client = f"client-{number}"
        expected = adapted(config, number, begin)
        test = images_of(config, number, "test")
        assert came[client] == confusion_of(begin, test)
        assert matrices[client] == confusion_of(expected, test)
        assert matrices[client] != came[client]
        for name, state in (("", begin), ("-adapted", expected)):
            file = home / "kept" / f"job-real-{client}{name}.safetensors"
            assert_same(load_file(file), state)
            stated = described(file)
            assert (stated.architecture, stated.small_stem) == ("shufflenet_v2_x1_0", False)
            assert (stated.classes, stated.run, stated.name) == (CLASSES, "job", "real")
            suffix = "; then 5 steps on a site's images" if name else ""
            assert stated.trained_on == f"the images of all clients, pooled{suffix}"
            assert file.stat().st_mode & 0o777 == 0o600
    metrics = of_run(home, "metrics.json")
    assert metrics["adapted"] == {"real": 2}
    assert metrics["shown"] == "real"
    assert metrics["average"] == metrics["accuracy"]["real"]["average"]
    assert metrics["not_tested"] == []
    # Sent twice
    size = (home / "runs" / "job" / "models" / "real.safetensors").stat().st_size
    assert metrics["clients"]["client-0"]["download_bytes"] == 2 * size
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "for 5 steps on its training images. 2 of 2 clients reported the result" in page
    assert "the others have a privacy" not in page


def test_without_steps_the_model_is_kept_as_it_came(home: Path, root: Path) -> None:
    sites = [{**nodes(2)[0], "models-dir": str(home / "kept")}, nodes(2)[1]]
    run(settings(root, personalization__steps=0), sites)
    assert not (home / "runs" / "job" / "tests" / "real.adapted.json").exists()
    assert of_run(home, "metrics.json")["adapted"] == {}
    assert "adapted" not in (home / "runs" / "job" / "report.html").read_text()
    weights = load_file(home / "kept" / "job-real-client-0.safetensors")
    file = home / "runs" / "job" / "models" / "real.safetensors"
    assert_same(weights, in_numbers(load_file(file)))
    clients = of_run(home, "metrics.json")["clients"]
    assert clients["client-0"]["download_bytes"] == file.stat().st_size


def test_a_site_with_a_guarantee_does_not_tell_what_it_made(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The site keeps the model and its own log has the accuracy; no client counts as not tested."""
    site = {"epsilon": 1.0, "test-results": "exact", "models-dir": str(home / "kept")}
    config, _ = run(settings(root), [{**nodes(2)[0], **site}, nodes(2)[1]])
    assert set(of_run(home, "tests/real.json")) == {"client-0", "client-1"}
    assert set(of_run(home, "tests/real.adapted.json")) == {"client-1"}
    metrics = of_run(home, "metrics.json")
    assert metrics["adapted"] == {"real": 1}
    assert metrics["not_tested"] == []
    page = (home / "runs" / "job" / "report.html").read_text()
    assert (
        "1 of 2 clients reported the result, and the averages are over them; the others have"
        in page
    )
    begin = in_numbers(load_file(home / "runs" / "job" / "models" / "real.safetensors"))
    expected = adapted(config, 0, begin)
    weights = load_file(home / "kept" / "job-real-client-0-adapted.safetensors")
    assert_same(weights, expected)
    right = int(np.trace(confusion_of(expected, images_of(config, 0, "test"))))
    assert f"client-0: model personalized: {right} of 24 test images correct" in caplog.text


def test_a_site_with_a_guarantee_may_keep_the_predictions_alone(home: Path, root: Path) -> None:
    site = {"epsilon": 1.0, "test-results": "exact", "predictions-dir": str(home / "kept")}
    run(settings(root), [{**nodes(2)[0], **site}, nodes(2)[1]])
    names = {file.name for file in (home / "kept").iterdir()}
    assert names == {"job-real-client-0.csv", "job-real-client-0-adapted.csv"}
    assert set(of_run(home, "tests/real.adapted.json")) == {"client-1"}


@pytest.mark.slow
def test_no_client_is_heard_in_a_run_with_an_epsilon(home: Path, root: Path) -> None:
    """Not even a client that tells."""
    config = settings(root, method="fedpft", epsilon=1.0, classifier__init="none")
    sites = [{**node, "models-dir": str(home / "kept")} for node in nodes(2)]
    run(config, sites, tamper=answering(confusion=[0, 0, 0, 6] * 4))
    # The personalized model has seen the site's images, to which the guarantee does not apply
    for suffix, epsilon in (("", 1.0), ("-adapted", None)):
        stated = described(home / "kept" / f"job-FedPFT-client-0{suffix}.safetensors")
        assert stated.epsilon == epsilon
    assert not (home / "runs" / "job" / "tests" / "FedPFT.adapted.json").exists()
    assert of_run(home, "metrics.json")["adapted"] == {}
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "none reported the result: with an epsilon none does" in page


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("one image", "personalization: 1 image.s. to train"),
        ("it diverged", "personalization: training diverged"),
    ],
)
def test_a_model_that_cannot_be_adapted_costs_its_own_test_alone(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture, why: str, said: str
) -> None:
    config = settings(root)
    sites = [{**node, "models-dir": str(home / "kept")} for node in nodes(2)]
    run(settings(root, personalization__steps=0), sites)
    files = sorted((root / "client-0" / "train").glob("*/*"))
    if why == "one image":
        for file in files[1:]:
            file.unlink()
        for folder in (root / "client-0" / "train").iterdir():
            if not any(folder.iterdir()):
                folder.rmdir()
    else:
        config["personalization.lr"] = 100.0
        config["personalization.steps"] = 2000
    # The model is there already, of all images
    run(config, sites)
    assert "client-0 could not test real, personalized: " in caplog.text
    assert re.search(said, caplog.text)
    assert set(of_run(home, "tests/real.json")) == {"client-0", "client-1"}
    assert not (home / "kept" / "job-real-client-0-adapted.safetensors").exists()
    assert (home / "kept" / "job-real-client-0.safetensors").exists()
    counts = of_run(home, "metrics.json")["adapted"]
    assert counts == ({} if why == "it diverged" else {"real": 1})


def answering(**metrics: object) -> Any:
    """A client 1 that says something else in its second test, of the adapted model."""
    asked = []

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 1:
            asked.append(kind)
            if len(asked) == 2:
                figures: Any = {**reply.content.metric_records["metrics"], **metrics}
                reply.content["metrics"] = MetricRecord(figures)
        return reply

    return tamper


def test_a_first_test_without_figures_is_none(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only of an adapted model a client may keep them to itself."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 1:
            reply.content["metrics"] = MetricRecord({"seconds": 1.0})
        return reply

    run(settings(root), tamper=tamper)
    assert "client-1 could not test real: " in caplog.text
    assert set(of_run(home, "tests/real.json")) == {"client-0"}
    assert of_run(home, "metrics.json")["not_tested"] == ["client-1"]


# The last has 24 counts, of other classes than the first test's images
@pytest.mark.parametrize("cells", [[1] * 15, [-1] * 16, [0.5] * 16, [24] + [0] * 15])
def test_a_matrix_that_cannot_be_true_is_refused(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture, cells: list[Any]
) -> None:
    run(settings(root), tamper=answering(confusion=cells))
    assert re.search(
        "client-1 could not test real, personalized: it(s confusion| tested)", caplog.text
    )
    assert set(of_run(home, "tests/real.json")) == {"client-0", "client-1"}
    assert set(of_run(home, "tests/real.adapted.json")) == {"client-0"}


@pytest.mark.parametrize(
    ("folder", "said"), [("file", "File exists"), ("relative", "must be an absolute path")]
)
def test_a_site_that_cannot_keep_models_says_so_before_the_work(
    home: Path, root: Path, folder: str, said: str
) -> None:
    (home / "file").write_text("in the way")
    path = folder if folder == "relative" else str(home / folder)
    sites = [{**nodes(2)[0], "models-dir": path}, nodes(2)[1]]
    with pytest.raises(RoundError, match=f"models-dir = .*{folder}.*{said}"):
        run(settings(root, join_timeout=2.0), sites)


@pytest.mark.slow
def test_a_site_keeps_no_other_clients_classifier(home: Path, root: Path) -> None:
    config = settings(root, method="local", personalization__steps=0, classifier__init="none")
    run(config, [{**node, "models-dir": str(home / "kept")} for node in nodes(2)])
    assert list((home / "kept").iterdir()) == []


@pytest.mark.slow
def test_a_clients_name_is_not_taken_for_an_adapted_models(home: Path, root: Path) -> None:
    sites = [{**nodes(2)[0], "client-id": "site"}, {**nodes(2)[1], "client-id": "site-adapted"}]
    run(settings(root, method="local", personalization__steps=0, classifier__init="none"), sites)
    metrics = of_run(home, "metrics.json")
    assert set(metrics["accuracy"]) == {"site", "site-adapted"}
    assert metrics["adapted"] == {}


def test_a_full_disk_loses_a_model_and_no_test(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handlers, "write_atomically", full)
    sites = [{**nodes(2)[0], "models-dir": str(home / "kept")}, nodes(2)[1]]
    run(settings(root), sites)
    assert "the model cannot be written: [Errno 28] No space left" in caplog.text
    assert set(of_run(home, "tests/real.adapted.json")) == {"client-0", "client-1"}


@pytest.mark.parametrize("name", ["../up", "a/b", "", "x" * 65])
@pytest.mark.parametrize("part", ["job", "name"])
def test_a_server_names_no_file_outside_of_the_folder(part: str, name: str) -> None:
    sent = pack_model(SentModel({"w": torch.ones(1)}, "none", True, "job", "FT"))
    header = dict(sent.config_records["header"])
    sent["header"] = ConfigRecord({**header, part: name})
    with pytest.raises(ValueError, match="1 to 64 letters"):
        unpack_model(sent)


def test_the_folder_of_models_shapes_no_payload(root: Path) -> None:
    from client_app.app import cache_key

    config = parse_run_config(settings(root))
    here = cache_key(config, NodeConfig(models_dir="/srv/models"), "")
    assert here == cache_key(config, NodeConfig(), "")
    assert here != cache_key(config, NodeConfig(domain="neon"), "")


def test_local_models_are_nobodys_to_adapt(root: Path) -> None:
    with pytest.raises(
        ConfigError, match="personalization.steps = 5: must be 0 with method 'local'"
    ):
        parse_run_config(settings(root, method="local"))


def test_a_model_with_rounds_is_shown_as_it_came(home: Path, root: Path) -> None:
    run(settings(root, method="fedavg", rounds__count=1, classifier__init="none"))
    metrics = of_run(home, "metrics.json")
    assert list(metrics["accuracy"]) == ["fedavg", "fedavg, adapted"]
    assert metrics["shown"] == "fedavg"
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "test images, also for the model that it adapted to its training images." in page


def test_a_client_that_adapts_is_not_asked_twice(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = evaluate.Exchange

    def spied(grid: Any, ttl: float, patience: float | None = None) -> Any:
        asked.append(patience)
        return real(grid, ttl, patience)

    monkeypatch.setattr(evaluate, "Exchange", spied)
    run(settings(root, test_timeout=900.0))
    assert asked == [None, 900.0]


def test_a_finished_run_is_tested_again_as_it_is_asked(home: Path, root: Path) -> None:
    """Nothing is trained anew; without steps what an earlier test left is gone."""
    run(settings(root, personalization__steps=0))
    model = home / "runs" / "job" / "models" / "real.safetensors"
    before = model.stat().st_mtime_ns
    config, _ = run(settings(root))
    begin = in_numbers(load_file(model))
    matrices = of_run(home, "tests/real.adapted.json")
    assert matrices["client-1"] == confusion_of(
        adapted(config, 1, begin), images_of(config, 1, "test")
    )
    run(settings(root, personalization__steps=0))
    assert model.stat().st_mtime_ns == before
    assert not (home / "runs" / "job" / "tests" / "real.adapted.json").exists()
    assert of_run(home, "metrics.json")["adapted"] == {}


@pytest.mark.slow
def test_each_of_several_global_models_is_adapted_by_itself(
    home: Path, root: Path, tiny_kit: Path
) -> None:
    """FedLMG's three: a client begins with the one that came, and keeps and tests each."""
    options = {"kit": str(tiny_kit), "classifier__init": "none", "fedlmg__bn_weight": 0.0}
    sites = [{**node, "models-dir": str(home / "kept")} for node in nodes(2)]
    several = settings(root, method="fedlmg", fedlmg__strategies="ft,md,sd", **options)
    config, grid = run(several, sites)
    assert [node for node, kind in grid.sent if kind == "evaluate"] == [0, 1] * 6
    files = {
        name: home / "runs" / "job" / "models" / f"{name}.safetensors"
        for name in ("FT", "MD", "SD")
    }
    assert len({file.read_bytes() for file in files.values()}) == 3
    for name, file in files.items():
        begin = in_numbers(load_file(file))
        for number in range(2):
            expected = adapted(config, number, begin)
            model_file = home / "kept" / f"job-{name}-client-{number}-adapted.safetensors"
            assert_same(load_file(model_file), expected)
            test = confusion_of(expected, images_of(config, number, "test"))
            assert of_run(home, f"tests/{name}.adapted.json")[f"client-{number}"] == test
    metrics = of_run(home, "metrics.json")
    assert metrics["adapted"] == {"FT": 2, "MD": 2, "SD": 2}
    # Each is sent twice; the kit was there
    size = sum(file.stat().st_size for file in files.values())
    assert metrics["clients"]["client-0"]["download_bytes"] == 2 * size
