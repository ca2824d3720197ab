"""Score histograms over whole runs: who sends them, what is refused, and what is shown."""

import csv
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MetricRecord
from sklearn.metrics import roc_auc_score

from client_app.app import app
from client_app.evaluation import ModelTest, write_predictions
from osfl.config import NodeConfig, parse_run_config
from osfl.data.parts import list_folder
from osfl.metrics.histograms import ScoreHistograms, check_histograms
from osfl.metrics.messages import CALIBRATION, HISTOGRAMS, pack_histograms, unpack_histograms
from osfl.models import classifiers
from osfl.payload.messages import pack_bytes
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import verify_run
from server_app.app import run_job
from tests.helpers import analytic_classifier
from tests.helpers.analytic import CLASSES
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.random_folders import folder_settings, save_clients
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, nodes


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "build_classifier", analytic_classifier.build)


@pytest.fixture
def root(home: Path) -> Path:
    """Folders of two clients, which test on 24 images, six of each class."""
    return save_clients(home / "root", 28, 28)


def settings(root: Path, **overrides: Any) -> dict[str, Any]:
    defaults = {
        **folder_settings(root),
        "global_model__lr": 0.01,
    }
    return quick(**{**defaults, **overrides})


def run(config: dict[str, Any], sites: list[dict] | None = None, tamper: Any = None) -> None:
    run_job(LoopGrid(app, config, sites or nodes(2), tamper), parse_run_config(config), "job")


def stored(home: Path, test: str = "real") -> dict[str, Any]:
    return RunFolder(home / "runs" / "job").stored_histograms(test)


def test_figures_are_those_of_the_predictions_that_each_site_keeps(home: Path, root: Path) -> None:
    sites = [
        {**node, "predictions-dir": str(home / f"kept-{k}")} for k, node in enumerate(nodes(2))
    ]
    run(settings(root, personalization__steps=2), sites)
    figures = metrics(home)["figures"]
    assert list(figures) == ["real", "real, adapted"]
    assert set(stored(home)) == {"client-0", "client-1"}
    rows = []
    for number in range(2):
        folder = home / f"kept-{number}"
        ending = f"job-real-client-{number}"
        assert {file.stem for file in folder.iterdir()} == {ending, f"{ending}-adapted"}
        with (folder / f"{ending}.csv").open() as file:
            rows += list(csv.DictReader(file))
    labels = np.array([CLASSES.index(row["true"]) for row in rows])
    p = np.array([[float(row[f"p({name})"]) for name in CLASSES] for row in rows])
    assert [row["class"] for row in rows] == [CLASSES[label] for label in p.argmax(axis=1)]
    exact = roc_auc_score(labels, p, multi_class="ovr")
    together = figures["real"]["together"]
    assert abs(together["auroc"]["value"] - exact) <= together["binning_error"] + 1e-9
    brier = ((p - np.eye(4)[labels]) ** 2).sum(axis=1).mean()
    assert together["brier"]["value"] == pytest.approx(brier, abs=1e-4)
    config = parse_run_config(settings(root))
    files = list_folder(config.data, NodeConfig(partition_id=1, num_partitions=2), "test")
    digests = [hashlib.sha256(str(file).encode()).hexdigest() for file, _ in files]
    assert [row["sha256"] for row in rows[24:]] == digests


def test_the_report_shows_curves_and_intervals(home: Path, root: Path) -> None:
    run(settings(root))
    folder = home / "runs" / "job"
    page = (folder / "report.html").read_text()
    section = page[page.index("<h2>ROC and calibration") :]
    assert len(re.findall('<svg class="plot"', section)) == 2
    area = metrics(home)["figures"]["real"]["together"]["auroc"]
    shown = "{value:.3f} ({low:.3f} to {high:.3f})".format(**area)
    assert shown in page[: page.index("<h2>ROC and calibration")]
    for client in ("client-0", "client-1", "all clients"):
        assert f"<title>{client}</title>" in section
        assert f"<td>{client}</td>" in section
    assert "nan" not in section
    assert [finding.problems for finding in verify_run(folder) if finding.problems] == []
    (folder / "histograms" / "real.json").write_text("{}")
    assert [finding.problems for finding in verify_run(folder) if finding.problems]


