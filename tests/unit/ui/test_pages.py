"""The pages of `osfl ui`: what they show of run folders, hostile ones too, and whom they serve."""

import io
import json
import os
import re
import shutil
import time
from html.parser import HTMLParser
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from osfl.metrics.histograms import count_scores
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.observation import ObservedRun, runs_stamp
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import Status, with_details
from osfl.ui.app import HEADERS, POLICY, create_app
from osfl.ui.comparison import Pair, differing_settings
from osfl.ui.stream import event
from tests.helpers.observed_runs import draw_unit, finished_run

HOSTILE = '"><script>alert(1)</script>&<img src=x onerror=alert(2)>'
SECRET = "the secret"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    runs.mkdir()
    return runs


def browser(root: Path, host: str = "127.0.0.1:8765") -> TestClient:
    app = create_app(root, ["127.0.0.1", "localhost"])
    return TestClient(app, base_url=f"http://{host}", follow_redirects=False)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page))


class Tags(HTMLParser):
    """The start tags of a page, with their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def events_of(client: TestClient, address: str) -> list[tuple[str, dict]]:
    """Read a stream to its end."""
    blocks = client.get(address).text.strip().split("\n\n")
    matches = [re.fullmatch(r"event: (\w+)\ndata: (.*)", block) for block in blocks]
    return [(match[1], json.loads(match[2])) for match in matches if match]


def test_an_empty_folder_says_how_to_begin(root: Path) -> None:
    for folder in (root, root / "missing"):
        page = browser(folder).get("/")
        assert page.status_code == 200
        assert "There are no runs in this folder yet" in page.text


def scored_run(folder: Path, seed: int = 0, **config: object) -> dict:
    """A finished run with histograms of its two clients' scores; return their figures."""
    finished_run(folder, **config)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    labels = np.array([0] * 20 + [1] * 20)
    logits = rng.normal(size=(40, 2))
    logits[:, 1] += 3.0 * labels
    histograms = count_scores(logits, labels)
    RunFolder(folder).store_histograms("FT", {"a": histograms, "b": histograms})
    write_report(folder, ("cat", "dog"))
    figures: dict = json.loads((folder / "metrics.json").read_text())["figures"]["FT"]["together"]
    return figures


def test_discrimination_and_calibration_have_intervals(root: Path) -> None:
    """On the run's page and in a comparison, also with a run that has none."""
    shown = scored_run(root / "one")
    other_run = scored_run(root / "two", seed=1, **{"test-specificity": 0.9})
    finished_run(root / "none")
    page = text_of(browser(root).get("/runs/one").text)
    for key, label, template in (
        ("auroc", "AUROC", "{:.3f}"),
        ("sensitivity", "sensitivity at 95 % specificity", "{:.0f}"),
        ("ece", "ECE", "{:.1f}"),
    ):
        scale = 1 if key == "auroc" else 100
        value, low, high = (template.format(scale * shown[key][part]) for part in shown["auroc"])
        unit = "" if key == "auroc" else " %"
        assert f"{value}{unit} {label}, {low} to {high}" in page
    assert "Brier score: of all clients together" in page
    pair = text_of(browser(root).get("/compare?a=one&b=two").text)
    areas = [
        "{value:.3f} ({low:.3f} to {high:.3f})".format(**each["auroc"])
        for each in (shown, other_run)
    ]
    assert f"AUROC {areas[0]} {areas[1]}" in pair
    assert "sensitivity at 95 % specificity; B sensitivity at 90 % specificity" in pair
    half = text_of(browser(root).get("/compare?a=none&b=one").text)
    assert f"AUROC – {areas[0]}" in half
    assert "AUROC" not in text_of(browser(root).get("/runs/none").text)
    # A file of another program
    metrics = json.loads((root / "one" / "metrics.json").read_text())
    metrics["figures"]["FT"]["together"]["auroc"]["low"] = 10**400
    (root / "one" / "metrics.json").write_text(json.dumps(metrics))
    assert browser(root).get("/runs/one").status_code == 200
    del metrics["figures"]["FT"]["clients"]
    (root / "one" / "metrics.json").write_text(json.dumps(metrics))
    assert browser(root).get("/compare?a=one&b=two").status_code == 200


