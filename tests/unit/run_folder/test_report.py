"""The report of runs large and small: what it shows, how large it is, how long it takes."""

import json
import re
import time
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from osfl.metrics.histograms import ScoreHistograms
from osfl.run_folder.layout import RunFolder, image_name
from osfl.run_folder.report.metrics import gather, write_report
from osfl.run_folder.report.page import human_seconds, scores
from osfl.run_folder.report.pictures import (
    FIRST_PIXELS,
    MAX_GRID_BYTES,
    MAX_IMAGES_PER_CLASS,
    gallery_of,
)
from osfl.run_folder.report.timeline import lanes_of, timeline_of
from osfl.run_folder.status import MAX_PHASES, Status, read_status
from tests.helpers.run_folders import run_folder

MATRIX = {"a": [[3, 1], [1, 3]], "b": [[2, 2], [0, 4]]}


def page_of(folder: Path, classes: tuple[str, ...]) -> str:
    write_report(folder, classes)
    return RunFolder(folder).report_file.read_text()


def draw(
    folder: Path, clients: list[str], classes: list[str], each: int, side: int, blur: int = 1
) -> list[str]:
    """Images of noise, which no format makes small, and their manifest, whose lines are returned.

    Args:
        blur: side of the noise's grains, in pixels.
    """
    numbers = np.random.default_rng(0)
    rows = []
    for client in clients:
        for label, name in enumerate(classes):
            for index in range(each):
                file = image_name(client, label, name, index)
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                grains = (side // blur, side // blur, 3)
                noise = Image.fromarray(numbers.integers(0, 256, grains, dtype=np.uint8))
                noise.resize((side, side), Image.Resampling.BICUBIC).save(folder / file)
                rows.append(json.dumps({"client": client, "class": name, "file": file}) + "\n")
    RunFolder(folder).manifest_file.write_text("".join(rows))
    return rows


def test_scores_are_those_of_the_images() -> None:
    """Counted one by one; a class without a test image has no recall, and an F1 of nothing."""
    result = scores(np.array([[3, 1, 0], [1, 2, 1], [0, 0, 0]]))
    assert result["balanced_accuracy"] == pytest.approx(100 * (3 / 4 + 2 / 4) / 2)
    f1 = (2 * 3 / (4 + 4), 2 * 2 / (4 + 3), 0)
    assert result["macro_f1"] == pytest.approx(100 * sum(f1) / 3)
    assert scores(np.zeros((2, 2), dtype=int)) == {"balanced_accuracy": 0.0, "macro_f1": 0.0}


def test_each_class_has_its_row_the_weakest_first(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "x", {"FT": MATRIX}), ("cat", "<dog>"))
    table = page[page.index("Each class") :]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(\d+)</td>.*?>([\d.]+)</td>", table, re.DOTALL)
    assert rows[:2] == [("cat", "8", "62.5"), ("&lt;dog&gt;", "8", "87.5")]
    assert "&lt;dog&gt; (3)" in table
    assert "<dog>" not in page


def test_the_grid_has_several_images_of_each_class(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "x", {"FT": MATRIX})
    draw(folder, ["a", "b"], ["cat", "dog"], 10, 32)
    page = page_of(folder, ("cat", "dog"))
    assert len(re.findall(r'<img alt="', page)) == 4
    for client in ("a", "b"):
        summary = f"<summary>{client}: up to {MAX_IMAGES_PER_CLASS} images of each class</summary>"
        grid = page[page.index(summary) :].partition("</details>")[0]
        assert len(re.findall(r"<img [^>]*image/jpeg", grid)) == 2 * MAX_IMAGES_PER_CLASS
        assert "<details open" not in grid
    assert "The table shows" not in page