@pytest.mark.parametrize(
    ("policy", "is_sent"),
    [
        ({}, True),
        ({"test-results": "exact"}, True),
        ({"test-results": "confusion"}, False),
        ({"min-class-images": 7}, True),
        ({"epsilon": 1.0, "test-results": "exact", "client-id": "client-1"}, False),
        ({"epsilon-total": 5.0, "test-results": "exact", "client-id": "client-1"}, False),
        ({"run": 1.0}, False),
    ],
)
def test_histograms_leave_a_site_only_without_a_guarantee(
    home: Path, root: Path, policy: dict[str, Any], is_sent: bool
) -> None:
    replies = []

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 1:
            replies.append(reply.content)
        return reply

    site = dict(policy)
    epsilon = site.pop("run", 0.0)
    is_private = bool(epsilon or "epsilon" in site)
    method = {"method": "fedpft", "classifier__init": "none", "epsilon": epsilon}
    sites = [nodes(2)[0], {**nodes(2)[1], **site}]
    run(settings(root, **(method if is_private else {})), sites, tamper)
    (reply,) = replies
    assert "confusion" in reply.metric_records["metrics"]
    records = {HISTOGRAMS, CALIBRATION} if is_sent else set()
    assert set(reply) - {"metrics"} == records
    assert ("client-1" in stored(home, next(iter(metrics(home)["accuracy"])))) == is_sent
    if is_private:
        page = (home / "runs" / "job" / "report.html").read_text()
        assert ("confusion matrix and score histograms of" in page) == (not epsilon)
    if is_sent:
        histograms = unpack_histograms(reply, 4)
        assert histograms is not None
        # Each class has six test images, fewer than seven
        least = site.get("min-class-images", 1)
        assert histograms.positives.sum(axis=1).tolist() == [0 if least > 6 else 6] * 4
        assert histograms.negatives.sum(axis=1).tolist() == [18] * 4


def test_a_run_with_an_epsilon_keeps_no_histograms(home: Path, root: Path) -> None:
    """Not even possible ones, which a client sends nevertheless."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate":
            cells = np.array(reply.content.metric_records["metrics"]["confusion"]).reshape(4, 4)
            positives, negatives = np.zeros((2, 4, 256), dtype=int)
            positives[:, 9] = 6
            negatives[:, 9] = 18
            confidence = np.zeros((3, 15), dtype=int)
            confidence[:, 14] = (24, np.trace(cells), 23000)
            sums = np.array([24000, 24000])
            possible = ScoreHistograms(positives, negatives, confidence, sums)
            check_histograms(possible, cells.tolist())
            reply.content.update(pack_histograms(possible))
        return reply

    run(settings(root, method="fedpft", classifier__init="none", epsilon=1.0), tamper=tamper)
    assert set(metrics(home)["accuracy"]["FedPFT"]) == {"client-0", "client-1", "average"}
    assert metrics(home)["figures"] == {}


@pytest.mark.parametrize("what", [HISTOGRAMS, CALIBRATION])
def test_a_client_with_false_histograms_has_not_tested(
    home: Path, root: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index == 1:
            if what == HISTOGRAMS:
                counts = np.zeros((2, 4, 256), dtype="<u4")
                counts[0, 0, 0] = 7
                reply.content[HISTOGRAMS] = pack_bytes(counts.tobytes(), "x")
            else:
                reply.content[CALIBRATION] = MetricRecord(
                    {"confidence": [-1] * 45, "brier": [0, 0]}
                )
        return reply

    run(settings(root), tamper=tamper)
    assert re.search("client-1 could not test real: .*its (histograms|confidence)", caplog.text)
    assert set(metrics(home)["accuracy"]["real"]) == {"client-0", "average"}
    assert set(stored(home)) == {"client-0"}


def test_older_clients_send_none_and_the_report_is_as_before(home: Path, root: Path) -> None:
    """A second test without histograms removes those of the first."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate":
            del reply.content[HISTOGRAMS]
        return reply

    run(settings(root, personalization__steps=1))
    assert stored(home)
    assert stored(home, "real.adapted")
    run(settings(root), tamper=tamper)
    assert set(metrics(home)["accuracy"]["real"]) == {"client-0", "client-1", "average"}
    assert metrics(home)["figures"] == {}
    assert not list((home / "runs" / "job" / "histograms").iterdir())
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "AUROC" not in page
    assert "<svg" not in page


def test_outputs_that_are_no_numbers_cost_the_histograms_alone(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        classifiers, "compute_logits", lambda model, pixels, device: torch.full((24, 4), torch.nan)
    )
    run(settings(root))
    assert stored(home) == {}
    assert set(metrics(home)["accuracy"]["real"]) == {"client-0", "client-1", "average"}


def test_predictions_that_cannot_be_written_cost_no_test(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = home / "kept"
    (folder / "job-real-client-0.csv").mkdir(parents=True)
    caplog.set_level(logging.INFO)
    run(settings(root), [{**nodes(2)[0], "predictions-dir": str(folder)}, nodes(2)[1]])
    assert f"predictions-dir = {folder}: cannot be written" in caplog.text
    assert json.loads((home / "runs" / "job" / "tests" / "real.json").read_text())["client-0"]


def test_nor_do_test_images_that_are_gone(
    home: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_run_config(settings(root))
    node = NodeConfig(data_dir=str(home / "gone"), predictions_dir=str(home / "kept"))
    test = ModelTest(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long), [[0] * 4] * 4)
    write_predictions(test, config, node, "job-real-client-0")
    assert f"predictions-dir = {home / 'kept'}: cannot be written" in caplog.text