def test_a_run_with_another_runs_payloads_sent_nothing(root: Path) -> None:
    for name in ("own", "reused"):
        folder = finished_run(root / name)
        metrics = json.loads((folder / "metrics.json").read_text())
        for costs in metrics["clients"].values():
            costs["upload_bytes"] = 1500
        metrics["payloads_from"] = "base" if name == "reused" else ""
        (folder / "metrics.json").write_text(json.dumps(metrics))
    assert "1.5 kB upload per client" in text_of(browser(root).get("/runs/own").text)
    page = text_of(browser(root).get("/runs/reused").text)
    assert "0 B upload per client; 1.5 kB in job base" in page
    pair = text_of(browser(root).get("/compare?a=own&b=reused").text)
    assert "upload per client 1.5 kB none; 1.5 kB in job base" in pair


def test_runs_are_listed_with_state_and_figures(root: Path) -> None:
    """Accuracy: the mean of 6 of 8 and 8 of 8 images."""
    finished_run(root / "study", method="fedlmg")
    status = Status(root / "cut")
    (root / "cut").mkdir()
    shutil.copy(root / "study" / "config.json", root / "cut")
    status.phase("synthesis", 24)
    page = browser(root).get("/").text
    rows = {row.split()[0]: row for row in map(text_of, page.split("<tr>")[2:])}
    assert "finished 87.5 % – 2" in rows["study"]
    assert "fedlmg" in rows["study"]
    assert "interrupted – –" in rows["cut"]
    assert 'action="/compare"' in page


def test_a_run_shows_its_clients_figures_and_images(root: Path) -> None:
    finished_run(root / "study")
    client = browser(root)
    page = client.get("/runs/study").text
    text = text_of(page)
    assert "87.5 % mean accuracy of the clients" in text
    assert "a delivered 10 bytes 75.0 %" in text
    assert "b delivered 10 bytes 100.0 %" in text
    assert "24 drawn" in text
    sources = re.findall(r'<img src="([^"]+)" alt="([^"]+)"', page)
    # Two clients, two classes, four of six images
    assert len(sources) == 16
    assert {alt for _, alt in sources} == {"cat, a", "dog, a", "cat, b", "dog, b"}
    picture = client.get(sources[0][0])
    assert picture.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(picture.content)) as image:
        # 16 times 8 pixels
        assert (image.size, image.getpixel((0, 0))) == ((128, 128), (0, 0, 0))
    assert "data-events" not in page
    assert client.get("/runs/study/report").content == (root / "study/report.html").read_bytes()


def test_a_run_at_work_shows_phase_and_time_left(root: Path) -> None:
    """A quarter took 10 seconds, so that 30 are left."""
    finished_run(root / "study")
    folder = RunFolder(root / "study")
    folder.metrics_file.unlink()
    folder.report_file.unlink()
    with folder.lock():
        status = Status(folder.path)
        status.phase("synthesis", 24)
        status.state["phases"][0]["began"] = time.time() - 10
        status.add_warning(with_details("one client is slow", "client b"))
        status.client("b", "asked")
        status.advance(6, 24)
        status.step(1, 2)
        cache = root / ".client-cache" / "study" / "b-123456789abc"
        cache.mkdir(parents=True)
        (cache / "progress").write_text("3 40 epoch")
        status.client("b", "asked")
        # Not a pattern
        status.client("*", "asked")
        page = browser(root).get("/runs/study").text
    text = text_of(page)
    assert "* asked" in text
    seconds = re.search(r"synthesis: 6 of 24 · about ([\d.]+) s left in this phase", text)
    assert seconds
    assert float(seconds[1]) == pytest.approx(30, abs=3)
    assert '<progress id="bar" max="24" value="6">' in page
    assert "b epoch 3 of 40" in text
    assert "one client is slow Details client b" in text
    assert 'data-events="/runs/study/events"' in page
    assert "Open the report" not in page