def test_phases_have_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "x", {"FT": MATRIX})
    began = round(time.time()) - 100.0
    clock = iter([began, began + 2.5])
    status = Status(folder)
    with monkeypatch.context() as at:
        now = SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic)
        at.setattr("osfl.run_folder.status.time", now)
        for name in ("joining", "synthesis"):
            status.phase(name)
    assert read_status(folder)["phase"] == "synthesis"
    first, last = gather(folder)["phases"]
    assert first == {"phase": "joining", "seconds": 2.5}
    assert last == {"phase": "synthesis", "seconds": pytest.approx(97.5, abs=30)}
    page = page_of(folder, ("cat", "dog"))
    assert '<b>joining</b><span class="span">2.5 s</span>' in page
    for number in range(MAX_PHASES + 5):
        status.phase(f"phase {number}")
    assert len(read_status(folder)["phases"]) == MAX_PHASES


def test_clients_have_their_times_on_the_same_axis() -> None:
    """In percent of all phases; a mark at the end stays visible."""
    phases = [("joining", 100), ("waiting for payloads", 110), ("testing on clients", 150)]
    times = {
        "b": {"joined": 105, "asked": 110, "delivered": 130, "tested": 160},
        "a": {"joined": 106, "asked": 110, "delivered": 120, "refused": 140},
        "c": {"test": 95, "tested": 500},
    }
    status = {"phases": [{"phase": name, "began": at} for name, at in phases], "times": times}
    timeline = timeline_of(status, 200)
    assert timeline["seconds"] == 100
    assert [(row["begin"], row["end"]) for row in timeline["phases"]] == [
        *((0, 10), (10, 50), (50, 100))
    ]
    lanes = lanes_of(timeline)["clients"]
    assert {lane["name"]: lane["seconds"] for lane in lanes} == {"a": 10, "b": 20, "c": None}
    assert [list(map(itemgetter("kind", "left", "width"), lane["bars"])) for lane in lanes] == [
        [("work", 10, 10), ("mark", 6, 0), ("mark", 20, 0), ("bad", 40, 0)],
        [("work", 10, 20), ("test", 50, 10), ("mark", 5, 0), ("mark", 30, 0)],
        # A clock that was set back, and a time after the end
        [("test", 50, 50), ("mark", 0, 0)],
    ]


def test_an_older_run_has_phases_alone(tmp_path: Path) -> None:
    assert timeline_of({"clients": {"a": "joined"}}, 1.0) == {}
    page = page_of(run_folder(tmp_path / "x", {"FT": MATRIX}), ("cat", "dog"))
    assert "<h2>Timeline</h2>" not in page
    timeline = timeline_of({"phases": [{"phase": "joining", "began": 5.0}]}, 4.0)
    assert timeline["clients"] == {}
    assert lanes_of(timeline)["phases"][0]["bars"][0]["width"] == 100


def test_rounds_have_their_times(tmp_path: Path) -> None:
    """The record goes on after a resume; one of an older version begins with its last round."""
    import torch

    folder = RunFolder(run_folder(tmp_path / "x", {"fedavg": MATRIX}, method="fedavg"))
    for number, seconds in ((3, 6.0), (4, 7.0), (5, 11.0)):
        folder.store_round(number, seconds, {}, {"w": torch.ones(1)}, {})
    contents = gather(folder.path)
    assert contents["rounds"] == 5
    assert contents["round_seconds"] == [
        {"round": 3, "seconds": 2.0},
        {"round": 4, "seconds": 1.0},
        {"round": 5, "seconds": 4.0},
    ]
    page = page_of(folder.path, ("cat", "dog"))
    bars = re.findall(r'<i style="--h:([\d.]+)%" title="(.*?)">', page)
    expected = [("50.0", "round 3: 2.0 s"), ("25.0", "round 4: 1.0 s"), ("100.0", "round 5: 4.0 s")]
    assert bars == expected
    assert "Accuracy is measured only at the end" in page


def test_times_are_written_as_people_say_them() -> None:
    texts = [human_seconds(count) for count in (7.42, 75, 3725)]
    assert texts == ["7.4 s", "1 min 15 s", "1 h 2 min"]


def test_the_page_is_for_every_screen(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "x", {"FT": MATRIX}), ("cat", "dog"))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme:dark" in page
    assert "<script" not in page
    assert not re.search("https?:", page)
    tables = len(re.findall("<table", page))
    assert len(re.findall(r'<div class="wide( long)?"><table', page)) == tables > 3


