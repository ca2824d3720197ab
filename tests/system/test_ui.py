"""`osfl ui` in a browser: a run is watched from its first client to its end, then compared."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from tests.helpers.settings import ROOT
from tests.helpers.system_tools import BIN, TWO_CLASSES, make_images, wait_for

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"{CHROMIUM} is not installed"),
]
SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}


class Site:
    """`osfl ui` in a process of its own.

    Attributes:
        address: of its first page, without the last slash.
    """

    def __init__(self, folder: Path):
        command = [str(BIN / "osfl"), "ui", "--port", "0"]
        self._output = folder / "ui.log"
        with open(self._output, "w") as log:
            self.process = psutil.Popen(command, cwd=folder, stdout=log, stderr=log)
        wait_for(lambda: "http://" in self.output(), 60, self.output)
        self.address = "http://" + self.output().partition("http://")[2].split("/")[0]

    def output(self) -> str:
        return self._output.read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    started = Site(tmp_path)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


@pytest.fixture
def page(site: Site) -> Iterator:  # type: ignore[type-arg]
    """A page of the browser, which must report no error."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        # A run begins within minutes on a busy machine
        page.set_default_timeout(300_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((site.address, "data:")) or problems.append(request.url)
            ),
        )
        yield page
        browser.close()
    assert problems == []


# A whole run in a process, without Ray, which does not start on every busy machine
RUN = """
import json, sys
from tests.helpers.loop_grid import begin_task
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start
begin_task()
start(quick(**json.loads(sys.argv[1])), sys.argv[2])
"""
SETTINGS = {
    "method": "feddeo",
    "data__image_size": 16,
    "feddeo__epochs": 40,
    "synthesis__images_per_class": 6,
    "synthesis__steps": 30,
    "synthesis__unit_size": 4,
}


@pytest.fixture
def begin(tmp_path: Path, tiny_kit: Path) -> Iterator[Callable[[str, int], psutil.Popen]]:
    """Begin a run in the background, which ends with the test."""
    started: list[psutil.Popen] = []
    for name in ("a", "b"):
        make_images(tmp_path / "sites" / name)

    def begin_run(job: str, seed: int) -> psutil.Popen:
        sites = {"data__root": str(tmp_path / "sites"), "kit": str(tiny_kit), "seed": seed}
        settings = json.dumps({**TWO_CLASSES, **SETTINGS, **sites})
        command = [sys.executable, "-c", RUN, settings, job]
        folders = {"OSFL_RUNS": "runs", "OSFL_CACHE": "runs/.client-cache", "OSFL_STATE": "state"}
        environment = {**os.environ, **folders, "PYTHONPATH": str(ROOT)}
        with open(tmp_path / "runs.log", "a") as log:
            run = psutil.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        started.append(run)
        return run

    yield begin_run
    for run in started:
        if run.poll() is None:
            run.kill()
            run.wait()


def watch(page, run: psutil.Popen) -> list[dict[str, object]]:  # type: ignore[no-untyped-def]
    """Record what the page shows, without a reload, until the run has finished."""
    views = []
    look = """() => ({
        phase: document.getElementById("phase").textContent.trim(),
        clients: document.getElementById("clients").textContent,
        images: document.querySelectorAll("#pictures img").length,
        marked: window.marked === true,
    })"""
    while not views or views[-1]["phase"] != "finished":
        assert run.poll() in (None, 0), "the run failed"
        view = page.evaluate(look)
        if not views or view != views[-1]:
            views.append(view)
        time.sleep(0.1)
        assert len(views) < 1000
    return views


def test_a_run_is_watched_to_its_end_and_compared(
    site: Site,
    page,  # type: ignore[no-untyped-def]
    begin: Callable[[str, int], psutil.Popen],
) -> None:
    page.goto(site.address)
    assert "There are no runs" in page.inner_text("main")
    first = begin("first", 1)
    # The list shows the run by itself
    page.click("text=first")
    page.wait_for_selector("#phase", state="attached")
    page.evaluate("window.marked = true")
    views = watch(page, first)
    assert first.wait(timeout=120) == 0
    assert all(view["marked"] for view in views)
    phases = list(dict.fromkeys(view["phase"] for view in views))
    assert {"running: synthesis", "running: training FT", "finished"} <= set(phases)
    shown = "".join(str(view["clients"]) for view in views)
    assert "asked" in shown or "step" in shown
    assert "delivered" in str(views[-1]["clients"])
    assert page.locator("#curves svg").count() == 1
    counts = [view["images"] for view in views]
    # Two clients, two classes, four of six images; they came one unit after the other
    assert counts == sorted(counts)
    assert counts[-1] == 16
    assert len(set(counts)) > 2
    assert "mean accuracy of the clients" in page.inner_text("#figures")
    check_screens(page)
    page.click("text=Open the report")
    page.wait_for_selector("text=What left the clients")
    second = begin("second", 2)
    assert second.wait(timeout=600) == 0
    page.goto(site.address)
    page.select_option("select[name=a]", "first")
    page.select_option("select[name=b]", "second")
    page.click("button")
    page.wait_for_selector("h2:text('Images of the same client and class')")
    keys = page.locator("h2:text('Settings that differ') + div td:first-child").all_inner_texts()
    assert keys == ["seed"]
    assert page.locator("table.cells img").count() == 8
    check_screens(page)


def check_screens(page) -> None:  # type: ignore[no-untyped-def]
    """No page is wider than its screen, and every picture on it is loaded."""
    for width, height in SCREENS.values():
        page.set_viewport_size({"width": width, "height": height})
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
    for image in page.locator("main img").all():
        image.scroll_into_view_if_needed()
    page.wait_for_function(
        "[...document.querySelectorAll('main img')].every(image => image.naturalWidth > 0)"
    )


def test_ctrl_c_ends_it_at_once_though_a_page_is_open(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cut"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with urlopen(f"{site.address}/runs/cut/events") as stream:
        assert stream.readline() == b"event: section\n"
        children = site.process.children(recursive=True)
        began = time.monotonic()
        site.process.send_signal(signal.SIGINT)
        assert site.process.wait(timeout=30) == 0
        assert time.monotonic() - began < 3
    assert "Traceback" not in site.output()
    assert "ended" in site.output()
    assert children == []


def test_watching_costs_little(site: Site, tmp_path: Path) -> None:
    """A page that is open on a run at which nothing happens: a fiftieth of a core at most."""
    run = tmp_path / "runs" / "cut"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with urlopen(f"{site.address}/runs/cut/events") as stream:
        assert stream.readline() == b"event: section\n"
        time.sleep(2)
        before = sum(site.process.cpu_times()[:2])
        time.sleep(5)
        assert sum(site.process.cpu_times()[:2]) - before < 0.1