def test_a_failed_run_says_why_in_lines(root: Path) -> None:
    finished_run(root / "study")
    Status(root / "study").fail(ValueError("no client\nnode 1: <away>\x1b[2J"))
    page = browser(root).get("/runs/study").text
    assert "ValueError: no client<br>node 1: &lt;away&gt;\N{REPLACEMENT CHARACTER}[2J</p>" in page
    assert "data-events" not in page


def test_the_stream_sends_what_has_changed_and_ends_with_the_run(root: Path) -> None:
    finished_run(root / "study")
    events = events_of(browser(root), "/runs/study/events")
    assert [name for name, _ in events[:-1]] == ["section"] * (len(events) - 1)
    assert events[-1] == ("end", {})
    page = browser(root).get("/runs/study").text
    for _, section in events[:-1]:
        assert f'<div id="{section["id"]}"' in page
        assert section["html"] in page


def test_a_server_that_is_killed_changes_the_stamp(root: Path) -> None:
    """The server's lock ends with it, and no file changes."""
    run = ObservedRun(root, finished_run(root / "study").name)
    with RunFolder(run.path).lock():
        Status(run.path).phase("synthesis")
        before = run.stamp(), runs_stamp(root)
        assert (run.stamp(), runs_stamp(root)) == before
        assert run.summary().state == "running"
    assert run.stamp() != before[0]
    assert runs_stamp(root) != before[1]
    assert run.summary().state == "interrupted"


@pytest.mark.slow
def test_the_stream_sends_only_sections_that_differ(root: Path) -> None:
    """A server that is ending ends the stream; meanwhile a client joins."""
    finished_run(root / "study")
    folder = RunFolder(root / "study")
    folder.metrics_file.unlink()
    calls = count()
    with folder.lock():
        status = Status(folder.path)
        status.phase("joining", 2)

        def is_ending() -> bool:
            number = next(calls)
            if number == 3:
                status.client("<new>", "joined")
            return number > 12

        client = TestClient(create_app(root, ["testserver"], is_ending))
        events = events_of(client, "/runs/study/events")
    names = [section["id"] for _, section in events]
    assert len(names) > len(set(names)) == 7
    assert names[7:] == ["clients"]
    assert "&lt;new&gt;" in events[-1][1]["html"]


def test_training_is_a_curve(root: Path) -> None:
    """A loss of 2, 1 and 0.5 at steps 1, 5 and 10: from the upper edge to a quarter's height."""
    finished_run(root / "study")
    curves = RunFolder(root / "study").curves_folder
    curves.mkdir()
    (curves / "FT.json").write_text('{"steps": [1, 5, 10], "loss": [2, 1, 0.5]}')
    (curves / "long.json").write_text(json.dumps({"steps": [*range(500)], "loss": [1.25] * 500}))
    page = browser(root).get("/runs/study").text
    lines = re.findall('<polyline points="([^"]+)"', page)
    assert lines[0] == "10.00,0.00 50.00,50.00 100.00,75.00"
    assert len(lines[1].split()) == 500
    assert "Loss of FT: 2 at step 1, 0.5 at step 10" in text_of(page)
    before = ObservedRun(root, "study").stamp()
    (curves / "long.json").unlink()
    assert ObservedRun(root, "study").stamp() != before


def test_an_event_is_one_line() -> None:
    assert event("section", {"html": "a\n\nb"}) == 'event: section\ndata: {"html": "a\\n\\nb"}\n\n'