def test_the_page_may_load_and_run_nothing(tmp_path: Path) -> None:
    """A policy before the first content: no script, no address, no form; its own pictures alone."""
    page = page_of(run_folder(tmp_path / "x", {"FT": MATRIX}), ("cat", "dog"))
    match = re.search('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert page.index(match[0]) < min(page.index("<title>"), page.index("<style>"))
    policy = dict(part.split(" ", 1) for part in match[1].split("; "))
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


@pytest.mark.slow
def test_a_large_run_has_a_page_of_less_than_5_mb(tmp_path: Path) -> None:
    """100 clients, 345 classes, and several images of each class."""
    names = [f"client-{number:03d}" for number in range(100)]
    classes = tuple(f"class number {label}" for label in range(345))
    numbers = np.random.default_rng(0)
    cells = numbers.poisson(0.05, (345, 345)) + np.diag(numbers.poisson(3, 345))
    folder = run_folder(tmp_path / "x", {"FT": dict.fromkeys(names, cells.tolist())})
    draw(folder, names[:12], list(classes[:12]), MAX_IMAGES_PER_CLASS, 128, blur=8)
    # Those of the others are not opened
    with open(RunFolder(folder).manifest_file, "a") as manifest:
        for client in names:
            for name in classes:
                manifest.write(json.dumps({"client": client, "class": name, "file": "x"}) + "\n")
    began = time.monotonic()
    page = page_of(folder, classes)
    seconds = time.monotonic() - began
    assert len(page) < 5_000_000
    assert seconds < 120
    grids = sum(map(len, re.findall(r"data:image/jpeg[^\"]*", page)))
    assert 0 < grids <= MAX_GRID_BYTES
    assert "The table shows 12 of 100 clients and 12 of 345 classes" in page
    # Long tables are closed, the matrix is a picture, and nothing has a cell for each of its cells
    assert "<details open" not in page
    assert len(re.findall('<img class="map"', page)) == 1
    assert len(re.findall("<t[dh]", page)) < 8000


@pytest.mark.slow
def test_a_thousand_classes_with_histograms_take_seconds(tmp_path: Path) -> None:
    """Six clients; the time is that of this process, which busy cores double."""
    count = 1000
    rng = np.random.default_rng(0)
    cells = np.diag(np.full(count, 8)) + np.roll(np.diag(np.full(count, 2)), 1, axis=1)
    names = [f"client-{number}" for number in range(6)]
    folder = run_folder(tmp_path / "x", {"FT": dict.fromkeys(names, cells.tolist())})
    histograms = {}
    for name in names:
        positives, negatives = rng.poisson((0.04, 40), (count, 256, 2)).transpose(2, 0, 1)
        confidence = np.stack([np.full(15, 600), np.full(15, 400), np.full(15, 400 << 20)])
        brier = np.array([1 << 20, 1 << 19])
        histograms[name] = ScoreHistograms(positives, negatives, confidence, brier)
    RunFolder(folder).store_histograms("FT", histograms)
    began = time.process_time()
    page = page_of(folder, tuple(f"class {label}" for label in range(count)))
    assert time.process_time() - began < 30
    assert "1000 classes, all clients together" in page
    metrics = RunFolder(folder).metrics_file
    # A line for each number would be seven times as much
    assert metrics.stat().st_size < 25e6
    assert json.loads(metrics.read_text())["confusion"]["FT"]["client-5"] == cells.tolist()


@pytest.mark.slow
def test_pictures_of_noise_are_no_larger(tmp_path: Path) -> None:
    """No format makes noise small.

    The first images shrink, and the grid has fewer of each class.
    """
    names = [f"c{number:02d}" for number in range(12)]
    rows = draw(tmp_path, names, names, 4, 128)
    gallery = gallery_of(tmp_path, rows, names)
    urls = [url for row in gallery.first.values() for url in row.values()]
    assert len(urls) == 144
    assert FIRST_PIXELS < sum(map(len, urls)) < 4.2 * FIRST_PIXELS
    grids = [url for row in gallery.grid.values() for urls in row.values() for url in urls]
    assert sum(map(len, grids)) <= MAX_GRID_BYTES
    assert gallery.per_class < 4
