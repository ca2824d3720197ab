"""Curves of the report: their areas, and plots of many clients with awkward names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import auc

from osfl.cli import display
from osfl.metrics.figures import figures_of
from osfl.metrics.histograms import ScoreHistograms, count_scores
from osfl.run_folder.events import FollowedRun, log_results
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.curves import MAX_LINES, macro_roc
from osfl.run_folder.report.metrics import gather, write_report
from osfl.run_folder.report.senders import partial_senders
from tests.helpers.digit_scores import digit_logits
from tests.helpers.run_folders import run_folder

SITES = [f"<site-{number}>" for number in range(MAX_LINES + 2)]


def digits(part: slice = slice(None)) -> ScoreHistograms:
    logits, labels = digit_logits(100)
    histograms = count_scores(logits[part], labels[part])
    assert histograms is not None
    return histograms


def test_the_area_of_the_mean_curve_is_the_mean_of_the_areas() -> None:
    histograms = digits()
    area = auc(*zip(*macro_roc(histograms), strict=True))
    # The curve is drawn at 101 rates
    assert area == pytest.approx(figures_of(histograms)["auroc"]["value"], abs=0.003)


def test_of_two_classes_the_second_is_drawn() -> None:
    """At a false-positive rate of a half: with the classes' curves averaged, it would be 0.75."""
    positives, negatives = np.zeros((2, 2, 256), dtype=int)
    positives[1, [10, 200]] = (5, 5)
    negatives[1, [10, 100]] = (5, 5)
    positives[0, [155, 245]] = negatives[1, [100, 10]]
    negatives[0, [55, 245]] = positives[1, [200, 10]]
    confidence = np.zeros((3, 15), dtype=int)
    curve = dict(macro_roc(ScoreHistograms(positives, negatives, confidence, np.zeros(2))))
    assert curve[0.5] == pytest.approx(0.5)
    empty = ScoreHistograms(0 * positives, negatives, confidence, np.zeros(2))
    assert macro_roc(empty) == []


def test_many_clients_share_a_plot(tmp_path: Path) -> None:
    names = tuple("0123456789")
    histograms = {site: digits(slice(k, None, len(SITES))) for k, site in enumerate(SITES)}
    matrix = np.diag([12] * 10).tolist()
    folder = run_folder(tmp_path / "x", {"FT": dict.fromkeys(SITES, matrix)})
    RunFolder(folder).store_histograms("FT", histograms)
    write_report(folder, names)
    page = (folder / "report.html").read_text()
    assert "The plots omit 2 clients." in page
    (bound,) = re.findall(r"AUROC of FT by at most ([\d.]+)\.", page)
    error = gather(folder)["figures"]["FT"]["together"]["binning_error"]
    assert 0 <= float(bound) - error < 1e-4
    assert "<site-" not in page
    assert len(re.findall(r"<polyline style=", page)) == 2 * MAX_LINES
    points = re.findall(r'points="([^"]*)"', page)
    coordinates = np.array([float(value) for value in re.findall(r"[\d.]+", " ".join(points))])
    assert coordinates.min() >= 8
    assert coordinates.max() <= 300
    # A key of newer runs
    config = json.loads((folder / "config.json").read_text())
    config["test-specificity"] = 0.8
    (folder / "config.json").write_text(json.dumps(config))
    wide = gather(folder)["figures"]["FT"]["together"]
    assert wide["specificity"] == 0.8
    del config["test-specificity"]
    (folder / "config.json").write_text(json.dumps(config))
    narrow = gather(folder)["figures"]["FT"]["together"]
    assert narrow["specificity"] == 0.95
    assert narrow["sensitivity"]["value"] < wide["sensitivity"]["value"]
    (folder / "histograms" / "FT.json").write_text('{"a": {"positives": 3}}')
    with pytest.raises(OSError, match=r"FT\.json is corrupt; repeat"):
        gather(folder)


@pytest.mark.parametrize(
    ("senders", "text"),
    [
        (3, "all clients"),
        (2, "the 2 clients that sent histograms"),
        (1, "the 1 client that sent histograms"),
    ],
)
def test_figures_say_whose_they_are(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    senders: int,
    text: str,
) -> None:
    """In the report, at the end of a run, and of a log that is followed."""
    sites = ["a", "b", "c"]
    matrix = np.diag([12] * 10).tolist()
    folder = run_folder(tmp_path / "x", {"FT": dict.fromkeys(sites, matrix)})
    RunFolder(folder).store_histograms("FT", {site: digits() for site in sites[:senders]})
    write_report(folder, tuple("0123456789"))
    page = (folder / "report.html").read_text()
    assert f"<td>{text}</td>" in page
    assert f"10 classes, {text} together" in page
    assert page.count(f"<title>{text}</title>") == 2
    with caplog.at_level("INFO", logger="flwr"):
        log_results(gather(folder), "report.html")
    followed = FollowedRun()
    for record in caplog.records:
        followed.read(f"INFO :      {record.getMessage()}")
    for metrics in (gather(folder), followed.metrics):
        display.print_metrics(metrics)
        assert f"FT, {text} together: AUROC" in capsys.readouterr().out


def test_a_test_only_site_that_withholds_is_not_missed() -> None:
    """The site's results are in no figure over the run's clients."""
    metrics = {
        "figures": {"FT": {"clients": {"a": {}, "b": {}}}},
        "accuracy": {"FT": {"a": 90.0, "b": 80.0, "average": 85.0}},
        "not_tested": [],
        "withheld": ["regulator"],
        "test_only": {"regulator": {}},
    }
    assert partial_senders(metrics, "FT") == 0
    assert partial_senders({**metrics, "withheld": ["c", "regulator"]}, "FT") == 2