def test_two_runs_are_compared(root: Path) -> None:
    finished_run(root / "one", seed=1)
    finished_run(root / "two", seed=2, **{"synthesis.steps": 7})
    shutil.rmtree(root / "two" / "units")
    draw_unit(root / "two", "u", "a", ("cat",), 1)
    page = browser(root).get("/compare?a=one&b=two").text
    text = text_of(page)
    settings = text[text.index("Settings that differ") : text.index("Images of the same")]
    assert settings.split("key A B")[1].split() == ["seed", "1", "2", "synthesis.steps", "20", "7"]
    assert "average 87.5 % 87.5 % +0.0" in text
    alts = re.findall('alt="([^"]+)"', page)
    assert alts == [
        *("cat, a, run A", "dog, a, run A", "cat, a, run B"),
        *("cat, b, run A", "dog, b, run A"),
    ]
    assert browser(root).get("/compare?a=one").status_code == 400
    assert browser(root).get("/compare?a=one&b=three").status_code == 404


def test_a_difference_is_the_second_minus_the_first() -> None:
    assert Pair("a", 1.0, 3.5).difference == 2.5
    assert Pair("a", None, 3.5).difference is None


def test_images_of_several_units_are_counted_and_read_anew(root: Path) -> None:
    folder = root / "study"
    folder.mkdir()
    run = ObservedRun(root, "study")
    draw_unit(folder, "one", "a", ("cat",), 3)
    draw_unit(folder, "two", "a", ("cat", "dog"), 2)
    assert run.pictures().counts == {"a": 7}
    assert [picture.file[-9:] for picture in run.pictures().first["a"]["cat"]] == [
        *("00000.png", "00000.png", "00001.png", "00001.png")
    ]
    assert run.pictures().classes == ["cat", "dog"]
    draw_unit(folder, "two", "a", ("cat",), 1)
    assert run.pictures().counts == {"a": 4}


def test_settings_differ_by_value_type_and_presence() -> None:
    first = {"job-id": "a", "same": 1, "flag": True, "only": "x"}
    second = {"job-id": "b", "same": 1, "flag": 1}
    pairs = [(pair.name, pair.first, pair.second) for pair in differing_settings(first, second)]
    assert pairs == [("flag", True, 1), ("only", "x", None)]


# ---- Hostile and damaged folders ----


def hostile_run(folder: Path) -> None:
    """A run whose every name is an attack on the page."""
    finished_run(folder, classes=(HOSTILE, "dog"))
    status = Status(folder)
    status.client(HOSTILE, HOSTILE)
    status.client("../../..", "asked")
    status.client("*", "asked")
    status.add_warning(HOSTILE)
    status.phase(HOSTILE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"method": HOSTILE, HOSTILE: HOSTILE}
    (folder / "config.json").write_text(json.dumps(config))


def test_names_are_escaped(root: Path) -> None:
    hostile_run(root / "x")
    hostile_run(root / HOSTILE.replace("/", ""))
    client = browser(root)
    name = "%22%3E%3Cscript%3Ealert(1)%3Cscript%3E%26%3Cimg%20src%3Dx%20onerror%3Dalert(2)%3E"
    for address in ("/", "/runs/x", f"/compare?a=x&b={name}", f"/runs/{name}"):
        page = client.get(address)
        assert page.status_code == 200, address
        assert "&lt;script&gt;" in page.text
        tags = Tags(page.text).tags
        assert [attributes for tag, attributes in tags if tag == "script"] == [
            {"src": "/static/live.js", "defer": None}
        ]
        for tag, attributes in tags:
            assert not [key for key in attributes if key.startswith("on") or key == "style"]
            assert tag != "img" or str(attributes["src"]).startswith("/runs/")
    for address in set(re.findall(r'href="(/runs/[^"]+)"', client.get("/").text)):
        assert client.get(address).status_code == 200, address


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../secret.json",
        "/runs/%2e%2e/report",
        "/runs/%2e%2e",
        "/compare?a=study&b=..",
        "/compare?a=../away&b=study",
        "/compare?a=study&b=linked",
        "/runs/..%2f..%2fsecret.json",
        "/runs/study/pictures/small/../../../secret.png",
        "/runs/study/pictures/small/images/%2e%2e/%2e%2e/%2e%2e/secret.png",
        "/runs/study/pictures/small/images/..%2f..%2f..%2fsecret.png",
        "/runs/study/pictures/small/%2fetc/passwd",
        "/runs/study/pictures/small/config.json",
        "/runs/study/pictures/small/other.png",
        "/runs/study/pictures/small/images",
        "/runs/study/pictures/small/images/a/000-cat/linked.png",
        "/runs/study/pictures/small/images/linked/secret.png",
        "/runs/study/pictures/small/images/a/000-cat/pipe.png",
        "/runs/study/pictures/small/images/a/000-cat/page.png",
        "/runs/study/pictures/small/images/a/000-cat/%00.png",
        "/runs/study/pictures/huge/images/a/000-cat/00000.png",
        "/runs/linked",
        "/runs/.client-cache",
        "/runs/linked/report",
        "/runs/other/report",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
    ],
)
def test_nothing_outside_the_runs_is_served(root: Path, path: str) -> None:
    outside = root.parent
    finished_run(outside / "away")
    (outside / "away" / "report.html").write_text(SECRET)
    Image.new("RGB", (8, 8)).save(outside / "secret.png")
    (outside / "secret.json").write_text(json.dumps({"phase": SECRET}))
    (outside / "config.json").write_text(json.dumps({"method": SECRET}))
    study = finished_run(root / "study")
    images = study / "images" / "a" / "000-cat"
    shutil.copy(outside / "secret.png", study / "other.png")
    (images / "linked.png").symlink_to(outside / "secret.png")
    (study / "images" / "linked").symlink_to(outside)
    os.mkfifo(images / "pipe.png")
    (images / "page.png").write_text(f"<script>{SECRET}</script>")
    (root / "linked").symlink_to(outside / "away")
    other_run = finished_run(root / "other")
    (other_run / "report.html").unlink()
    (other_run / "report.html").symlink_to(outside / "away" / "report.html")
    answer = browser(root).get(path)
    assert answer.status_code == 404
    assert SECRET not in answer.text


def test_links_inside_a_run_are_not_read(root: Path) -> None:
    study = finished_run(root / "study")
    for name in ("config.json", "status.json", "metrics.json"):
        content = json.loads((study / name).read_text())
        if name == "config.json":
            content |= {"method": SECRET}
        elif name == "status.json":
            content |= {"warnings": [SECRET], "error": SECRET}
        outside = root.parent / name
        outside.write_text(json.dumps(content))
        (study / name).unlink()
        (study / name).symlink_to(outside)
    for address in ("/", "/runs/study", "/compare?a=study&b=study"):
        page = browser(root).get(address)
        assert page.status_code == 200
        assert SECRET not in page.text
        assert "87.5" not in page.text
    assert "config.json is a link, which is not followed" in browser(root).get("/").text


DAMAGES = {
    "status": (
        "status.json",
        '{"phase": "synthesis", "clients": {"a": 5}, "done": -3, "total": 0}',
    ),
    "phases": (
        "status.json",
        '{"phase": "x", "clients": {}, "done": 1, "total": 2, "phases": [5, {"began": "x"}, '
        '{"phase": {}, "began": 1e400}], "warnings": {"a": 1}, "error": [1]}',
    ),
    "cut status": ("status.json", '{"phase": "syn'),
    "deep status": ("status.json", "[" * 5000),
    "cut metrics": ("metrics.json", '{"method": "x"'),
    "other metrics": ("metrics.json", "[]"),
    "config": ("config.json", "5"),
    "binary config": ("config.json", "\udcff\x00"),
    "huge status": (
        "status.json",
        '{"phase": "x", "clients": {}, "done": HUGE, "total": HUGE, '
        '"phases": [{"phase": "a", "began": -1e308}, {"phase": "b", "began": 1e308}]}',
    ),
    "huge metrics": (
        "metrics.json",
        '{"method": "x", "accuracy": {"FT": {"a": HUGE, "average": 1e400}}, "rounds": 1, '
        '"over_images": {"FT": NaN}, "clients": {"a": {"upload_bytes": HUGE}}, "versions": {}, '
        '"server": {"synthetic_images": HUGE, "seconds_per_image": HUGE}, "not_tested": [], '
        '"confusion": {}, "config": {}, "shown": [1], "scores": [], "epsilons": [HUGE]}',
    ),
    "curve": ("curves/<b>.json", '{"steps": [1, "a", 3, true], "loss": [NaN, 1, HUGE, 4, 5]}'),
    "half a curve": ("curves/x.json", '{"steps": 5, "loss": [1]}'),
    "unit": ("units/unit-a.jsonl", "nonsense"),
    "names": (
        "units/unit-a.jsonl",
        '{"file": "images/\\udcff/x\\u0000.png", "client": "\\udcff", "class": "\\udcff", '
        '"seed": 1, "sha256": "\\udcff"}\n',
    ),
    "unit outside": (
        "units/unit-a.jsonl",
        '{"file": "images/../../x.png", "client": "a", "class": "c", "seed": 1, "sha256": "x"}\n',
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_leave_a_page(root: Path, damage: str) -> None:
    study = finished_run(root / "study")
    name, content = DAMAGES[damage]
    content = content.replace("HUGE", "9" * 400)
    (study / name).parent.mkdir(exist_ok=True)
    (study / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    for address in ("/", "/runs/study", "/compare?a=study&b=study"):
        page = browser(root).get(address)
        assert page.status_code == 200, page.text
        assert "study" in page.text


def test_a_folder_of_leftovers_has_a_page(root: Path) -> None:
    (root / "study" / "units").mkdir(parents=True)
    (root / "file").write_text("x")
    (root / "other").mkdir()
    page = browser(root).get("/runs/study")
    assert page.status_code == 200
    assert "No client has joined" in page.text
    listed = re.findall('href="/runs/([^"]+)"', browser(root).get("/").text)
    assert listed == ["study"]
    os.mkdir(os.fsencode(root) + b"/\xff")
    (root / "\udcff" / "config.json").write_text("{}")
    assert browser(root).get("/").status_code == 200
    for name in ("file", "other", "nothing", "%ff"):
        assert browser(root).get(f"/runs/{name}").status_code == 404


# ---- Whom the page serves ----


def test_other_host_names_are_refused(root: Path) -> None:
    """A web site whose name resolves to this machine is another host."""
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8765"):
        answer = browser(root, host).get("/")
        assert (answer.status_code, answer.text) == (400, "Invalid host header")
    assert browser(root, "localhost:1").get("/").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(root: Path, method: str) -> None:
    finished_run(root / "study")
    for address in ("/", "/runs/study", "/runs/study/report", "/compare", "/static/live.js"):
        assert browser(root).request(method, address).status_code == 405, address


def test_every_answer_has_the_headers(root: Path) -> None:
    finished_run(root / "study")
    client = browser(root)
    exceptions = {"/runs/study/report", "/favicon.ico"}
    for address in ("/", "/runs/study", "/runs/none", "/static/style.css", "/events2", *exceptions):
        headers = client.get(address).headers
        assert set(HEADERS) <= set(headers), address
        assert "set-cookie" not in headers
        assert "access-control-allow-origin" not in headers
        if address not in exceptions:
            assert headers["content-security-policy"] == POLICY
    assert set(HEADERS) <= set(browser(root, "evil.example").get("/").headers)


def test_a_report_runs_no_script(root: Path) -> None:
    finished_run(root / "study")
    policy = browser(root).get("/runs/study/report").headers["content-security-policy"]
    directives = [part.split() for part in policy.split("; ")]
    assert ["sandbox"] in directives
    assert ["default-src", "'none'"] in directives
    assert not any(part[0].startswith("script-src") for part in directives)


def test_pages_need_nothing_from_elsewhere(root: Path) -> None:
    finished_run(root / "study")
    client = browser(root)
    addresses = ("/", "/runs/study", "/compare?a=study&b=study", "/static/style.css")
    for text in [client.get(address).text for address in (*addresses, "/static/live.js")]:
        assert not re.search(r"https?:|//\w|@import|url\(", text)
        assert "</style>" not in text
